"""What happened in one outage, as values that a picture and a page can be drawn from.

A story comes from a journal alone (`told.py`), and a drill adds what only a drill knows: the battery's truth,
the moment the power was cut, and whether the resumed run is the same as one that nobody interrupted.
Instants are CLOCK_BOOTTIME seconds; pictures show seconds since *zero_at*.
"""

from __future__ import annotations

from msgspec import Struct

Points = tuple[tuple[float, float], ...]
"""(instant, value), in order of time. Unknown is a gap: no point."""


class Span(Struct, frozen=True):
    """The node was in *phase* from *start* to *end*. Beyond the phases of the daemon: "off" and "starting"."""

    start: float
    end: float
    phase: str


class Mark(Struct, frozen=True):
    """An instant that matters; *kind* chooses its colour (`picture.MARKS`)."""

    at: float
    kind: str
    text: str


class Steps(Struct, frozen=True):
    """The steps that one rank completed in one life of its process."""

    rank: int
    life: int  # 0 before the power cut, 1 after
    points: Points


class Save(Struct, frozen=True):
    """An order whose generation was sealed."""

    purpose: str  # "snapshot" or "stop"
    step: int
    ordered_at: float
    sealed_at: float

    @property
    def took_s(self) -> float:
        """From the order to sealed."""
        return self.sealed_at - self.ordered_at


class Event(Struct, frozen=True, omit_defaults=True):
    """A line of the log: what was decided or seen, and why."""

    at: float
    phase: str
    text: str
    reason: str = ""
    level: str = "info"


class Number(Struct, frozen=True, omit_defaults=True):
    """A row of the table: *value* is ready to read, *note* says how it was measured."""

    name: str
    value: str
    note: str = ""


class Series(Struct, frozen=True, omit_defaults=True):
    """Curves over the outage. *runway_s* is the bound that decides, *idle_s* the same once ranks are parked,
    *reported_s* what the UPS itself promises; *truth* is the battery's own runway, known in a simulation only.
    """

    charge_pct: Points = ()
    load_pct: Points = ()
    runway_s: Points = ()
    need_s: Points = ()
    spare_s: Points = ()
    idle_s: Points = ()
    reported_s: Points = ()
    truth_s: Points = ()
    write_mbps: Points = ()  # of all ranks together; each point holds until the next


class Story(Struct, frozen=True, omit_defaults=True):
    """One outage, whole."""

    title: str
    zero_at: float  # the mains failed, or whatever else it began with: *zero*
    start: float
    end: float
    verdict: str = ""
    why: tuple[str, ...] = ()
    node: str = ""
    date: str = ""
    spans: tuple[Span, ...] = ()
    marks: tuple[Mark, ...] = ()
    series: Series = Series()
    steps: tuple[Steps, ...] = ()
    events: tuple[Event, ...] = ()
    numbers: tuple[Number, ...] = ()
    late: tuple[str, ...] = ()  # what took longer than planned, in words
    zero: str = "the mains failed"
    configuration: str = ""
