"""A journal decided anew: each decision with the state that it left, and where its outages are.

Beliefs (runway, need) are not written with every record; they are what `decide` makes again of what was seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from powerguard.core.decide import decide
from powerguard.core.policy import Policy
from powerguard.core.state import State
from powerguard.core.types import Phase
from powerguard.journal import Base, Fault, Head, Record, Recording, Rules, Tick
from powerguard.journal.records import decode_line


class Moment(Struct, frozen=True):
    """A decision, and the state that it left; None where the journal doesn't say enough to know it."""

    tick: Tick
    state: State | None


class Walk:
    """Decides a journal anew, record by record."""

    def __init__(self) -> None:
        self._policy, self._state = Policy(), State("")
        self._known = False  # the state is the daemon's

    def absorb(self, record: Record) -> Moment | None:
        """The moment of *record*, if it is a decision."""
        if isinstance(record, Rules):
            self._policy = record.policy
        elif isinstance(record, Fault):
            self._known = False
        elif isinstance(record, Tick):
            self._absorb(record)
            return Moment(record, self._state if self._known else None)
        elif isinstance(record, Base):
            self._state, self._known = record.state, True
        return None

    def _absorb(self, tick: Tick) -> None:
        if tick.state is not None:
            self._state, self._known = tick.state, True
        elif self._known:
            again = decide(self._policy, self._state, tick.seen, tick.at)
            self._state, self._known = again.state, again.actions == tick.actions


def moments(recording: Recording) -> list[Moment]:
    """Every decision of the journal in order."""
    walk = Walk()
    return [moment for record in recording.records if (moment := walk.absorb(record)) is not None]


class Follower:
    """Reads a journal while it is being written: each call of `new` gives the moments since the last one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._walk = Walk()
        self._offset = 0
        self._rest = b""
        self.last: Moment | None = None

    def new(self) -> list[Moment]:
        """What was written since the last call; nothing while there is no journal. A drill fits into one file."""
        path = next(iter(sorted(self._directory.glob("journal-*.jsonl"))), None)
        if path is None:
            return []
        with path.open("rb") as file:
            file.seek(self._offset)
            data = self._rest + file.read()
            self._offset = file.tell()
        *lines, self._rest = data.split(b"\n")
        found = [moment for line in lines if (moment := self._moment(line)) is not None]
        self.last = found[-1] if found else self.last
        return found

    def _moment(self, line: bytes) -> Moment | None:
        try:
            record = decode_line(line)
        except (msgspec.DecodeError, ValueError):
            return None
        return None if isinstance(record, Head) else self._walk.absorb(record)


def outages(told: list[Moment]) -> list[tuple[int, int]]:
    """(first, one past the last) of each stretch of decisions that weren't ONLINE."""
    return away(moment.tick for moment in told)


def away(ticks: Iterable[Tick]) -> list[tuple[int, int]]:
    """As `outages`, by the decisions alone: nothing has to be decided anew to count them."""
    found: list[tuple[int, int]] = []
    start: int | None = None
    count = 0
    for i, tick in enumerate(ticks):
        count = i + 1
        gone = tick.phase is not Phase.ONLINE
        if gone and start is None:
            start = i
        elif not gone and start is not None:
            found.append((start, i))
            start = None
    if start is not None:
        found.append((start, count))
    return found


def turns(told: list[Moment]) -> list[Moment]:
    """The moments at which the phase changed, the first one included."""
    return [m for i, m in enumerate(told) if i == 0 or m.tick.phase is not told[i - 1].tick.phase]
