"""A journal decided anew: each decision with the state that it left, and where its outages are.

Beliefs (runway, need) are not written with every record; they are what `decide` makes again of what was seen.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from powerguard.core.decide import decide
from powerguard.core.policy import Policy
from powerguard.core.state import State
from powerguard.core.types import Phase
from powerguard.journal import Done, Fault, Recording, Rules, Tick


class Moment(Struct, frozen=True):
    """A decision, and the state that it left; None where the journal doesn't say enough to know it."""

    tick: Tick
    state: State | None


def moments(recording: Recording) -> list[Moment]:
    """Every decision of the journal in order."""
    return list(_walk(recording))


def _walk(recording: Recording) -> Iterator[Moment]:
    policy, state = Policy(), None
    for record in recording.records:
        if isinstance(record, Rules):
            policy = record.policy
        elif isinstance(record, Fault):
            state = None
        elif isinstance(record, Tick):
            if record.state is not None:
                state = record.state
            elif state is not None:
                again = decide(policy, state, record.seen, record.at)
                state = again.state if again.actions == record.actions else None
            yield Moment(record, state)
        elif not isinstance(record, Done):
            state = record.state


def outages(told: list[Moment]) -> list[tuple[int, int]]:
    """(first, one past the last) of each stretch of decisions that weren't ONLINE."""
    found: list[tuple[int, int]] = []
    start: int | None = None
    for i, moment in enumerate(told):
        away = moment.tick.phase is not Phase.ONLINE
        if away and start is None:
            start = i
        elif not away and start is not None:
            found.append((start, i))
            start = None
    if start is not None:
        found.append((start, len(told)))
    return found


def turns(told: list[Moment]) -> list[Moment]:
    """The moments at which the phase changed, the first one included."""
    return [m for i, m in enumerate(told) if i == 0 or m.tick.phase is not told[i - 1].tick.phase]
