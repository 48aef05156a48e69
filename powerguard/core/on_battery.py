"""One poll on battery: every witness takes in what is new, and the instants of power-out are combined.

The rules of the combination are in `runway.py`; the witnesses are in `evidence.py`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from msgspec.structs import replace

from powerguard.core import capacity
from powerguard.core.bound import FROM_S
from powerguard.core.draw import Draw, Mains, Tally
from powerguard.core.evidence import (
    CHARGE_FLOOR_PCT,
    CHARGE_FROM_S,
    RUNTIME_FROM_S,
    RUNTIME_LOAD_EXPONENT,
    VOLT_FROM_S,
    VOLT_LOW,
    Charge,
    Firmware,
    Voltage,
    charge_says,
    level_s,
    runtime_says,
    see_charge,
    see_runtime,
    see_voltage,
    step_charge,
    step_runtime,
)
from powerguard.core.load import Load, see_load
from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.types import Reading

# Population: tuned on 20,000 simulated outages (see evidence.py), checked on others. Estimator seconds.
BOTH, ONE, IDLE = 0.80, 0.60, 0.50
IDLE_FROM_S = 24.0  # after parking, the stretched bound holds so long
IDLE_UNMEASURED = 0.5  # a load that can't be measured isn't believed to fall further
STRETCH_MAX = 4.0  # published tables: 4.4-4.7 at 30 % of the load
STRETCH_TRUST = 0.8  # of a load that is expected, not measured
RECENT_RUNTIME = 0.65  # of a runtime reported soon after another outage
RECENT_FLOOR_PCT = 22.0
LOAD_LEAST = 0.10  # below, firmware runtimes are fiction (APC FAQ000246147; 65535 in nut#731)
RUNTIME_MOST_S = 64800.0
LOADED_V = (1.2, 2.16)  # per cell on battery
POLLFREQ_S, ARRIVED_S = 30.0, 2.0  # after NUT's default pollfreq and a poll, values that are the same are the battery's
PLATEAU_V = 1.95  # per cell under load: at full load six minutes are left (Eaton's table), at less load more
PLATEAU_SHARE = 0.5  # of what voltage and plain runtime say; rates of a gauge or a runtime alone don't go below it
CAP_VOLTS_S = 16.0  # a power cap moves the voltage less than a transfer: it is waited for so much less
LOAD_SHOWS_S = 8.0  # firmware filters its load for 3-30 s; so long after a refresh a park shows in it
SETTLE_FASTER = 3.0  # after our own step the mean of the load follows so many times as fast
SLOW_S = 8.0  # a UPS that refreshes more seldom shows the load after a step in one value
ALIVE_S = 45.0  # a voltage not refreshed for longer is no second witness


class Poll(NamedTuple):
    """What one poll on battery is judged by."""

    policy: Policy
    feed: FeedPolicy
    mains: Mains
    reading: Reading
    now: float
    dt: float  # since the last readable poll
    fresh: bool  # a value changed
    partial: bool  # a value is missing that was there: nothing may get better by that
    period: float  # usual refresh
    lithium: bool


def absorb_poll(poll: Poll, draw: Draw) -> Draw:
    """One poll on battery."""
    reading, now, fresh = poll.reading, poll.now, poll.fresh
    t = now - draw.since
    refresh = reading.pollfreq_s / poll.policy.time_scale if reading.pollfreq_s else POLLFREQ_S
    arrived = draw.arrived or (fresh and t > 0.0) or t >= refresh + ARRIVED_S
    draw, load = _measure(poll, draw, arrived)
    ref = load.ref
    charge, firmware = _counters(poll, draw, load, arrived) if fresh else (draw.charge, draw.firmware)
    volts = _level(poll, draw) if arrived and reading.voltage is not None else draw.volts
    rated, basis = capacity.rated_now(poll.feed, poll.mains.promise_s, load.mean, poll.policy.time_scale)
    used = draw.used + poll.dt / rated
    prior_at = now + _prior_s(poll, draw, charge, used=used, rated=rated, basis=basis)
    if not fresh and draw.prior_at >= 0.0:
        prior_at = min(prior_at, draw.prior_at)
    raw, by = _combine(poll, draw, charge, firmware, volts, load=load, prior_at=prior_at)
    if not fresh and draw.raw >= 0.0:
        raw = min(raw, draw.raw)
    if poll.partial and draw.deadline >= 0.0:
        raw = min(raw, draw.deadline)
    median = _median(raw, draw.raw, draw.raw1)
    lb = reading.low_battery
    if ref <= 0.0 and arrived and t >= RUNTIME_FROM_S and not draw.settle:
        load = Load(load.mean, load.mean)
    return Draw(
        draw.since, draw.seen_whole, draw.soc, draw.recent, charge, firmware, volts, load, arrived, draw.stepped_at,
        draw.idle, draw.settle, draw.carry_s, draw.carry_at, draw.carry_factor, used, prior_at,
        raw, draw.raw, draw.raw1, median, by,
        (now if draw.lb_since < 0.0 else draw.lb_since) if lb else -1.0, draw.lb_polls + 1 if lb else 0,
        _tally(poll, draw, volts, t=t, left=median - now, used=used, load=load.mean),
    )  # fmt: skip


def _tally(poll: Poll, draw: Draw, volts: Voltage, *, t: float, left: float, used: float, load: float) -> Tally:
    """What the summary needs, one poll further."""
    was = draw.tally
    first = was.first_bound_s < 0.0 and t >= FROM_S
    cell = volts.value if volts is not draw.volts and volts.value > 0.0 else 9.0
    return Tally(
        was.load_sum + max(0.0, load) * poll.dt,
        was.seconds + poll.dt,
        max(0.0, left) if first else was.first_bound_s,
        t if first else was.first_bound_after_s,
        was.promised_s,
        was.charge_from,
        min(was.volts_least, cell),
        used if cell < VOLT_LOW and was.knee_used < 0.0 else was.knee_used,
        was.claimed or poll.reading.low_battery,
        was.tested or poll.reading.testing,
        was.blind_s,
    )


def _measure(poll: Poll, draw: Draw, arrived: bool) -> tuple[Draw, Load]:
    """The load, and what a step of it does to the witnesses."""
    reading, now, was = poll.reading, poll.now, draw.load
    load = was
    if reading.load_pct is not None:
        share = max(capacity.LOAD_MIN, reading.load_pct / 100.0)
        anew = (arrived and not draw.arrived) or (was.remeasure and poll.fresh)
        if draw.settle:
            watched = see_load(Load(was.mean), share, now, dt=SETTLE_FASTER * poll.dt, anew=anew, left=0.0)
            load = Load(watched.mean, was.ref, remeasure=was.remeasure and not anew)
        else:
            load = see_load(was, share, now, dt=poll.dt, anew=anew, left=max(0.0, draw.deadline - now))
            if load.ref != was.ref:
                return _stepped(poll, draw, load), load
    after = now - draw.stepped_at
    if draw.settle and after >= IDLE_FROM_S and (poll.fresh or after >= IDLE_FROM_S + poll.period):
        mean = load.mean
        if poll.period > SLOW_S and reading.load_pct is not None:
            mean = max(capacity.LOAD_MIN, reading.load_pct / 100.0)
        load = Load(mean, mean)
        return _settled(poll, draw, load), load
    return draw, load


def _counters(poll: Poll, draw: Draw, load: Load, arrived: bool) -> tuple[Charge, Firmware]:
    """Charge and runtime take in what is new."""
    reading, now = poll.reading, poll.now
    t = now - draw.since
    charge, firmware = draw.charge, draw.firmware
    if reading.charge_pct is not None:
        # Not in the poll in which the mains' value is replaced; and where a voltage watches, not while a gauge that
        # is made of loaded volts plunges (population: up to 40 points in the first half minute of a healthy battery).
        watched = draw.volts.value > 0.0 and poll.mains.volts_sane is True
        settled = draw.arrived and t >= (VOLT_FROM_S if watched else CHARGE_FROM_S)
        charge = see_charge(charge, reading.charge_pct, now, settled=settled, floor=_floor(draw))
    runtime = reading.runtime_s
    if runtime is None or reading.overload or not 0.0 <= runtime < RUNTIME_MOST_S:
        return charge, firmware
    if (reading.load_pct is not None and reading.load_pct < 100.0 * LOAD_LEAST) or (
        runtime == 0.0 and (reading.charge_pct is None or reading.charge_pct > 10.0)
    ):
        return charge, firmware
    return charge, see_runtime(
        firmware,
        runtime / poll.policy.time_scale,
        now,
        dt=poll.dt,
        settled=arrived and t >= RUNTIME_FROM_S and not draw.settle,
        load_ratio=load.mean / load.ref if load.mean > 0.0 and load.ref > 0.0 else 1.0,
        period=poll.period,
    )


def _floor(draw: Draw) -> float:
    return RECENT_FLOOR_PCT if draw.recent else CHARGE_FLOOR_PCT


def _level(poll: Poll, draw: Draw) -> Voltage:
    """The voltage takes in what is new; what can't be cells of lead-acid under load is not seen."""
    reading, mains = poll.reading, poll.mains
    assert reading.voltage is not None
    cells = mains.cells or (reading.voltage_nominal or 0.0) / 2.0
    if poll.lithium or cells <= 0.0 or mains.volts_sane is False:
        return draw.volts
    cell = reading.voltage / cells
    if not LOADED_V[0] <= cell <= LOADED_V[1]:
        return draw.volts
    since_step = _since_step(draw, poll.now)
    return see_voltage(draw.volts, cell, poll.now, dt=poll.dt, since_step=since_step, fresh=poll.fresh)


def _since_step(draw: Draw, now: float) -> float:
    """Seconds since the load stepped, as far as the voltage minds."""
    after = now - draw.stepped_at
    if draw.carry_factor < 1.0 and not draw.idle:
        after = min(now - draw.since, after + CAP_VOLTS_S)
    return after


def _prior_s(poll: Poll, draw: Draw, charge: Charge, *, used: float, rated: float, basis: str) -> float:
    """Seconds left by what is known beforehand: (sure share - used share) of the rated runtime.

    A UPS of unknown size is sized by its own charge: since the first change seen, it can't have fallen faster than by
    the points seen and one step more.
    """
    reading = poll.reading
    phi = capacity.phi_of(poll.feed, reading.chemistry, reading.voltage, replace_battery=reading.replace_battery)
    left = max(0.0, phi * draw.soc - used) * rated
    if basis == "default" and charge.first_at >= 0.0 and poll.now > charge.first_at:
        fastest = (charge.first - charge.value + charge.quantum) / (poll.now - charge.first_at)
        spent = (draw.tally.charge_from - charge.value) / 100.0
        if fastest > 0.0:
            left = max(left, (phi * draw.soc - spent) * 100.0 / fastest)
    return left


def _combine(
    poll: Poll,
    draw: Draw,
    charge: Charge,
    firmware: Firmware,
    volts: Voltage,
    *,
    load: Load,
    prior_at: float,
) -> tuple[float, str]:
    """The instant of power-out by the rules of the module's docstring, and who says so."""
    now = poll.now
    if draw.carry_s >= 0.0 and now - draw.carry_at < (IDLE_FROM_S if draw.settle else FROM_S):
        factor = stretch(draw, load, now - draw.carry_at, poll.period)
        return draw.carry_at + draw.carry_s * factor, "carried"
    counted = firmware.seconds >= 0.0 or charge.seconds >= 0.0 or charge.first_at >= 0.0  # that it moves is enough
    trusted = poll.mains.volts_sane and not poll.reading.replace_battery
    seen = volts.value > 0.0 and now - volts.seen_at <= max(ALIVE_S, 3.0 * poll.period)
    both = counted and seen and trusted
    factor = IDLE if draw.idle else BOTH if both else ONE
    at, by = math.inf, ""
    least = _least(draw, firmware, volts, now, factor) if both and not draw.idle else -math.inf
    if charge.seconds >= 0.0:
        rises = (load.ref / load.mean) ** RUNTIME_LOAD_EXPONENT if load.mean > load.ref > 0.0 else 1.0
        at, by = max(least, charge.at + factor * charge.seconds * rises), "charge"
    if firmware.seconds >= 0.0:
        by_runtime = firmware.at + factor * firmware.seconds * (RECENT_RUNTIME if draw.recent else 1.0)
        by_runtime = max(least, by_runtime)
        if by_runtime < at:
            at, by = by_runtime, "runtime"
    if volts.seconds >= 0.0:
        by_volts = volts.at + factor * volts.seconds
        if by_volts < at:
            at, by = by_volts, "voltage"
    if by and draw.idle:
        return at, by
    learned = poll.feed.learned_phi is not None
    if not by and seen and trusted and not draw.idle and not learned:
        # The voltage waits for the dip of the transfer to pass. Alone it is no less than a prior even so: a dip is low.
        return now + ONE * level_s(volts.value), "voltage"
    if prior_at < at and (not both or learned):
        return prior_at, "learned capacity" if learned else "prior"
    return at, by


def _least(draw: Draw, firmware: Firmware, volts: Voltage, now: float, factor: float) -> float:
    """The instant below which no *rate* takes the bound while the voltage is on its plateau.

    A gauge that plunges and a runtime that wobbles with the load look like a fast discharge; the voltage, which is
    independent of both, doesn't agree. Levels are believed in full: this one, and the runtime itself.
    """
    if volts.seconds < 0.0 or volts.value < PLATEAU_V:
        return -math.inf
    left = volts.at + volts.seconds - now
    if firmware.seconds >= 0.0:
        plain = firmware.seconds * firmware.kappa * (RECENT_RUNTIME if draw.recent else 1.0)
        left = min(left, firmware.at + plain - now)
    return now + factor * PLATEAU_SHARE * max(0.0, left)


def _median(a: float, b: float, c: float) -> float:
    """Of three; of fewer (negative ones are missing) the least."""
    if b < 0.0:
        return a
    if c < 0.0:
        return min(a, b)
    return max(min(a, b), min(max(a, b), c))


def _stepped(poll: Poll, draw: Draw, load: Load) -> Draw:
    """A step that isn't ours: rates begin anew, the old ones, scaled, stay in force."""
    ratio = load.ref / draw.load.ref
    volts = Voltage()
    if draw.volts.seconds >= 0.0:
        volts = Voltage(draw.volts.seconds / max(1.0, ratio) ** capacity.LOAD_RISES, draw.volts.at)
    return _rates_anew(poll, replace(draw, stepped_at=draw.load.off_since, volts=volts), ratio)


def _settled(poll: Poll, draw: Draw, load: Load) -> Draw:
    """Our own step is over and its load is measured: witnesses answer anew, rates begin."""
    before = draw.load.ref
    known = load.ref > 0.0 and before > 0.0
    ratio = load.ref / before if known else max(draw.carry_factor, IDLE_UNMEASURED)
    return _rates_anew(poll, replace(draw, settle=False), ratio)


def _rates_anew(poll: Poll, draw: Draw, ratio: float) -> Draw:
    charge = step_charge(draw.charge, poll.now, ratio**RUNTIME_LOAD_EXPONENT)
    firmware = step_runtime(draw.firmware, poll.now)
    if firmware.value >= 0.0:
        firmware = runtime_says(firmware, poll.now, exact=False, period=poll.period)
    return replace(draw, charge=charge_says(charge, poll.now, _floor(draw)), firmware=firmware)


def stretch(draw: Draw, load: Load, since_step: float, period: float) -> float:
    """How much longer than before our own step the same charge lasts, *since_step* seconds after it.

    By the load as it is measured; by the one that was expected where there is no measure, and until a park had the time
    to show: a UPS tells its load once a *period* and filters it. A flush of a second would else be followed by a halt,
    since the load of the training is still what is reported.
    """
    if draw.carry_factor >= 1.0:
        return 1.0
    expected = min(STRETCH_MAX, max(1.0, STRETCH_TRUST / max(draw.carry_factor, 0.01)))
    if load.mean <= 0.0 or load.ref <= 0.0:
        return expected
    measured = min(STRETCH_MAX, max(1.0, load.ref / load.mean))
    shown = since_step >= min(IDLE_FROM_S, period + LOAD_SHOWS_S)
    return measured if shown or not draw.idle else max(measured, expected)
