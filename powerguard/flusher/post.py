"""What the deputy hears and says: the ear of its link. Orders go to the deputy's main thread, deeds are repeated."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from powerguard.core.messages import (
    Ack,
    Decide,
    Exit,
    Failed,
    FromRank,
    Held,
    Plan,
    Resume,
    Seal,
    Sealed,
    SealWritten,
    Shard,
    ToRank,
)

Order = Decide | Seal
Deed = Shard | Failed | SealWritten

REPEAT_FIRST_S = 0.25
REPEAT_MAX_S = 2.0
DEEDS_MAX = 16


class Post:
    """One lock, the listener thread on one side and the main thread on the other."""

    def __init__(self, held: Callable[[], Held], keep: Callable[[int], None]) -> None:
        """*held* is what the deputy can do now; *keep* has a step kept from being overwritten, -1: none."""
        self.orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()  # None: look around
        self._held, self._keep = held, keep
        self._lock = threading.Lock()
        self._seq = 0  # the newest decision taken on
        self._taken: set[tuple[int, str]] = set()
        self._deeds: dict[tuple[int, str], Deed] = {}
        self._due: dict[tuple[int, str], tuple[float, int]] = {}  # deeds that aren't acknowledged: when again, tries
        self._told: tuple[int, ...] | None = None
        self.leave = False  # EXIT was heard
        self.trouble_seen = ""
        self.wake: Callable[[], None] = lambda: None

    # ---- the main thread -----------------------------------------------------------------------------

    def say(self, deed: Deed) -> None:
        """A deed, told until it is acknowledged."""
        with self._lock:
            key = (deed.seq, type(deed).__name__)
            while len(self._deeds) >= DEEDS_MAX:
                oldest = next(iter(self._deeds))
                self._deeds.pop(oldest)
                self._due.pop(oldest, None)
            self._deeds[key] = deed
            self._due[key] = (0.0, 0)
        self.wake()

    def open(self) -> bool:
        """Something was done that nobody has acknowledged, or is still to do."""
        with self._lock:
            return bool(self._due) or not self.orders.empty()

    # ---- the listener --------------------------------------------------------------------------------

    def hello(self) -> FromRank:
        """A deputy doesn't register."""
        return self._held()

    def beat(self) -> FromRank:
        """What can be made durable now."""
        held = self._held()
        self._told = held.steps
        return held

    def hear(self, message: ToRank) -> tuple[FromRank, ...]:
        """Takes a message in."""
        with self._lock:
            if isinstance(message, Ack):
                self._due.pop((message.seq, message.of), None)
            elif isinstance(message, Decide):
                self._decide(message)
            elif isinstance(message, Seal):
                self._take(message)
            elif isinstance(message, (Sealed, Resume)):
                if message.seq >= self._seq:
                    self._keep(-1)
                self.orders.put(None)
            elif isinstance(message, Exit):
                self.leave = True
                self.orders.put(None)
        return ()

    def _decide(self, order: Decide) -> None:
        if order.plan is not Plan.STAGED or order.seq < self._seq:
            return
        if order.seq > self._seq:
            self._seq = order.seq
            self._keep(order.step)
        self._take(order)

    def _take(self, order: Order) -> None:
        """Once; what was done for it is said again when it is asked for again."""
        key = (order.seq, type(order).__name__)
        if key not in self._taken:
            if len(self._taken) > 100:
                self._taken.clear()
            self._taken.add(key)
            self.orders.put(order)
            return
        for deed_key in self._deeds:
            if deed_key[0] == order.seq and (deed_key[1] == "SealWritten") == isinstance(order, Seal):
                self._due.setdefault(deed_key, (0.0, 0))

    def due(self) -> tuple[FromRank, ...]:
        """Deeds to say (again), and news of what is held."""
        now = time.monotonic()
        with self._lock:
            ripe = [key for key, (at, _) in self._due.items() if now >= at]
            for key in ripe:
                tries = self._due[key][1]
                self._due[key] = (now + min(REPEAT_FIRST_S * 1.5**tries, REPEAT_MAX_S), min(tries + 1, 9))
            said: list[FromRank] = [self._deeds[key] for key in ripe]
        held = self._held()
        if held.steps != self._told:
            self._told = held.steps
            said.append(held)
        return tuple(said)

    def next_due(self) -> float | None:
        """When there will be something to say, by time.monotonic()."""
        with self._lock:
            return min((at for at, _ in self._due.values()), default=None)

    def connected(self, *, yes: bool) -> None:
        """A daemon is there now, or isn't any more."""

    def alone(self, path: str) -> None:
        """Nobody serves *path* so far."""

    def trouble(self, error: Exception) -> None:
        """Something went wrong in the link, which goes on."""
        self.trouble_seen = f"{type(error).__name__}: {error}"
        self.orders.put(None)
