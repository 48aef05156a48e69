"""Observations out of noise: bytes become what UPSes, ranks, pages and operators might say, in any order at all.

    state = initial("boot", 0.0)
    for state, decision in babble(policy, state, data): ...

Two bytes make one observation. Messages of ranks refer to the orders that are there, so that noise gets somewhere, and
sometimes to ones that aren't. Deterministic; shrinks well under hypothesis.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from powerguard.core.commands import CANCELLED, DRY_RUN, SHUTDOWN
from powerguard.core.decide import decide
from powerguard.core.job import Job
from powerguard.core.lawful import check
from powerguard.core.messages import (
    Ack,
    Beat,
    Bye,
    Failed,
    FromRank,
    Hello,
    Missed,
    Pace,
    Parked,
    Promise,
    Quiesced,
    SealWritten,
    Shard,
    ShardRecord,
    Staged,
)
from powerguard.core.policy import Policy
from powerguard.core.state import Decision, State
from powerguard.core.types import Comm, Command, Observation, PageReport, RankReport, Sample

JOBS = ("a", "b")
WORLD = 2
WAITS_S = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0, 12.0, 40.0, 150.0, 700.0)

STATUSES = (
    "OL",
    "OL CHRG",
    "OB",
    "OB DISCHRG",
    "OB LB",
    "OL LB",
    "FSD OB",
    "FSD OL",
    "OB CAL",
    "OL OFF",
    "TRIM",
    "",
    "WAIT",
    "OL DISCHRG OB",
    "OL BYPASS",
    "OB LB RB OVER ALARM",
)
NUMBERS: tuple[dict[str, str], ...] = (
    {"battery.charge": "100", "battery.runtime": "1200", "ups.load": "40"},
    {"battery.charge": "60", "battery.runtime": "300", "ups.load": "45"},
    {"battery.charge": "20", "battery.runtime": "60", "ups.load": "50", "battery.runtime.low": "120"},
    {"battery.charge": "3", "battery.runtime": "0", "battery.voltage": "21", "battery.voltage.nominal": "24"},
    {},
    {"battery.runtime": "65535", "battery.charge": "255", "ups.load": "-1"},
    {"battery.voltage": "24.6", "battery.voltage.nominal": "24", "ups.load": "30"},
    {"battery.charge": "90", "battery.voltage": "2.1", "battery.voltage.nominal": "24"},
)
AFTER_HALT_S = 60.0
"""A log ends so long after the power-off order."""

VERBS = ("flush", "park", "resume", DRY_RUN, SHUTDOWN, CANCELLED, "reboot")


def babble(policy: Policy, state: State, data: bytes, now: float = 100.0) -> Iterator[tuple[State, Decision, float]]:
    """Each decision that *data* leads to, checked against the laws, with the state before it and its instant."""
    for first, second in zip(data[::2], data[1::2], strict=False):
        now += WAITS_S[second % len(WAITS_S)]
        seen = observe(policy, state, first, second // len(WAITS_S), now)
        decision = decide(policy, state, seen, now)
        check(policy, state, decision, now)
        yield state, decision, now
        state = decision.state
        if state.halted_at is not None and now - state.halted_at > AFTER_HALT_S:
            return


def babble_forgetfully(policy: Policy, state: State, data: bytes, now: float = 100.0) -> Iterator[Decision]:
    """The same with a crash and a restart from JSON after every decision."""
    for first, second in zip(data[::2], data[1::2], strict=False):
        now += WAITS_S[second % len(WAITS_S)]
        decision = decide(policy, state, observe(policy, state, first, second // len(WAITS_S), now), now)
        yield decision
        state = msgspec.json.decode(msgspec.json.encode(decision.state), type=State)


def observe(policy: Policy, state: State, what: int, how: int, now: float) -> Observation:
    """The observation that two small numbers stand for."""
    kind = what % 8
    rest = what // 8
    if kind <= 2:
        feed = policy.feeds[rest % len(policy.feeds)].name
        variables = {"ups.status": STATUSES[(rest // 2) % len(STATUSES)], **NUMBERS[how % len(NUMBERS)]}
        return Observation(samples=(Sample(feed, now, Comm.OK, variables),))
    if kind == 3:
        comm = tuple(Comm)[rest % len(Comm)]
        return Observation(samples=tuple(Sample(each.name, now, comm) for each in policy.feeds))
    job, rank = JOBS[how % 2], (how // 2) % WORLD
    if kind == 4:
        if rest % 4 == 0:
            return Observation(commands=(Command(VERBS[how % len(VERBS)]),))
        return Observation(pages=(PageReport(job, rank, now, rest, alive=rest % 4 != 1),))
    if kind == 5:
        return Observation(reports=tuple(_hello(job, each, rest, now) for each in range(WORLD)))
    known = state.jobs.get(job)
    if kind == 6:  # everybody does what comes next
        deeds = [_deeds(known, each)[(rest + i) % DEEDS] for i in range(2) for each in range(WORLD)]
        return Observation(reports=tuple(RankReport(job, i % WORLD, now, deed) for i, deed in enumerate(deeds)))
    if rest % 5 == 0:  # everybody has done everything
        return Observation(
            reports=tuple(
                RankReport(job, each, now, deed) for each in range(WORLD) for deed in _deeds(known, each)[:WHOLE_SAVE]
            )
        )
    return Observation(reports=(RankReport(job, rank, now, _deeds(known, rank)[rest % DEEDS]),))


def _hello(job: str, rank: int, rest: int, now: float) -> RankReport:
    pace = Pace(0.5, 0.3, 4.0 * (1 + rest % 3), 0.2) if rest % 4 else Pace()
    return RankReport(
        job, rank, now, Hello(job, rank, rank, WORLD, 100 + rank + 10 * (rest % 2), "/c", step=rest, pace=pace)
    )


def _deeds(job: Job | None, rank: int) -> tuple[FromRank, ...]:
    """All that a rank might say of the newest order; the first five in this order are a whole save."""
    seq, step, generation = 0, 7, ""
    if job is not None and job.order is not None:
        seq, step, generation = job.order.seq, max(job.order.step, 7), job.order.generation
    return (
        Promise(seq, step),
        Staged(seq, step, 0.3),
        Shard(seq, step, generation, ShardRecord(rank, f"rank-{rank:05d}", 9, "d"), 4.0, 0.2),
        SealWritten(seq, step, generation),
        Parked(seq, step),
        Quiesced(seq),
        Missed(seq, step, "past it"),
        Failed(seq, step, "disk full"),
        Ack(seq, "Exit"),
        Ack(seq, "Resume"),
        Beat(step + 1, Pace(), "parked"),
        Beat(step + 3, Pace(2.0, 1.0, 30.0, 1.0)),
        Bye("finished"),
        Promise(seq + 5, 3),
    )


DEEDS = 14
WHOLE_SAVE = 5
