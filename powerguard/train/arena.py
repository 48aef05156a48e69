"""Host memory for staged states, made before the emergency: page aligned, touched, pinned where there is CUDA.

One slot holds one whole shard file as it will be written, header included, so that it goes to the disk without
another copy. Memory: *slots* times the capacity, for the life of the flusher, and nothing more at the time of a save.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from powerguard.errors import StateError
from powerguard.generations.memory import available_bytes
from powerguard.generations.record import ALIGN

HUGE = 2 * 1024 * 1024
_TOUCH_BYTES = 64 * 1024 * 1024
_SPARE_BYTES = 512 * 1024 * 1024
"""Memory to leave to others when the arena is made."""


class Slot:
    """One aligned, touched region. *view* is for the writer, *tensor* for staging; both are the same bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = -(-capacity // HUGE) * HUGE
        self._map = mmap.mmap(-1, self.capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, ValueError):  # kernels without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        # A forked child (a DataLoader's worker) must not share these pages: while it lives, each of our writes into
        # them would copy a page, and direct I/O from shared pages isn't safe.
        self._map.madvise(mmap.MADV_DONTFORK)
        self.view = memoryview(self._map)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        assert self.tensor.data_ptr() % ALIGN == 0
        self.pinned = False

    def touch(self, pool: ThreadPoolExecutor) -> None:
        """Makes the kernel give the memory now; first touch was measured at 0.4 GB/s on a cold guest, 7.5 warm."""
        start = self.tensor.data_ptr()
        parts = [
            pool.submit(partial(ctypes.memset, start + at, 0, min(_TOUCH_BYTES, self.capacity - at)))
            for at in range(0, self.capacity, _TOUCH_BYTES)
        ]
        for part in parts:
            part.result()

    def pin(self) -> str:
        """Registers the memory with CUDA, so that copies from the device run at full speed; returns what went wrong."""
        code = int(_cudart().cudaHostRegister(self.tensor.data_ptr(), self.capacity, 0))
        self.pinned = code == 0
        return "" if code == 0 else f"the arena couldn't be pinned (cudaHostRegister: {code}): staging is slower"

    def release(self) -> None:
        """Undoes the pinning; the memory goes when the last view of it goes."""
        if self.pinned:
            _cudart().cudaHostUnregister(self.tensor.data_ptr())
            self.pinned = False


def make_slots(count: int, capacity: int, pool: ThreadPoolExecutor, *, pin: bool) -> tuple[list[Slot], list[str]]:
    """(*count* slots, or fewer where memory allows no more; what isn't as wished, in words).

    Raises StateError with the numbers where not even one fits.
    """
    available = available_bytes()
    fitting = count if available is None else min(count, max(0, (available - _SPARE_BYTES) // max(1, capacity)))
    if fitting < 1:
        raise StateError(
            f"the state takes {capacity / 1e9:.2f} GB and only {(available or 0) / 1e9:.2f} GB of memory are free",
            todo="free host memory or save less state",
        )
    warnings: list[str] = []
    if fitting < count:
        warnings.append(
            f"host memory holds {fitting} staged states of {capacity / 1e9:.2f} GB, not {count}: "
            "a save waits for the one before it"
        )
    slots = [Slot(capacity) for _ in range(fitting)]
    for slot in slots:
        slot.touch(pool)
        if pin:
            warnings += filter(None, [slot.pin()])
    return slots, warnings


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
