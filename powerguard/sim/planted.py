"""Bugs to plant in the core, each a small one that somebody could make, with the law that must notice it.

    with planted("a rank gets another step"):
        Cluster(draw(seed)).run()     # raises Breach, for some seeds

They prove that the simulation looks: a law that no bug can break shows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from powerguard.core import agree, answers, demand, follow, gossip, seats, serve, transition
from powerguard.core.duty import GO, Hold
from powerguard.core.job import Job, Order, Stage
from powerguard.core.messages import Plan, Seal, Shard, ShardRecord, Staged
from powerguard.core.steps import stay

Wrong = Callable[..., Any]


class Bug(Struct, frozen=True):
    """*attribute* of *module* is replaced by what *wrong* makes of it."""

    name: str
    law: str  # how the breach begins
    seed: int  # of a run that notices it; another one does as well
    module: ModuleType
    attribute: str
    wrong: Callable[[Wrong], Wrong]


def _one_shard_is_enough(right: Wrong) -> Wrong:
    def wrong(order: Order) -> bool:
        some = order.step >= 0 and any(part.shard is not None for part in order.parts.values())
        return bool(right(order)) or some

    return wrong


def _an_early_seal(right: Wrong) -> Wrong:
    """The sealer is told of all shards that there will be, not of those that are there."""

    def wrong(policy: Any, job: Job, order: Order, rank: int) -> Any:
        message = right(policy, job, order, rank)
        ready = [part.shard for part in order.parts.values() if part.shard is not None]
        if order.stage is not Stage.DECIDED or rank != min(order.parts) or not ready or not job.leads:
            return message
        shards = tuple(replace(ready[0], rank=number) for number in range(job.world_size))
        return Seal(order.seq, order.step, order.generation, job.world_size, shards)

    return wrong


def _another_step(right: Wrong) -> Wrong:
    """Every second rank is told the step after."""

    def wrong(order: Order, part: Any) -> Any:
        message = right(order, part)
        return replace(message, step=message.step + 1) if message.step % 2 and part.edge < message.step else message

    return wrong


def _wherever_it_is(right: Wrong) -> Wrong:
    """A rank that is past the stop step saves where it is."""

    def wrong(f: Any, duty: Any, decide: Any, step: int, now: float) -> Any:
        if step > decide.step >= 0 and decide.plan is Plan.FRESH and not duty.did(Shard):
            return f, follow.Save(duty.seq, step, decide.generation, stop=True)
        return right(f, duty, decide, step, now)

    return wrong


def _no_hold(right: Wrong) -> Wrong:
    def wrong(f: Any, duty: Any, now: float) -> Any:
        return right(f, duty, now)[0], now

    return wrong


def _passes_half_the_time(right: Wrong) -> Wrong:
    """The hold is forgotten at even steps."""

    def wrong(f: Any, step: int, now: float) -> Any:
        f, todo = right(f, step, now)
        return (f, GO) if isinstance(todo, Hold) and step % 2 == 0 else (f, todo)

    return wrong


def _at_once(_: Wrong) -> Wrong:
    def wrong(*_: Any) -> bool:
        return True

    return wrong


def _never(_: Wrong) -> Wrong:
    def wrong(*_: Any) -> bool:
        return False

    return wrong


def _nobody_takes_over(_: Wrong) -> Wrong:
    def wrong(_state: Any, job: Job, _now: float) -> Any:
        return job, ()

    return wrong


def _the_next_number(_: Wrong) -> Wrong:
    """Two leaders count alike."""

    def wrong(after: int, _job: Job) -> int:
        return after + 1

    return wrong


def _decides_again(_: Wrong) -> Wrong:
    """A successor forgets what was decided, and collects promises anew under the old number."""

    def wrong(job: Job, now: float) -> Job:
        order = job.order
        if order is None or order.over or order.purpose.value != "stop":
            return job
        parts = {rank: replace(part, edge=-1, asked="") for rank, part in order.parts.items()}
        again = replace(order, stage=Stage.PREPARE, step=-1, ordered_at=now, parts=parts)
        return replace(job, order=again)

    return wrong


def _none(_: Wrong) -> Wrong:
    def wrong(_job: Job) -> int:
        return 0

    return wrong


def _keeps_its_own_halt(_: Wrong) -> Wrong:
    """Nobody is told that another node halts."""

    def wrong(_job: Job, _now: float) -> bool:
        return False

    return wrong


def _staged_is_enough(right: Wrong) -> Wrong:
    """A copy in memory counts as one on disk."""

    def wrong(part: Any, rank: int, message: Any, at: float, **more: Any) -> Any:
        part = right(part, rank, message, at, **more)
        copied = isinstance(message, Staged) and part.shard is None
        return replace(part, shard=ShardRecord(rank, "", 0, "")) if copied else part

    return wrong


def _all_quiet(_: Wrong) -> Wrong:
    """Ranks of other nodes aren't waited for."""

    def wrong(job: Job) -> bool:
        call = job.quiesce
        return call is not None and not any(not job.members[rank].node for rank in call.waiting if rank in job.members)

    return wrong


def _pauses_for_good(_: Wrong) -> Wrong:
    """Ranks that stopped in a silence aren't let go once their save is durable."""

    def wrong(case: Any) -> Any:
        return stay(case.view, "training pauses")

    return wrong


BUGS = (
    Bug("seals with one shard", "seal", 1, agree, "whole", _one_shard_is_enough),
    Bug("seals before all is durable", "seal", 6, demand, "_demand", _an_early_seal),
    Bug("a rank gets another step", "moved", 5, demand, "_decision", _another_step),
    Bug("a late rank saves where it is", "steps", 53, follow, "_decided", _wherever_it_is),
    Bug("nobody waits at the promised boundary", "passed", 1, follow, "_hold", _no_hold),
    Bug("even boundaries are passed", "passed", 1, follow, "arrive", _passes_half_the_time),
    Bug("leaves without waiting for the peers", "exit", 16, demand, "may_leave", _at_once),
    Bug("other nodes' ranks count as quiet", "exit", 55, demand, "quiet", _all_quiet),
    Bug("staged counts as durable", "seal", 6, answers, "_delivered", _staged_is_enough),
    Bug("never resumes", "end", 1, serve, "_to_be_recalled", _never),
    Bug("nobody says that ranks wait", "end", 13654, gossip, "astray", _none),
    Bug("never dismisses", "end", 43, serve, "_cannot_go_on", _keeps_its_own_halt),
    Bug("a pause never ends", "end", 7, transition, "_pausing", _pauses_for_good),
    Bug("no successor", "end", 0, seats, "care", _nobody_takes_over),
    Bug("two leaders give one number", "moved", 0, seats, "number", _the_next_number),
    Bug("a successor decides an order again", "moved", 47, seats, "_claimed", _decides_again),
)


@contextmanager
def planted(name: str) -> Iterator[Bug]:
    """Plants the bug of that name, for as long as it lasts."""
    bug = next(bug for bug in BUGS if bug.name == name)
    right = getattr(bug.module, bug.attribute)
    setattr(bug.module, bug.attribute, bug.wrong(right))
    try:
        yield bug
    finally:
        setattr(bug.module, bug.attribute, right)
