"""The runway of one feed: a lower bound of the seconds until its output goes dark, at the present load.

    state = EMPTY
    state = absorb(policy, feed, state, reading, now)        # every reading, on mains too
    state = load_step(state, now, factor)                    # we changed the load: a park, a power cap
    answer = bound(policy, feed, state, now, save_s=..., halt_s=...)

Three witnesses (evidence.py) and a prior (capacity.py) each give an instant of power-out. The bound is

    both kinds of witness, charge or runtime and voltage     0.80 x the earliest
    one kind                                                 0.60 x it, and no more than the prior
    none                                                     the prior
    ranks parked (idle)                                      0.50 x the earliest

as the median of three polls; with learned capacity never more than the prior. What holds of it:

1. It is kept as an instant, so it runs down with the clock by itself. It moves later only through a reading in which a
   value changed (or the two after it, which confirm it), or after a load step. Silence, sentinels and missing values
   never move it.
2. It is None only before the first reading of the feed, and in the first seconds of an outage (`settling_s` says how
   many are left) in which UPSes still show the mains' values and the dip of the transfer.
3. State is bounded; nothing here depends on how long an outage or an uptime lasts.

Inside, seconds are estimator seconds: real ones over `Policy.time_scale`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from msgspec.structs import replace

from powerguard.core import capacity
from powerguard.core.bound import FROM_S, Bound, bound
from powerguard.core.discharge import Discharge
from powerguard.core.draw import EMPTY, Draw, Mains, Runway
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
from powerguard.core.types import Comm, Reading

__all__ = ["EMPTY", "Bound", "Runway", "absorb", "bound", "load_step"]

# Population: tuned on 20,000 simulated outages (see evidence.py), checked on others.
BOTH, ONE, IDLE = 0.80, 0.60, 0.50
STEP_SHARE = 0.30  # a load step: the mean is off by so much ...
STEP_FOR_S = 20.0  # ... for so long
LOAD_EW_S = 15.0
IDLE_FROM_S = 24.0  # after parking, the stretched bound holds so long
IDLE_UNMEASURED = 0.5  # a load that can't be measured isn't believed to fall further
IDLE_BELOW = 0.7  # a step of ours to less than this is a park, else a power cap
STRETCH_MAX = 4.0  # published tables: 4.4-4.7 at 30 % of the load
STRETCH_TRUST = 0.8  # of a load that is expected, not measured
EASED_RATE = 0.75  # while a flush runs at less load, the battery ages by so much of the clock
EASED_BELOW = 0.8
RECENT_RUNTIME = 0.65  # of a runtime reported soon after another outage
RECENT_FLOOR_PCT = 22.0
RECHARGE_FACTOR = 20.0  # recharge takes 10 times the discharge (Eaton); twice that to be trusted again
RECHARGE_MAX_S = 86400.0
FLAP_S = 60.0  # mains back for less: the same discharge goes on
LOAD_LEAST = 0.10  # below, firmware runtimes are fiction (APC FAQ000246147; 65535 in nut#731)
RUNTIME_MOST_S = 64800.0
FLOAT_V = (2.05, 2.45)  # per cell on mains; outside it the unit isn't volts of this many cells
LOADED_V = (1.2, 2.16)  # per cell on battery
GUESS_BLOCKS = 5  # up to 60 V the float voltage tells the number of 12 V blocks without doubt
PERIOD_S = 20.0  # refresh period assumed until it is reported or seen
PERIOD_MAX_S = 120.0
ALIVE_S = 45.0  # a voltage not refreshed for longer is no second witness
PROMISE_UP_S, PROMISE_DOWN_S = 300.0, 30.0  # a promise is taken down sooner than up (it walks: Goldenmate, +-17 %)
SOC_UNKNOWN = 0.5  # first seen on battery, with no charge reported


def absorb(policy: Policy, feed: FeedPolicy, state: Runway, reading: Reading, now: float) -> Runway:
    """*reading*, taken in at *now*. Out of order it counts as of the newest."""
    now = max(now / policy.time_scale, state.at)
    dt = now - state.at if state.at >= 0.0 else 0.0
    blind = 0.0
    if state.on_battery:
        blind = max(0.0, state.blind_s - dt) if state.ok else state.blind_s + dt
    if reading.comm is not Comm.OK:
        return replace(state, scale=policy.time_scale, at=now, ok=False, blind_s=blind)
    seen: tuple[float | None, ...] = (
        reading.charge_pct,
        reading.runtime_s,
        reading.load_pct,
        reading.voltage,
        reading.input_voltage,
    )
    fresh = seen != state.seen
    if fresh and None in seen:  # a value that went missing is no news
        seen = tuple(old if new is None else new for new, old in zip(seen, state.seen, strict=True))
        fresh = seen != state.seen
    on = state.on_battery if reading.on_battery is None else reading.on_battery
    mains, draw, period, idle_ratio = state.mains, state.draw, state.period_s, state.idle_ratio
    if on:
        first = False
        if draw is None:
            draw, first = _begin(state, reading, now), True
        elif fresh and state.ok:
            gap = min(now - state.changed_at, PERIOD_MAX_S)
            period = period + (gap - period) * (0.5 if gap > period else 0.1) if period else gap
        if not state.ok:
            draw = replace(draw, blind_s=draw.blind_s + dt)
        if not mains.promise_s:
            mains = _promise(mains, reading, policy.time_scale, 0.0)
        usual = reading.pollfreq_s / policy.time_scale if reading.pollfreq_s else period or PERIOD_S
        since_ok = now - state.ok_at if state.ok_at >= 0.0 else 0.0
        lithium = capacity.lithium(feed, reading.chemistry)
        ref, settle = draw.ref, draw.settle
        draw = _drain(_Now(policy, feed, mains, reading, now, since_ok, fresh or first, usual, lithium), draw)
        if settle and not draw.settle and draw.idle and draw.ref > 0.0 and ref > 0.0:
            idle_ratio = draw.ref / ref
    elif on is not None:
        mains = _on_line(mains, reading, policy.time_scale, dt)
    new = Runway(
        policy.time_scale, now, now, now if fresh or state.changed_at < 0.0 else state.changed_at, True, blind,
        period, seen, on, reading, mains, draw, state.last, state.discharges, state.ended, state.ended_at,
        state.recover_at, idle_ratio,
    )  # fmt: skip
    return _end(new, draw, feed, now) if draw is not None and on is False else new


# ---- on mains --------------------------------------------------------------------------------------


def _on_line(was: Mains, reading: Reading, scale: float, dt: float) -> Mains:
    """What is worth knowing before the next outage."""
    charge = was.charge if reading.charge_pct is None else reading.charge_pct
    load = was.load
    if reading.load_pct is not None:
        share = reading.load_pct / 100.0
        load = share if load < 0.0 else load + (share - load) * (dt / (LOAD_EW_S + dt))
    cells, sane = was.cells, was.volts_sane
    if reading.voltage is not None:
        cells = _cells(reading.voltage, reading.voltage_nominal) or cells
        sane = cells > 0.0 and FLOAT_V[0] <= reading.voltage / cells <= FLOAT_V[1]
    return _promise(Mains(charge, load, was.promise_s, cells, sane), reading, scale, dt)


def _cells(volts: float, nominal: float | None) -> float:
    """Lead-acid cells in series: two volts each by the nominal voltage, else by the float voltage of few blocks."""
    if nominal is not None:
        return nominal / 2.0
    blocks = round(volts / (6.0 * 2.27))
    fits = 1 <= blocks <= GUESS_BLOCKS and FLOAT_V[0] <= volts / (6.0 * blocks) <= FLOAT_V[1]
    return 6.0 * blocks if fits else 0.0


def _promise(mains: Mains, reading: Reading, scale: float, dt: float) -> Mains:
    """The runtime that the UPS promises, brought to a full battery at half load, taken down sooner than up."""
    runtime, charge = reading.runtime_s, reading.charge_pct
    load = 0.5 if reading.load_pct is None else reading.load_pct / 100.0
    soc = 1.0 if charge is None else charge / 100.0
    if runtime is None or not 0.0 < runtime < RUNTIME_MOST_S or load < LOAD_LEAST or soc < capacity.PROMISE_MIN_SOC:
        return mains
    full = runtime / scale / soc * (load / 0.5) ** capacity.LOAD_EXPONENT
    was = mains.promise_s
    if was > 0.0:
        full = was + (full - was) * (dt / (dt + (PROMISE_UP_S if full > was else PROMISE_DOWN_S)))
    return Mains(mains.charge, mains.load, full, mains.cells, mains.volts_sane)


# ---- the transfer and back -------------------------------------------------------------------------


def _begin(state: Runway, reading: Reading, now: float) -> Draw:
    """The first poll on battery: a new discharge, or the old one after a flap."""
    old = state.ended
    if old is not None and now - state.ended_at < FLAP_S:
        # The battery did not age on mains, and it did not recharge to speak of: what was left is left.
        left = max(0.0, old.deadline - state.ended_at) if old.deadline >= 0.0 else -1.0
        return replace(
            old, since=now, arrived=False, stepped_at=now, idle=False, settle=False, carry_s=left, carry_at=now,
            carry_factor=1.0, eased_at=-1.0, off_since=-1.0, prior_at=-1.0, raw=-1.0, raw1=-1.0, raw2=-1.0,
            deadline=-1.0, lb_since=-1.0, lb_polls=0, first_bound_s=-1.0, load_sum=0.0, blind_s=0.0,
            charge=step_charge(old.charge, now, 1.0), firmware=step_runtime(old.firmware, now), volts=Voltage(),
        )  # fmt: skip
    recent = now < state.recover_at
    seen_whole = state.on_battery is False
    charge = state.mains.charge if seen_whole and state.mains.charge >= 0.0 else reading.charge_pct
    soc = (1.0 if seen_whole else SOC_UNKNOWN) if charge is None else charge / 100.0
    return Draw(
        since=now,
        seen_whole=seen_whole,
        soc=max(0.0, soc - capacity.RECENT_SOC) if recent else soc,
        recent=recent,
        arrived=not seen_whole,
        stepped_at=now,
        promised_s=-1.0 if reading.runtime_s is None else reading.runtime_s,
        charge_from=-1.0 if reading.charge_pct is None else reading.charge_pct,
    )


def _end(state: Runway, draw: Draw, feed: FeedPolicy, now: float) -> Runway:
    """The mains are back: the discharge is summed up, and the battery owes a recharge."""
    lasted = now - draw.since
    recover = min(max(state.recover_at, now) + RECHARGE_FACTOR * lasted, now + RECHARGE_MAX_S / state.scale)
    return replace(
        state, draw=None, last=_sum_up(state, draw, feed, now), discharges=state.discharges + 1, ended=draw,
        ended_at=now, recover_at=recover, blind_s=0.0,
    )  # fmt: skip


def _sum_up(state: Runway, draw: Draw, feed: FeedPolicy, now: float) -> Discharge:
    lasted, scale = now - draw.since, state.scale
    half, basis = capacity.rated_now(feed, state.mains.promise_s, 0.5, scale)
    return Discharge(
        lasted_s=lasted * scale,
        load_pct=100.0 * draw.load_sum / lasted if draw.load >= 0.0 and lasted > 0.0 else None,
        used=draw.used,
        basis=basis,
        basis_s=half * scale,
        soc=draw.soc,
        charge_from_pct=_known(draw.charge_from),
        charge_to_pct=_known(draw.charge.value),
        promised_s=_known(draw.promised_s),
        reported_s=None if draw.firmware.value < 0.0 else draw.firmware.value * scale,
        bound_s=None if draw.first_bound_s < 0.0 else draw.first_bound_s * scale,
        bound_after_s=None if draw.first_bound_s < 0.0 else draw.first_bound_after_s * scale,
        volts_least=draw.volts_least if draw.volts_least < 9.0 else None,
        volts_last=_known(draw.volts.value),
        knee_used=_known(draw.knee_used),
        low_battery=draw.claimed,
        tested=draw.tested,
        replace_battery=state.reading is not None and state.reading.replace_battery,
        seen_whole=draw.seen_whole,
        blind_s=draw.blind_s * scale,
    )


def _known(value: float) -> float | None:
    return None if value < 0.0 else value


def load_step(state: Runway, now: float, factor: float) -> Runway:
    """We changed the load (or are about to) to *factor* of what it was: witnesses begin anew.

    Less than `IDLE_BELOW` is a park: until the witnesses speak again, what was left is stretched by the load as it is
    measured (at most four times). A rise cuts what was left at once. Parking what is parked changes nothing.
    """
    draw = state.draw
    idle = factor < IDLE_BELOW
    if draw is None or (idle and draw.idle):
        return state
    now = max(now / state.scale, state.at)
    left = -1.0
    if draw.deadline >= 0.0 and (draw.carry_s >= 0.0 or now - draw.since >= FROM_S):
        left = max(0.0, draw.deadline - now)
        if draw.eased_at >= 0.0:
            left = max(left, draw.eased_left - EASED_RATE * (now - draw.eased_at))
        if factor > 1.0:
            left /= factor**capacity.LOAD_RISES
    draw = replace(
        draw, idle=idle, settle=True, stepped_at=now, off_since=-1.0, eased_at=-1.0, carry_s=left, carry_at=now,
        carry_factor=factor, volts=replace(draw.volts, value=-1.0),
    )  # fmt: skip
    if left >= 0.0:
        at = now + left * _stretch(draw, draw.load)
        draw = replace(draw, raw=at, raw1=at, raw2=at, deadline=at, by="carried")
    return replace(state, draw=draw)


def _stretch(draw: Draw, load: float) -> float:
    """How much longer than before the step the same charge lasts."""
    if draw.carry_factor >= 1.0:
        return 1.0
    if load > 0.0 and draw.ref > 0.0:
        return min(STRETCH_MAX, max(1.0, draw.ref / load))
    return min(STRETCH_MAX, max(1.0, STRETCH_TRUST / max(draw.carry_factor, 0.01)))


# ---- on battery ------------------------------------------------------------------------------------


class _Now(NamedTuple):
    """What one poll on battery is judged by."""

    policy: Policy
    feed: FeedPolicy
    mains: Mains
    reading: Reading
    now: float
    dt: float  # since the last readable poll
    fresh: bool  # a value changed
    period: float  # usual refresh
    lithium: bool


def _drain(poll: _Now, draw: Draw) -> Draw:
    """One poll on battery."""
    reading, now, dt, fresh = poll.reading, poll.now, poll.dt, poll.fresh
    t = now - draw.since
    arrived = draw.arrived or (fresh and t > 0.0 and reading.on_battery is True)
    load = draw.load
    if reading.load_pct is not None:
        share = reading.load_pct / 100.0
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


def _counters(poll: _Now, draw: Draw, load: float, arrived: bool) -> tuple[Charge, Firmware]:
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


def _level(poll: _Now, draw: Draw) -> Voltage:
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


def _prior_s(poll: _Now, draw: Draw, charge: Charge, *, used: float, rated: float, basis: str) -> float:
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
    poll: _Now,
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
        return draw.carry_at + draw.carry_s * _stretch(draw, load), "carried"
    counted = charge.seconds >= 0.0 or firmware.seconds >= 0.0
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


def _watch_load(poll: _Now, draw: Draw, load: float) -> Draw:
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


def _settled(poll: _Now, draw: Draw, load: float) -> Draw:
    """Our own step is over and its load is measured: witnesses answer anew, rates begin."""
    now, ref = poll.now, draw.ref
    ratio = load / ref if load > 0.0 and ref > 0.0 else max(draw.carry_factor, IDLE_UNMEASURED)
    charge = step_charge(draw.charge, now, ratio**RUNTIME_LOAD_EXPONENT)
    return replace(
        draw, settle=False, ref=load, charge=charge_says(charge, now, _floor(draw)),
        firmware=_runtime_again(poll, step_runtime(draw.firmware, now)),
    )  # fmt: skip


def _runtime_again(poll: _Now, firmware: Firmware) -> Firmware:
    if firmware.value < 0.0:
        return firmware
    return runtime_says(firmware, poll.now, exact=False, period=poll.period)
