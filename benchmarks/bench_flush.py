"""Is a save as fast as the disk? From tensors in host memory to durable, checksums included, against fio.

    python benchmarks/bench_flush.py                   all states, five rounds, a table
    python benchmarks/bench_flush.py --json            one JSON line a state
    python benchmarks/bench_flush.py --quick           one round of one state of 0.5 GB
    python benchmarks/bench_flush.py --ranks 2         two ranks at once, ours against fio with two jobs
    python benchmarks/bench_flush.py --minutes 5       fewer rounds, where five don't fit into the time

Every method's result is made durable the same way: data, name and folder fsynced. Methods take turns within a round,
and fio runs at its beginning, middle and end. Needs fio and memory for seven times the state.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import statistics
import time
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
    fsync,
    measure,
    other_load,
    print_table,
    progress,
    state_bytes,
    warm,
)
from safetensors.torch import save_file

from powerguard.generations import generation_name
from powerguard.train.flush import Flusher

LIMIT = "fio O_DIRECT"


class Methods:
    """The ways to save one state, each durable when it returns."""

    def __init__(self, state: dict[str, Any], root: Path) -> None:
        self.state, self.root, self.step = state, root, 0
        self.flusher = Flusher(root / "ours", rank=0, world_size=1)
        self.flusher.prepare(state, prove=False)

    def all(self) -> dict[str, tuple[Callable[[], float | None], bool]]:
        """Name -> (method, whether it writes through the page cache)."""
        return {
            "ours (flush)": (self.flush, False),
            "ours (stage, write)": (self.stage_and_write, False),
            "torch.save": (self.torch_save, True),
            "dcp.save 1 thread": (lambda: self.dcp_save(1), True),
            "dcp.save 4 threads": (lambda: self.dcp_save(4), True),
            "safetensors": (self.safetensors, True),
        }

    def flush(self) -> None:
        self.step += 1
        self.flusher.flush(self.state, self.step, generation_name(self.step, "b"))

    def stage_and_write(self) -> float:
        self.step += 1
        staged = self.flusher.stage(self.state, self.step)
        self.flusher.write(staged, generation_name(self.step, "b"))
        return staged.stage_s

    def torch_save(self) -> None:
        folder = fresh(self.root / "torch")
        torch.save(self.state, folder / "aside")
        fsync(folder / "aside")
        os.rename(folder / "aside", folder / "state.pt")
        fsync(folder)

    def dcp_save(self, threads: int) -> None:
        folder = fresh(self.root / "dcp")
        writer = dcp.FileSystemWriter(folder, thread_count=threads)
        dcp.save(self.state, storage_writer=writer, no_dist=True)
        fsync(folder / ".metadata")
        fsync(folder)
        fsync(folder.parent)

    def safetensors(self) -> None:
        folder = fresh(self.root / "safetensors")
        flat = {f"{source}.{name}": t for source, part in self.state.items() for name, t in part.items()}
        save_file(flat, folder / "aside")
        fsync(folder / "aside")
        os.rename(folder / "aside", folder / "state.safetensors")
        fsync(folder)

    def clear(self) -> None:
        """Between runs: old results go, and space is reserved anew, as after a seal."""
        for folder in self.root.glob("ours/step-*"):
            fresh(folder)
            folder.rmdir()
        for name in ("torch", "dcp", "safetensors"):
            fresh(self.root / name)
        self.flusher.settle()


def run_state(state: dict[str, Any], root: Path, rounds: Iterator[int]) -> dict[str, Any]:
    """Medians of all *rounds*."""
    nbytes = state_bytes(state)
    methods, results = Methods(state, root), Results()
    names = list(methods.all())
    done = 0
    for number in rounds:
        order = names[number % len(names) :] + names[: number % len(names)]
        for place, name in enumerate(order):
            if place % 3 == 0:
                results.add(LIMIT, measure(lambda: None))
                results.samples[LIMIT][-1].wall_s = fio(root, nbytes, direct=True)
            call, cached = methods.all()[name]
            methods.clear()
            if cached:
                warm(nbytes)
            results.add(name, measure(call))
        methods.clear()
        warm(nbytes)
        results.add("fio buffered", measure(lambda: None))
        results.samples["fio buffered"][-1].wall_s = fio(root, nbytes, direct=False)
        results.add(LIMIT, measure(lambda: None))
        results.samples[LIMIT][-1].wall_s = fio(root, nbytes, direct=True)
        done += 1
        table = results.table(LIMIT, nbytes)
        progress(f"round {done}: " + ", ".join(f"{name} {row['s']:.2f} s" for name, row in table.items()))
    methods.flusher.close()
    ours = table["ours (flush)"]["s"]
    times = {name: round(row["s"] / ours, 2) for name, row in table.items() if not name.startswith("ours")}
    return {"bytes": nbytes, "rounds": done, "times_as_fast_as": times, "methods": table}


def one_rank(rank: int, gate: Any, told: Any, plan: tuple[int, float, str, int]) -> None:
    """A process that flushes whenever all are ready, and tells when it began and ended."""
    world, nbytes, root, rounds = plan
    state = STATES["700 tensors"](nbytes / world)
    flusher = Flusher(root, rank=rank, world_size=world)
    flusher.prepare(state, prove=False)
    for step in range(1, rounds + 1):
        flusher.settle()
        gate.wait()
        begun = time.monotonic()
        flusher.flush(state, step, generation_name(step, "b"))
        told.put((step, begun, time.monotonic()))
        gate.wait()
        gate.wait()  # the parent runs fio meanwhile
    flusher.close()


def run_ranks(world: int, nbytes: float, root: Path, rounds: int) -> dict[str, Any]:
    """All ranks at once against fio with as many jobs, for the same bytes in all."""
    context = mp.get_context("spawn")
    gate, told = context.Barrier(world + 1), context.Queue()
    plan = (world, nbytes, str(root / "ours"), rounds)
    ranks = [context.Process(target=one_rank, args=(rank, gate, told, plan)) for rank in range(world)]
    for process in ranks:
        process.start()
    ours, limit = [], [fio(root, int(nbytes), direct=True, jobs=world)]
    for step in range(1, rounds + 1):
        gate.wait()
        gate.wait()
        spans = [told.get() for _ in range(world)]
        ours.append(max(end for _, _, end in spans) - min(begun for _, begun, _ in spans))
        fresh(root / "ours" / generation_name(step, "b")).rmdir()
        limit.append(fio(root, int(nbytes), direct=True, jobs=world))
        progress(f"round {step}: ours {ours[-1]:.2f} s, fio {limit[-1]:.2f} s")
        gate.wait()
    for process in ranks:
        process.join()
    s, limit_s = statistics.median(ours), statistics.median(limit)
    return {"ranks": world, "bytes": int(nbytes), "s": s, "limit_s": limit_s, "ratio": limit_s / s}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gb", type=float, default=2.94)
    parser.add_argument("--state", choices=STATES, action="append")
    parser.add_argument("--minutes", type=float, default=0.0, help="time for all states together; 0 = no limit")
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=Path("build/bench-flush"), help="on the disk in question")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rounds, size = (1, 0.5) if options.quick else (options.rounds, options.gb)
    root = fresh(options.dir.absolute())
    try:
        if options.ranks:
            answer = {"benchmark": "flush", **run_ranks(options.ranks, size * GB, root, rounds), "load": other_load()}
            print(json.dumps(answer))
            return
        names = ["700 tensors"] if options.quick else options.state or list(STATES)
        budget = Budget(options.minutes, len(names))
        for name in names:
            done = run_state(STATES[name](size * GB), root, budget.rounds(rounds))
            ratio = done["methods"]["ours (flush)"]["ratio"]
            answer = {"benchmark": "flush", "state": name, "ratio": ratio, "load": other_load(), **done}
            if options.json:
                print(json.dumps(answer), flush=True)
            else:
                print_table(f"{name}, {done['bytes'] / GB:.2f} GB, load {other_load():.1f}", done["methods"])
    finally:
        fresh(root).rmdir()


if __name__ == "__main__":
    main()
