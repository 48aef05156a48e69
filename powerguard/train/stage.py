"""Copies a state into a slot of the arena: the only part of a save that the training thread waits for.

Host memory is copied by the flusher's own threads, part by part, and not by torch's: those split each tensor among
themselves and wait for the slowest at every one, which took 5 s instead of 0.3 s for 700 tensors of 2.9 GB (measured)
when other processes wanted the cores.
"""

from __future__ import annotations

import bisect
import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from powerguard.generations.record import CHUNK_BYTES
from powerguard.train.blobs import Blob, bytes_view
from powerguard.train.dtypes import copies_as_bytes
from powerguard.train.layout import Layout, Part

THREADS = 4


class Place(Protocol):
    """Page-aligned host memory: *view* and *tensor* are the same bytes."""

    capacity: int
    view: memoryview
    tensor: torch.Tensor


class Copy:
    """One copy in the making. After `begin`, `fill` may be called from any thread, for any range, in any order."""

    def __init__(self, slot: Place, layout: Layout, blobs: list[Blob]) -> None:
        assert layout.file_bytes <= slot.capacity
        self.slot, self.layout = slot, layout
        self._base = slot.tensor.data_ptr()
        parts = sorted(zip(layout.parts, blobs, strict=True), key=lambda pair: pair[0].offset)
        parts = [(part, blob) for part, blob in parts if part.nbytes]
        self._plain: list[tuple[Part, Blob]] = []
        self._others: list[tuple[Part, Blob]] = []
        for pair in parts:
            (self._plain if _is_plain(pair[1]) else self._others).append(pair)
        self._offsets = [part.offset for part, _ in self._plain]
        self._sources = [blob.source.data_ptr() for _, blob in self._plain]

    def begin(self) -> None:
        """Copies the header, what lies on devices, and what isn't contiguous."""
        self.slot.view[: len(self.layout.header)] = self.layout.header
        with torch.no_grad():
            _copy_from_devices(self.slot, [pair for pair in self._others if pair[1].source.device.type != "cpu"])
            for part, blob in self._others:
                if blob.source.device.type == "cpu":
                    _copy(self.slot, part, blob.source, non_blocking=False)

    def fill(self, begin: int, end: int) -> None:
        """Copies what belongs into bytes *begin* to *end* of the file and `begin` didn't copy. Holds no lock."""
        index = max(0, bisect.bisect_right(self._offsets, begin) - 1)
        while index < len(self._offsets) and self._offsets[index] < end:
            offset = self._offsets[index]
            low, high = max(begin, offset), min(end, offset + self._plain[index][0].nbytes)
            if low < high:
                ctypes.memmove(self._base + low, self._sources[index] + low - offset, high - low)
            index += 1

    def run(self, pool: ThreadPoolExecutor) -> None:
        """The whole copy; on return, later changes of the state can't leak in."""
        self.begin()
        lock = threading.Lock()
        chunks = iter(range(0, self.layout.file_bytes, CHUNK_BYTES))

        def work() -> None:
            while True:
                with lock:
                    start = next(chunks, None)
                if start is None:
                    return
                self.fill(start, start + CHUNK_BYTES)

        # the caller works too: on busy cores it need not wait for a thread to be scheduled
        helpers = min(THREADS, self.layout.file_bytes // CHUNK_BYTES)
        outcomes = [pool.submit(work) for _ in range(helpers)]
        work()
        for outcome in outcomes:
            if not outcome.cancel():  # a helper that never started (the pool is busy writing) isn't waited for
                outcome.result()


def _is_plain(blob: Blob) -> bool:
    return blob.source.device.type == "cpu" and blob.source.is_contiguous()


def _copy(slot: Place, part: Part, source: torch.Tensor, *, non_blocking: bool) -> None:
    target = slot.tensor[part.offset : part.offset + part.nbytes]
    if copies_as_bytes(source.dtype):
        target.copy_(bytes_view(source.contiguous(), 0, part.nbytes), non_blocking=non_blocking)
    else:
        target.view(source.dtype).view(source.shape).copy_(source, non_blocking=non_blocking)


def _copy_from_devices(slot: Place, parts: list[tuple[Part, Blob]]) -> None:
    """All devices' copies run at once, each on a side stream of its device; returns when they are done."""
    by_device: dict[torch.device, list[tuple[Part, Blob]]] = {}
    for part, blob in parts:
        by_device.setdefault(blob.source.device, []).append((part, blob))
    events: list[torch.cuda.Event] = []
    for device, mine in by_device.items():
        if device.type == "cuda":
            events.append(_copy_on_stream(slot, device, mine))
        else:
            for part, blob in mine:
                _copy(slot, part, blob.source, non_blocking=False)
    for event in events:
        event.synchronize()


def _copy_on_stream(slot: Place, device: torch.device, parts: list[tuple[Part, Blob]]) -> torch.cuda.Event:
    """Starts the copies behind the work that is queued on the current stream so far."""
    with torch.cuda.device(device):
        side = _side_stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            for part, blob in parts:
                # a contiguous copy is made on the side stream, whose allocator keeps it until the transfer ran
                _copy(slot, part, blob.source.contiguous(), non_blocking=True)
            event.record(side)
    return event


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]
