"""One poll on battery: every witness takes in what is new, and the instants of power-out are combined.

The rules of the combination are in `runway.py`; the witnesses are in `evidence.py`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from msgspec.structs import replace

from powerguard.core import capacity
from powerguard.core.bound import FROM_S
from powerguard.core.draw import Draw, Mains
from powerguard.core.evidence import (
    CHARGE_FLOOR_PCT,
    CHARGE_FROM_S,
    RUNTIME_FROM_S,
    RUNTIME_LOAD_EXPONENT,
    VOLT_LOW,
    Charge,
    Firmware,
    Voltage,
    charge_says,
    runtime_says,
    see_charge,
    see_runtime,
    see_voltage,
    step_charge,
    step_runtime,
)
from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.types import Reading

# Population: tuned on 20,000 simulated outages (see evidence.py), checked on others. Estimator seconds.
BOTH, ONE, IDLE = 0.80, 0.60, 0.50
STEP_SHARE = 0.30  # a load step: the mean is off by so much ...
STEP_FOR_S = 20.0  # ... for so long
LOAD_EW_S = 15.0
IDLE_FROM_S = 24.0  # after parking, the stretched bound holds so long
IDLE_UNMEASURED = 0.5  # a load that can't be measured isn't believed to fall further
STRETCH_MAX = 4.0  # published tables: 4.4-4.7 at 30 % of the load
STRETCH_TRUST = 0.8  # of a load that is expected, not measured
EASED_BELOW = 0.8
RECENT_RUNTIME = 0.65  # of a runtime reported soon after another outage
RECENT_FLOOR_PCT = 22.0
LOAD_LEAST = 0.10  # below, firmware runtimes are fiction (APC FAQ000246147; 65535 in nut#731)
RUNTIME_MOST_S = 64800.0
LOADED_V = (1.2, 2.16)  # per cell on battery
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


def drain(poll: Poll, draw: Draw) -> Draw:
    """One poll on battery."""
    reading, now, dt, fresh = poll.reading, poll.now, poll.dt, poll.fresh
    t = now - draw.since
    arrived = draw.arrived or (fresh and t > 0.0 and reading.on_battery is True)
    load = draw.load
    if reading.load_pct is not None:
        share = max(capacity.LOAD_MIN, reading.load_pct / 100.0)
        anew = load < 0.0 or (arrived and not draw.arrived)
        load = share if anew else load + (share - load) * (dt / (LOAD_EW_S + dt))
    if draw.settle:
        if now - draw.stepped_at >= IDLE_FROM_S:
            draw = _settled(poll, draw, load)
    elif draw.ref > 0.0 and load >= 0.0:
        draw = _watch_load(poll, draw, load)
    ref = draw.ref
    if ref <= 0.0 and arrived and t >= RUNTIME_FROM_S and not draw.settle:
        ref = load
    charge, firmware = _counters(poll, draw, load, arrived) if fresh else (draw.charge, draw.firmware)
    volts = _level(poll, draw) if arrived and reading.voltage is not None else draw.volts
    rated, basis = capacity.rated_now(poll.feed, poll.mains.promise_s, load, poll.policy.time_scale)
    used = draw.used + dt / rated
    prior_at = now + _prior_s(poll, draw, charge, used=used, rated=rated, basis=basis)
    if not fresh and draw.prior_at >= 0.0:
        prior_at = min(prior_at, draw.prior_at)
    raw, by = _combine(poll, draw, charge, firmware, volts, load=load, ref=ref, prior_at=prior_at)
    if not fresh and draw.raw >= 0.0:
        raw = min(raw, draw.raw)
    if poll.partial and draw.deadline >= 0.0:
        raw = min(raw, draw.deadline)
    median = _median(raw, draw.raw, draw.raw1)
    first = draw.first_bound_s < 0.0 and t >= FROM_S
    lb = reading.low_battery
    low_volts = volts is not draw.volts and 0.0 <= volts.value < VOLT_LOW
    return Draw(
        draw.since, draw.seen_whole, draw.soc, draw.recent, charge, firmware, volts, arrived, load, ref,
        draw.off_since, draw.eased_at, draw.eased_left, draw.stepped_at, draw.idle, draw.settle,
        draw.carry_s, draw.carry_at, draw.carry_factor, used, prior_at, raw, draw.raw, draw.raw1, median, by,
        (now if draw.lb_since < 0.0 else draw.lb_since) if lb else -1.0, draw.lb_polls + 1 if lb else 0,
        draw.load_sum + max(0.0, load) * dt,
        median - now if first else draw.first_bound_s, t if first else draw.first_bound_after_s,
        draw.promised_s, draw.charge_from, min(draw.volts_least, volts.value) if volts.value > 0 else draw.volts_least,
        used if low_volts and draw.knee_used < 0.0 else draw.knee_used,
        draw.claimed or lb, draw.tested or reading.testing, draw.blind_s,
    )  # fmt: skip


def _counters(poll: Poll, draw: Draw, load: float, arrived: bool) -> tuple[Charge, Firmware]:
    """Charge and runtime take in what is new."""
    reading, now = poll.reading, poll.now
    t = now - draw.since
    charge, firmware = draw.charge, draw.firmware
    if reading.charge_pct is not None:
        settled = arrived and t >= CHARGE_FROM_S
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
        load_ratio=load / draw.ref if load > 0.0 and draw.ref > 0.0 else 1.0,
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
    return see_voltage(draw.volts, cell, poll.now, dt=poll.dt, since_step=poll.now - draw.stepped_at, fresh=poll.fresh)


def _prior_s(poll: Poll, draw: Draw, charge: Charge, *, used: float, rated: float, basis: str) -> float:
    """Seconds left by what is known beforehand: (sure share - used share) of the rated runtime.

    A UPS of unknown size is sized by its own charge: since the first change seen, it can't have fallen faster than by
    the points seen and one step more.
    """
    reading = poll.reading
    phi = capacity.phi_of(poll.feed, reading.chemistry, replace_battery=reading.replace_battery)
    left = max(0.0, phi * draw.soc - used) * rated
    if basis == "default" and charge.first_at >= 0.0 and poll.now > charge.first_at:
        fastest = (charge.first - charge.value + charge.quantum) / (poll.now - charge.first_at)
        spent = (draw.charge_from - charge.value) / 100.0
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
    load: float,
    ref: float,
    prior_at: float,
) -> tuple[float, str]:
    """The instant of power-out by the rules of the module's docstring, and who says so."""
    now = poll.now
    if draw.carry_s >= 0.0 and now - draw.carry_at < (IDLE_FROM_S if draw.settle else FROM_S):
        return draw.carry_at + draw.carry_s * stretch(draw, load), "carried"
    counted = firmware.seconds >= 0.0 or charge.seconds >= 0.0 or charge.first_at >= 0.0  # that it moves is enough
    trusted = poll.mains.volts_sane and not poll.reading.replace_battery
    seen = volts.value > 0.0 and now - volts.seen_at <= max(ALIVE_S, 3.0 * poll.period)
    both = counted and seen and trusted
    factor = IDLE if draw.idle else BOTH if both else ONE
    at, by = math.inf, ""
    if charge.seconds >= 0.0:
        rises = (ref / load) ** RUNTIME_LOAD_EXPONENT if load > ref > 0.0 else 1.0
        at, by = charge.at + factor * charge.seconds * rises, "charge"
    if firmware.seconds >= 0.0:
        by_runtime = firmware.at + factor * firmware.seconds * (RECENT_RUNTIME if draw.recent else 1.0)
        if by_runtime < at:
            at, by = by_runtime, "runtime"
    if volts.seconds >= 0.0:
        by_volts = volts.at + factor * volts.seconds
        if by_volts < at:
            at, by = by_volts, "voltage"
    if by and draw.idle:
        return at, by
    learned = poll.feed.learned_phi is not None
    if prior_at < at and (not both or learned):
        return prior_at, "learned capacity" if learned else "prior"
    return at, by


def _median(a: float, b: float, c: float) -> float:
    """Of three; of fewer (negative ones are missing) the least."""
    if b < 0.0:
        return a
    if c < 0.0:
        return min(a, b)
    return max(min(a, b), min(max(a, b), c))


def _watch_load(poll: Poll, draw: Draw, load: float) -> Draw:
    """Notes when the load leaves the reference; a step that holds starts the rates anew."""
    now, ref = poll.now, draw.ref
    eased_at, eased_left, off_since = draw.eased_at, draw.eased_left, draw.off_since
    if load >= EASED_BELOW * ref:
        eased_at = -1.0
    elif eased_at < 0.0:
        eased_at, eased_left = now, max(0.0, draw.deadline - now)
    if abs(load - ref) <= STEP_SHARE * ref:
        off_since = -1.0
    elif off_since < 0.0:
        off_since = now
    elif now - off_since >= STEP_FOR_S:
        rise = max(1.0, load / ref) ** capacity.LOAD_RISES
        volts = Voltage(seconds=draw.volts.seconds / rise, at=draw.volts.at) if draw.volts.seconds >= 0 else Voltage()
        charge = step_charge(draw.charge, now, (load / ref) ** RUNTIME_LOAD_EXPONENT)
        return replace(
            draw, ref=load, stepped_at=off_since, off_since=-1.0, eased_at=-1.0, volts=volts,
            charge=charge_says(charge, now, _floor(draw)),
            firmware=_runtime_again(poll, step_runtime(draw.firmware, now)),
        )  # fmt: skip
    if (eased_at, off_since) == (draw.eased_at, draw.off_since):
        return draw
    return replace(draw, eased_at=eased_at, eased_left=eased_left, off_since=off_since)


def _settled(poll: Poll, draw: Draw, load: float) -> Draw:
    """Our own step is over and its load is measured: witnesses answer anew, rates begin."""
    now, ref = poll.now, draw.ref
    ratio = load / ref if load > 0.0 and ref > 0.0 else max(draw.carry_factor, IDLE_UNMEASURED)
    charge = step_charge(draw.charge, now, ratio**RUNTIME_LOAD_EXPONENT)
    return replace(
        draw, settle=False, ref=load, charge=charge_says(charge, now, _floor(draw)),
        firmware=_runtime_again(poll, step_runtime(draw.firmware, now)),
    )  # fmt: skip


def _runtime_again(poll: Poll, firmware: Firmware) -> Firmware:
    if firmware.value < 0.0:
        return firmware
    return runtime_says(firmware, poll.now, exact=False, period=poll.period)


def stretch(draw: Draw, load: float) -> float:
    """How much longer than before the step the same charge lasts."""
    if draw.carry_factor >= 1.0:
        return 1.0
    if load > 0.0 and draw.ref > 0.0:
        return min(STRETCH_MAX, max(1.0, draw.ref / load))
    return min(STRETCH_MAX, max(1.0, STRETCH_TRUST / max(draw.carry_factor, 0.01)))
