"""Whether all ranks see one directory: of a generation that lies in several, none is ever whole.

Rank 0 leaves a mark there, tells its name, and the others look for it. A directory of each node's own is refused when
the run begins, not found out after the outage.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from powerguard.errors import DirectoryError
from powerguard.generations.names import SEEN, home

WITHIN_S = 30.0
"""A network file system may show a new file that late: NFS may keep what it knows of a directory so long (acdirmin)."""
OLD_S = 3600.0


def leave_mark(directory: Path, name: str) -> bool:
    """Whether a mark *name* could be left; old ones go. A directory that can only be read has none."""
    place = home(directory) / SEEN
    try:
        place.mkdir(parents=True, exist_ok=True)
        (place / name).touch()
    except OSError:
        return False
    for mark in place.iterdir():
        with contextlib.suppress(OSError):
            if mark.name != name and time.time() - mark.stat().st_mtime > OLD_S:
                mark.unlink()
    return True


def find_mark(
    directory: Path,
    name: str,
    *,
    rank: int,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Looks for the mark, for at most `WITHIN_S`; raises DirectoryError where it isn't there."""
    ends = clock() + WITHIN_S
    while not (home(directory) / SEEN / name).exists():
        if clock() > ends:
            raise DirectoryError(
                f"{directory} on the node of rank {rank} isn't the one that rank 0 sees",
                todo="give a directory that all nodes share: a generation is sealed, and resumed from, by what all "
                "ranks have written there",
            )
        sleep(0.1)
