"""Load shedding: while the node is on battery its GPUs run at less power, so that the battery lasts longer.

It decides nothing: the phase says when (`want`). The work is done on a thread here, since a driver with a lost GPU may
take its time, and by a *way* that has the right to it: NVML allows root alone to change limits, so the daemon, which
isn't root, starts and stops a small unit (`powerguard-shed.service`) that may do nothing else.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import structlog

from powerguard.core.types import LoadStep
from powerguard.errors import PowerguardError
from powerguard.node.gpus import Limits, Outcome, library
from powerguard.node.program import ProgramFailed, run

UNIT = "powerguard-shed.service"
UNIT_S = 30.0
NOTE = Path("/var/lib/powerguard-shed/limits.json")
RETRY_FIRST_S, RETRY_MOST_S = 5.0, 60.0

GPU_SHARE = 0.55
"""Of a training node's power that its GPUs draw: 8 x 700 W of the 10.2 kW of a DGX H100 (its data sheet)."""
LEAST_FACTOR = 0.7
"""The estimator takes a step to less than this for a park."""

log = structlog.get_logger()


class ShedFailed(Exception):
    """The limits couldn't be changed, or not all of them; the text is for people."""


class Way(Protocol):
    """Somebody who may change the limits. Both words may be repeated, and are bounded."""

    name: str

    def lower(self) -> str:
        """Lowers them; what was done. Raises ShedFailed."""

    def restore(self) -> str:
        """Puts them back; what was done. Raises ShedFailed."""


class Direct:
    """By NVML, in this process: needs root."""

    name = "direct"

    def __init__(self, pct: float, limits: Callable[[], Limits]) -> None:
        self._pct, self._limits = pct, limits

    def lower(self) -> str:
        return _told(lambda: self._limits().lower(self._pct))

    def restore(self) -> str:
        return _told(lambda: self._limits().restore())


def limits(boot: str, path: Path = NOTE, nvml: Any = None) -> Limits:
    """The real limits of this node. Raises MissingDependency."""
    return Limits(path, boot, library() if nvml is None else nvml)


def _told(act: Callable[[], Outcome]) -> str:
    try:
        outcome = act()
    except PowerguardError as err:
        raise ShedFailed(str(err)) from None
    if outcome.failed:
        raise ShedFailed("; ".join((*outcome.failed, *outcome.done)))
    return "; ".join(outcome.done)


class Unit:
    """By a unit of systemd's: starting it lowers the limits, stopping it restores them. Needs the polkit rule."""

    name = "unit"

    def __init__(self, unit: str = UNIT, systemctl: str = "/usr/bin/systemctl", bound_s: float = UNIT_S) -> None:
        self._unit, self._systemctl, self._bound_s = unit, systemctl, bound_s

    def lower(self) -> str:
        return self._do("start")

    def restore(self) -> str:
        return self._do("stop")

    def _do(self, verb: str) -> str:
        try:
            run([self._systemctl, "--no-ask-password", verb, self._unit], self._bound_s)
        except ProgramFailed as err:
            raise ShedFailed(f"{err}; see: journalctl -u {self._unit}") from None
        return f"{self._unit}: {verb}"


def choose(pct: float, method: str, boot: str) -> Way | None:
    """The way that the configuration names; None where nothing is to be shed."""
    if not pct:
        return None
    if method == "direct" or (method == "auto" and os.geteuid() == 0):
        return Direct(pct, lambda: limits(boot))
    return Unit()


def expected(pct: float) -> float:
    """The node's load with its GPUs at *pct*, to that without: what the estimator is told until it has measured it."""
    return max(LEAST_FACTOR, 1.0 - GPU_SHARE * (1.0 - pct / 100.0))


class Shedder:
    """Keeps the limits as they are wanted, on a thread of its own. *put* is told of each step of the load.

    The first `want` is always carried out: a daemon that died may have left the limits low.
    """

    def __init__(
        self,
        way: Way | None,
        put: Callable[[LoadStep], object],
        *,
        factor: float = 1.0,
        retry_s: float = RETRY_FIRST_S,
    ) -> None:
        self._way, self._put, self._factor, self._retry_s = way, put, factor, retry_s
        self._changed = threading.Condition()
        self._wanted: bool | None = None  # limits low
        self._done: bool | None = None  # None: not known, also after a failure, which may have changed some
        self._tried = False  # to lower them, ever
        self._stepped = False  # the load was told to be lower
        self._trouble = ""
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def lowered(self) -> bool:
        """Whether the limits are low now, as far as known."""
        return bool(self._done)

    def trouble(self) -> str:
        """ "" or why the limits aren't as they should be."""
        return self._trouble

    def want(self, lowered: bool) -> None:
        """Low limits, or those that were found. Never waits."""
        if self._way is None or lowered is self._wanted:
            return
        with self._changed:
            self._wanted = lowered
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="shed", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self, *, restore: bool, wait_s: float = 5.0) -> None:
        """Ends; with *restore* the limits are put back first, for at most *wait_s*."""
        if self._thread is None:
            return
        if restore:
            self.want(False)
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(wait_s)

    def _run(self) -> None:
        retry_s = self._retry_s
        while True:
            with self._changed:
                while self._wanted is self._done and not self._closing:
                    self._changed.wait()
                wanted = self._wanted
            if wanted is self._done or wanted is None:
                return
            if self._attempt(wanted):
                retry_s = self._retry_s
                continue
            with self._changed:
                if self._wanted is wanted:
                    if self._closing:
                        return
                    self._changed.wait(retry_s)
            retry_s = min(RETRY_MOST_S, 2 * retry_s)

    def _attempt(self, lower: bool) -> bool:
        assert self._way is not None
        self._tried = self._tried or lower
        try:
            what = self._way.lower() if lower else self._way.restore()
        except Exception as err:  # a driver may fail in any way
            self._done, self._trouble = None, f"GPU power isn't {'lowered' if lower else 'restored'}: {err}"
            log.error(self._trouble)
            return False
        self._done, self._trouble = lower, ""
        if self._tried:
            log.info("GPU power lowered" if lower else "GPU power restored", what=what, by=self._way.name)
        if lower is not self._stepped:
            self._stepped = lower
            self._put(LoadStep(self._factor if lower else 1.0 / self._factor))
        return True
