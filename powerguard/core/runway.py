"""The runway of one feed: a lower bound of the seconds until its output goes dark, at the present load.

    state = EMPTY
    state = absorb(policy, feed, state, reading, now)        # every reading, on mains too
    state = load_step(state, now, factor)                    # we changed the load: a park, a power cap
    answer = bound(policy, feed, state, now, save_s=..., halt_s=...)

Three witnesses (evidence.py, volts.py) and a prior (capacity.py) each give an instant of power-out. The bound is

    both kinds of witness, charge or runtime and voltage     0.80 x the earliest
    one kind                                                 0.60 x it, and no more than the prior
    none                                                     the prior
    ranks parked (idle)                                      0.50 x the earliest

as the median of three polls; with learned capacity never more than the prior. What holds of it:

1. It is kept as an instant, so it runs down with the clock by itself. It moves later only through a reading in which a
   value changed (or the two after it, which confirm it), or after a load step. Silence, sentinels and readings that
   lack a value never move it.
2. It is None only before the first reading of the feed, and in the first seconds of an outage (`settling_s` says how
   many are left) in which UPSes still show the mains' values and the dip of the transfer.
3. State is bounded; nothing here depends on how long an outage or an uptime lasts.

Inside, seconds are estimator seconds: real ones over `Policy.time_scale`.
"""

from __future__ import annotations

from msgspec.structs import replace

from powerguard.core import capacity
from powerguard.core.bound import FROM_S, Bound, bound
from powerguard.core.combine import STRETCH_MAX, Poll, stretch
from powerguard.core.discharge import Discharge
from powerguard.core.draw import EMPTY, PRESENT, Draw, Mains, Runway, Tally
from powerguard.core.evidence import step_charge, step_runtime
from powerguard.core.load import LOAD_EW_S, Load, left_after_easing
from powerguard.core.on_battery import LOAD_LEAST, RUNTIME_MOST_S, absorb_poll
from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.types import Comm, Reading
from powerguard.core.volts import Voltage

__all__ = ["EMPTY", "Bound", "Runway", "absorb", "bound", "load_step"]

# Population: tuned on 20,000 simulated outages (see evidence.py), checked on others.
IDLE_BELOW = 0.7  # a step of ours to less than this is a park, else a power cap
RECHARGE_FACTOR = 20.0  # recharge takes 10 times the discharge (Eaton); twice that to be trusted again
RECHARGE_MAX_S = 86400.0
FLAP_S = 60.0  # mains back for less: the same discharge goes on
FLOAT_V = (2.05, 2.45)  # per cell on mains; outside it the unit isn't volts of this many cells
GUESS_BLOCKS = 5  # up to 60 V the float voltage tells the number of 12 V blocks without doubt
GONE_S = 60.0  # a value missing for longer isn't waited for: the others may raise the bound again
PERIOD_S = 20.0  # refresh period assumed until it is reported or seen
PERIOD_MAX_S = 120.0
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
    fresh, partial = seen != state.seen, False
    lacking: tuple[float, ...] = PRESENT
    if None in seen:  # a value that went missing is no news
        lacking = tuple(
            -1.0 if new is not None or old is None else now if since < 0.0 else since
            for new, old, since in zip(seen, state.seen, state.lacking, strict=True)
        )
        partial = any(since >= 0.0 and now - since < GONE_S for since in lacking)
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
            draw = replace(draw, tally=replace(draw.tally, blind_s=draw.tally.blind_s + dt))
        if not mains.promise_s:
            mains = _promise(mains, reading, policy.time_scale, 0.0)
        usual = reading.pollfreq_s / policy.time_scale if reading.pollfreq_s else period or PERIOD_S
        since_ok = now - state.ok_at if state.ok_at >= 0.0 else 0.0
        lithium = capacity.lithium(feed, reading.chemistry, reading.voltage)
        ref, settle = draw.load.ref, draw.settle
        poll = Poll(policy, feed, mains, reading, now, since_ok, fresh or first, partial, usual, lithium)
        draw = absorb_poll(poll, draw)
        if settle and not draw.settle and draw.idle and draw.load.ref > 0.0 and ref > 0.0:
            idle_ratio = draw.load.ref / ref
    elif on is not None:
        mains = _on_line(mains, reading, policy.time_scale, dt)
    new = Runway(
        policy.time_scale, now, now, now if fresh or state.changed_at < 0.0 else state.changed_at, True, blind,
        period, seen, lacking, on, reading, mains, draw, state.last, state.discharges,
        state.ended if now - state.ended_at < FLAP_S else None, state.ended_at, state.recover_at, idle_ratio,
    )  # fmt: skip
    return _end(new, draw, feed, now) if draw is not None and on is False else new


# ---- on mains --------------------------------------------------------------------------------------


def _on_line(was: Mains, reading: Reading, scale: float, dt: float) -> Mains:
    """What is worth knowing before the next outage."""
    charge = was.charge if reading.charge_pct is None else reading.charge_pct
    load = was.load
    if reading.load_pct is not None:
        share = max(capacity.LOAD_MIN, reading.load_pct / 100.0)
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
            old, since=now, arrived=False, stepped_at=now, idle=old.idle, settle=old.idle, carry_s=left, carry_at=now,
            carry_factor=1.0, prior_at=-1.0, raw=-1.0, raw1=-1.0, raw2=-1.0, deadline=-1.0, lb_since=-1.0, lb_polls=0,
            charge=step_charge(old.charge, now, 1.0), firmware=step_runtime(old.firmware, now), volts=Voltage(),
            load=Load(old.load.mean, old.load.ref),
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
        tally=Tally(
            promised_s=-1.0 if reading.runtime_s is None else reading.runtime_s,
            charge_from=-1.0 if reading.charge_pct is None else reading.charge_pct,
        ),
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
    lasted, scale, tally = now - draw.since, state.scale, draw.tally
    half, basis = capacity.rated_now(feed, state.mains.promise_s, 0.5, scale)
    bounded = tally.first_bound_s >= 0.0
    return Discharge(
        lasted_s=max(lasted, tally.seconds) * scale,  # flaps included
        load_pct=100.0 * tally.load_sum / tally.seconds if draw.load.mean >= 0.0 and tally.seconds > 0.0 else None,
        used=draw.used,
        basis=basis,
        basis_s=half * scale,
        soc=draw.soc,
        charge_from_pct=_known(tally.charge_from),
        charge_to_pct=_known(draw.charge.value),
        promised_s=_known(tally.promised_s),
        reported_s=None if draw.firmware.value < 0.0 else draw.firmware.value * scale,
        bound_s=tally.first_bound_s * scale if bounded else None,
        bound_after_s=tally.first_bound_after_s * scale if bounded else None,
        volts_least=tally.volts_least if tally.volts_least < 9.0 else None,
        volts_last=_known(draw.volts.value),
        knee_used=_known(tally.knee_used),
        low_battery=tally.claimed,
        tested=tally.tested,
        replace_battery=state.reading is not None and bool(state.reading.doubt),
        seen_whole=draw.seen_whole,
        blind_s=tally.blind_s * scale,
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
        left = left_after_easing(draw.load, max(0.0, draw.deadline - now), now)
        if factor > 1.0:
            left /= factor**capacity.LOAD_RISES
    draw = replace(
        draw, idle=idle, settle=True, stepped_at=now, carry_s=left, carry_at=now, carry_factor=factor,
        volts=replace(draw.volts, value=-1.0), load=Load(draw.load.mean, draw.load.ref, remeasure=True),
    )  # fmt: skip
    if left >= 0.0:
        at = now + left * stretch(draw, draw.load, 0.0, PERIOD_S)
        draw = replace(draw, raw=at, raw1=at, raw2=at, deadline=at, by="carried")
    return replace(state, draw=draw)


def load_back(state: Runway, now: float, factor: float) -> Runway:
    """Parked ranks train again: what was left at idle load is cut, of a discharge that a flap may go on with, too.

    By as much as the park stretched it, as far as that was measured, else by *factor*.
    """
    old = state.ended if state.draw is None else state.draw
    if old is None or not old.idle:
        return state
    eased = max(factor, stretch(old, old.load, max(0.0, state.at - old.carry_at), PERIOD_S))
    if state.idle_ratio > 0.0:
        eased = min(STRETCH_MAX, max(1.0, 1.0 / state.idle_ratio))
    if state.draw is not None:
        return load_step(state, now, eased)
    left = max(0.0, old.deadline - state.ended_at) / eased
    deadline = state.ended_at + left if old.deadline >= 0.0 else old.deadline
    return replace(state, ended=replace(old, idle=False, deadline=deadline))


def shows_volts(feed: FeedPolicy, state: Runway) -> bool:
    """Whether the battery's voltage is a witness: lead-acid, of cells that are known."""
    reading = state.reading
    if reading is None or reading.voltage is None or capacity.lithium(feed, reading.chemistry, reading.voltage):
        return False
    known = state.mains.cells > 0.0 or reading.voltage_nominal is not None
    return known and state.mains.volts_sane is not False
