"""The ledger of a shelf: what lies in its two slots, written by the rank, read by another process at any moment.

======  =====  =================================================================================
offset  bytes  what
======  =====  =================================================================================
0       8      b"pgshelf1"
8       8      pid of the rank
16      8      pid of its deputy, 0 = none has come yet
24      8      1 = the rank has closed its guard: nobody needs the shelf any more
32      8      the step that the deputy keeps from being overwritten, -1 = none
40      8      length of the facts
64      128    what lies in slot 0
192     128    what lies in slot 1
4096    ..     `Facts` as JSON
======  =====  =================================================================================

A slot's line is a sequence number, the facts of the copy, and a checksum over all of it. The number is odd from before
the first byte of the slot is touched until after the last one is there; it is stored last, and it never repeats. So a
reader who finds the same even number and a matching checksum before and after reading the slot has read one whole copy,
wherever the writer was stopped or killed. Integers are in the machine's own order: a shelf never leaves it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from pathlib import Path

import msgspec
import xxhash
from msgspec import Struct

from powerguard.errors import StateError

MAGIC = b"pgshelf1"
SLOTS = 2
BYTES = 64 * 1024
_HEAD = struct.Struct("=8sqqqqq")
_CELL = struct.Struct("=q")
_LINE = struct.Struct("=qqqqqQd")  # sequence, step, file, bytes of data, bytes of content, checksum of content, instant
_SUM = struct.Struct("=Q")
_DEPUTY, _CLOSED, _KEEP = 16, 24, 32
_LINES, _LINE_BYTES = 64, 128
_FACTS = 4096


class Facts(Struct, frozen=True):
    """What the deputy must know of its rank; fixed for the life of the shelf."""

    job: str
    rank: int
    world_size: int
    pid: int
    socket: str  # of the daemon
    directory: str
    unit: str
    attempt: str = ""
    portable: bool = False
    reserve: bool = True  # disk space is kept for one save
    write_s: float = 0.0  # what the rank's own save took
    linger_s: float = 900.0  # for so long the shelf outlives a rank that died


class Line(Struct, frozen=True):
    """What lies in a slot, whole. The data begins at the file's start, the content at `content_at`."""

    slot: int
    sequence: int
    step: int
    number: int  # of the slot's file
    data_bytes: int
    content_bytes: int
    content_sum: int
    at: float  # when it was staged, CLOCK_BOOTTIME


class Ledger:
    """One ledger, mapped. Who writes what: the rank all but `deputy` and `keep`."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        self._map = mmap.mmap(fd, BYTES)
        self._map.madvise(mmap.MADV_DONTFORK)
        self._fence = threading.Lock()

    @classmethod
    def create(cls, path: Path, facts: Facts) -> Ledger:
        """A new one, its slots empty; raises OSError.

        It has its lock before it has its name: what nobody holds is swept, and the ranks of a node start at once.
        """
        text = msgspec.json.encode(facts)
        if len(text) > BYTES - _FACTS:
            raise StateError(f"the names of job and directory take {len(text)} bytes, too many to stage")
        aside = path.with_name(f"{path.name}.new")
        fd = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(fd, 0, BYTES)
            fcntl.flock(fd, fcntl.LOCK_SH)
            ledger = cls(path, fd)
            ledger._map[_FACTS : _FACTS + len(text)] = text
            for slot in range(SLOTS):
                ledger._write(slot, (0, -1, 0, 0, 0, 0, 0.0))
            ledger._map[: _HEAD.size] = _HEAD.pack(MAGIC, facts.pid, 0, 0, -1, len(text))
            os.link(aside, path)  # never over one that is there
        except BaseException:
            os.close(fd)
            raise
        finally:
            os.unlink(aside)
        return ledger

    @classmethod
    def open(cls, path: Path) -> Ledger:
        """One that is there; raises OSError, or StateError where it is none."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(fd).st_size != BYTES or os.pread(fd, 8, 0) != MAGIC:
                raise StateError(f"{path} is no shelf")
            return cls(path, fd)
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Lets go of it; the file stays."""
        if self.fd >= 0:
            self._map.close()
            os.close(self.fd)
            self.fd = -1

    # ---- cells -------------------------------------------------------------------------------------

    @property
    def facts(self) -> Facts:
        """As the rank wrote them; raises StateError where they can't be read."""
        length = _HEAD.unpack_from(self._map)[5]
        try:
            return msgspec.json.decode(self._map[_FACTS : _FACTS + length], type=Facts)
        except msgspec.MsgspecError as error:
            raise StateError(f"{self.path} can't be read: {error}") from error

    @property
    def deputy(self) -> int:
        """Its process; 0 = none has come."""
        return self._cell(_DEPUTY)

    @deputy.setter
    def deputy(self, pid: int) -> None:
        self._set(_DEPUTY, pid)

    @property
    def closed(self) -> bool:
        """The rank needs it no longer."""
        return self._cell(_CLOSED) != 0

    @closed.setter
    def closed(self, yes: bool) -> None:
        self._set(_CLOSED, int(yes))

    @property
    def keep(self) -> int:
        """The step that must not be overwritten; -1 = none."""
        return self._cell(_KEEP)

    @keep.setter
    def keep(self, step: int) -> None:
        self._set(_KEEP, step)

    def _cell(self, at: int) -> int:
        return int(_CELL.unpack_from(self._map, at)[0])

    def _set(self, at: int, value: int) -> None:
        _CELL.pack_into(self._map, at, value)
        self._order()

    def _order(self) -> None:
        """No store after this is seen before one that stands before it: a lock is a barrier on every machine."""
        with self._fence:
            pass

    # ---- lines -------------------------------------------------------------------------------------

    def line(self, slot: int) -> Line | None:
        """What lies there; None where nothing whole does."""
        at = _LINES + slot * _LINE_BYTES
        raw = self._map[at : at + _LINE.size]
        sequence, step, number, data, content, content_sum, instant = _LINE.unpack(raw)
        if _SUM.unpack_from(self._map, at + _LINE.size)[0] != xxhash.xxh3_64_intdigest(raw):
            return None
        if sequence % 2 or step < 0:
            return None
        return Line(slot, sequence, step, number, data, content, content_sum, instant)

    def lines(self) -> list[Line]:
        """All that lies there whole, oldest step first."""
        found = (self.line(slot) for slot in range(SLOTS))
        return sorted((line for line in found if line is not None), key=lambda line: line.step)

    def open_slot(self, slot: int) -> bool:
        """From now on the slot holds nothing; False, and all as before, where the deputy keeps what lies there."""
        at = _LINES + slot * _LINE_BYTES
        before = self.line(slot)
        sequence = self._cell(at)
        odd = sequence if sequence % 2 else sequence + 1
        _CELL.pack_into(self._map, at, odd)
        self._order()
        if before is not None and self.keep == before.step:
            _CELL.pack_into(self._map, at, sequence)
            return False
        return True

    def fill_slot(
        self, slot: int, *, step: int, number: int, data_bytes: int, content_bytes: int, content_sum: int, at: float
    ) -> None:
        """The slot, which was opened, holds a whole copy now."""
        self._order()
        odd = self._cell(_LINES + slot * _LINE_BYTES)
        assert odd % 2, "the slot wasn't opened"
        self._write(slot, (odd + 1, step, number, data_bytes, content_bytes, content_sum, at))

    def _write(self, slot: int, values: tuple[int, int, int, int, int, int, float]) -> None:
        at = _LINES + slot * _LINE_BYTES
        raw = _LINE.pack(*values)
        self._map[at + 8 : at + _LINE.size] = raw[8:]
        _SUM.pack_into(self._map, at + _LINE.size, xxhash.xxh3_64_intdigest(raw))
        self._order()
        _CELL.pack_into(self._map, at, values[0])
        self._order()
