"""Which staged state lies in which slot of the arena, and who is using it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from powerguard.errors import StateError
from powerguard.generations.record import Content
from powerguard.train.arena import Slot, make_slots


@dataclass(eq=False)
class Staged:
    """A state copied into the arena. Valid until its slot is needed again: two saves later."""

    step: int
    bytes: int
    stage_s: float
    slot: Slot | None  # None once it isn't valid any more
    content: Content
    writers: int = 0
    fill: Callable[[int, int], None] | None = None  # while the copy isn't complete

    @property
    def valid(self) -> bool:
        """Whether it can still be written."""
        return self.slot is not None


class Slots:
    """The arena of one flusher; safe for use by several threads."""

    def __init__(self, count: int, pool: ThreadPoolExecutor) -> None:
        self.capacity = 0  # bytes of state that a slot was made for
        self._count = count
        self._pool = pool
        self._slots: list[Slot] = []
        self._staged: list[Staged] = []  # what the slots hold, oldest first
        self._changed = threading.Condition()

    @property
    def count(self) -> int:
        """Slots there are; 0 before `make`."""
        return len(self._slots)

    @property
    def memory_bytes(self) -> int:
        """Host memory that the slots take."""
        return sum(slot.capacity for slot in self._slots)

    @property
    def first(self) -> Slot:
        """Any slot, for use while nothing is staged."""
        return self._slots[0]

    def fits(self, size: int) -> bool:
        """Whether a state of *size* bytes can be staged as things are."""
        return bool(self._slots) and size <= self._slots[0].capacity

    def make(self, capacity: int) -> list[str]:
        """New slots, the old ones' memory given back first; what was staged there is gone. Returns warnings.

        Waits for running writes; raises StateError where memory doesn't allow one slot.
        """
        with self._changed:
            self._let_go()
            self._slots, warnings = make_slots(self._count, capacity, self._pool, pin=torch.cuda.is_available())
            self.capacity = capacity
        return warnings

    def close(self) -> None:
        """Waits for running writes and gives the memory back."""
        with self._changed:
            self._let_go()

    def _let_go(self) -> None:
        self._changed.wait_for(lambda: not any(staged.writers for staged in self._staged))
        for staged in self._staged:
            staged.slot = None
        self._staged.clear()
        for slot in self._slots:
            slot.release()
        self._slots.clear()

    def claim(self) -> Slot:
        """A slot that holds nothing, or the oldest that isn't being written; waits while all are."""
        with self._changed:
            while True:
                used = {id(staged.slot) for staged in self._staged}
                for slot in self._slots:
                    if id(slot) not in used:
                        return slot
                idle = next((staged for staged in self._staged if not staged.writers), None)
                if idle is not None:
                    freed, idle.slot = idle.slot, None
                    self._staged.remove(idle)
                    assert freed is not None
                    return freed
                self._changed.wait()

    def keep(self, staged: Staged) -> None:
        """*staged* now holds its slot."""
        with self._changed:
            self._staged.append(staged)

    def drop(self, staged: Staged) -> None:
        """*staged* can't be used any more."""
        with self._changed:
            staged.slot = None
            self._staged.remove(staged)

    @contextlib.contextmanager
    def writing(self, staged: Staged) -> Iterator[Slot]:
        """Keeps the slot of *staged* from being reused; raises StateError where it already was."""
        with self._changed:
            slot = staged.slot
            if slot is None:
                raise StateError(f"the copy of step {staged.step} was replaced by a newer one")
            staged.writers += 1
        try:
            yield slot
        finally:
            with self._changed:
                staged.writers -= 1
                self._changed.notify_all()
