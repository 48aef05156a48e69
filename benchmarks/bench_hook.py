"""What the hook costs: `boundary()` unarmed, against the all-reduce of a flag that other tools make at every step.

    python benchmarks/bench_hook.py [--json] [--seconds 3]

Two gloo ranks on this machine all-reduce one int32 a step, as a loop does that asks all ranks whether to stop; in the
same run the same processes call `boundary()`, with the listener thread connected to a daemon's bus. Then a busy
training thread is timed with and without a listener. Rounds alternate, medians are given; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import powerguard
from powerguard.core import agree
from powerguard.core.policy import Policy
from powerguard.core.types import Send
from powerguard.node.bus import Bus

ROUNDS = 5


def ns_a_call(call, seconds):
    """Nanoseconds a call of *call(number)*, of which the empty loop's share is taken off."""
    numbers, start = 20_000, 0
    ends = time.perf_counter() + seconds
    best = []
    while time.perf_counter() < ends:
        begun = time.perf_counter()
        for number in range(start, start + numbers):
            call(number)
        spent = time.perf_counter() - begun
        begun = time.perf_counter()
        for _ in range(start, start + numbers):
            pass
        best.append((spent - (time.perf_counter() - begun)) / numbers * 1e9)
        start += numbers
    return statistics.median(best), start


def work(kind, seconds):
    """How much a training thread gets done: Python code, or matrix products that don't hold the GIL."""
    a = torch.randn(192, 192)
    done, ends = 0, time.perf_counter() + seconds
    while time.perf_counter() < ends:
        if kind == "python":
            sum(range(2000))
        else:
            a @ a
        done += 1
    return done / seconds


def rank_main(rank, folder, seconds, results):
    """One of two ranks; rank 0 tells what it measured."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29411")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = torch.nn.Linear(8, 8)
    said = {"boundary_ns": [], "all_reduce_ns": [], "python": [], "python_alone": [], "matmul": [], "matmul_alone": []}
    flag = torch.zeros(1, dtype=torch.int32)
    for round_number in range(ROUNDS):
        guard = powerguard.attach({"m": model}, f"{folder}/c", job="bench", socket=f"{folder}/b.sock", reserve=False)
        while not guard.connected:
            time.sleep(0.01)
        ns, _ = ns_a_call(guard.boundary, seconds / 4)
        said["boundary_ns"].append(ns)
        for kind in ("python", "matmul"):
            said[kind].append(work(kind, seconds / 4))
        guard.close()
        for kind in ("python", "matmul"):
            said[f"{kind}_alone"].append(work(kind, seconds / 4))
        dist.barrier()
        begun, calls = time.perf_counter(), 300
        for _ in range(calls):
            dist.all_reduce(flag)
            flag.item()
        said["all_reduce_ns"].append((time.perf_counter() - begun) / calls * 1e9)
        if rank == 0:
            print(f"round {round_number + 1} of {ROUNDS}", file=sys.stderr)
    dist.destroy_process_group()
    if rank == 0:
        results.put(said)


def serve(folder, ready, done):
    """A bus that greets, so that ranks beat as they would."""
    jobs, inbox = {}, queue.SimpleQueue()
    bus = Bus(Path(folder) / "b.sock", put=inbox.put, clock=time.monotonic)
    ready.set()
    while not done.wait(0.05):
        reports = [inbox.get() for _ in range(inbox.qsize())]
        jobs, actions = agree.absorb(Policy(), jobs, reports, bus.pages(time.monotonic()), time.monotonic())
        for action in actions:
            if isinstance(action, Send):
                bus.send(action.job, action.rank, action.message)
    bus.close()


def main():
    """Measures and prints."""
    options = argparse.ArgumentParser()
    options.add_argument("--json", action="store_true", help="only the JSON line")
    options.add_argument("--seconds", type=float, default=3.0, help="of each round")
    arguments = options.parse_args()
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ready, done, results = context.Event(), context.Event(), context.Queue()
        daemon = context.Process(target=serve, args=(folder, ready, done))
        daemon.start()
        ready.wait(60)
        ranks = [context.Process(target=rank_main, args=(r, folder, arguments.seconds, results)) for r in (0, 1)]
        for process in ranks:
            process.start()
        said = results.get(timeout=600)
        for process in ranks:
            process.join()
        done.set()
        daemon.join()
    middle = {name: statistics.median(values) for name, values in said.items()}
    line = {
        "benchmark": "hook",
        "boundary_ns": round(middle["boundary_ns"], 1),
        "all_reduce_us": round(middle["all_reduce_ns"] / 1000, 1),
        "ratio": round(middle["all_reduce_ns"] / middle["boundary_ns"]),
        "slowdown_python": round(middle["python_alone"] / middle["python"], 3),
        "slowdown_matmul": round(middle["matmul_alone"] / middle["matmul"], 3),
        "rounds": ROUNDS,
        "ranks": 2,
        "cores": os.cpu_count(),
    }
    if not arguments.json:
        print(f"boundary() unarmed      {line['boundary_ns']:>9.1f} ns")
        print(f"all-reduce of a flag    {line['all_reduce_us']:>9.1f} us, {line['ratio']} times as long")
        print(f"listener beside Python  {line['slowdown_python']:>9.3f} x the time without")
        print(f"listener beside matmul  {line['slowdown_matmul']:>9.3f} x the time without")
    print(json.dumps(line))


if __name__ == "__main__":
    main()
