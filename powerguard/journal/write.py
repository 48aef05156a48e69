"""Writing the journal: appended and synced before anything is done, and never in the way of a flush or a halt.

One thread owns the file. A durable append waits for the sync, but only so long: a disk that is full, broken or merely
choked by a checkpoint makes the journal late or incomplete, and is said so; it doesn't stop the decision.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

SYNC_MAX_S = 2.0
"""A durable append waits at most this long (a synced line takes 0.24 ms on an idle NVMe disk, 0.9 ms at p95)."""
TROUBLED_WAIT_S = 0.05
"""The same while the disk is known to fail: every order would pay it."""
RETRY_S = 1.0
BACKLOG_MAX_BYTES = 8 << 20
BALLAST_BYTES = 1 << 20
"""Kept allocated beside the journal, given up when the disk is full, so that the outage itself is still recorded."""
BALLAST = "ballast"


class File(NamedTuple):
    """The system calls that can fail, so that tests can make each of them fail."""

    write: Callable[[int, bytes], int] = os.write
    sync: Callable[[int], None] = os.fdatasync


class _Item:
    """Bytes on their way to the disk; *path* starts a new file with them."""

    __slots__ = ("data", "done", "opened", "path")

    def __init__(self, data: bytes, path: Path | None = None, done: threading.Event | None = None) -> None:
        self.data, self.path, self.done, self.opened = data, path, done, False


class Appender:
    """Appends lines to a file on its own thread. *trouble* is "" or what is wrong with the disk now."""

    def __init__(self, file: File = File(), *, retry_s: float = RETRY_S) -> None:  # noqa: B008 - an immutable value
        self.trouble = ""
        self.lost = 0  # lines given up because the backlog was full
        self._file, self._retry_s = file, retry_s
        self._items: deque[_Item] = deque()
        self._backlog = 0
        self._wake = threading.Condition()
        self._closing = False
        self._path: Path | None = None
        self._fd = -1
        self._torn = False
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def start(self, path: Path, head: bytes) -> None:
        """From here on lines go to *path*, made if it isn't there; *head* is the first of them."""
        self._put(_Item(head, path))

    def append(self, line: bytes, durable: bool) -> bool:
        """Queues *line* (with its newline). True once it is on the disk, or at once if it needn't be *durable*."""
        done = threading.Event() if durable else None
        self._put(_Item(line, done=done))
        if done is None:
            return True
        if not done.wait(TROUBLED_WAIT_S if self.trouble else SYNC_MAX_S):
            self.trouble = self.trouble or f"the disk took longer than {SYNC_MAX_S:g} s"
            return False
        return not self.trouble

    def close(self, wait_s: float = SYNC_MAX_S) -> None:
        """Writes what is queued, for at most *wait_s*."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(wait_s)

    def _put(self, item: _Item) -> None:
        with self._wake:
            self._items.append(item)
            self._backlog += len(item.data)
            while self._backlog > BACKLOG_MAX_BYTES and len(self._items) > 1:
                victim = next((i for i in self._items if i.path is None), None)
                if victim is None or victim is item:
                    break
                self._items.remove(victim)
                self._backlog -= len(victim.data)
                self.lost += 1
            self._wake.notify()

    # ---- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._items and not self._closing:
                    self._wake.wait()
                if not self._items:
                    break
                batch = list(self._items)
            failed = self._attempt(batch)
            if failed and self._closing:
                break
            if failed:
                with self._wake:
                    self._wake.wait(self._retry_s)
        if self._fd >= 0:
            os.close(self._fd)

    def _attempt(self, batch: list[_Item]) -> bool:
        """Writes *batch* and syncs if one of it asks; what isn't on the disk stays queued. True if something failed.

        Lines whose sync failed are written again: the kernel may have dropped the pages (readers skip repeats).
        """
        written = 0
        try:
            for item in batch:
                self._write(item)
                written += 1
            if any(item.done for item in batch):
                written = 0
                self._file.sync(self._fd)
            written = len(batch)
            self.trouble = ""
        except (OSError, ValueError) as err:
            self.trouble = f"{self._path}: {getattr(err, 'strerror', None) or err}"
            if getattr(err, "errno", None) in (errno.ENOSPC, errno.EDQUOT) and self._path:
                with contextlib.suppress(OSError):
                    (self._path.parent / BALLAST).unlink()
        with self._wake:
            for item in batch[:written]:
                with contextlib.suppress(ValueError):  # given up meanwhile
                    self._items.remove(item)
                    self._backlog -= len(item.data)
        for item in batch:
            if item.done:
                item.done.set()
        return bool(self.trouble)

    def _write(self, item: _Item) -> None:
        if item.path is None:
            self._all((b"\n" if self._torn else b"") + item.data)
        elif not item.opened:
            self._open(item.path, item.data)
            item.opened = True

    def _open(self, path: Path, head: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR | os.O_CLOEXEC, 0o640)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._path = fd, path
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        self._all((b"\n" if torn else b"") + head)
        _sync_directory(path.parent)
        _ballast(path.parent)

    def _all(self, data: bytes) -> None:
        """Every byte, or an error and the knowledge that the line is torn."""
        view = memoryview(data)
        while view:
            count = self._file.write(self._fd, bytes(view))
            self._torn = True
            view = view[count:]
        self._torn = False


def _ballast(directory: Path) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(directory / BALLAST, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, BALLAST_BYTES)
        finally:
            os.close(fd)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
