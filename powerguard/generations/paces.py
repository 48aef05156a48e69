"""What saves into a directory have taken, kept over restarts: a run knows its need before its first save.

One small file a rank, beside the generations, and one of `powerguard calibrate`, which counts for every rank. Losing
one costs measurements and no checkpoint, so nothing here ever stops a save.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from powerguard.generations.disk import DISK, Disk
from powerguard.generations.durable import make_directory, write_file
from powerguard.generations.names import PACE, home, rank_name

SAVES = 100
"""So many are kept: of 100 the second slowest is the 99th percentile."""
ALIKE = 2.0
"""A save of a state this many times as large, or as small, tells nothing of this one."""
CALIBRATED = "calibrated"


class Save(Struct, frozen=True, omit_defaults=True):
    """One save of one rank: bytes and seconds."""

    bytes: int
    write_s: float
    fsync_s: float
    disk_bytes: int = 0  # what the disk took meanwhile, of everybody; 0 = not known
    stage_s: float = 0.0  # 0 = not measured, or done while writing
    at: float = 0.0  # seconds since 1970


def rank_key(rank: int) -> str:
    """The name under which *rank* keeps its saves."""
    return rank_name(rank)


def path(directory: str | Path, key: str) -> Path:
    """The file that keeps *key*'s saves."""
    return home(Path(directory)) / PACE / f"{key}.json"


def read(directory: str | Path, key: str) -> tuple[Save, ...]:
    """The saves kept under *key*, oldest first; none where nothing is known."""
    try:
        data = path(directory, key).read_bytes()
        saves = msgspec.json.decode(data, type=tuple[Save, ...])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return ()
    return tuple(save for save in saves if _sound(save))[-SAVES:]


def keep(directory: str | Path, key: str, saves: Sequence[Save], *, disk: Disk = DISK) -> None:
    """Writes the newest *saves* under *key*, in place of what was kept there."""
    target = path(directory, key)
    try:
        make_directory(disk, target.parent)
        write_file(disk, target, msgspec.json.encode(list(saves)[-SAVES:]))
    except OSError:
        return


def known(directory: str | Path, rank: int) -> tuple[Save, ...]:
    """All that is known of *rank*'s saves there: its own and those of a calibration, oldest first."""
    both = (*read(directory, rank_key(rank)), *read(directory, CALIBRATED))
    return tuple(sorted(both, key=lambda save: save.at))[-SAVES:]


def everybody(directory: str | Path) -> tuple[Save, ...]:
    """What is known of any rank there, oldest first."""
    try:
        keys = [name.removesuffix(".json") for name in os.listdir(path(directory, "").parent) if name[:1] != "."]
    except OSError:
        return ()
    return tuple(sorted((save for key in keys for save in read(directory, key)), key=lambda save: save.at))


def like(saves: Sequence[Save], size: int) -> tuple[Save, ...]:
    """The saves of states about as large as *size*, as if they had been of that size: time goes with the bytes."""
    return tuple(
        Save(size, save.write_s * f, save.fsync_s, int(save.disk_bytes * f), save.stage_s * f, save.at)
        for save in saves
        if 1 / ALIKE <= (f := size / save.bytes) <= ALIKE
    )


def together(save: Save, sharers: int) -> float:
    """How many times as long *save* would take with *sharers* ranks writing as much at once to the same disk.

    Part of that is in the measurement already, if others wrote meanwhile: what the disk took beside this rank's bytes.
    """
    if sharers <= 1 or save.disk_bytes <= 0:
        return 1.0
    return min(max(1.0, sharers * save.bytes / max(save.disk_bytes, save.bytes)), float(sharers))


def _sound(save: Save) -> bool:
    numbers = (save.write_s, save.fsync_s, save.stage_s)
    return save.bytes > 0 and save.disk_bytes >= 0 and all(0.0 <= number < 1e7 for number in numbers)
