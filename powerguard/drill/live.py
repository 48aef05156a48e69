"""`powerguard drill --live`: an outage rehearsed on a running node, with its real daemon and its real ranks.

The order goes the way of a real one. What the daemon does is the daemon's; this only asks, watches, reads back what
was written, and says what came of it. Nothing here can halt a node, and a real event makes the drill its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from powerguard.drill.moments import moments
from powerguard.drill.parts import Parts, stops
from powerguard.errors import DaemonUnreachable, DrillFailed, JournalError, PowerguardError, UsageError
from powerguard.generations import verify
from powerguard.generations.scan import look
from powerguard.journal import Recording, read
from powerguard.node.ask import CONTROL_SOCKET, Answer, Ask, ask
from powerguard.node.status import JobStatus, Status

LOOK_S = 0.1
PARKED_S = 30.0
"""With --full ranks stay parked so long, so that the load without them shows in the UPS's own reading."""
LATE_FACTOR, LATE_S = 4.0, 120.0
"""A drill is waited for as long as the need times this, and so much more; a hung flush is given up by the daemon."""
IN_PLACE, NOT, GAVE_WAY = "resumed in place", "not as it must be", "gave way"


class Refused(PowerguardError):
    """The drill wasn't begun."""


class Result(Struct, frozen=True):
    """What came of it. Seconds; *spare_s* is runway less need and margin, with the need as measured now."""

    verdict: str
    why: tuple[str, ...]
    parts: tuple[Parts, ...]
    stopped_s: float | None  # from the order until every rank was past its stop step
    need_before_s: float
    need_s: float
    runway_s: float | None
    idle_runway_s: float | None
    spare_s: float | None
    verified: bool
    load_pct: float | None = None  # of the UPSes while training, and while parked, as reported
    parked_load_pct: float | None = None
    journal: str = ""
    begun_at: float = 0.0  # CLOCK_BOOTTIME

    @property
    def ok(self) -> bool:
        """Everything that must hold does."""
        return self.verdict == IN_PLACE


class Daemon(Protocol):
    """What a drill asks of a daemon."""

    def status(self) -> Status:
        """What it knows now."""

    def order(self, verb: str, *, job: str = "", for_s: float = 0.0) -> str:
        """An operator's order; Refused with its words."""


class Node:
    """The running daemon, asked through its control socket."""

    def __init__(self, run_dir: str | Path, by: str = "") -> None:
        self._path, self._by = Path(run_dir) / CONTROL_SOCKET, by

    def status(self) -> Status:
        """What it knows. DaemonUnreachable."""
        try:
            return msgspec.convert(self._ask(Ask("status")).data, Status, strict=False)
        except msgspec.ValidationError as err:
            raise DaemonUnreachable(f"the daemon's status can't be understood: {err}", todo="update both") from None

    def order(self, verb: str, *, job: str = "", for_s: float = 0.0) -> str:
        """An order; Refused with the daemon's words."""
        answer = self._ask(Ask(verb, by=self._by, job=job, for_s=for_s))
        if not answer.ok:
            raise Refused(answer.text or f"{verb} was refused")
        return answer.text

    def _ask(self, question: Ask) -> Answer:
        return ask(self._path, question)


def may(status: Status, job: str) -> tuple[JobStatus, ...]:
    """The jobs that a drill now would stop. Refused says why there can be none; UsageError: there is no such job."""
    if status.on_battery:
        raise Refused("the node is on battery: a drill is refused", todo="wait until the mains are back")
    if status.phase != "online":
        raise Refused(f"the node is {status.phase.replace('_', ' ')}: {status.reason}", todo="see: powerguard status")
    if status.on_battery is None:
        raise Refused("nobody knows whether mains are there", todo="see: powerguard status")
    alive = tuple(each for each in status.jobs if any(rank.alive for rank in each.ranks))
    if not alive:
        raise Refused("no training job is registered", todo="start one: a drill measures a real flush")
    if job and job not in {each.name for each in alive}:
        known = ", ".join(each.name for each in alive)
        raise UsageError(f"no job is called {job!r}", todo=f"there is {known}")
    return tuple(each for each in alive if job in ("", each.name))


def warning(status: Status, jobs: tuple[JobStatus, ...], *, full: bool) -> str:
    """What is going to happen, for whoever is to say yes."""
    names = ", ".join(f"{job.name} ({len(job.ranks)} ranks, at step {_step(job)})" for job in jobs)
    parked = f", stays parked for {PARKED_S:.0f} s" if full else ""
    first = "a snapshot is taken; then " if full else ""
    return (
        f"On {status.node}, {first}{names} stops at one step, is flushed{parked}, and trains on in place: "
        f"a pause of about {status.need.save_s + (PARKED_S if full else 0.0):.0f} s. Nothing is halted or restarted."
    )


def run(
    node: Daemon,
    *,
    job: str = "",
    full: bool = False,
    say: Callable[[str], None],
    clock: Callable[[], float],
    pause: Callable[[float], None] = time.sleep,
) -> Result:
    """The drill. Refused, or DrillFailed where it can't be followed to its end."""
    before = node.status()
    jobs = may(before, job)
    longest = LATE_FACTOR * before.need.save_s + LATE_S
    if full:
        say(f"snapshot: {node.order('flush')}")
        _wait(lambda: _saved(node.status(), jobs), longest, clock, pause, "the snapshot to be durable")
        jobs = may(node.status(), job)
    begun = clock()
    say(node.order("drill", job=job, for_s=PARKED_S if full else 0.0))
    watch = _Watch(node, jobs, say)
    _wait(watch.over, longest + (PARKED_S if full else 0.0), clock, pause, "the ranks to train on")
    return _concluded(before, watch, begun, clock())


class _Watch:
    """Follows the node through the drill."""

    def __init__(self, node: Daemon, jobs: tuple[JobStatus, ...], say: Callable[[str], None]) -> None:
        self._node, self._say = node, say
        self.was = {job.name: job.saved_generation for job in jobs}
        self._phase = ""
        self._stopped = False
        self.last: Status | None = None
        self.real = ""  # the real event that took over
        self.parked_load: float | None = None

    def over(self) -> bool:
        """Every rank is past the step where it was stopped, or something real has come."""
        status = self.last = self._node.status()
        if status.phase != self._phase:
            self._phase = status.phase
            self._say(f"{status.phase.replace('_', ' ')}: {status.reason}")
        if status.on_battery or status.phase in ("on_battery", "halting"):
            self.real = f"on battery, {status.reason}" if status.on_battery else status.reason
            return True
        if status.phase == "parked":
            self.parked_load = _load(status)
        if status.phase in ("flushing", "parked"):
            self._stopped = True
            return False
        return all(self._goes_on(job) for job in status.jobs if job.name in self.was)

    def _goes_on(self, job: JobStatus) -> bool:
        if job.saved_generation == self.was[job.name]:
            return self._stopped  # given up: nothing more will come
        return _step(job) > (job.saved_step or 0)


def _concluded(before: Status, watch: _Watch, begun: float, ended: float) -> Result:
    after = watch.last
    assert after is not None
    parts, unread = _parts(after.journal, begun)
    wrong: list[str] = []
    unverified: list[str] = []
    for job in after.jobs if not watch.real else ():
        if job.name in watch.was:
            lost = _wrong(job, watch.was[job.name], [part for part in parts if part.job == job.name])
            wrong += lost
            unverified += [] if lost else _unread(job)
    verdict = GAVE_WAY if watch.real else NOT if wrong or unverified else IN_PLACE
    why = (f"a real event took over: {watch.real}",) if watch.real else (*wrong, *unverified)
    return Result(
        verdict=verdict,
        why=why or _right(after, watch, ended - begun, unread),
        parts=parts,
        stopped_s=None if watch.real else ended - begun,
        need_before_s=before.need.total_s,
        need_s=after.need.total_s,
        runway_s=after.runway_s,
        idle_runway_s=after.idle_runway_s,
        spare_s=after.spare_s,
        verified=not unverified and not watch.real,
        load_pct=_load(before),
        parked_load_pct=watch.parked_load,
        journal="" if unread else after.journal,
        begun_at=begun,
    )


def _parts(journal: str, begun: float) -> tuple[tuple[Parts, ...], str]:
    """The stops since *begun* from the daemon's journal, and why there are none."""
    try:
        recording: Recording = read(journal)
    except JournalError as err:
        return (), f"without the journal there are no parts: {err.message}"
    return stops(moments(recording), begun), ""


def _wrong(job: JobStatus, was: str, own: list[Parts]) -> list[str]:
    """What isn't as it must be of one job, whose newest generation before was *was*."""
    wrong = [f"{job.name}: rank {rank.rank} {rank.gone or 'is gone'}" for rank in job.ranks if not rank.alive]
    if job.saved_generation == was:
        wrong.append(f"{job.name}: no generation came of the flush{f' ({job.why})' if job.why else ''}")
    elif own and job.saved_step != own[-1].step:
        wrong.append(f"{job.name} stopped at step {own[-1].step}, and the newest generation is of {job.saved_step}")
    if any(part.same_processes is False for part in own):
        wrong.append(f"{job.name}: a rank isn't the process that it was")
    return wrong


def _unread(job: JobStatus) -> list[str]:
    """What is wrong with the generation that was written, after every byte of it was read back."""
    try:
        problems = verify(look(Path(job.directory) / job.saved_generation))
    except (OSError, PowerguardError) as err:
        return [f"{job.name}: {job.saved_generation} can't be read back: {err}"]
    return [f"{job.name}: {job.saved_generation}: {problem}" for problem in problems]


def _right(after: Status, watch: _Watch, took_s: float, unread: str) -> tuple[str, ...]:
    right = [
        f"{job.name} stopped at step {job.saved_step}, was flushed and sealed, every byte read back"
        for job in after.jobs
        if job.name in watch.was
    ]
    right.append(f"every rank trained on in place after {took_s:.1f} s")
    return (*right, unread) if unread else tuple(right)


def _wait(
    done: Callable[[], bool],
    within_s: float,
    clock: Callable[[], float],
    pause: Callable[[float], None],
    what: str,
) -> None:
    end = clock() + within_s
    while not done():
        if clock() > end:
            raise DrillFailed(f"waited {within_s:.0f} s for {what}, in vain", todo="see: powerguard status")
        pause(LOOK_S)


def _saved(status: Status, before: tuple[JobStatus, ...]) -> bool:
    """Every job has a newer generation than *before*, and nothing is under way."""
    was = {job.name: job.saved_generation for job in before}
    jobs = [job for job in status.jobs if job.name in was]
    return all(job.saved_generation != was[job.name] and job.outcome != "underway" for job in jobs)


def _step(job: JobStatus, of: Callable[[list[int]], int] = min) -> int:
    """The step of the rank that is furthest behind, or the other way round; -1 = none yet."""
    return of([-1 if rank.step is None else rank.step for rank in job.ranks if rank.alive] or [-1])


def _load(status: Status) -> float | None:
    return max((feed.load_pct for feed in status.feeds if feed.load_pct is not None), default=None)
