"""What happens in one outage while the node trains, and what happens after a policy stops it.

The training part depends on no policy (only on whether the GPUs are capped), so it is simulated once, poll by poll, and
kept. What follows a stop depends on the policy and is simulated, or solved in closed form, from the state at that poll.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from powerguard.core.status import RUNTIME_SENTINELS
from powerguard.core.types import Comm, Reading
from powerguard.sim.battery import SimUps
from powerguard.sim.population import Outage, repair_s

POLL_S = 2.0
FAR_S, FAR_POLL_S = 300.0, 6.0
"""From so long after the transfer polls are so far apart: whoever decides, decides up to 4 s late, and it takes a third
of the time to simulate."""
ONLINE_POLL_S = 5.0
CAP_AT_S = 12.0
CAP_SHARE = 0.75
CAP_SPEED = 0.83  # of pre-training at 75 % of the power: 600 of 700 W costs 10-15 % on H100
STALL = 0.15  # of the training speed, while a snapshot is written in the background
FEED = "sim@bench"


@dataclass(frozen=True, slots=True)
class Poll:
    """One poll on battery: seconds since the transfer, what was read, and the UPS as it was."""

    t: float
    reading: Reading
    ups: SimUps


@dataclass(slots=True)
class Track:
    """One outage with the node training: `polls` until the output goes off or mains return."""

    outage: Outage
    capped: bool
    prelude: list[Reading]  # on mains, before the transfer
    polls: list[Poll] = field(default_factory=list)
    out_at: float | None = None  # the output went off; None = mains came first
    mains_at: float = 0.0  # mains return


def poll_s(t: float) -> float:
    """From a poll at *t*, which counts from the transfer or from the park, to the next."""
    return POLL_S if t < FAR_S else FAR_POLL_S


def reading_of(ups: SimUps, at: float) -> Reading:
    """What `status.parse` makes of `ups.variables()`; spelled out because the benchmark does it ten million times."""
    spec, firmware, report = ups.spec, ups.spec.firmware, ups.report
    runtime = report.runtime_s
    if runtime is not None:
        runtime = float(round(runtime))
        empty = report.charge_pct is not None and report.charge_pct <= 10.0 and not ups.mains
        if not (0.0 < runtime <= 86400.0 or (runtime == 0.0 and empty)) or runtime in RUNTIME_SENTINELS:
            runtime = None
    return Reading(
        feed=FEED,
        at=at,
        comm=Comm.OK,
        tokens=frozenset(ups.status.split()),
        on_battery=not ups.mains,
        low_battery=ups.firmware.low,
        charge_pct=None if report.charge_pct is None else float(round(report.charge_pct)),
        charge_low_pct=firmware.low_charge_pct,
        runtime_s=runtime,
        runtime_low_s=firmware.low_runtime_s,
        load_pct=report.load_pct,
        voltage=None if report.voltage is None else round(report.voltage, 1),
        voltage_nominal=spec.nominal_v,
        input_voltage=report.input_v,
        chemistry=("lifepo4" if spec.chemistry == "lfp" else "pbac") if spec.tells_type else "",
        pollfreq_s=firmware.refresh_s,
        pollinterval_s=min(2.0, firmware.refresh_s),
    )


def look(ups: SimUps, outage: Outage, t: float) -> Reading:
    """The poll at *t*: stale inside the outage's gap."""
    if outage.gap_s and outage.gap_at <= t < outage.gap_at + outage.gap_s:
        return Reading(feed=FEED, at=t, comm=Comm.STALE)
    return reading_of(ups, t)


def run(outage: Outage, *, sustained: bool, capped: bool = False, mains_at: float | None = None) -> Track:
    """Trains through *outage* until it is over; if *sustained*, mains return later than the battery ends."""
    rng = Random(outage.seed)
    load = outage.load
    ups = SimUps(outage.spec, outage.seed, load_pct=load.mains_pct)
    prelude = []
    for i in range(4):
        ups.step(ONLINE_POLL_S, mains=True, load_pct=load.mains_pct)
        ups.battery.held_s = ups.battery.cells.full_s * outage.spec.soc  # twenty seconds of charge don't matter
        prelude.append(reading_of(ups, (i - 4) * ONLINE_POLL_S))
    ends = float("inf") if sustained else outage.lasts_s
    if mains_at is not None:
        ends = mains_at
    track = Track(outage, capped, prelude, mains_at=ends)
    t, step, drift = 0.0, rng.uniform(0.0, min(POLL_S, ends)), 0.0
    while True:
        drift = 0.6 * drift + 0.8 * rng.uniform(-1.0, 1.0)
        base = load.capped(CAP_SHARE) if capped and t >= CAP_AT_S else load.train_pct
        ups.step(step, mains=False, load_pct=min(109.0, base * (1.0 + load.swing * drift)))
        t += step
        step = poll_s(t)
        if t >= ends:
            break
        if not ups.alive:
            track.out_at = t
            break
        track.polls.append(Poll(t, look(ups, outage, t), ups.copy()))
    if sustained and mains_at is None:
        track.mains_at = repair_s(rng, t)
    return track


def survives(ups: SimUps, stages: Iterator[tuple[float, float]] | list[tuple[float, float]]) -> int:
    """How many of the (seconds, load_pct) *stages* the battery carries to their end, one after the other."""
    battery = ups.battery.copy()
    for done, (seconds, load_pct) in enumerate(stages):
        dc = ups.spec.losses.dc(load_pct / 100.0)
        if battery.lasts_s(dc, seconds + 1.0) < seconds:
            return done
        battery.discharge(seconds, dc)
    return len(list(stages))


SEEN_S = 4.0
"""Nobody acts before on battery was read twice: an outage that only an earlier stop saves counts as past saving."""


def last_chance(track: Track, need_s: float) -> int:
    """Index of the last poll at which a stop still saves and halts; -1 if that is before `SEEN_S`. An oracle's stop."""
    outage, load = track.outage, track.outage.load
    stages = [(need_s * outage.flush_x, load.flush_pct), (outage.halt_s, load.halt_pct)]
    low, high = -1, len(track.polls) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if survives(track.polls[middle].ups, stages) == 2:
            low = middle
        else:
            high = middle - 1
    return low if low >= 0 and track.polls[low].t >= SEEN_S else -1


def trained(track: Track, until: float, early_at: float | None, flush_s: float, snapshots: int = 1) -> float:
    """Productive seconds up to *until*: slower while capped, and while a snapshot is written in the background.

    *early_at* is when the last of *snapshots* began.
    """
    seconds = until
    if track.capped:
        seconds = min(until, CAP_AT_S) + CAP_SPEED * max(0.0, until - CAP_AT_S)
    if early_at is not None and snapshots:
        seconds -= STALL * (min(flush_s, max(0.0, until - early_at)) + (snapshots - 1) * flush_s)
    return seconds
