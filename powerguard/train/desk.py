"""What the training thread, the listener and the writers of one rank share: the order at hand, under one lock.

The hot path touches none of it: it stores the step into the page and looks at one attribute, which `arm` sets.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from powerguard.core import follow
from powerguard.core.follow import Follower, Place, Todo
from powerguard.core.messages import Exit, FromRank, Notice, Pace, Purpose, ToRank

LOOK_S = 0.5
"""A wait is cut into pieces of this length: signals, and time limits, are seen in between."""


class Desk:
    """Lock, order and place. *step_now* reads the page, *arm* sets what the hot path looks at."""

    def __init__(self, *, step_now: Callable[[], int], arm: Callable[[bool], None], pace: Callable[[], Pace]) -> None:
        self._step_now, self._arm, self._pace = step_now, arm, pace
        self._changed = threading.Condition()
        self._f = Follower()
        self._inside = False
        # without the GIL a store may be seen after a later load: one more step of slack makes up for it
        self._slack = 0 if getattr(sys, "_is_gil_enabled", lambda: True)() else 1
        self.wake: Callable[[], None] = lambda: None  # the listener has something to send
        self.busy = ""
        self.notice: Notice | None = None
        self.alone_since: float | None = time.monotonic()  # no daemon is connected since then; None = one is

    # ---- the listener --------------------------------------------------------------------------------

    def hear(self, message: ToRank) -> tuple[FromRank, ...]:
        """Takes a message in; what to answer at once."""
        with self._changed:
            if isinstance(message, Notice):
                self.notice = message
            self._arm(True)  # before the step is read: whoever stores a later one will look here
            step = self._step_now()
            place = Place(step, True) if self._inside else Place(step + self._slack)
            self._f, replies = follow.hear(self._f, message, place, self._pace(), time.monotonic())
            self._settle()
            return replies

    def due(self) -> tuple[FromRank, ...]:
        """What is to be said (again) now."""
        with self._changed:
            self._f, ripe = follow.due(self._f, time.monotonic())
            return ripe

    def next_due(self) -> float | None:
        """When `due` will have something, on the clock of time.monotonic()."""
        with self._changed:
            return follow.next_due(self._f)

    @property
    def step(self) -> int:
        """The step last completed."""
        return self._step_now()

    @property
    def seq(self) -> int:
        """The newest order that this rank knows."""
        return self._f.seq

    @property
    def stopping(self) -> bool:
        """A STOP is at hand: nothing but the flush should use the disk."""
        duty = self._f.duty
        return duty is not None and duty.purpose is Purpose.STOP and not duty.done

    def look(self) -> None:
        """Whoever waits is to look again."""
        with self._changed:
            self._changed.notify_all()

    @property
    def exit(self) -> Exit | None:
        """The word to leave, once it has come."""
        return self._f.exit

    # ---- whoever did something -----------------------------------------------------------------------

    def say(self, deed: follow.Deed) -> None:
        """A deed, to be told to the daemon until it is acknowledged."""
        with self._changed:
            self._f = follow.say(self._f, deed, time.monotonic())
            self._settle()
        self.wake()

    # ---- the training thread -------------------------------------------------------------------------

    def enter(self) -> None:
        """The training thread is inside a boundary: it can be held there."""
        with self._changed:
            self._inside = True

    def leave(self) -> None:
        """It is outside, whatever the order says: an exception takes it away."""
        with self._changed:
            self._inside = False

    def next(self, step: int) -> Todo:
        """What to do at boundary *step*; with `Go` the training thread is outside from then on."""
        with self._changed:
            before = self._f.unheard
            self._f, todo = follow.arrive(self._f, step, time.monotonic())
            if todo is follow.GO:
                self._inside = False
            self._settle()
            news = self._f.unheard is not before
        if news:
            self.wake()
        return todo

    def wait(self, until: float | None = None) -> None:
        """Until something has changed, *until* has come or a moment has passed; the GIL is released."""
        with self._changed:
            pause = LOOK_S if until is None else min(LOOK_S, max(0.0, until - time.monotonic()))
            self._changed.wait(pause)

    def alone_s(self) -> float:
        """For how long no daemon has been connected; 0 = one is."""
        since = self.alone_since
        return 0.0 if since is None else time.monotonic() - since

    def let_go(self) -> None:
        """The order is over without a word of the daemon's, which is gone."""
        with self._changed:
            self._f = follow.let_go(self._f)
            self._settle()

    @property
    def quiesced(self) -> bool:
        """QUIESCED was said to the order at hand."""
        return self._f.quiesced

    def _settle(self) -> None:
        """After every change, under the lock."""
        self._arm(self._f.armed)
        self._changed.notify_all()
