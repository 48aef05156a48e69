"""Who writes what of the state that several ranks hold alike: a pure function of it, the same on every rank.

The parts, by name, are laid end to end, and each rank of the group takes a stretch of that as long as its weight says.
No word between ranks is needed, and nothing is measured: equal inputs give equal plans, and a digest of the plan in
each record shows whether they were.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import xxhash

SMALL_BYTES = 1024
"""What is smaller (a step counter) each rank keeps for itself: telling where it is would take as much."""
SNAP_BYTES = 1 << 20
SNAP_SHARE = 1 / 16
"""A cut so near to a part's edge (and as near as this fraction of a share) is made there: other tools read whole parts
more easily."""
GRAIN_BYTES = 4096
"""Cuts within a part are at multiples of this: of every dtype's size, and of what disks write."""
SHARE_MAX = 2.0
"""No rank writes more than so many equal shares, so that its memory and disk space can be made beforehand."""


class Item(NamedTuple):
    """A part that the group holds alike; *whole* where it can't be cut."""

    name: str
    bytes: int
    whole: bool = False


class Cut(NamedTuple):
    """Bytes *begin* to *end* of part *name*."""

    name: str
    begin: int
    end: int


def shares(count: int, weights: Sequence[float] = ()) -> tuple[float, ...]:
    """What each of *count* ranks takes, as fractions that sum to 1: by *weights*, none above `SHARE_MAX` equal shares.

    What isn't a weight (missing, negative, not finite) is 0; if all are, all take the same.
    """
    clean = [weights[i] if i < len(weights) else 0.0 for i in range(count)] if weights else [1.0] * count
    clean = [w if math.isfinite(w) and w > 0.0 else 0.0 for w in clean]
    top = max(clean, default=0.0)
    clean = [w / top for w in clean] if top > 0.0 else [1.0] * count
    most = min(1.0, SHARE_MAX / count)
    given = [0.0] * count
    full: set[int] = set()
    while True:
        left = 1.0 - most * len(full)
        rest = [i for i in range(count) if i not in full]
        total = sum(clean[i] for i in rest)
        for i in rest:
            given[i] = left * (clean[i] / total if total > 0.0 else 1.0 / len(rest))
        over = [i for i in rest if given[i] > most * (1.0 + 1e-9)]
        if not over:
            return tuple(given)
        for i in over:
            given[i] = most
        full.update(over)


def split(items: Sequence[Item], count: int, weights: Sequence[float] = ()) -> list[list[Cut]]:
    """For each of *count* ranks, in order, what it writes: together every byte of *items* exactly once."""
    ordered = sorted(items)
    total = sum(item.bytes for item in ordered)
    ends: list[float] = []
    for share in shares(count, weights):
        ends.append((ends[-1] if ends else 0.0) + share * total)
    ends[-1] = math.inf  # whatever rounding did
    cuts: list[list[Cut]] = [[] for _ in range(count)]
    snap = min(float(SNAP_BYTES), SNAP_SHARE * total / count)
    rank, at = 0, 0
    for item in ordered:
        begin = 0
        while rank < count - 1 and ends[rank] < at + item.bytes:
            end = _cut(item, ends[rank] - at, begin, snap)
            if end > begin:
                cuts[rank].append(Cut(item.name, begin, end))
                begin = end
            rank += 1
        if begin < item.bytes:
            cuts[rank].append(Cut(item.name, begin, item.bytes))
        at += item.bytes
    return cuts


def _cut(item: Item, wish: float, begin: int, snap: float) -> int:
    """Where *item* is cut, for a cut wished at byte *wish*; not before *begin*."""
    if wish <= 0:
        return begin
    near_end = item.bytes - wish
    if item.whole or min(wish, near_end) <= snap:
        edge = 0 if wish < near_end else item.bytes
        if item.whole and begin:
            return begin
        return max(begin, edge)
    return max(begin, int(wish) // GRAIN_BYTES * GRAIN_BYTES)


def digest(items: Sequence[Item], group: Sequence[int], cuts: Sequence[Sequence[Cut]]) -> str:
    """What all ranks of a group must have in common, in 32 hexadecimal digits."""
    return str(xxhash.xxh3_128_hexdigest(msgspec.json.encode([sorted(items), list(group), cuts])))
