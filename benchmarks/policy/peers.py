"""The rules of other tools, as they are shipped: when would each have begun to shut this node down?

Each is a function of the polls of one outage that gives the index of the poll at which it stops, or None. Sources: NUT
2.8 clients/upsmon.c (OB and LB; OB and no data for DEADTIME, 15 s), Eneru 6.2.2 monitor.py (charge < 20 %, runtime
< 600 s, more than 15 %/min over 300 s after 90 s, 900 s on battery; 30 s of stabilisation; 3 failed polls on battery).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from policy.outcome import Outcome
from policy.world import Poll, Track, survives
from powerguard.core.types import Comm

UPSMON_POLL_S = 5.0
UPSMON_DEADTIME_S = 15.0


class Peer(NamedTuple):
    """A rule: `stop(polls, need_s)` and whether mains coming back call it off until the node halts."""

    name: str
    stop: Callable[[list[Poll], float], int | None]
    revocable: bool


def upsmon(polls: list[Poll], need_s: float) -> int | None:  # noqa: ARG001
    """OB and LB at one of its polls, or on battery with no data for longer than DEADTIME."""
    good_at, due = 0.0, 0.0
    for i, poll in enumerate(polls):
        if poll.t < due:
            continue
        due = poll.t + UPSMON_POLL_S
        if poll.reading.comm is Comm.OK:
            good_at = poll.t
            if poll.reading.low_battery:
                return i
        elif poll.t - good_at > UPSMON_DEADTIME_S:
            return i
    return None


def fixed(after_s: float) -> Callable[[list[Poll], float], int | None]:
    """So many seconds on battery."""

    def stop(polls: list[Poll], need_s: float) -> int | None:  # noqa: ARG001
        return next((i for i, poll in enumerate(polls) if poll.t >= after_s), None)

    return stop


def eneru(polls: list[Poll], need_s: float) -> int | None:  # noqa: ARG001
    """The four triggers and the failsafe, with their defaults."""
    window: deque[tuple[float, float]] = deque()
    failed = 0
    for i, poll in enumerate(polls):
        reading, t = poll.reading, poll.t
        if reading.comm is not Comm.OK:
            failed += 1
            if failed >= 3:
                return i
            continue
        failed = 0
        if reading.fsd:
            return i
        charge, runtime = reading.charge_pct, reading.runtime_s
        if charge is not None:
            window.append((t, charge))
            while window[0][0] < t - 300.0:
                window.popleft()
        if t < 30.0:
            continue
        if (charge is not None and charge < 20.0) or (runtime is not None and runtime < 600.0) or t > 900.0:
            return i
        if t >= 90.0 and len(window) >= 30:
            (first_t, first), (last_t, last) = window[0], window[-1]
            if last_t > first_t and (first - last) / (last_t - first_t) * 60.0 > 15.0:
                return i
    return None


def runtime(factor: float) -> Callable[[list[Poll], float], int | None]:
    """battery.runtime times *factor* is no more than the planned need; LB where no runtime is reported."""

    def stop(polls: list[Poll], need_s: float) -> int | None:
        planned = 1.25 * need_s + 55.0
        for i, poll in enumerate(polls):
            reading = poll.reading
            if reading.low_battery or (reading.runtime_s is not None and factor * reading.runtime_s <= planned):
                return i
        return None

    return stop


PEERS = (
    Peer("upsmon OB+LB", upsmon, False),
    Peer("fixed 30 s", fixed(30.0), False),
    Peer("fixed 60 s", fixed(60.0), False),
    Peer("fixed 120 s", fixed(120.0), False),
    Peer("Eneru 6.2.2", eneru, False),
    Peer("battery.runtime x1.0", runtime(1.0), True),
    Peer("battery.runtime x0.7", runtime(0.7), True),
    Peer("battery.runtime x0.5", runtime(0.5), True),
)


def play_peer(peer: Peer, track: Track, need_s: float, stop: int | None) -> Outcome:
    """A rule that stops once, saves and halts; *stop* is where it does."""
    outage, load = track.outage, track.outage.load
    if stop is None:
        ridden = track.out_at is None
        return Outcome(trained_s=track.mains_at if ridden else (track.out_at or 0.0), final=ridden, out=not ridden)
    poll = track.polls[stop]
    flush_s = need_s * outage.flush_x
    outcome = Outcome(trained_s=poll.t, saves=1)
    if peer.revocable and track.mains_at <= poll.t + flush_s:
        outcome.final = True  # called off, trains on
        return outcome
    stages = survives(poll.ups, [(flush_s, load.flush_pct), (outage.halt_s, load.halt_pct)])
    outcome.final, outcome.halted = stages >= 1, stages == 2
    outcome.out = stages < 2
    return outcome
