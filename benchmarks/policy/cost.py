"""What the runway costs: microseconds for a reading and its bound, bytes of state, over whole discharges."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from msgspec import json

from policy.world import FEED, run
from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.runway import EMPTY, absorb, bound
from powerguard.sim.population import models, outage

OUTAGES, READINGS = 12, 400
"""So many outages, the first readings of each."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of `runway.absorb` and `runway.bound` together, in seconds of this thread: what else runs here doesn't count."""

    readings: int
    median_us: float
    p99_us: float
    state_bytes: int  # largest, as JSON in the journal


def cost(seed: int) -> Cost:
    """Measured in this process."""
    market, took, largest = models(seed), [], 0
    policy, feed = Policy(), FeedPolicy(FEED)
    for n in range(OUTAGES):
        track = run(outage(seed, market, n), sustained=True)
        state = EMPTY
        for reading in [*track.prelude, *(poll.reading for poll in track.polls[:READINGS])]:
            now = 1000.0 + reading.at
            began = time.thread_time()
            state = absorb(policy, feed, state, reading, now)
            bound(policy, feed, state, now, save_s=130.0, halt_s=45.0)
            took.append(1e6 * (time.thread_time() - began))
            largest = max(largest, len(json.encode(state)))
    return Cost(len(took), statistics.median(took), statistics.quantiles(took, n=100)[-1], largest)
