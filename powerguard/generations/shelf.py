"""Where staged states lie: files in /dev/shm, which outlive the process that wrote them.

::

    /dev/shm/powerguard-stage.<pid>.<job>.<rank>.ledger     see ledger.py
    /dev/shm/powerguard-stage.<pid>.<job>.<rank>.<n>        a slot: the shard file as it will be, then the content

Rank and deputy hold a lock on the ledger, which gets its name with it: what nobody holds is a leftover. Only their user
may read them. Memory is allocated when a slot is made: later, a full /dev/shm would kill the writer.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import time
from pathlib import Path

import xxhash

from powerguard.errors import StateError
from powerguard.generations.ledger import SLOTS, Facts, Ledger, Line
from powerguard.generations.memory import available_bytes
from powerguard.generations.record import ALIGN

SHM = Path("/dev/shm")
PREFIX = "powerguard-stage"
SPARE_BYTES = 64 * 1024 * 1024
"""Room in /dev/shm to leave to others."""
CONTENT_SPARE = 4
"""Room is made for a content so many times as large as it is now: lists in a state grow, and optimizers add theirs."""


MAKING_S = 60.0
"""A ledger without its name for so long is one whose maker was killed."""

GIVE_BACK_S = 3.0
"""A deputy that isn't needed any more leaves within about half a second."""


class SlotFile:
    """One mapped slot."""

    def __init__(self, path: Path, *, size: int = 0) -> None:
        """With *size* a new one, its memory allocated; else one that is there. Raises OSError."""
        self.path = path
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if size else 0)
        fd = os.open(path, flags, 0o600)
        try:
            if size:
                os.posix_fallocate(fd, 0, size)
            self.capacity = os.fstat(fd).st_size
            self.map = mmap.mmap(fd, self.capacity)
        except BaseException:
            if size:
                with contextlib.suppress(OSError):
                    os.unlink(path)
            raise
        finally:
            os.close(fd)
        self.map.madvise(mmap.MADV_DONTFORK)
        self.view = memoryview(self.map)

    def close(self) -> None:
        """Lets go of the mapping, unless somebody still looks into it."""
        with contextlib.suppress(BufferError):
            self.view.release()
            self.map.close()


def content_at(data_bytes: int) -> int:
    """Where the content begins: after the padding that direct I/O may write."""
    return -(-data_bytes // ALIGN) * ALIGN


class Shelf:
    """The rank's side. Used by one thread at a time."""

    def __init__(self, facts: Facts, *, folder: Path = SHM) -> None:
        """A new, empty one; an older one of the same rank is closed. Raises StateError where it can't be made."""
        name = re.sub(r"[^A-Za-z0-9_-]", "_", facts.job)[:64]
        self.folder = folder
        self.stem = f"{PREFIX}.{facts.pid}.{name}.{facts.rank}"
        self._number = 0
        self._slots: list[SlotFile | None] = [None] * SLOTS
        sweep(folder)
        try:
            _wait_for(retire_others(folder, facts))
            self.ledger = Ledger.create(folder / f"{self.stem}.ledger", facts)
        except OSError as error:
            raise StateError(
                f"states can't be staged in {folder}: {error.strerror}", todo="make it writable, or don't stage"
            ) from error

    def make(self, data_bytes: int, content_bytes: int) -> None:
        """Makes room for two states of that size; raises StateError with the numbers where there is none."""
        size = content_at(data_bytes) + content_at(CONTENT_SPARE * content_bytes)
        small = [slot for slot, held in enumerate(self._slots) if held is None or held.capacity < size]
        for slot in small:
            self._drop(slot)
        self._check_room(len(small), size)
        for slot in small:
            self._remake(slot, size)

    def open(self, data_bytes: int, content_bytes: int) -> tuple[int, SlotFile] | None:
        """The slot for a new state, which holds nothing from now on; None while the deputy keeps one.

        Raises StateError where the state has grown and there is no room.
        """
        if self.ledger.keep >= 0:
            return None
        lines = {line.slot: line for line in self.ledger.lines()}
        slot = min(range(SLOTS), key=lambda index: lines[index].step if index in lines else -1)
        if not self.ledger.open_slot(slot):
            return None
        need = content_at(data_bytes) + content_bytes
        held = self._slots[slot]
        if held is None or held.capacity < need:
            held = self._remake(slot, content_at(data_bytes) + content_at(CONTENT_SPARE * content_bytes))
        return slot, held

    def fill(self, slot: int, *, step: int, data_bytes: int, content: bytes) -> None:
        """The data is there; with *content* the slot holds the state of *step*."""
        held = self._slots[slot]
        assert held is not None
        at = content_at(data_bytes)
        held.view[at : at + len(content)] = content
        self.ledger.fill_slot(
            slot,
            step=step,
            number=int(held.path.suffix[1:]),
            data_bytes=data_bytes,
            content_bytes=len(content),
            content_sum=xxhash.xxh3_64_intdigest(content),
            at=time.clock_gettime(time.CLOCK_BOOTTIME),
        )

    def _remake(self, slot: int, size: int) -> SlotFile:
        """A larger slot; what lay there is gone."""
        self.ledger.open_slot(slot)
        self._drop(slot)
        self._number += 1
        path = self.folder / f"{self.stem}.{self._number}"
        self._check_room(1, size)
        try:
            made = self._slots[slot] = SlotFile(path, size=size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise StateError(f"states can't be staged in {self.folder}: {error.strerror}") from error
            raise self._no_room(1, size, free_bytes(self.folder)) from error
        return made

    def _check_room(self, count: int, size: int) -> None:
        free = free_bytes(self.folder)
        if count and free < count * size + SPARE_BYTES:
            raise self._no_room(count, size, free)

    def _no_room(self, count: int, size: int, free: int) -> StateError:
        return StateError(
            f"staging takes {count} x {size / 1e9:.3f} GB more in {self.folder}, and only {free / 1e9:.3f} GB are free "
            f"there ({SPARE_BYTES / 1e9:.3f} GB of it are left to others)",
            todo=f"enlarge it (mount -o remount,size=... {self.folder}; for a container --shm-size), or don't stage",
        )

    def _drop(self, slot: int) -> None:
        held, self._slots[slot] = self._slots[slot], None
        if held is not None:
            with contextlib.suppress(OSError):
                os.unlink(held.path)
            held.close()

    def close(self) -> None:
        """Nobody needs it any more. A repeat is nothing."""
        if self.ledger.fd < 0:
            return
        self.ledger.closed = True
        for slot in range(SLOTS):
            self._drop(slot)
        with contextlib.suppress(OSError):
            os.unlink(self.ledger.path)
        self.ledger.close()


def slot_path(ledger: Ledger, line: Line) -> Path:
    """The file of a line's slot."""
    return ledger.path.with_suffix(f".{line.number}")


def read_content(ledger: Ledger, line: Line, held: SlotFile) -> bytes:
    """The content that lies behind the data; raises StateError where it isn't what the line says."""
    at = content_at(line.data_bytes)
    content = bytes(held.view[at : at + line.content_bytes])
    if xxhash.xxh3_64_intdigest(content) != line.content_sum or ledger.line(line.slot) != line:
        raise StateError(f"the staged state of step {line.step} isn't there any more")
    return content


def free_bytes(folder: Path) -> int:
    """What an ordinary user may still take there, and the machine has memory for."""
    facts = os.statvfs(folder)
    free = facts.f_bavail * facts.f_frsize
    memory = available_bytes()
    return free if memory is None else min(free, memory)


def remove(ledger_path: Path) -> None:
    """Deletes a shelf's files; what is gone already is fine."""
    stem = ledger_path.name.removesuffix("ledger")
    with contextlib.suppress(OSError):
        for entry in os.scandir(ledger_path.parent):
            if entry.name.startswith(stem):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)


def sweep(folder: Path = SHM) -> None:
    """Removes our user's shelves that neither a rank nor a deputy holds: both were killed."""
    with contextlib.suppress(OSError):
        for path in folder.glob(f"{PREFIX}.*.ledger.new"):
            with contextlib.suppress(OSError):
                if path.lstat().st_uid == os.geteuid() and time.time() - path.lstat().st_mtime > MAKING_S:
                    os.unlink(path)
        for path in folder.glob(f"{PREFIX}.*.ledger"):
            with contextlib.suppress(OSError):
                if path.lstat().st_uid != os.geteuid():
                    continue
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove(path)
                finally:
                    os.close(fd)


def retire_others(folder: Path, facts: Facts) -> list[Path]:
    """Tells the shelves of earlier processes of the same rank that they aren't needed any more; their ledgers."""
    told: list[Path] = []
    for path in folder.glob(f"{PREFIX}.*.{facts.rank}.ledger"):
        with contextlib.suppress(OSError, StateError):
            if path.lstat().st_uid != os.geteuid():
                continue
            other = Ledger.open(path)
            try:
                known = other.facts
                if (known.job, known.rank) == (facts.job, facts.rank) and known.pid != facts.pid:
                    other.closed = True
                    told.append(path)
            finally:
                other.close()
    return told


def _wait_for(ledgers: list[Path]) -> None:
    """Until the deputies of these have left and given the memory back; not for long: one may have an order at hand."""
    ends = time.monotonic() + GIVE_BACK_S
    while any(path.exists() for path in ledgers) and time.monotonic() < ends:
        time.sleep(0.02)
