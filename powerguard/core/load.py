"""The load of one UPS on battery, and whether it stepped. Loads are shares of the rating, 0.6 = 60 %.

Rates (charge per second, reported runtime per second) belong to the load they were measured at, the *reference*. A mean
that leaves the reference and stays away is a step: the reference moves there and the rates begin anew.
"""

from __future__ import annotations

from msgspec import Struct

# Estimator seconds (see evidence.py). Population: tuned on 20,000 simulated outages.
LOAD_EW_S = 15.0  # training swings between near idle and near full several times a second (arXiv 2508.14318)
STEP_SHARE = 0.30  # a step: the mean is off by so much ...
STEP_FOR_S = 20.0  # ... for so long
EASED_BELOW = 0.8  # a load so far below the reference is a flush, or a park
EASED_RATE = 0.75  # while a flush runs at less load, the battery ages by so much of the clock


class Load(Struct, frozen=True, omit_defaults=True):
    """What is known of the load. Negative: unknown, or has not happened."""

    mean: float = -1.0
    ref: float = -1.0
    off_since: float = -1.0  # the mean is off the reference since then
    off_mean: float = 0.0  # mean load since then ...
    off_n: int = 0  # ... of so many polls
    eased_at: float = -1.0  # the load fell well below the reference then ...
    eased_left: float = 0.0  # ... and so much was left
    remeasure: bool = False  # we stepped it: the next fresh value is taken as it is


def see_load(was: Load, share: float, now: float, *, dt: float, anew: bool, left: float) -> Load:
    """*share* was reported, *dt* after the last; *anew* forgets the mean. *left*: the seconds now bounded.

    If the load stepped, the answer's `ref` is another one than before.
    """
    mean = share if anew or was.mean < 0.0 else was.mean + (share - was.mean) * (dt / (LOAD_EW_S + dt))
    ref = was.ref
    if ref <= 0.0:
        return Load(mean, ref)
    eased_at, eased_left = was.eased_at, was.eased_left
    if mean >= EASED_BELOW * ref:
        eased_at, eased_left = -1.0, 0.0
    elif eased_at < 0.0:
        eased_at, eased_left = now, left
    if abs(mean - ref) <= STEP_SHARE * ref:
        return Load(mean, ref, eased_at=eased_at, eased_left=eased_left)
    if was.off_since < 0.0:
        return Load(mean, ref, now, share, 1, eased_at, eased_left)
    n = was.off_n + 1
    off_mean = was.off_mean + (share - was.off_mean) / n
    if now - was.off_since >= STEP_FOR_S:
        return Load(off_mean, off_mean)
    return Load(mean, ref, was.off_since, off_mean, n, eased_at, eased_left)


def left_after_easing(load: Load, left: float, now: float) -> float:
    """What is left now, after a flush that ran at less load: at least what was left then, aged by `EASED_RATE`."""
    if load.eased_at < 0.0:
        return left
    return max(left, load.eased_left - EASED_RATE * (now - load.eased_at))
