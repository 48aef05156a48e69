"""How long does a snapshot hold the training thread? The copy into the arena, against a plain copy of the memory.

    python benchmarks/bench_snapshot.py [--json] [--quick]

*ratio* is the time of copying all tensors into tensors that are there by torch, over ours. A write of the copy before
runs meanwhile, as it would in training.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
from disk.rig import GB, STATES, fresh, other_load, state_bytes

from powerguard.generations import generation_name
from powerguard.train.flush import Flusher


def run_state(state: dict[str, Any], root: Path, rounds: int) -> dict[str, Any]:
    """Medians of *rounds* snapshots."""
    flat = [tensor for part in state.values() for tensor in part.values()]
    twins = [torch.zeros_like(tensor) for tensor in flat]
    flusher = Flusher(root, rank=0, world_size=1)
    flusher.prepare(state, prove=False)
    quiet, busy, plain = [], [], []
    for step in range(1, rounds + 1):
        begun = time.monotonic()
        for twin, tensor in zip(twins, flat, strict=True):
            twin.copy_(tensor)
        plain.append(time.monotonic() - begun)
        staged = flusher.stage(state, 2 * step)
        quiet.append(staged.stage_s)
        writer = threading.Thread(target=flusher.write, args=(staged, generation_name(2 * step, "b")))
        writer.start()
        busy.append(flusher.stage(state, 2 * step + 1).stage_s)
        writer.join()
        fresh(root / generation_name(2 * step, "b")).rmdir()
        flusher.settle()
    flusher.close()
    return {
        "bytes": state_bytes(state),
        "tensors": len(flat),
        "blocked_s": round(statistics.median(quiet), 4),
        "blocked_while_writing_s": round(statistics.median(busy), 4),
        "plain_copy_s": round(statistics.median(plain), 4),
        "ratio": round(statistics.median(plain) / statistics.median(quiet), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true", help="kept for all benchmarks alike: the answer is JSON anyway")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--dir", type=Path, default=Path("build/bench-snapshot"))
    options = parser.parse_args()
    rounds, size = (2, 0.5) if options.quick else (options.rounds, options.gb)
    root = fresh(options.dir.absolute())
    try:
        for name in ["700 tensors"] if options.quick else list(STATES):
            done = run_state(STATES[name](size * GB), root, rounds)
            print(json.dumps({"benchmark": "snapshot", "state": name, "load": other_load(), **done}), flush=True)
    finally:
        fresh(root).rmdir()


if __name__ == "__main__":
    main()
