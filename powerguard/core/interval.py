"""How often to save: the optimum between the time that saves take and the work that failures lose. Pure.

Young (1974) and Daly (2006), for failures that come without a warning. A failure that is announced (an outage with a
UPS and a working emergency save) loses no work, so only the others count: MTBF / (1 - announced share) takes the MTBF's
place. Fewer saves, then, but never none: a battery can be dead without anybody knowing.
"""

from __future__ import annotations

import math

PRIOR_WEIGHT = 0.25
PRIOR_S = 30 * 86400.0
"""Assumed, not measured: one unannounced failure of a run in 30 days, while nothing is configured or learned."""


def unannounced_mtbf_s(mtbf_s: float, announced: float) -> float:
    """Mean seconds between failures that lose work; *announced* is the share of those that don't, 0 to 1."""
    return mtbf_s / max(1e-3, 1.0 - announced)


def learned_mtbf_s(ran_s: float, unannounced: int, prior_s: float) -> float:
    """The same from a record of *unannounced* failures in *ran_s*, with a prior of one failure in *prior_s*.

    The prior counts as a quarter of a failure: it judges while nothing is known, and two failures outweigh it.
    """
    return (ran_s + PRIOR_WEIGHT * prior_s) / (unannounced + PRIOR_WEIGHT)


def optimum_s(blocked_s: float, mtbf_s: float) -> float:
    """Seconds of training between two saves that each block it for *blocked_s*; Daly's second-order formula."""
    if blocked_s <= 0.0:
        return 0.0
    if blocked_s >= 2.0 * mtbf_s:
        return mtbf_s
    half = blocked_s / (2.0 * mtbf_s)
    return math.sqrt(2.0 * blocked_s * mtbf_s) * (1.0 + math.sqrt(half) / 3.0 + half / 9.0) - blocked_s


def overhead(interval_s: float, blocked_s: float, mtbf_s: float) -> float:
    """The share of time that saves and lost work cost together, with a save every *interval_s*, to first order."""
    return blocked_s / interval_s + (interval_s + blocked_s) / (2.0 * mtbf_s)
