"""What discharges teach of a battery: a record, kept on disk with its evidence.

1. Only a whole discharge measures capacity: from full, at a steady load worth the name, to the knee of the voltage.
   Everything else is censored: it proves that the battery had *at least* so much, never that it had less (a 105 s
   outage fitted as a whole one once made a daemon ask for a new battery: j2h4u/ups-unfucked). Who wakes up after the
   dark can't tell an empty battery from a pulled plug, so the dark measures nothing.
2. LB is a claim, not an end: it proves the share used so far, no more.
3. What was learned decays with the battery's age. A new battery begins anew: by the operator's word (another date of
   installation), or when it gives half as much again as the old one ever could.

*day* counts days, fractions too, on any calendar that the caller keeps to (the core has no clock).
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from powerguard.core.capacity import LOAD_EXPONENT
from powerguard.core.discharge import Discharge
from powerguard.core.policy import FeedPolicy

KNEE_SHARE = 0.95  # at 1.80 V per cell so much of the runtime is spent (runs to the dark, 20,000 simulated)
KNEE_LAST_V = 1.88  # the discharge ended there: a dip that recovered is no knee
FULL_SOC = 0.90  # firmware relearns from full only, for the same reason (APC, GE, Vertiv manuals)
LOAD_LEAST_PCT = 20.0  # and only above 20-30 % of load
BLIND_SHARE = 0.2  # of the discharge that may go unseen
PROVES_S = 30.0  # less says nothing about capacity
REPLACED = 1.5  # survived share to learned capacity that only another battery explains
YOUNG_Y, YOUNG_DECAY, OLD_DECAY = 3.0, 0.05, 0.15  # a year: VRLA to the age of 3, and after
EVIDENCE = 16  # discharges kept in the record
YEAR_DAYS = 365.25


class Lesson(Struct, frozen=True, omit_defaults=True):
    """One discharge, and what it was taken for."""

    day: float
    what: str  # "measured", "proven", "nothing", "replaced"
    why: str
    discharge: Discharge


class Record(Struct, frozen=True, omit_defaults=True):
    """What is known of one feed's battery."""

    feed: str
    installed: str = ""  # as the operator said when this was learned
    phi: float | None = None  # measured capacity, as a share of *basis_s*
    phi_day: float = 0.0
    proven: float | None = None  # largest share that was used and survived, likewise
    proven_day: float = 0.0
    basis: str = ""
    basis_s: float = 0.0  # rated runtime at half load that shares refer to
    lessons: tuple[Lesson, ...] = ()  # newest last


def learn(record: Record, discharge: Discharge, *, day: float, age_y: float | None = None) -> Record:
    """*record* with one discharge more."""
    if record.basis_s > 0.0 and discharge.basis_s > 0.0:
        scale = discharge.basis_s / record.basis_s
    else:
        scale = 1.0
        record = replace(record, basis=discharge.basis, basis_s=discharge.basis_s)
    used = discharge.used * scale
    why_not = _censored(discharge)
    known = decayed(record, day, age_y)
    if known is not None and used > REPLACED * known:
        kept = Record(record.feed, record.installed, basis=record.basis, basis_s=record.basis_s, lessons=record.lessons)
        why = f"used {used:.2f} where {known:.2f} was the most: another battery"
        return _prove(_taught(kept, day, "replaced", why, discharge), used, day)
    if not why_not:
        phi = (discharge.knee_used or 0.0) * scale / KNEE_SHARE / discharge.soc
        record = _taught(record, day, "measured", f"capacity {phi:.2f} of rated", discharge)
        return replace(record, phi=phi, phi_day=day, proven=None, proven_day=0.0)
    if discharge.lasted_s < PROVES_S or not discharge.seen_whole:
        return _taught(record, day, "nothing", why_not, discharge)
    return _prove(_taught(record, day, "proven", f"at least {used:.2f} of rated: {why_not}", discharge), used, day)


def _censored(discharge: Discharge) -> str:
    """Why this discharge doesn't measure the capacity, or ""."""
    if not discharge.seen_whole:
        return "its beginning wasn't seen"
    if discharge.soc < FULL_SOC:
        return f"it began at {100 * discharge.soc:.0f} % charge"
    if discharge.load_pct is None or discharge.load_pct < LOAD_LEAST_PCT:
        return "the load was unknown or too small"
    if discharge.blind_s > BLIND_SHARE * discharge.lasted_s:
        return "too much of it went unseen"
    knee = discharge.knee_used is not None and discharge.volts_last is not None
    if knee and discharge.volts_last is not None and discharge.volts_last < KNEE_LAST_V:
        return ""
    return "mains came back before its end"


def _taught(record: Record, day: float, what: str, why: str, discharge: Discharge) -> Record:
    return replace(record, lessons=(*record.lessons[1 - EVIDENCE :], Lesson(day, what, why, discharge)))


def _prove(record: Record, used: float, day: float) -> Record:
    if record.proven is not None and record.proven >= used:
        return record
    return replace(record, proven=used, proven_day=day)


def decayed(record: Record, day: float, age_y: float | None) -> float | None:
    """The measured capacity today, never below what was proven since; None = never measured. *age_y*: today."""
    if record.phi is None:
        return None
    phi = record.phi * _decay(day - record.phi_day, age_y)
    proven = proven_now(record, day, age_y)
    return phi if proven is None else max(phi, proven)


def proven_now(record: Record, day: float, age_y: float | None) -> float | None:
    """The survived share, aged to today."""
    return None if record.proven is None else record.proven * _decay(day - record.proven_day, age_y)


def _decay(days: float, age_y: float | None) -> float:
    """What *days* up to today leave of a capacity; an unknown age counts as old."""
    years = max(0.0, days) / YEAR_DAYS
    young = 0.0 if age_y is None else min(years, max(0.0, YOUNG_Y - (age_y - years)))
    return float((1.0 - YOUNG_DECAY) ** young * (1.0 - OLD_DECAY) ** (years - young))


def trusted(record: Record, feed: FeedPolicy, day: float) -> FeedPolicy:
    """*feed* with what the record knows today.

    A record of another battery (the operator gave another date) teaches nothing. Shares of a runtime that the UPS
    promised refer to the promise of that time: it is pinned as rated points, for promises change.
    """
    if record.feed != feed.name or record.installed != feed.battery_installed:
        return feed
    phi, proven = decayed(record, day, feed.age_y), proven_now(record, day, feed.age_y)
    if phi is None and proven is None:
        return feed
    rated = feed.rated
    if not rated and record.basis_s > 0.0 and (record.basis == "promised" or phi is not None):
        rated = ((50.0, record.basis_s), (100.0, record.basis_s / 2.0**LOAD_EXPONENT))
    elif rated and record.basis != "rated":
        return feed  # shares of a promise say nothing about a table that was configured since
    return replace(feed, learned_phi=phi, proven_phi=proven, rated=rated)
