"""The parts of a stop, as a journal tells them: how long each took, by the slowest rank. The need is made of them."""

from __future__ import annotations

from msgspec import Struct

from powerguard.core.messages import Decide, Prepare, Purpose, Resume, SealWritten, Shard, Staged
from powerguard.core.types import Send
from powerguard.drill.moments import Moment


class Parts(Struct, frozen=True):
    """One stop of one job, from the order to the seal; None = it isn't in the journal."""

    job: str
    step: int
    generation: str
    ordered_at: float
    agree_s: float | None = None  # the order → the step is decided
    step_s: float | None = None  # decided → the last rank has got there
    stage_s: float | None = None
    write_s: float | None = None
    fsync_s: float | None = None
    seal_s: float | None = None  # the last shard is durable → sealed
    total_s: float | None = None  # the order → sealed
    parked_s: float | None = None  # sealed → told to go on
    bytes: int = 0
    ranks: int = 0
    same_processes: bool | None = None  # every rank is the process that it was


class _Stop:
    """What is collected of one order."""

    def __init__(self, job: str, ordered_at: float) -> None:
        self.job, self.ordered_at = job, ordered_at
        self.decide: Decide | None = None
        self.decided_at: float | None = None
        self.staged: list[tuple[float, float]] = []  # (when, how long)
        self.shards: list[tuple[float, Shard]] = []
        self.sealed_at: float | None = None
        self.resumed_at: float | None = None

    def parts(self, told: list[Moment]) -> Parts:
        """The durations."""
        decide, at = self.decide, self.ordered_at
        stage_s = max((took for _, took in self.staged), default=None)
        arrived = max((when - took for when, took in self.staged), default=None)
        durable_at = max((when for when, _ in self.shards), default=None)
        return Parts(
            job=self.job,
            step=decide.step if decide else -1,
            generation=decide.generation if decide else "",
            ordered_at=at,
            agree_s=_between(at, self.decided_at),
            step_s=_between(self.decided_at, arrived),
            stage_s=stage_s,
            write_s=max((shard.write_s for _, shard in self.shards), default=None),
            fsync_s=max((shard.fsync_s for _, shard in self.shards), default=None),
            seal_s=_between(durable_at, self.sealed_at),
            total_s=_between(at, self.sealed_at),
            parked_s=_between(self.sealed_at, self.resumed_at),
            bytes=sum(shard.record.bytes for _, shard in self.shards),
            ranks=len(self.shards),
            same_processes=_same_processes(told, self.job, at),
        )


def stops(told: list[Moment], since: float = float("-inf")) -> tuple[Parts, ...]:
    """Every STOP ordered from *since* on, in order."""
    found: dict[int, _Stop] = {}
    for moment in told:
        tick = moment.tick
        for action in tick.actions:
            if isinstance(action, Send):
                _ordered(found, action, tick.at, since)
        for report in tick.seen.reports:
            message = report.message
            stop = found.get(getattr(message, "seq", -1))
            if stop is None or stop.job != report.job:
                continue
            if isinstance(message, Staged):
                stop.staged.append((report.at, message.stage_s))
            elif isinstance(message, Shard):
                stop.shards.append((report.at, message))
            elif isinstance(message, SealWritten):
                stop.sealed_at = stop.sealed_at or report.at
    return tuple(stop.parts(told) for stop in found.values())


def _ordered(found: dict[int, _Stop], action: Send, at: float, since: float) -> None:
    message = action.message
    if isinstance(message, Prepare) and message.purpose is Purpose.STOP and at >= since:
        found.setdefault(message.seq, _Stop(action.job, at))
    elif isinstance(message, Decide) and message.seq in found:
        stop = found[message.seq]
        if stop.decide is None:
            stop.decide, stop.decided_at = message, at
    elif isinstance(message, Resume):
        for stop in found.values():
            if stop.job == action.job and stop.resumed_at is None:
                stop.resumed_at = at


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else max(0.0, end - begin)


def _same_processes(told: list[Moment], job: str, at: float) -> bool | None:
    """Whether the ranks at the end are the processes that they were when the order was given."""
    known = [moment for moment in told if moment.state is not None and job in moment.state.jobs]
    before = [moment for moment in known if moment.tick.at <= at] or known[:1]
    if not before or before[-1].state is None or known[-1].state is None:
        return None
    was = {rank: member.pid for rank, member in before[-1].state.jobs[job].members.items()}
    now = {rank: member.pid for rank, member in known[-1].state.jobs[job].members.items() if member.alive}
    return was == now
