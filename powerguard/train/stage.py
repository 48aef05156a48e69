"""Copies a state into a slot of the arena: the only part of a save that the training thread waits for."""

from __future__ import annotations

import torch

from powerguard.train.arena import Slot
from powerguard.train.blobs import Blob, bytes_view
from powerguard.train.dtypes import copies_as_bytes
from powerguard.train.layout import Layout, Part


def copy_into(slot: Slot, layout: Layout, blobs: list[Blob]) -> None:
    """Puts the whole shard file of *blobs* into *slot*; on return, later changes of the state can't leak in.

    Device tensors go over a side stream that first waits for the work queued so far, and that is waited for here.
    """
    assert layout.file_bytes <= slot.capacity
    slot.view[: len(layout.header)] = layout.header
    device_parts: list[tuple[Part, Blob]] = []
    with torch.no_grad():
        for part, blob in zip(layout.parts, blobs, strict=True):
            if part.nbytes == 0:
                continue
            if blob.source.device.type == "cpu":
                _copy(slot, part, blob.source, non_blocking=False)
            else:
                device_parts.append((part, blob))
        if device_parts:
            _copy_from_devices(slot, device_parts)


def _copy(slot: Slot, part: Part, source: torch.Tensor, *, non_blocking: bool) -> None:
    target = slot.tensor[part.offset : part.offset + part.nbytes]
    if copies_as_bytes(source.dtype):
        target.copy_(bytes_view(source.contiguous(), 0, part.nbytes), non_blocking=non_blocking)
    else:
        target.view(source.dtype).view(source.shape).copy_(source, non_blocking=non_blocking)


def _copy_from_devices(slot: Slot, parts: list[tuple[Part, Blob]]) -> None:
    """All devices' copies run at once, each on a side stream of its device."""
    by_device: dict[torch.device, list[tuple[Part, Blob]]] = {}
    for part, blob in parts:
        by_device.setdefault(blob.source.device, []).append((part, blob))
    events: list[torch.cuda.Event] = []
    for device, mine in by_device.items():
        if device.type != "cuda":
            for part, blob in mine:
                _copy(slot, part, blob.source, non_blocking=False)
            continue
        events.append(_copy_on_stream(slot, device, mine))
    for event in events:
        event.synchronize()


def _copy_on_stream(slot: Slot, device: torch.device, parts: list[tuple[Part, Blob]]) -> torch.cuda.Event:
    with torch.cuda.device(device):
        side = _side_stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            for part, blob in parts:
                source = blob.source
                if not source.is_contiguous():
                    source = source.contiguous()  # on the side stream, whose allocator keeps it until the copy ran
                _copy(slot, part, source, non_blocking=True)
            event.record(side)
    return event


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]
