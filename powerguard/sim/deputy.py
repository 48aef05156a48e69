"""A simulated deputy: keeps the last two states that its rank has staged, and makes one durable when it is told to.

It lives on when its rank hangs or is dead, and ends with the power, or with the word to leave.
"""

from __future__ import annotations

from collections.abc import Callable

from powerguard.core.messages import Decide, Exit, Failed, FromRank, Held, Plan, Resume, Sealed, Shard, ToRank

HELD_S = 1.0
SLOTS = 2


class SimDeputy:
    """The deputy of one rank. *save_s* is what making a state durable takes; *shard* does it."""

    def __init__(self, save_s: float, shard: Callable[[Decide, float], Shard]) -> None:
        self.save_s, self._shard = save_s, shard
        self.alive = True
        self.steps: tuple[int, ...] = ()
        self._kept = -1  # the step that isn't overwritten
        self._order: Decide | None = None
        self._ready_at = 0.0
        self._done: Shard | Failed | None = None
        self._say: list[FromRank] = []
        self._held_at = 0.0

    def stage(self, step: int) -> None:
        """The rank has copied its state at *step*; nothing while one is kept."""
        if self.alive and self._kept < 0:
            self.steps = (*self.steps, step)[-SLOTS:]
            self._held_at = 0.0

    def hear(self, message: ToRank, now: float) -> None:
        """Takes in what concerns it."""
        if not self.alive:
            return
        if isinstance(message, Decide) and message.plan is Plan.STAGED:
            self._decide(message, now)
        elif isinstance(message, (Resume, Sealed)):
            self._kept = -1
        elif isinstance(message, Exit):
            self.alive = False

    def _decide(self, order: Decide, now: float) -> None:
        if self._order is not None and order.seq <= self._order.seq:
            if order.seq == self._order.seq and self._done is not None:
                self._say.append(self._done)
            return
        self._order, self._done = order, None
        if order.step in self.steps:
            self._kept, self._ready_at = order.step, now + self.save_s
        else:
            self._done = Failed(order.seq, order.step, f"step {order.step} isn't staged")
            self._say.append(self._done)

    def tick(self, now: float) -> list[FromRank]:
        """Lives until *now*: what it says."""
        if not self.alive:
            return []
        if self._order is not None and self._done is None and now >= self._ready_at:
            self._done = self._shard(self._order, now)
            self._say.append(self._done)
        said, self._say = self._say, []
        if now >= self._held_at:
            self._held_at = now + HELD_S
            said.append(Held(1, self.steps, 1 << 30, self.save_s))
        return said
