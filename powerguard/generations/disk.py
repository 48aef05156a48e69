"""The operating system's calls that durability rests on, in one object, so that each can be made to fail.

Every method is one call, and raises what the call raises. What is built of them is in `durable.py`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

Buffer: TypeAlias = memoryview | bytes | bytearray

RWF_DONTCACHE = 0x80
SYNC_FILE_RANGE_WRITE = 2
FALLOC_FL_KEEP_SIZE = 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def _checked(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


class Disk:
    """The real thing. A test hands in a subclass whose n-th call fails."""

    def open(self, path: str | Path, flags: int, mode: int = 0o644) -> int:
        """A file descriptor that children don't inherit over exec."""
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def pwritev(self, fd: int, data: Sequence[Buffer], offset: int, flags: int) -> int:
        return os.pwritev(fd, data, offset, flags)

    def preadv(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, into, offset)

    def ftruncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def fallocate(self, fd: int, mode: int, offset: int, length: int) -> None:
        """The system call, without the C library's emulation that writes zeros where it isn't supported."""
        _checked(_libc.fallocate(fd, mode, offset, length))

    def sync_file_range(self, fd: int, offset: int, length: int) -> None:
        """Starts write-back of the range; promises no durability."""
        _checked(_libc.sync_file_range(fd, offset, length, SYNC_FILE_RANGE_WRITE))

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def mkdir(self, path: Path) -> None:
        os.mkdir(path)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)

    def free_bytes(self, path: Path) -> int:
        """What an ordinary user may still write there."""
        facts = os.statvfs(path)
        return facts.f_bavail * facts.f_frsize


DISK = Disk()
