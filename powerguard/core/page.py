"""The shared page of a rank: 64 bytes in a file that the rank maps and the daemon reads. Pure: bytes in, values out.

======  =====  ==========================================================
offset  bytes  what
======  =====  ==========================================================
0       8      b"pgpage1\\n"
8       8      pid of the rank, as it sees itself
16      8      step: optimizer step last completed, -1 = none; signed
24      40     zero, for later
======  =====  ==========================================================

Integers are in the machine's own order: the page never leaves it. The step is stored with one aligned 8-byte store,
so a reader sees the old value or the new one, never a mixture.
"""

from __future__ import annotations

import struct

from msgspec import Struct

MAGIC = b"pgpage1\n"
BYTES = 64
CELL = 2
"""The step is the third 8-byte cell."""

_HEAD = struct.Struct("=8sQq")


class Page(Struct, frozen=True):
    """What a page says."""

    pid: int
    step: int


def blank(pid: int, step: int = -1) -> bytes:
    """A whole page."""
    return _HEAD.pack(MAGIC, pid, step).ljust(BYTES, b"\0")


def read(data: bytes) -> Page | None:
    """The page in *data*, or None where it is none."""
    if len(data) < BYTES or not data.startswith(MAGIC):
        return None
    _, pid, step = _HEAD.unpack_from(data)
    return Page(pid, step) if -1 <= step < 2**53 else None
