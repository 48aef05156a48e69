"""Several journals as one history: boots in order of time, and the files of one boot joined to one recording."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from powerguard.errors import JournalError
from powerguard.journal.read import Recording, read_any


def several(places: Iterable[Path]) -> list[Recording]:
    """The journals at *places*, the oldest first; a folder, as the daemon's state_dir, stands for all that are in it.

    A file that goes on where another one stopped is joined to it, so that an outage is one wherever a file ended. A
    file that holds nothing of a journal's is no more than its damaged lines, as long as another one holds something.
    JournalError: one can't be opened, or none holds anything.
    """
    found = [read_any(path) for path in _files(places)]
    if all(recording.nothing for recording in found) and any(recording.damaged for recording in found):
        raise JournalError(
            f"{found[0].path}: not a journal of powerguard", todo="name a journal-*.jsonl of its state_dir"
        )
    joined: list[Recording] = []
    for recording in sorted(found, key=_begun):
        before = next((one for one in reversed(joined) if _goes_on(one, recording)), None)
        if before is None:
            joined.append(recording)
        else:
            before.heads += recording.heads
            before.records += recording.records
            before.damaged += recording.damaged
    return joined


def _files(places: Iterable[Path]) -> list[Path]:
    """Each once, however often it is named."""
    found: list[Path] = []
    for place in places:
        found += _in_folder(place) if os.path.isdir(place) else [place]
    return list(dict.fromkeys(found))


def _in_folder(folder: Path) -> list[Path]:
    try:
        names = sorted(os.listdir(folder))
    except OSError as err:
        raise JournalError(
            f"{folder}: can't be read: {err.strerror or err}", todo="check who may read it, or run this with sudo"
        ) from None
    found = [folder / name for name in names if name.startswith("journal-") and name.endswith(".jsonl")]
    if not found:
        raise JournalError(f"{folder}: no journal-*.jsonl is in this folder", todo="name the daemon's state_dir")
    return found


def _begun(recording: Recording) -> tuple[str, str]:
    """When, by the clock on the wall; boots have no other in common. One whose head is lost comes first."""
    return recording.head.created if recording.head else "", Path(recording.path).name


def _goes_on(before: Recording, after: Recording) -> bool:
    """Whether *after* is the next file of the same boot; numbers that begin anew are another daemon's."""
    if not (before.heads and after.heads and before.records and after.records):
        return False
    last, head = before.heads[-1], after.heads[0]
    follows = (head.node, head.boot, head.segment) == (last.node, last.boot, last.segment + 1)
    return follows and before.records[-1].n < after.records[0].n
