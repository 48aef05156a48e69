"""Powering the node off: once, however often it is asked, and tried again until the node is down.

The ways to do it are in `halt_ways.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from msgspec import Struct

from powerguard.node.halt_ways import Way

RETRY_S = 5.0
AGAIN_S = 120.0
"""A shutdown that takes longer than this hangs: systemd's own limit for one unit is 90 s."""


class Result(Struct, frozen=True):
    """What became of one attempt."""

    done: bool
    real: bool
    text: str


class Poweroff:
    """Carries a halt out on its own thread, so that the loop goes on. *put* gets a Result for each attempt.

    Asked twice it is one halt. What fails is tried again after *retry_s*; a node that is still up *again_s* after it
    was powered off is powered off again.
    """

    def __init__(
        self, way: Way, put: Callable[[Result], None], *, retry_s: float = RETRY_S, again_s: float = AGAIN_S
    ) -> None:
        self.way, self._put, self._retry_s, self._again_s = way, put, retry_s, again_s
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    @property
    def ordered(self) -> bool:
        """Whether a halt is under way or done."""
        return self._thread is not None

    def halt(self, reason: str, *, done: bool = False) -> None:
        """Begins, once. *done*: it was carried out already (before a restart), so only watch that it takes effect."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._halt, args=(reason, done), name="poweroff", daemon=True)
            self._thread.start()

    def again(self) -> None:
        """Forgets a halt that was only a dry run: the next one is a new one."""
        if not self.way.real:
            self._thread = None

    def close(self) -> None:
        """No more retries."""
        self._stop.set()

    def _halt(self, reason: str, done: bool) -> None:
        while True:
            if done and (not self.way.real or self._stop.wait(self._again_s)):
                return
            if done:
                reason = f"still up {self._again_s:g} s after the power-off: {reason}"
            try:
                result = Result(True, self.way.real, self.way.halt(reason))
            except Exception as err:  # whatever it is, the node must still go down
                result = Result(False, self.way.real, str(err))
            done = result.done
            self._put(result)
            if not done and self._stop.wait(self._retry_s):
                return
