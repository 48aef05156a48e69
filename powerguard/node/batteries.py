"""What is known of the node's batteries and outages, as a document for people, and what they may say of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime

from msgspec import Struct

from powerguard.core import learn
from powerguard.core.outages import STRENGTH, Outages, back_within
from powerguard.errors import UsageError
from powerguard.node.learned import Learned

WAITED_S, WITHIN_S = 10.0, 300.0
"""The odds that are told: still out after so long, back within so long from then."""


class Battery(Struct, frozen=True):
    """One feed's battery. Shares are of the rated runtime, None is unknown."""

    feed: str
    installed: str
    age_y: float | None
    capacity: float | None  # measured, as of today
    proven: float | None  # used and survived, as of today
    operator: bool  # the capacity is the configuration's `learned_phi`, whatever was learned
    discharges: int  # kept in the record
    last: str  # the newest lesson


class Batteries(Struct, frozen=True):
    """The whole document."""

    batteries: tuple[Battery, ...]
    outages: int  # own ones that were learned from
    back: float  # probability that an outage of `WAITED_S` ends within `WITHIN_S` more


def about(learned: Learned) -> Batteries:
    """The document as of now."""
    day = learned.day()
    found = []
    for feed, record in learned.records():
        known = record or learn.Record(feed.name)
        last = known.lessons[-1] if known.lessons else None
        found.append(
            Battery(
                feed=feed.name,
                installed=feed.battery_installed,
                age_y=feed.age_y,
                capacity=feed.learned_phi,
                proven=learn.proven_now(known, day, feed.age_y),
                operator=feed.name in learned.by_operator,
                discharges=len(known.lessons),
                last=f"{last.what} ({last.why}), {max(0.0, day - last.day):.0f} days ago" if last else "",
            )
        )
    own = own_outages(learned.outages)
    return Batteries(tuple(found), own, round(back_within(learned.outages, WAITED_S, WITHIN_S), 3))


def own_outages(outages: Outages) -> int:
    """How many of the site's own are in it."""
    return round(sum(outages.counts) - STRENGTH)


def outage_words(own: int, back: float) -> str:
    """The odds in a sentence."""
    whose = f"the default and {own} of this node's own" if own else "the default, none of this node's own yet"
    return f"of outages that last {WAITED_S:.0f} s, {100 * back:.0f} % end within {WITHIN_S / 60:.0f} min ({whose})"


def which(names: Sequence[str], said: str) -> str:
    """The one feed that *said* means: "ups", "ups@host" or the whole name. UsageError: none, or several."""
    found = [
        name
        for name in names
        if said.lower() in (name.lower(), name.rpartition(":")[0].lower(), name.partition("@")[0].lower())
    ]
    if len(found) == 1:
        return found[0]
    what = "is no UPS of this node" if not found else "names several"
    raise UsageError(f"{said[:80]!r} {what}", todo=f"one of {', '.join(names)}")


def put_in(day: str) -> date:
    """The day as an ISO date; "" is today. UsageError: it isn't one, or hasn't come yet."""
    today = datetime.now(tz=UTC).date()
    if not day:
        return today
    try:
        found = date.fromisoformat(day)
    except ValueError:
        raise UsageError(f"{day[:40]!r} isn't a date", todo="write it as 2026-05-17") from None
    if found > today:
        raise UsageError(f"{found} is in the future", todo="the day the battery was put in")
    return found


def replaced_words(feed: str, day: date) -> str:
    """What follows from it."""
    return f"{feed}: battery of {day}; what was learned of the one before it is forgotten"
