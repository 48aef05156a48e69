"""Faults done to real processes: those of `sim.faults` that an unprivileged user can do to processes of their own.

A rank is stopped, slowed and killed from outside; its writes are refused by a limit on the size of its files. What a
UPS says is changed on its way to the simulated upsd, by the same code as in the pure world. Flapping mains and a cut of
the power are `supply.py`'s.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from powerguard.core.types import Comm
from powerguard.drill import accomplice
from powerguard.errors import UsageError
from powerguard.sim import faults as f
from powerguard.sim.battery import SimUps
from powerguard.sim.feed import SimFeed
from powerguard.sim.upsd import SimUpsd

SHARD_MAX_BYTES = 1 << 20
"""A rank whose disk is "full" may still write its trace and its log, and no shard."""

ELSEWHERE = {
    f.OtherUid: "it needs root and a second user",
    f.WallJump: "it needs root, and every other process would see it",
    f.VolatileCache: "it needs a disk of its own: hil/ has rigs for that",
    f.WriteSlow: "it needs a disk of its own: hil/ has rigs for that",
}
"""Faults that only the pure world has, and why."""


class Target(Protocol):
    """The processes of a node that faults are done to."""

    def pid_of(self, rank: int) -> int:
        """The process of a rank."""

    def daemon_pid(self) -> int:
        """The daemon's process."""

    def daemon_again(self) -> None:
        """systemd starts the daemon anew, from its journal."""

    def all_pids(self) -> list[int]:
        """Every living process of the node."""


def refuse(faults: tuple[f.Fault, ...]) -> None:
    """UsageError for the first fault that can't be done to processes here."""
    for fault in faults:
        why = ELSEWHERE.get(type(fault))
        if why:
            raise UsageError(f"{f.kebab(type(fault))} can't be done to processes: {why}", todo="tell it as a story")
        lost = isinstance(fault, f.DaemonDown) and fault.journal_lost
        if lost:
            raise UsageError("a drill keeps its journals: they are its evidence", todo="tell it as a story")


class Injector:
    """Begins faults and ends them when their time is over. `look` is to be called again and again."""

    def __init__(self, target: Target, ups: FaultyUps | None, clock: Callable[[], float]) -> None:
        self._target, self._ups, self._clock = target, ups, clock
        self._ends: list[tuple[float, Callable[[], None]]] = []
        self._slow: list[tuple[float, int, float]] = []  # (until, pid, factor)

    def begin(self, fault: f.Fault) -> str:
        """Does it now; what was done, in words."""
        now = self._clock()
        if isinstance(fault, f.UpsFault):
            if self._ups is None:
                raise UsageError(f"{f.kebab(type(fault))} needs the simulated upsd", todo="leave --nut out")
            self._ups.ail(fault, now)
            return f"the UPS: {f.spell(fault)}"
        if isinstance(fault, f.RankFault):
            return self._rank(fault, now)
        if isinstance(fault, f.DaemonDown):
            _signal(self._target.daemon_pid(), signal.SIGKILL)
            self._ends.append((now + fault.down_s, self._target.daemon_again))
            return "the daemon is killed"
        if isinstance(fault, f.DaemonStopped):
            self._stop([self._target.daemon_pid()], now, fault.for_s)
            return f"the daemon is stopped for {fault.for_s:g} s"
        if isinstance(fault, f.Suspended):
            self._stop(self._target.all_pids(), now, fault.for_s)
            return f"the node sleeps for {fault.for_s:g} s"
        raise UsageError(f"{f.kebab(type(fault))} can't be done to processes", todo="tell it as a story")

    def mend_ups(self) -> None:
        """What was wrong with the UPS and on the way to it is over."""
        if self._ups is not None:
            self._ups.mend()

    def look(self) -> None:
        """Ends what is over; slows what is slow."""
        now = self._clock()
        for item in [item for item in self._ends if item[0] <= now]:
            self._ends.remove(item)
            item[1]()
        for until, pid, factor in self._slow:
            awake = (until > 0.0 and now >= until) or int(now * 10) % round(max(2.0, factor)) == 0
            _signal(pid, signal.SIGCONT if awake else signal.SIGSTOP)

    def _rank(self, fault: f.RankFault, now: float) -> str:
        pid = self._target.pid_of(fault.rank)
        if isinstance(fault, f.RankDead):
            _signal(pid, signal.SIGKILL)
        elif isinstance(fault, f.RankStopped):
            self._stop([pid], now, fault.for_s)
        elif isinstance(fault, f.StepSlow):
            self._slow.append((now + fault.for_s if fault.for_s else 0.0, pid, fault.factor))
        elif isinstance(fault, f.LoaderWorkersDead):
            for child in children(pid):
                _signal(child, signal.SIGKILL)
        elif type(fault) in accomplice.BEGIN:
            _signal(pid, accomplice.BEGIN[type(fault)])
            if fault.for_s:
                self._ends.append((now + fault.for_s, lambda: _signal(pid, accomplice.END)))
        elif isinstance(fault, f.LateJoiner):
            pass  # it was started so
        else:
            soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (SHARD_MAX_BYTES, hard))
            if fault.for_s:
                undo = lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))  # noqa: E731
                self._ends.append((now + fault.for_s, lambda: _quietly(undo)))
        return f"rank {fault.rank}: {f.kebab(type(fault)).removeprefix('rank-').replace('-', ' ')}"

    def _stop(self, pids: list[int], now: float, for_s: float) -> None:
        for pid in pids:
            _signal(pid, signal.SIGSTOP)
        if for_s:
            self._ends.append((now + for_s, lambda: _go_on(pids)))


class FaultyUps:
    """What a simulated UPS publishes, as a client sees it through its faults."""

    def __init__(self, name: str, ups: SimUps, upsd: SimUpsd, clock: Callable[[], float]) -> None:
        self._feed, self._upsd, self._clock, self._name = SimFeed(name, ups=ups), upsd, clock, name
        self._link = Comm.OK
        self._kind = ""

    def ail(self, fault: f.UpsFault, now: float) -> None:
        """One fault more, from *now* on."""
        self._feed.faults = (*self._feed.faults, _from(fault, now))

    def mend(self) -> None:
        """All its faults are over."""
        self._feed.faults = ()

    def publish(self, variables: Mapping[str, str]) -> None:
        """*variables* are what the UPS says; upsd is told what is left of them."""
        if not self._feed.faults:
            if self._kind:
                self._kind = ""
                self._upsd.clear()
            self._upsd.replace(self._name, variables)
            return
        now = self._clock()
        kind = next((_LINKS[type(each)] for each in self._feed.faults if type(each) in _LINKS and each.active(now)), "")
        sample = self._feed.sample(now)
        if not kind and sample.comm is Comm.STALE:
            kind = "stale"  # the link that drops on the edge
        if kind != self._kind:
            self._kind = kind
            self._upsd.clear()
            if kind == _UNKNOWN:
                self._upsd.remove(self._name)
            elif kind:
                self._upsd.fault(kind)
        if sample.comm is Comm.OK and not kind:
            self._upsd.replace(self._name, sample.variables)


_UNKNOWN = "unknown"
_LINKS: dict[type[f.UpsFault], str] = {
    f.DataStale: "stale",
    f.DriverGone: "driver-gone",
    f.UpsdGone: "refuse",
    f.HalfOpen: "half-open",
    f.Silent: "silent",
    f.UpsdRefuses: _UNKNOWN,
    f.Waits: "wait",
}


def _from(fault: f.UpsFault, now: float) -> f.UpsFault:
    return replace(fault, at=now, step=-1, feed="")


def children(pid: int) -> list[int]:
    """The processes that *pid* has started and that live."""
    with suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _go_on(pids: list[int]) -> None:
    for pid in pids:
        _signal(pid, signal.SIGCONT)


def _quietly(do: Callable[[], object]) -> None:
    with suppress(OSError):
        do()


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
