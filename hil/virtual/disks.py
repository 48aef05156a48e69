"""Disks that fail or do less, and otherwise are the real one. Seams, not mocks."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from powerguard.generations.disk import Buffer, Disk


class FaultyDisk(Disk):
    """Counts the calls by which a save changes the disk, and asks *fault(number, name)* before each.

    *fault* may raise, or return a number of bytes that a write is cut short to, or None.
    """

    def __init__(self, fault: Callable[[int, str], int | None] = lambda _number, _name: None) -> None:
        self.fault = fault
        self.number = 0
        self.names: list[str] = []
        self._lock = threading.Lock()

    def _next(self, name: str) -> int | None:
        with self._lock:
            number = self.number
            self.number += 1
            self.names.append(name)
        return self.fault(number, name)

    def open(self, path: str | Path, flags: int, mode: int = 0o644) -> int:
        self._next("open")
        return super().open(path, flags, mode)

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        short = self._next("pwrite")
        return super().pwrite(fd, data if short is None else memoryview(data)[:short], offset)

    def pwritev(self, fd: int, data: Sequence[Buffer], offset: int, flags: int) -> int:
        short = self._next("pwritev")
        return super().pwritev(fd, data if short is None else [memoryview(data[0])[:short]], offset, flags)

    def ftruncate(self, fd: int, length: int) -> None:
        self._next("ftruncate")
        super().ftruncate(fd, length)

    def fallocate(self, fd: int, mode: int, offset: int, length: int) -> None:
        self._next("fallocate")
        super().fallocate(fd, mode, offset, length)

    def sync_file_range(self, fd: int, offset: int, length: int) -> None:
        self._next("sync_file_range")
        super().sync_file_range(fd, offset, length)

    def fsync(self, fd: int) -> None:
        self._next("fsync")
        super().fsync(fd)

    def mkdir(self, path: Path) -> None:
        self._next("mkdir")
        super().mkdir(path)

    def rename(self, source: Path, target: Path) -> None:
        self._next("rename")
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._next("unlink")
        super().unlink(path)

    def rmdir(self, path: Path) -> None:
        self._next("rmdir")
        super().rmdir(path)


class PageCacheDisk(FaultyDisk):
    """A disk that has only the page cache, no way past it: all durability rests on fsync."""

    def open(self, path: str | Path, flags: int, mode: int = 0o644) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return super().open(path, flags, mode)

    def pwritev(self, fd: int, data: Sequence[Buffer], offset: int, flags: int) -> int:  # noqa: ARG002
        raise OSError(errno.EOPNOTSUPP, "no RWF_DONTCACHE")

    def sync_file_range(self, fd: int, offset: int, length: int) -> None:  # noqa: ARG002
        raise OSError(errno.ENOSYS, "no sync_file_range")
