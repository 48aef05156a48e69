"""What to expect of a battery before it has shown anything: rated runtime, age, load.

`prior = (share that is left in it for sure - share used) x rated runtime at the present load`. The share, *phi*, is a
low quantile by age, or own experience: learned from a whole discharge, or proven by one that was survived.
Loads are shares of the UPS's rating (0.6 = 60 %), seconds are estimator seconds (see evidence.py).
"""

from __future__ import annotations

import math

from powerguard.core.policy import FeedPolicy

PHI_BY_AGE = ((0.0, 0.75), (2.0, 0.70), (3.0, 0.60), (4.0, 0.42), (5.0, 0.28), (6.0, 0.18), (7.0, 0.12))
"""Years since the battery was put in, share of the rated runtime that it still gives nearly surely.

VRLA lives 3-5 years (Eaton 5PX and APC SRT manuals), ends at 80 % and then falls off (EUROBAT); the low quantiles are
those of 20,000 simulated batteries with that life, a rate of weak blocks and firmware beliefs as published.
"""

PHI_UNKNOWN_AGE = 0.38  # the same quantile over ages 0-7
PHI_LFP = 0.80  # lithium iron phosphate keeps its capacity for a rack's life
PHI_LEARNED = 0.85  # of a learned capacity: repeatability and the year since
PHI_DOUBTED = 0.6  # the UPS itself asks for a new battery (RB), or its last self-test failed
RECENT_SOC = 0.30  # missing from a battery that was used and has not had the time to recharge (Santak: 36 -> 14 min)

LITHIUM_CELL_V = 4.5  # no lead-acid battery in a UPS has so few volts, a single lithium cell does

LOAD_EXPONENT = 1.15  # between a promise and another load, either way
LOAD_RISES = 1.3  # published tables: runtime ~ load^-1.2 ... -1.5 above half load with internal batteries
LOAD_FALLS = 1.0  # and about load^-1 below; both exponents are on the cautious side
DEFAULT_FULL_S = 150.0  # at full load, for a UPS that promises nothing (10 % quantile of 390 dumps: 139 s)
RATED_MIN_S = 1.0  # a UPS is good for a second at least, whatever it says
LOAD_MIN = 0.02  # standby draw: less load than this lasts no longer
PROMISE_MIN_SOC = 0.5  # below that a promise isn't scaled up to a full battery


def phi_of(feed: FeedPolicy, chemistry: str, volts: float | None, *, doubted: bool) -> float:
    """The share of the rated runtime that may be counted on."""
    if feed.learned_phi is not None:
        phi = PHI_LEARNED * feed.learned_phi
    elif lithium(feed, chemistry, volts):
        phi = PHI_LFP
    elif feed.age_y is None:
        phi = PHI_UNKNOWN_AGE
    else:
        phi = by_age(feed.age_y)
    if feed.proven_phi is not None:
        phi = max(phi, feed.proven_phi)
    return phi * PHI_DOUBTED if doubted else phi


def by_age(age_y: float) -> float:
    """`PHI_BY_AGE`, linear between its points."""
    before, phi_before = PHI_BY_AGE[0]
    for age, phi in PHI_BY_AGE:
        if age_y <= age:
            return phi_before + (phi - phi_before) * (age_y - before) / (age - before) if age > before else phi
        before, phi_before = age, phi
    return phi_before


def lithium(feed: FeedPolicy, chemistry: str, volts: float | None = None) -> bool:
    """The cells have a flat curve: no voltage evidence, slower ageing."""
    kind = (feed.chemistry or chemistry).lower()
    if not kind and volts is not None and volts < LITHIUM_CELL_V:
        return True
    return kind.startswith(("lfp", "li", "nmc")) or "lithium" in kind or "lifepo" in kind


def rated_s(points: tuple[tuple[float, float], ...], load: float) -> float:
    """Runtime at *load* by the vendor's (load_pct, runtime_s) *points*, a power law between and beyond them."""
    pct = max(load * 100.0, 0.1)
    points = tuple(sorted(points))
    low_pct, low_s = points[0]
    if pct <= low_pct:
        return low_s * float((low_pct / pct) ** LOAD_FALLS)
    for high_pct, high_s in points[1:]:
        if pct <= high_pct:
            k = math.log(low_s / high_s) / math.log(high_pct / low_pct)
            return low_s * float((low_pct / pct) ** k)
        low_pct, low_s = high_pct, high_s
    return low_s * float((low_pct / pct) ** LOAD_RISES)


def rated_now(feed: FeedPolicy, promise_s: float, load: float, scale: float) -> tuple[float, str]:
    """(runtime of a new and full battery at *load*, what it rests on): configuration, the UPS's promise, or nothing.

    *promise_s* is the promise at half load, 0 for none; *load* < 0 is unknown: the configured highest load, the load
    at which the promise was made, or full load.
    """
    if feed.rated:
        full = max(pct for pct, _ in feed.rated) / 100.0
        return max(RATED_MIN_S, rated_s(feed.rated, full if load < 0.0 else load) / scale), "rated"
    share = max(load, LOAD_MIN)
    if promise_s > 0.0:
        rated = promise_s if load < 0.0 else promise_s * float((0.5 / share) ** LOAD_EXPONENT)
        return max(RATED_MIN_S, rated), "promised"
    return DEFAULT_FULL_S * (1.0 if load < 0.0 else float(share**-LOAD_EXPONENT)), "default"
