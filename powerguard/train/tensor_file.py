"""A safetensors file of tensors that may still lie in several ranks' shards."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from powerguard.generations.disk import DISK
from powerguard.generations.durable import fsync_path, persistently, write_all
from powerguard.train.blobs import Blob
from powerguard.train.layout import plan
from powerguard.train.portable import Sharded


def write_tensors(
    place: Path, tensors: Mapping[str, torch.Tensor | Sharded], metadata: dict[str, str] | None = None
) -> None:
    """Writes *tensors* to *place*, which must not exist: whole and durable, or not there.

    Memory: one assembled tensor at a time. Raises OSError, and CheckpointError where a part of a tensor is missing.
    """
    layout = plan([Blob(name, _outline(value)) for name, value in tensors.items()], metadata)
    aside = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        fd = persistently(partial(DISK.open, aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        try:
            write_all(DISK, fd, layout.header, 0)
            for part, value in zip(layout.parts, tensors.values(), strict=True):
                write_all(DISK, fd, _bytes(value), part.offset)
            DISK.fsync(fd)
        finally:
            DISK.close(fd)
        DISK.rename(aside, place)
    finally:
        aside.unlink(missing_ok=True)
    fsync_path(DISK, place.parent)


def _outline(value: torch.Tensor | Sharded) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _bytes(value: torch.Tensor | Sharded) -> memoryview:
    tensor = value.assemble() if isinstance(value, Sharded) else value
    if tensor.numel() == 0:
        return memoryview(b"")
    flat = tensor.contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
