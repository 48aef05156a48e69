"""How long outages last: a documented prior that learns from the site's own.

A mixture of four lognormals over "the UPS went on battery":

    weight  median   sigma   meaning
    0.45       3 s    0.8    sags, instantaneous reclose, self-tests
    0.25      18 s    0.7    delayed reclose shots (10-15 s and 30-45 s: reclosers' manuals)
    0.10      90 s    0.7    automatic and remote switching
    0.20      60 min  1.2    repair (mean 123 min: CAIDI of EIA table 11.3 without major events)

It says 0.53 at 10 s, 0.35 at 30 s, 0.20 at 5 min ("80 % are shorter than 5 minutes", Eaton). Weights are a Dirichlet
with the strength of 20 outages; each own outage adds itself to the components by their responsibility for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec import Struct

STRENGTH = 20.0
"""Own outages that weigh as much as the default."""

COMPONENTS = ((3.0, 0.8), (18.0, 0.7), (90.0, 0.7), (3600.0, 1.2))
"""(median in seconds, sigma of the logarithm) of each."""

WEIGHTS = (0.45, 0.25, 0.10, 0.20)
SHORTEST_S = 0.1


class Outages(Struct, frozen=True):
    """The weights as counts of outages: the default ones and one's own."""

    counts: tuple[float, ...] = tuple(STRENGTH * weight for weight in WEIGHTS)


DEFAULT = Outages()


def of(counts: tuple[float, ...]) -> Outages:
    """What `Policy.outages` says: learned counts, or the default."""
    return Outages(counts) if len(counts) == len(COMPONENTS) else DEFAULT


def survival(outages: Outages, t: float) -> float:
    """The probability that an outage lasts longer than *t* seconds."""
    total = sum(outages.counts)
    return sum(count * _longer(i, t) for i, count in enumerate(outages.counts)) / total


def hazard(outages: Outages, t: float) -> float:
    """The rate, per second, at which an outage of *t* seconds ends."""
    total = sum(outages.counts)
    ends = sum(count * _density(i, t) for i, count in enumerate(outages.counts)) / total
    lasts = survival(outages, t)
    return ends / lasts if lasts > 0.0 else 0.0


def back_within(outages: Outages, t: float, seconds: float) -> float:
    """The probability that an outage of *t* seconds is over *seconds* from now."""
    lasts = survival(outages, t)
    return 1.0 - survival(outages, t + max(0.0, seconds)) / lasts if lasts > 0.0 else 0.0


def learn(outages: Outages, durations: Iterable[float], censored: Iterable[float] = ()) -> Outages:
    """With own outages of so many seconds, and *censored* ones of which only is known that they lasted longer."""
    counts = list(outages.counts)
    for seconds in durations:
        _share_out(counts, [weight * _density(i, seconds) for i, weight in enumerate(outages.counts)])
    for seconds in censored:
        _share_out(counts, [weight * _longer(i, seconds) for i, weight in enumerate(outages.counts)])
    return Outages(tuple(counts))


def _share_out(counts: list[float], likelihoods: list[float]) -> None:
    """One outage more, split by responsibility; far beyond all components it is the last one's."""
    total = sum(likelihoods)
    if total <= 0.0 or not math.isfinite(total):
        likelihoods, total = [0.0] * (len(counts) - 1) + [1.0], 1.0
    for i, likelihood in enumerate(likelihoods):
        counts[i] += likelihood / total


def _standard(i: int, t: float) -> float:
    median, sigma = COMPONENTS[i]
    return math.log(max(t, SHORTEST_S) / median) / sigma


def _longer(i: int, t: float) -> float:
    return 1.0 if t <= 0.0 else 0.5 * math.erfc(_standard(i, t) / math.sqrt(2.0))


def _density(i: int, t: float) -> float:
    z, t = _standard(i, t), max(t, SHORTEST_S)
    return math.exp(-0.5 * z * z) / (t * COMPONENTS[i][1] * math.sqrt(2.0 * math.pi))
