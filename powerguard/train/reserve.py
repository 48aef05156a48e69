"""Disk space kept for the next saves, so that "no space left" can't happen in an emergency.

::

    .powerguard/reserve/rank-00000.0.lock       held by the process that saves this rank here
    .powerguard/reserve/rank-00000.0.ballast    freed when even a folder's block isn't to be had
    .powerguard/reserve/rank-00000.0.<n>/       a rank folder in waiting: its files' blocks are allocated

A save writes into a folder in waiting, which then becomes the generation's rank folder by one rename. What a crash
leaves here is no checkpoint and is swept at the next start.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from functools import partial
from pathlib import Path

from powerguard.errors import DirectoryError
from powerguard.generations.disk import Disk
from powerguard.generations.durable import (
    FULL,
    fsync_path,
    make_directory,
    persistently,
    remove_tree,
    trouble,
    uninterrupted,
)
from powerguard.generations.names import BALLAST, RECORD, RESERVE, SHARD, home, rank_name
from powerguard.generations.record import ALIGN

BALLAST_BYTES = 1024 * 1024
RECORD_SPARE = 2
"""The record's file is kept this many times as large as the record is now: lists in a state grow."""
LOCK_WAIT_S = 10.0
"""A run that was killed a moment ago may still hold the lock."""

_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

_instances: set[tuple[str, int, int]] = set()
_instances_lock = threading.Lock()


class Reserve:
    """The folders in waiting of one rank in one directory. Used by one thread at a time."""

    def __init__(self, disk: Disk, directory: Path, rank: int) -> None:
        self.disk, self.directory, self.rank = disk, directory, rank
        self.root = home(directory) / RESERVE
        self.instance = 0
        self.reason = ""  # why less is reserved than was asked for
        self.short = False  # because there is no room, or no quota
        self.shard_bytes = 0
        self.record_bytes = 0
        self._waiting: list[Path] = []
        self._number = 0
        self._lock_fd = -1

    # ---- life ------------------------------------------------------------------------------------

    def open(self, *, wait_s: float = LOCK_WAIT_S) -> None:
        """Makes the place, takes the lock, sweeps leftovers; raises DirectoryError."""
        try:
            make_directory(self.disk, self.root)
        except OSError as error:
            raise trouble(error, "can't make", self.root) from error
        with _instances_lock:
            key = os.path.realpath(self.directory)
            while (key, self.rank, self.instance) in _instances:
                self.instance += 1
            _instances.add((key, self.rank, self.instance))
        self._take_lock(wait_s)
        for name in os.listdir(self.root):
            if name.startswith(self._prefix) and not name.endswith((".lock", f".{BALLAST}")):
                with contextlib.suppress(OSError):
                    remove_tree(self.disk, self.root / name)

    def close(self) -> None:
        """Gives the reserved space back and releases the lock."""
        self.drop()
        with contextlib.suppress(OSError):
            self.disk.unlink(self._ballast)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
        with _instances_lock:
            _instances.discard((os.path.realpath(self.directory), self.rank, self.instance))

    def drop(self) -> None:
        """Deletes the folders in waiting."""
        while self._waiting:
            self.discard(self._waiting.pop())

    @property
    def count(self) -> int:
        """Folders in waiting."""
        return len(self._waiting)

    @property
    def _prefix(self) -> str:
        return f"{rank_name(self.rank)}.{self.instance}."

    @property
    def _ballast(self) -> Path:
        return self.root / f"{self._prefix}{BALLAST}"

    def _take_lock(self, wait_s: float) -> None:
        path = self.root / f"{self._prefix}lock"
        # A record lock: forked children don't inherit it, so an orphaned worker can't hold it.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        until = time.monotonic() + wait_s
        while True:
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    break  # a file system without locks
                if time.monotonic() < until:
                    time.sleep(0.05)
                    continue
                os.close(fd)
                raise DirectoryError(
                    f"rank {self.rank} of another running process saves into {self.directory}",
                    todo="stop that run, or give this one a directory of its own",
                ) from error
        self._lock_fd = fd

    # ---- space -----------------------------------------------------------------------------------

    def fill(self, count: int, shard_bytes: int, record_bytes: int) -> int:
        """Tries to have *count* folders of that size waiting; returns how many there are. *reason* says why fewer."""
        shard_bytes = -(-shard_bytes // ALIGN) * ALIGN
        if shard_bytes > self.shard_bytes or record_bytes > self.record_bytes:
            self.drop()
            self.shard_bytes = shard_bytes
            self.record_bytes = RECORD_SPARE * record_bytes
        self.reason, self.short = "", False
        try:
            self._make_ballast()
            while len(self._waiting) < count:
                self._waiting.append(self._make())
        except OSError as error:
            if error.errno in FULL:
                self.reason, self.short = self._shortage(count), True
            elif error.errno in _UNSUPPORTED:
                self.reason = f"the file system of {self.directory} can't reserve space ({error.strerror})"
            else:
                raise trouble(error, "can't reserve space in", self.root) from error
        return len(self._waiting)

    def _shortage(self, count: int) -> str:
        need = (count - len(self._waiting)) * (self.shard_bytes + self.record_bytes)
        free = self.disk.free_bytes(self.root)
        return (
            f"{need / 1e9:.3f} GB more must be free in {self.directory} to reserve {count} saves, "
            f"there are {free / 1e9:.3f} GB"
        )

    def take(self) -> Path | None:
        """A folder in waiting, now the caller's; None where none is left."""
        return self._waiting.pop(0) if self._waiting else None

    def bare(self) -> Path:
        """A new folder with nothing reserved, the caller's; raises OSError."""
        self._number += 1
        folder = self.root / f"{self._prefix}{self._number}"
        uninterrupted(partial(self.disk.mkdir, folder))
        return folder

    def give_back(self, folder: Path) -> None:
        """A folder whose files are as good as new: a save into it was given up."""
        self._waiting.append(folder)

    def discard(self, folder: Path) -> None:
        """Deletes a folder; what can't be deleted is swept at the next start."""
        with contextlib.suppress(OSError):
            remove_tree(self.disk, folder)

    def free_ballast(self) -> None:
        """Lets go of the last reserve, for a block that a folder needs."""
        with contextlib.suppress(OSError):
            self.disk.unlink(self._ballast)

    def _make_ballast(self) -> None:
        if not self._ballast.exists():
            self._allocate(self._ballast, BALLAST_BYTES)

    def _make(self) -> Path:
        folder = self.bare()
        try:
            self._allocate(folder / SHARD, self.shard_bytes)
            self._allocate(folder / RECORD, self.record_bytes)
            fsync_path(self.disk, folder)
        except OSError:
            self.discard(folder)
            raise
        return folder

    def _allocate(self, path: Path, size: int) -> None:
        fd = persistently(partial(self.disk.open, path, os.O_WRONLY | os.O_CREAT))
        try:
            uninterrupted(partial(self.disk.fallocate, fd, 0, 0, max(1, size)))
            uninterrupted(partial(self.disk.fsync, fd))
        except OSError:
            with contextlib.suppress(OSError):
                self.disk.unlink(path)
            raise
        finally:
            self.disk.close(fd)
