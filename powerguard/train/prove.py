"""Proves before the emergency how a save will be written, and how long that takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from msgspec import Struct

from powerguard.errors import DirectoryError
from powerguard.generations.disk import Disk
from powerguard.generations.durable import trouble, uninterrupted
from powerguard.generations.names import SHARD
from powerguard.train.arena import Slot
from powerguard.train.reserve import Reserve
from powerguard.train.writer import Mode, choose, open_for, write_data


class Proof(Struct, frozen=True):
    """The writer that works there, and what a whole slot took; None where it wasn't written."""

    mode: Mode
    stage_s: float | None = None
    write_s: float | None = None
    fsync_s: float | None = None


def prove(
    disk: Disk,
    reserve: Reserve,
    slot: Slot,
    size: int,
    *,
    stage: Callable[[], None] | None,
    pool: ThreadPoolExecutor,
) -> Proof:
    """Chooses the writer in a folder that is used for nothing else; with *stage*, stages and writes *size* bytes.

    Raises DirectoryError where nothing can be written.
    """
    try:
        mode = choose_mode(disk, reserve, slot.view)
        if stage is None:
            return Proof(mode)
        folder = reserve.take() or reserve.bare()
        try:
            return _measure(disk, folder / SHARD, slot, size, stage=stage, mode=mode, pool=pool)
        finally:
            reserve.discard(folder)
    except OSError as error:
        raise trouble(error, "can't write to", reserve.directory) from error


def choose_mode(disk: Disk, reserve: Reserve, data: memoryview) -> Mode:
    """The fastest writer that works in the reserve's file system; raises OSError."""
    folder = reserve.bare()
    try:
        return choose(disk, folder / SHARD, data)
    finally:
        reserve.discard(folder)


def _measure(
    disk: Disk,
    path: Path,
    slot: Slot,
    size: int,
    *,
    stage: Callable[[], None],
    mode: Mode,
    pool: ThreadPoolExecutor,
) -> Proof:
    begun = time.monotonic()
    stage()
    staged = time.monotonic()
    fd = open_for(disk, path, mode)
    try:
        write_data(disk, fd, slot.view, size, mode=mode, pool=pool)
        written = time.monotonic()
        uninterrupted(partial(disk.fsync, fd))
    finally:
        disk.close(fd)
    return Proof(mode, staged - begun, written - staged, time.monotonic() - written)


def cant_write(error: DirectoryError, generation: str, left: str) -> DirectoryError:
    """*error* with what is left if *generation* can't be made durable."""
    held = f"the newest whole generation there is {left}" if left else "no whole generation is there"
    return DirectoryError(f"{generation}: {error.message}; {held}", todo=error.todo)
