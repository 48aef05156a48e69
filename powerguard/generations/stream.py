"""Reads a shard once, in parallel, and checks every chunk on the way; the reader may keep what passes by.

Direct I/O through a small aligned buffer per thread where the file system has it: a checkpoint is read once, so the
page cache would only cost. Extra memory: one chunk (8 MiB) per thread.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeAlias

import xxhash

from powerguard.errors import CheckpointError
from powerguard.generations.disk import DISK, Disk
from powerguard.generations.durable import persistently
from powerguard.generations.record import ALIGN, ShardFile

Sink: TypeAlias = Callable[[int, memoryview], None]
"""Called with a chunk's offset in the file and its verified bytes, from several threads, each chunk once."""

THREADS = 4


def read_shard(
    path: Path,
    file: ShardFile,
    sink: Sink | None = None,
    *,
    ranges: Sequence[tuple[int, int]] | None = None,
    threads: int = THREADS,
    disk: Disk = DISK,
) -> None:
    """Reads and checks the whole shard, or the chunks that hold *ranges*; raises CheckpointError naming the first bad.

    *sink* may have been given good chunks before another one turns out bad.
    """
    expected = -(-file.bytes // file.chunk_bytes)
    if len(file.sums) != expected:
        raise CheckpointError(f"{path.parent.name}'s record has {len(file.sums)} checksums for {expected} chunks")
    wanted = range(expected) if ranges is None else _chunks(file, ranges)
    try:
        reader = _Reader(path, file, sink, disk, wanted)
    except OSError as error:
        raise CheckpointError(f"{path.parent.name}'s shard can't be read: {error.strerror}") from error
    workers = max(1, min(threads, len(wanted)))
    try:
        with ThreadPoolExecutor(workers, "powerguard-read") as pool:
            outcomes = [pool.submit(reader.work) for _ in range(workers)]
            for outcome in outcomes:
                outcome.result()
    finally:
        reader.close()


def _chunks(file: ShardFile, ranges: Sequence[tuple[int, int]]) -> list[int]:
    """The chunks that hold any byte of *ranges*, ascending."""
    found: set[int] = set()
    for begin, end in ranges:
        if not 0 <= begin <= end <= file.bytes:
            raise CheckpointError(f"{file.name} has no bytes {begin} to {end}")
        found.update(range(begin // file.chunk_bytes, -(-end // file.chunk_bytes)))
    return sorted(found)


def read_range(path: Path, file: ShardFile, begin: int, end: int, *, disk: Disk = DISK) -> bytes:
    """Bytes *begin* to *end* of the shard, from chunks that match; raises CheckpointError."""
    if not 0 <= begin <= end <= file.bytes:
        raise CheckpointError(f"{path.parent.name}'s shard has no bytes {begin} to {end}")
    out = bytearray(end - begin)

    def keep(offset: int, data: memoryview) -> None:
        low, high = max(begin, offset), min(end, offset + len(data))
        out[low - begin : high - begin] = data[low - offset : high - offset]

    first, last = begin // file.chunk_bytes, -(-end // file.chunk_bytes)
    try:
        reader = _Reader(path, file, keep, disk, range(first, last))
    except OSError as error:
        raise CheckpointError(f"{path.parent.name}'s shard can't be read: {error.strerror}") from error
    try:
        buffer = reader.buffer()
        for index in range(first, last):
            reader.chunk(index, buffer)
    finally:
        reader.close()
    return bytes(out)


class _Reader:
    """The work shared by the threads of one `read_shard`."""

    def __init__(self, path: Path, file: ShardFile, sink: Sink | None, disk: Disk, wanted: Sequence[int]) -> None:
        self.path, self.file, self.sink, self.disk, self.wanted = path, file, sink, disk, wanted
        self.next = 0
        self.failed = False
        self.lock = threading.Lock()
        self.buffered = disk.open(path, os.O_RDONLY)
        try:
            aligned = file.chunk_bytes % ALIGN == 0
            self.direct = disk.open(path, os.O_RDONLY | os.O_DIRECT) if aligned else -1
        except OSError:
            self.direct = -1

    def close(self) -> None:
        self.disk.close(self.buffered)
        if self.direct >= 0:
            self.disk.close(self.direct)

    def take(self) -> int | None:
        with self.lock:
            if self.failed or self.next >= len(self.wanted):
                return None
            self.next += 1
            return self.wanted[self.next - 1]

    def buffer(self) -> memoryview:
        room = -(-min(self.file.chunk_bytes, self.file.bytes) // ALIGN) * ALIGN
        return memoryview(mmap.mmap(-1, max(room, ALIGN)))

    def work(self) -> None:
        buffer = self.buffer()
        try:
            while (index := self.take()) is not None:
                self.chunk(index, buffer)
        except BaseException:
            self.failed = True
            raise

    def chunk(self, index: int, buffer: memoryview) -> None:
        offset = index * self.file.chunk_bytes
        size = min(self.file.chunk_bytes, self.file.bytes - offset)
        try:
            self.fill(buffer, size, offset)
        except OSError as error:
            raise CheckpointError(
                f"{self.path.parent.name}'s shard can't be read at byte {offset}: {error.strerror}"
            ) from error
        data = buffer[:size]
        hasher = xxhash.xxh3_128()
        hasher.update(data)
        if hasher.hexdigest() != self.file.sums[index]:
            raise CheckpointError(
                f"{self.path.parent.name}'s shard doesn't match its checksum in bytes {offset} to {offset + size}"
            )
        if self.sink is not None:
            self.sink(offset, data)

    def fill(self, buffer: memoryview, size: int, offset: int) -> None:
        """*size* bytes at *offset* into *buffer*, directly as far as that goes."""
        done = 0
        if self.direct >= 0:
            try:
                room = min(-(-size // ALIGN) * ALIGN, len(buffer))
                done = min(size, persistently(partial(self.disk.preadv, self.direct, [buffer[:room]], offset)))
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
        while done < size:
            got = persistently(partial(self.disk.preadv, self.buffered, [buffer[done:size]], offset + done))
            if got <= 0:
                raise OSError(errno.EIO, "the file is shorter than its record says")
            done += got
