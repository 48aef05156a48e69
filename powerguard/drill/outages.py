"""Which outage of a history is meant: those of all its journals are counted together, in order of time."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from powerguard.drill.moments import away
from powerguard.errors import JournalError
from powerguard.journal import Recording, Tick


class Outage(Struct, frozen=True):
    """The decisions of *recording* from *first* to before *last*; the outage *number* of *count*, 1 = the first."""

    recording: Recording
    first: int
    last: int
    number: int
    count: int


def pick(recordings: Sequence[Recording], outage: int = -1, *, since: float = float("-inf")) -> Outage:
    """Outage number *outage* (0: the first, -1: the last) of those that end after *since*.

    JournalError: there is none, or not that one.
    """
    found = [(recording, *stretch) for recording in recordings for stretch in _stretches(recording, since)]
    one = len(recordings) == 1
    where = recordings[0].path if one else f"{len(recordings)} journals"
    if not found:
        lost = damage(recordings)
        none = f"no outage is in {'this journal' if one else 'any of them'}{f' ({lost})' if lost else ''}"
        raise JournalError(f"{where}: {none}", todo="name the journal of another day")
    if not -len(found) <= outage < len(found):
        has = "one outage" if len(found) == 1 else f"{len(found)} outages"
        there = "it has" if one else "they have"
        raise JournalError(f"{where}: there is no outage {outage + 1}, {there} {has}", todo=f"choose 1 to {len(found)}")
    recording, first, last = found[outage]
    return Outage(recording, first, last, outage % len(found) + 1, len(found))


def damage(recordings: Sequence[Recording]) -> str:
    """What of them couldn't be read, in words; "" for nothing."""
    torn = [recording for recording in recordings if recording.damaged]
    if not torn:
        return ""
    count = sum(recording.damaged for recording in torn)
    where = torn[0].path if len(torn) == 1 else f"{len(torn)} journals"
    return f"{count} damaged line{'s' * (count != 1)} of {where} left out"


def _stretches(recording: Recording, since: float) -> list[tuple[int, int]]:
    ticks = [record for record in recording.records if isinstance(record, Tick)]
    return [(first, last) for first, last in away(ticks) if ticks[last - 1].at >= since]
