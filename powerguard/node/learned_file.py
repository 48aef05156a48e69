"""`learned.json`: what it may hold, and how it is replaced so that a power cut leaves the old one or the new one."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
from collections.abc import Callable
from datetime import date
from pathlib import Path

import msgspec
from msgspec import Struct, field

from powerguard.core.learn import Record
from powerguard.core.outages import COMPONENTS, DEFAULT, Outages

FILE_MAX_BYTES = 16 << 20
SHARE_MAX = 100.0
"""No battery gives so many times its rated runtime."""
MODE = 0o640


class Book(Struct, frozen=True, tag_field="k", tag="learned", omit_defaults=True):
    """The whole file."""

    format: int
    boot: str = ""  # of the instants in *taught*
    taught: dict[str, float] = field(default_factory=dict)  # end of each feed's last discharge that was learned from
    batteries: dict[str, Record] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)  # ISO date, by the operator's word
    outages: Outages = DEFAULT


NOTHING = Book(1)
_decode = msgspec.json.Decoder(Book).decode


def read(path: Path) -> Book:
    """The file's content, empty without one. ValueError: it isn't ours or isn't whole; OSError as it comes."""
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_MAX_BYTES + 1)
    except FileNotFoundError:
        return NOTHING
    if len(raw) > FILE_MAX_BYTES:
        raise ValueError(f"{path}: longer than {FILE_MAX_BYTES} bytes")
    try:
        book = _decode(raw)
    except (msgspec.DecodeError, RecursionError) as err:
        raise ValueError(f"{path}: {err}") from None
    wrong = _wrong(book)
    if wrong:
        raise ValueError(f"{path}: {wrong}")
    return book


def _wrong(book: Book) -> str:
    """Why these can't be values of ours, or ""."""
    if book.format != 1:
        return f"format {book.format}, known is 1"
    counts = book.outages.counts
    if len(counts) != len(COMPONENTS) or not all(math.isfinite(c) and c > 0.0 for c in counts):
        return "outages: not a count for each component"
    for name, record in book.batteries.items():
        shares = [share for share in (record.phi, record.proven) if share is not None]
        if record.feed != name or not all(0.0 <= share <= SHARE_MAX for share in shares):
            return f"{name}: not a battery's record"
        if not (math.isfinite(record.basis_s) and record.basis_s >= 0.0):
            return f"{name}: basis_s is {record.basis_s}"
    for name, day in book.replaced.items():
        try:
            date.fromisoformat(day)
        except ValueError:
            return f"{name}: {day!r} isn't a date"
    return ""


def set_aside(path: Path) -> str:
    """Renames what can't be understood; where it is now. OSError: it can't be."""
    aside = path.with_name(f"{path.name}.bad")
    path.replace(aside)
    return str(aside)


def write(path: Path, content: bytes) -> None:
    """Replaces *path*, durable on return. OSError leaves the old file as it was."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW, MODE)
        try:
            if os.geteuid() == 0:  # root edits for a daemon that isn't
                owner = path.parent.stat()
                os.fchown(fd, owner.st_uid, owner.st_gid)
            left = memoryview(content)
            while left:
                left = left[os.write(fd, left) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class Writer:
    """A thread, from the first `put` on, that writes the newest content. What fails is kept as *trouble*."""

    def __init__(self, path: Path, put: Callable[[Path, bytes], None]) -> None:
        self.trouble = ""
        self._path, self._put = path, put
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, content: bytes) -> None:
        """Never waits."""
        self._waiting.put(content)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="powerguard-learned", daemon=True)
            self._thread.start()

    def close(self, wait_s: float) -> None:
        """Ends when everything is written or *wait_s* are over."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(wait_s)
            self._thread = None

    def _run(self) -> None:
        last = False
        while not last:
            waiting = [self._waiting.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting.append(self._waiting.get_nowait())
            last = None in waiting
            contents = [content for content in waiting if content is not None]
            if contents:
                self._write(contents[-1])

    def _write(self, content: bytes) -> None:
        try:
            self._put(self._path, content)
        except Exception as err:
            self.trouble = f"{self._path}: {getattr(err, 'strerror', None) or err}"
        else:
            self.trouble = ""
