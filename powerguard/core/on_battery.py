"""One poll on battery: every witness takes in what is new, and the instants of power-out are combined.

The combination is in `combine.py`; the witnesses are in `evidence.py`.
"""

from __future__ import annotations

from msgspec.structs import replace

from powerguard.core import capacity
from powerguard.core.bound import FROM_S
from powerguard.core.combine import IDLE_FROM_S, Poll, combine, median, prior_s
from powerguard.core.draw import Draw, Tally
from powerguard.core.evidence import (
    CHARGE_FLOOR_PCT,
    CHARGE_FROM_S,
    RUNTIME_FROM_S,
    RUNTIME_LOAD_EXPONENT,
    Charge,
    Firmware,
    charge_says,
    runtime_says,
    see_charge,
    see_runtime,
    step_charge,
    step_runtime,
)
from powerguard.core.load import Load, see_load
from powerguard.core.volts import VOLT_FROM_S, VOLT_LOW, Voltage, light, see_voltage

# Population: tuned on 20,000 simulated outages (see evidence.py), checked on others. Estimator seconds.
IDLE_UNMEASURED = 0.5  # a load that can't be measured isn't believed to fall further
RECENT_FLOOR_PCT = 22.0
LOAD_LEAST = 0.10  # below, firmware runtimes are fiction (APC FAQ000246147; 65535 in nut#731)
RUNTIME_MOST_S = 64800.0
LOADED_V = (1.2, 2.16)  # per cell on battery
POLLFREQ_S, ARRIVED_S = 30.0, 2.0  # after NUT's default pollfreq and a poll, values that are the same are the battery's
CAP_VOLTS_S = 16.0  # a power cap moves the voltage less than a transfer: it is waited for so much less
SETTLE_FASTER = 3.0  # after our own step the mean of the load follows so many times as fast
SLOW_S = 8.0  # a UPS that refreshes more seldom shows the load after a step in one value


def absorb_poll(poll: Poll, draw: Draw) -> Draw:
    """One poll on battery."""
    reading, now, fresh = poll.reading, poll.now, poll.fresh
    t = now - draw.since
    refresh = reading.pollfreq_s / poll.policy.time_scale if reading.pollfreq_s else POLLFREQ_S
    arrived = draw.arrived or (fresh and t > 0.0) or t >= refresh + ARRIVED_S
    draw, load = _measure(poll, draw, arrived)
    ref = load.ref
    charge, firmware = _counters(poll, draw, load, arrived) if fresh else (draw.charge, draw.firmware)
    volts = _level(poll, draw, load) if arrived and reading.voltage is not None else draw.volts
    rated, basis = capacity.rated_now(poll.feed, poll.mains.promise_s, load.mean, poll.policy.time_scale)
    used = draw.used + poll.dt / rated
    prior_at = now + prior_s(poll, draw, charge, used=used, rated=rated, basis=basis)
    if not fresh and draw.prior_at >= 0.0:
        prior_at = min(prior_at, draw.prior_at)
    raw, by = combine(poll, draw, charge, firmware, volts, load=load, prior_at=prior_at)
    if not fresh and draw.raw >= 0.0:
        raw = min(raw, draw.raw)
    if poll.partial and draw.deadline >= 0.0:
        raw = min(raw, draw.deadline)
    deadline = median(raw, draw.raw, draw.raw1)
    lb = reading.low_battery
    if ref <= 0.0 and arrived and t >= RUNTIME_FROM_S and not draw.settle:
        load = Load(load.mean, load.mean)
    return Draw(
        draw.since, draw.seen_whole, draw.soc, draw.recent, charge, firmware, volts, load, arrived, draw.stepped_at,
        draw.idle, draw.settle, draw.carry_s, draw.carry_at, draw.carry_factor, used, prior_at,
        raw, draw.raw, draw.raw1, deadline, by,
        (now if draw.lb_since < 0.0 else draw.lb_since) if lb else -1.0, draw.lb_polls + 1 if lb else 0,
        _tally(poll, draw, volts, t=t, left=deadline - now, used=used, load=load.mean),
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


def _level(poll: Poll, draw: Draw, load: Load) -> Voltage:
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
    lighter = 1.0 if draw.idle or draw.settle else light(load.mean)
    return see_voltage(draw.volts, cell, poll.now, dt=poll.dt, since_step=since_step, fresh=poll.fresh, lighter=lighter)


def _since_step(draw: Draw, now: float) -> float:
    """Seconds since the load stepped, as far as the voltage minds."""
    after = now - draw.stepped_at
    if draw.carry_factor < 1.0 and not draw.idle:
        after = min(now - draw.since, after + CAP_VOLTS_S)
    return after


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
