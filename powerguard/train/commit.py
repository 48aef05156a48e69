"""Makes one rank's folder of a generation durable: data, record, name, in that order.

Every attempt writes into a folder of its own, outside all generations; only when both files and the folder are synced
does one rename make it the rank's folder of the generation. So a generation never holds half a rank, and nothing that
counts is ever overwritten.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from powerguard.generations.disk import Disk
from powerguard.generations.durable import FULL, fsync_path, persistently, uninterrupted, write_all
from powerguard.generations.names import RECORD, SHARD, rank_name
from powerguard.generations.record import CHUNK_BYTES, RECORD_FORMAT, SPLIT_FORMAT, Content, Record, ShardFile, encode
from powerguard.generations.seal import CREATOR
from powerguard.train.reserve import Reserve
from powerguard.train.writer import Mode, open_for, write_data

ATTEMPTS = 3
"""One as planned, one elsewhere, one plainly."""


@dataclass(frozen=True)
class Shard:
    """What is to be written: the first *size* bytes of *data*, and what the record says of them."""

    data: memoryview
    size: int
    fill: Callable[[int, int], None] | None  # puts a range of the data there before it is written; None: it is there
    content: Content
    generation: str
    step: int
    unit: str
    rank: int
    world_size: int
    attempt: str
    portable: bool
    check: Callable[[], None] | None = None  # asked once all was read: raises where the data has changed meanwhile


@dataclass(frozen=True)
class Committed:
    """A durable rank folder. *fsync_s* is all that came after the data was handed to the kernel."""

    digest: str
    bytes: int
    write_s: float
    fsync_s: float


def commit(
    disk: Disk,
    directory: Path,
    shard: Shard,
    reserve: Reserve,
    *,
    mode: Mode,
    pool: ThreadPoolExecutor,
    cancelled: Callable[[], bool] | None = None,
) -> Committed:
    """Durable on return. Raises the last attempt's OSError, or Cancelled."""
    target = directory / shard.generation / rank_name(shard.rank)
    if target.exists():
        raise FileExistsError(errno.EEXIST, f"rank {shard.rank} has already written it")
    for attempt in range(ATTEMPTS):
        folder: Path | None = None
        try:
            folder = reserve.take() or reserve.bare()
            return _attempt(disk, directory, shard, folder, mode=mode, pool=pool, cancelled=cancelled)
        except OSError as error:
            if folder is not None:
                reserve.discard(folder)  # after a failed fsync its data can't be trusted any more
            if attempt == ATTEMPTS - 1:
                raise
            if error.errno in FULL:
                reserve.free_ballast()
            elif error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.EIO):
                mode = mode.next if attempt == 0 else Mode.BUFFERED
        except BaseException:
            if folder is not None:
                reserve.discard(folder)
            raise
    raise AssertionError("unreachable")


def _attempt(
    disk: Disk,
    directory: Path,
    shard: Shard,
    folder: Path,
    *,
    mode: Mode,
    pool: ThreadPoolExecutor,
    cancelled: Callable[[], bool] | None,
) -> Committed:
    begun = time.monotonic()
    fd = open_for(disk, folder / SHARD, mode)
    try:
        _make_room(disk, fd, shard.size)
        sums = write_data(disk, fd, shard.data, shard.size, mode=mode, pool=pool, fill=shard.fill, cancelled=cancelled)
        written = time.monotonic()
        uninterrupted(partial(disk.ftruncate, fd, shard.size))
        uninterrupted(partial(disk.fsync, fd))
    finally:
        disk.close(fd)
    if shard.check is not None:
        shard.check()
    data, digest = encode(
        Record(
            format=SPLIT_FORMAT if shard.content.splits else RECORD_FORMAT,
            digest="",
            generation=shard.generation,
            step=shard.step,
            unit=shard.unit,
            rank=shard.rank,
            world_size=shard.world_size,
            attempt=shard.attempt,
            portable=shard.portable,
            written_at=time.time(),
            created_by=CREATOR,
            file=ShardFile(SHARD, shard.size, CHUNK_BYTES, sums),
            splits=shard.content.splits,
            shared=shard.content.shared,
            pieces=shard.content.pieces,
            state=shard.content.state,
        )
    )
    _write_record(disk, folder / RECORD, data)
    fsync_path(disk, folder)
    _place(disk, folder, directory / shard.generation / rank_name(shard.rank))
    return Committed(digest, shard.size + len(data), written - begun, time.monotonic() - written)


def _make_room(disk: Disk, fd: int, size: int) -> None:
    """Allocates what isn't reserved yet: direct writes that extend a file wait for each other."""
    if os.fstat(fd).st_size >= size:
        return
    try:
        uninterrupted(partial(disk.fallocate, fd, 0, 0, size))
    except OSError as error:
        if error.errno in FULL:
            raise


def _write_record(disk: Disk, path: Path, data: bytes) -> None:
    fd = persistently(partial(disk.open, path, os.O_WRONLY | os.O_CREAT))
    try:
        write_all(disk, fd, data, 0)
        uninterrupted(partial(disk.ftruncate, fd, len(data)))
        uninterrupted(partial(disk.fsync, fd))
    finally:
        disk.close(fd)


def _place(disk: Disk, folder: Path, target: Path) -> None:
    """Gives the finished *folder* its name. If that can't be made durable, takes it away again."""
    with contextlib.suppress(FileExistsError):
        uninterrupted(partial(disk.mkdir, target.parent))
    uninterrupted(partial(disk.rename, folder, target))
    try:
        fsync_path(disk, target.parent)
        fsync_path(disk, target.parent.parent)
    except OSError:
        with contextlib.suppress(OSError):
            disk.rename(target, folder)
        raise
