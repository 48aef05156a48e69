"""Is a resume as fast as the disk? Reading, checking and placing a state, against fio and against other readers.

    python benchmarks/bench_load.py [--json] [--quick] [--minutes M]

Into tensors that are there, with the files dropped from the page cache before each run. Only ours verifies anything.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from disk.rig import (
    GB,
    STATES,
    Budget,
    Results,
    fio,
    fresh,
    measure,
    other_load,
    print_table,
    progress,
    state_bytes,
    warm,
)
from safetensors.torch import load_file, save_file

from powerguard.generations import generation_name, scan, verify
from powerguard.train.flush import Flusher

LIMIT = "fio O_DIRECT"


def drop(root: Path) -> None:
    """Out of the page cache with everything under *root*."""
    for path in root.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def run_state(state: dict[str, Any], root: Path, rounds: Iterator[int]) -> dict[str, Any]:
    """Medians of all *rounds*."""
    nbytes = state_bytes(state)
    flat = {f"{source}.{name}": t for source, part in state.items() for name, t in part.items()}
    flusher = Flusher(root / "ours", rank=0, world_size=1, slots=1, reserve=False)
    flusher.flush(state, 1, generation_name(1, "b"))
    (generation,) = scan(root / "ours")
    flusher.close()
    reader = Flusher(root / "ours", rank=0, world_size=1, reserve=False)
    torch.save(state, root / "state.pt")
    save_file(flat, root / "state.safetensors")
    dcp.save(state, checkpoint_id=root / "dcp", no_dist=True)

    def by_safetensors() -> None:
        for name, value in load_file(root / "state.safetensors").items():
            flat[name].copy_(value)

    def by_torch(mapped: bool) -> None:
        loaded = torch.load(root / "state.pt", mmap=mapped)
        for source, part in state.items():
            for name, value in part.items():
                value.copy_(loaded[source][name])

    def by_verify() -> None:
        assert verify(generation) == []

    methods: dict[str, Callable[[], Any]] = {
        "ours (verified load)": lambda: reader.load(generation, state) and None,
        "ours (verify only)": by_verify,
        "torch.load": lambda: by_torch(False),
        "torch.load mmap": lambda: by_torch(True),
        "safetensors": by_safetensors,
        "dcp.load": lambda: dcp.load(state, checkpoint_id=root / "dcp", no_dist=True),
    }
    results = Results()
    done = 0
    for number in rounds:
        names = list(methods)
        for place, name in enumerate(names[number % len(names) :] + names[: number % len(names)]):
            if place % 3 == 0:
                results.add(LIMIT, measure(lambda: None))
                results.samples[LIMIT][-1].wall_s = fio(root, nbytes, direct=True, read=True)
            drop(root)
            if not name.startswith("ours"):
                warm(nbytes)
            results.add(name, measure(methods[name]))
        done += 1
        table = results.table(LIMIT, nbytes)
        progress(f"round {done}: " + ", ".join(f"{name} {row['s']:.2f} s" for name, row in table.items()))
    reader.close()
    verify_ratio = table["ours (verify only)"]["ratio"]
    return {"bytes": nbytes, "rounds": done, "verify_ratio": verify_ratio, "methods": table}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gb", type=float, default=2.94)
    parser.add_argument("--minutes", type=float, default=0.0, help="time for all states together; 0 = no limit")
    parser.add_argument("--dir", type=Path, default=Path("build/bench-load"), help="on the disk in question")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rounds, size = (1, 0.5) if options.quick else (options.rounds, options.gb)
    root = fresh(options.dir.absolute())
    try:
        names = ["700 tensors"] if options.quick else ["700 tensors", "3000 tensors"]
        budget = Budget(options.minutes, len(names))
        for name in names:
            done = run_state(STATES[name](size * GB), fresh(root), budget.rounds(rounds))
            ratio = done["methods"]["ours (verified load)"]["ratio"]
            answer = {"benchmark": "load", "state": name, "ratio": ratio, "load": other_load(), **done}
            if options.json:
                print(json.dumps(answer), flush=True)
            else:
                print_table(f"{name}, {done['bytes'] / GB:.2f} GB, load {other_load():.1f}", done["methods"])
    finally:
        fresh(root).rmdir()


if __name__ == "__main__":
    main()
