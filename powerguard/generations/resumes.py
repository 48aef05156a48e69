"""How often each generation was resumed from: a generation that kills its run must not be taken for ever.

A public failure of this kind went round 44 times (NVIDIA/Megatron-LM#5281). One small file a directory, written by
whoever resumes; losing it costs nothing but the count, so nothing here ever stops a load.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from powerguard.generations.disk import DISK, Disk
from powerguard.generations.durable import make_directory, write_file
from powerguard.generations.names import RESUMES, home

CAP = 5
"""Resumes from one generation, with none newer written in between, before an older one is tried. Five: blackouts in
quick succession may end several runs before their first save, and that is no fault of the generation."""

_FILE = "counts.json"


def read(directory: str | Path) -> dict[str, int]:
    """Resumes by generation name; empty where nothing is known."""
    try:
        data = (home(Path(directory)) / RESUMES / _FILE).read_bytes()
        return msgspec.json.decode(data, type=dict[str, int])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}


def count(directory: str | Path, name: str, *, disk: Disk = DISK) -> int:
    """One more resume from generation *name*; returns how many. To be called by one rank, before it trains on.

    Only the generation resumed from keeps its count, and those that already reached the cap: they stay passed over.
    """
    counts = read(directory)
    number = counts.get(name, 0) + 1
    kept = {other: times for other, times in counts.items() if times >= CAP}
    _write(directory, {**kept, name: number}, disk)
    return number


def forget(directory: str | Path, name: str, *, disk: Disk = DISK) -> None:
    """The run got further from generation *name*: its count starts anew."""
    counts = read(directory)
    if counts.pop(name, None) is not None:
        _write(directory, counts, disk)


def _write(directory: str | Path, counts: dict[str, int], disk: Disk) -> None:
    path = home(Path(directory)) / RESUMES / _FILE
    try:
        make_directory(disk, path.parent)
        write_file(disk, path, msgspec.json.encode(counts))
    except OSError:
        return  # a full or read-only disk doesn't keep a run from resuming
