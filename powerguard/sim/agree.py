"""Many runs of a job over several nodes (`cluster.py`), each drawn from its seed: `make sim-agree`.

    python -m powerguard.sim.agree --runs 20000 --first 1 --jobs 2 --json
    python -m powerguard.sim.agree --runs 1 --first 4711          # one seed again

Exit code 0: every law held in every run; 1: not, and the seeds are named.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from msgspec import Struct, to_builtins

from powerguard.core.messages import Plan
from powerguard.errors import InvariantError
from powerguard.sim.chances import draw
from powerguard.sim.cluster import Cluster
from powerguard.sim.laws import Breach

BLOCK = 50
"""Seeds that one process takes at a time."""


SUMS = ("runs", "decisions", "words", "seals", "claims", "halted", "paused", "resumed", "fresh", "staged", "durable")


class Tally(Struct):
    """What a number of runs have come to."""

    runs: int = 0
    decisions: int = 0
    words: int = 0
    seals: int = 0
    claims: int = 0  # runs in which a successor took the lead
    halted: int = 0  # runs in which a node halted
    paused: int = 0  # runs in which training paused in a silence
    resumed: int = 0  # runs in which an order ended in training again
    fresh: int = 0
    staged: int = 0
    durable: int = 0
    ranks_max: int = 0
    nodes_max: int = 0
    longest_s: float = 0.0  # from the calm to the end
    cpu_s: float = 0.0
    breaches: dict[int, str] = {}

    def add(self, other: Tally) -> None:
        """The runs of *other*, too."""
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.cpu_s += other.cpu_s
        self.ranks_max = max(self.ranks_max, other.ranks_max)
        self.nodes_max = max(self.nodes_max, other.nodes_max)
        self.longest_s = max(self.longest_s, other.longest_s)
        self.breaches.update(other.breaches)


def one(seed: int) -> Tally:
    """The run of *seed*, and what it has come to."""
    began = time.process_time()
    cluster = Cluster(draw(seed))
    tally = Tally(runs=1, nodes_max=len(cluster.nodes), ranks_max=len(cluster.ranks))
    try:
        cluster.run()
    except (Breach, InvariantError) as error:
        tally.breaches = {seed: str(error)}
    except Exception as error:  # a fault of the core is as bad as a breach
        tally.breaches = {seed: f"{type(error).__name__}: {error}"}
    jobs = [job for node in cluster.nodes for job in node.state.jobs.values()]
    tally.decisions, tally.words = cluster.decides, cluster.net.sent
    tally.seals = len(cluster.laws.seals)
    tally.claims = int(any(job.term for job in jobs))
    tally.halted = int(any(node.off_at is not None for node in cluster.nodes))
    tally.paused = int(cluster.paused)
    tally.resumed = int(any(job.resumed for job in jobs))
    tally.fresh, tally.staged, tally.durable = (
        int(plan in cluster.plans) for plan in (Plan.FRESH, Plan.STAGED, Plan.DURABLE)
    )
    if cluster.ended_at is not None:
        tally.longest_s = cluster.ended_at - cluster.begins_at - cluster.plan.calm_at
    tally.cpu_s = time.process_time() - began
    return tally


def many(seeds: Iterable[int]) -> Tally:
    """The runs of all *seeds*, on this process."""
    whole = Tally()
    gc.disable()  # the values are frozen and have no cycles
    try:
        for seed in seeds:
            whole.add(one(seed))
    finally:
        gc.enable()
        gc.collect()
    return whole


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m powerguard.sim.agree", description="A job over several nodes.")
    parser.add_argument("--runs", type=int, default=20000)
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(argv)
    seeds = range(asked.first, asked.first + asked.runs)
    _say(f"seeds {seeds.start} to {seeds.stop - 1}")
    whole, began = Tally(), time.monotonic()
    blocks = [range(at, min(at + BLOCK, seeds.stop)) for at in range(seeds.start, seeds.stop, BLOCK)]
    for tally in _tallies(blocks, asked.jobs):
        whole.add(tally)
        for seed, why in tally.breaches.items():
            _say(f"seed {seed}: {why}")
        if whole.runs % 1000 < BLOCK:
            _say(f"{whole.runs} runs, {time.monotonic() - began:.0f} s")
    wall_s = round(time.monotonic() - began, 1)
    if asked.json:
        told = {**to_builtins(whole, str_keys=True), "seeds": [seeds.start, seeds.stop - 1], "wall_s": wall_s}
        sys.stdout.write(json.dumps(told) + "\n")
    else:
        sys.stdout.write(_words(whole) + "\n")
    return 1 if whole.breaches else 0


def _tallies(blocks: list[range], jobs: int) -> Iterator[Tally]:
    """What each of *blocks* has come to: on this process, or on *jobs* fresh ones.

    Fresh, not forked: a fork takes over the locks and the garbage of a process that may have threads, and waits for
    them forever.
    """
    if jobs == 1:
        yield from map(many, blocks)
        return
    pool = ProcessPoolExecutor(jobs, get_context("spawn"))
    try:
        for done in as_completed([pool.submit(many, block) for block in blocks]):
            yield done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _words(whole: Tally) -> str:
    kinds = Counter(why.split(":", maxsplit=1)[0] for why in whole.breaches.values())
    return (
        f"{whole.runs} runs, up to {whole.nodes_max} nodes and {whole.ranks_max} ranks, {whole.decisions} decisions, "
        f"{whole.words} words between nodes; {whole.seals} generations sealed; a successor led in {whole.claims} runs, "
        f"training went on in {whole.resumed} and paused in {whole.paused}, a node halted in {whole.halted}; "
        f"plans: fresh {whole.fresh}, staged {whole.staged}, durable {whole.durable}; "
        f"the longest ended {whole.longest_s:.0f} s after the calm; "
        f"{whole.cpu_s:.0f} s of processor time; breaches: {dict(kinds) or 'none'}"
    )


if __name__ == "__main__":
    sys.exit(main())
