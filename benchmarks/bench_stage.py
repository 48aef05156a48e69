"""What staging costs a step: a copy of the whole state into shared memory, against none, and against torch's own copy.

    python benchmarks/bench_stage.py [--json] [--quick] [--gb 0.5] [--every 5] [--device cuda]

One training process, three kinds of steps in turns: `boundary()` alone; with torch copying every tensor of the state
into tensors that are there (pinned, for a device); with `guard.stage()`. The deputy runs beside it as it would.
*ratio* is what torch's copy adds to a step over what staging adds. Medians; the answer is one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from disk.rig import other_load

import powerguard
from powerguard.generations.shelf import SlotFile, slot_path
from powerguard.train.layout import parse_header


def build(size, device):
    """A model and its optimizer, with moments, of about *size* bytes together."""
    width = 1024
    layers = max(1, round(size / (3 * 4 * width * width)))
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    return model, optimizer


def tensors_of(model, optimizer):
    """All that a copy of the state must hold."""
    moments = [item for state in optimizer.state.values() for item in state.values() if isinstance(item, torch.Tensor)]
    return [p.detach() for p in model.parameters()] + moments


def twins_of(tensors):
    """Host tensors to copy into; pinned where there is a device."""
    return [torch.zeros(t.shape, dtype=t.dtype, pin_memory=t.device.type == "cuda") for t in tensors]


class Loop:
    """The training of one run."""

    def __init__(self, options, folder):
        self.device = options.device
        torch.manual_seed(0)
        self.model, self.optimizer = build(options.gb * 1e9, self.device)
        self.batch = torch.randn(options.batch, 1024, device=self.device)
        self.train()
        self.guard = powerguard.attach(
            {"model": self.model, "optimizer": self.optimizer},
            folder,
            job="bench-stage",
            rank=0,
            world_size=1,
            socket=str(Path(folder) / "none.sock"),
            reserve=False,
            prove=False,
        )
        self.step = 0
        self.tensors = tensors_of(self.model, self.optimizer)
        self.twins = twins_of(self.tensors)

    def train(self):
        """One optimizer step, done when it returns."""
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.wait()

    def wait(self):
        if self.device != "cpu":
            torch.cuda.synchronize()

    def torch_copy(self):
        with torch.no_grad():
            for twin, tensor in zip(self.twins, self.tensors, strict=True):
                twin.copy_(tensor, non_blocking=True)
        self.wait()

    def timed(self, kind):
        """(the whole step's seconds, the copy's)."""
        begun = time.perf_counter()
        self.train()
        self.guard.boundary(self.step)
        copied = time.perf_counter()
        if kind == "torch":
            self.torch_copy()
        elif kind == "stage":
            assert self.guard.stage()
        self.step += 1
        ends = time.perf_counter()
        return ends - begun, ends - copied


def right(loop):
    """Whether what was staged last is the state, byte for byte."""
    loop.torch_copy()
    staging = loop.guard._staging
    line = staging.shelf.ledger.lines()[-1]
    held = SlotFile(slot_path(staging.shelf.ledger, line))
    _, entries = parse_header(bytes(held.view[: 8 + int.from_bytes(held.view[:8], "little")]))
    names = [f"model.{name}" for name, _ in loop.model.named_parameters()]
    pairs = list(zip(names, loop.twins, strict=False))
    same = all(held.view[entries[n].begin : entries[n].end] == twin.flatten().numpy().tobytes() for n, twin in pairs)
    held.close()
    return same


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true", help="kept for all benchmarks alike: the answer is JSON anyway")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--gb", type=float, default=0.5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--every", type=int, default=5, help="for the cost by step when only every so many are staged")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.gb = 5, 0.2
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    with tempfile.TemporaryDirectory(prefix="bench-stage-") as folder:
        loop = Loop(options, folder)
        for kind in ("none", "torch", "stage", "stage"):  # memory is touched, the shelf made
            loop.timed(kind)
        steps: dict[str, list[float]] = {"none": [], "torch": [], "stage": []}
        copies: dict[str, list[float]] = {"none": [], "torch": [], "stage": []}
        for _ in range(options.rounds):
            for kind, times in steps.items():
                step_s, copy_s = loop.timed(kind)
                times.append(step_s)
                copies[kind].append(copy_s)
        assert right(loop)
        size = loop.guard._staging.shelf.ledger.lines()[-1].data_bytes
        loop.guard.close()
    step = {kind: statistics.median(times) for kind, times in steps.items()}
    copy = {kind: statistics.median(times) for kind, times in copies.items()}
    print(
        json.dumps(
            {
                "benchmark": "stage",
                "device": options.device,
                "state_bytes": size,
                "step_s": round(step["none"], 4),
                "step_with_torch_copy_s": round(step["torch"], 4),
                "step_with_staging_s": round(step["stage"], 4),
                "torch_copy_s": round(copy["torch"], 4),
                "stage_s": round(copy["stage"], 4),
                "stage_gb_per_s": round(size / copy["stage"] / 1e9, 2),
                "every": options.every,
                "cost_per_step_pct": round(100 * copy["stage"] / options.every / step["none"], 2),
                "cost_per_step_staging_each_pct": round(100 * copy["stage"] / step["none"], 1),
                "ratio": round(copy["torch"] / copy["stage"], 3),
                "load": other_load(),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
