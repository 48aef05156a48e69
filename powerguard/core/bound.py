"""What the runway answers: the bound, and the strong signals that don't wait for it."""

from __future__ import annotations

from msgspec import Struct, field

from powerguard.core import capacity
from powerguard.core.draw import Draw, Runway
from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.types import Reading
from powerguard.core.volts import level_s, light

# Estimator seconds. Population: tuned on 20,000 simulated outages (see evidence.py), checked on others.
FROM_S = 16.0  # no bound before; only the strong signals
IDLE_STRETCH = 2.0  # what parking buys until it was seen: published tables give 2.3 at half the load
IDLE_STRETCH_MAX = 4.0
RUNTIME_HARD_FROM_S = 4.0
VOLT_SAVE, VOLT_SAVE_EARLY, VOLT_EARLY_S, VOLT_HARD_FROM_S = 1.80, 1.86, 60.0, 6.0
FRAIL_FROM_S = 2.0  # two looks: nobody stops for one reading
FRAIL_SPARE = 1.5  # a quantile by age is wrong by so much where it matters
RECENT_S = 3600.0  # so soon after another outage a battery isn't full, whatever it shows: VRLA takes hours
UNSEEN_SPARE, UNSEEN_SLOW_S = 1.5, 8.0
"""A UPS that refreshes more seldom shows nothing of its battery for up to a minute, and must hold so many needs
meanwhile: of 3,030 simulated saves of 300 s it loses two fewer."""
OLD_Y = 4.0  # VRLA lives 3-5 years (Eaton 5PX and APC SRT manuals)
VOLT_HALT = 1.93  # at idle load this is past the plateau
LB_DOUBT_LEFT, LB_DOUBT_S = 2.0, 60.0
"""LB is a claim: while the bound is so many halts it is doubted, but never for longer (LB at once and right: nut#1942,
dead after two minutes; LB at once and wrong: nut#3087, over ten minutes left)."""
LB_RUNTIME_SLACK, LB_CHARGE_SLACK = 1.1, 1.0
LB_RUNTIME_MAX_S = 1800.0  # 718 device dumps: thresholds above are nobody's intention and explain nothing
FROZEN_PERIODS, FROZEN_S = 3.0, 180.0
"""Nothing changed for so many usual refreshes, and for so long: the values are stale though upsd says ok.

Long, because whole minutes, whole percents and tenths of a volt do stand still on a big battery, and because every
witness runs down with the clock meanwhile: while much is left, standing still costs nothing."""
FROZEN_LEFT = 0.5  # ... and for so much of what is left
FROZEN_IDLE = 2.0  # at idle load less moves
PERIOD_S = 20.0
PARKED_BLIND_S = 60.0  # parked without a voltage: no longer than this


class Bound(Struct, frozen=True):
    """The answer, in real seconds. *save_now* and *halt_now* are "" or the reason, in words.

    `halt_now` speaks of parked ranks: power must be presumed nearly gone, or waiting gains nothing. While ranks train
    or flush it stays "": a halt would only lose what the flush can still save.
    """

    runway_s: float | None
    idle_runway_s: float | None
    by: str
    reason: str
    save_now: str = ""
    halt_now: str = ""
    settling_s: float = 0.0  # on battery and no bound yet: so long until there is one
    blind_s: float = 0.0  # without a fresh value for so long
    evidence: dict[str, float] = field(default_factory=dict)


def bound(policy: Policy, feed: FeedPolicy, state: Runway, now: float, *, save_s: float, halt_s: float) -> Bound:
    """The bound at *now*. *save_s*: what a save and a halt need, margin included; *halt_s*: what a halt needs."""
    reading, draw, scale = state.reading, state.draw, state.scale
    if reading is None:
        return Bound(None, None, "", "never heard from")
    now = max(now / scale, state.at)
    if draw is None:
        return _on_line(feed, state, reading)
    t = now - draw.since
    blind = blind_s(state, now)
    evidence = _evidence(draw, now, scale)
    recent = draw.recent or (state.ended_at >= 0.0 and draw.since - state.ended_at < RECENT_S / scale)
    save_now = _save_now(
        policy, feed, draw, reading, t_s=t * scale, blind=blind, save_s=save_s, scale=scale, recent=recent
    )
    given = draw.deadline >= 0.0 and (t >= FROM_S or draw.carry_s >= 0.0)
    if not given:
        settling = max(0.0, (FROM_S - t) * scale)
        reason = f"on battery for {t * scale:.0f} s: too early for a bound"
        return Bound(None, None, "", reason, save_now, "", settling, blind, evidence)
    left = max(0.0, draw.deadline - now) * scale
    reason = f"{left:.0f} s left by the {draw.by}"
    if draw.idle:
        parked_s = (now - draw.stepped_at) * scale
        halt_now = _halt_now(policy, state, draw, left=left, blind=blind, halt_s=halt_s, parked_s=parked_s)
        return Bound(left, left, draw.by, reason, save_now, halt_now, 0.0, blind, evidence)
    ratio = state.idle_ratio
    stretch = min(IDLE_STRETCH_MAX, max(1.0, 1.0 / ratio)) if ratio > 0.0 else IDLE_STRETCH
    return Bound(left, left * stretch, draw.by, reason, save_now, "", 0.0, blind, evidence)


def _on_line(feed: FeedPolicy, state: Runway, reading: Reading) -> Bound:
    """On mains: what an outage that began now would surely give."""
    if state.on_battery is None:
        return Bound(None, None, "", "neither on line nor on battery")
    if reading.bypass:
        return Bound(0.0, 0.0, "bypass", "on bypass there is no battery behind the output")
    load = state.mains.load
    rated, basis = capacity.rated_now(feed, state.mains.promise_s, load, state.scale)
    phi = capacity.phi_of(feed, reading.chemistry, reading.voltage, doubted=bool(reading.doubt))
    charge = state.mains.charge
    soc = 1.0 if charge < 0.0 else charge / 100.0
    if state.at < state.recover_at:
        soc = max(0.0, soc - capacity.RECENT_SOC)
    left = phi * soc * rated * state.scale
    reason = f"{left:.0f} s by the prior: {phi:.2f} of a {basis} runtime of {rated * state.scale:.0f} s"
    ratio = state.idle_ratio
    stretch = min(IDLE_STRETCH_MAX, max(1.0, 1.0 / ratio)) if ratio > 0.0 else IDLE_STRETCH
    return Bound(left, left * stretch, "prior", reason, evidence={"prior_s": left})


def blind_s(state: Runway, now: float) -> float:
    """Real seconds on battery without a fresh value: unreadable in all (a good poll in between doesn't reset it), or
    readable and frozen for longer than refreshes take."""
    draw = state.draw
    if draw is None:
        return 0.0
    unread = max(state.blind_s + (0.0 if state.ok else now - state.at), now - state.ok_at)
    frozen = now - max(state.changed_at, draw.since)
    reading = state.reading
    reported = (reading.pollfreq_s or 0.0) / state.scale if reading is not None else 0.0
    allowed = max(FROZEN_PERIODS * max(state.period_s or PERIOD_S, reported), FROZEN_S)
    allowed = max(allowed, FROZEN_LEFT * (draw.deadline - now))
    if draw.idle:
        allowed *= FROZEN_IDLE
    moving = any(value is not None for value in state.seen[:4])
    return state.scale * (frozen if moving and frozen > allowed else unread)


def _evidence(draw: Draw, now: float, scale: float) -> dict[str, float]:
    """Each witness's own seconds left, unscaled by trust, and what they rest on."""
    evidence = {"prior_s": max(0.0, draw.prior_at - now) * scale, "used": draw.used, "load": draw.load.mean}
    if draw.firmware.seconds >= 0.0:
        evidence["runtime_s"] = max(0.0, draw.firmware.at + draw.firmware.seconds - now) * scale
        evidence["kappa"] = draw.firmware.kappa
    if draw.charge.seconds >= 0.0:
        evidence["charge_s"] = max(0.0, draw.charge.at + draw.charge.seconds - now) * scale
    if draw.volts.seconds >= 0.0:
        evidence["voltage_s"] = max(0.0, draw.volts.at + draw.volts.seconds - now) * scale
    if draw.volts.value > 0.0:
        evidence["cell_v"] = draw.volts.value
    return evidence


def _save_now(
    policy: Policy,
    feed: FeedPolicy,
    draw: Draw,
    reading: Reading,
    *,
    t_s: float,
    blind: float,
    save_s: float,
    scale: float,
    recent: bool,
) -> str:
    """Why a save must start now whatever the bound, or ""."""
    runtime, cell = reading.runtime_s, draw.volts.value
    if blind > policy.blind_save_s:
        return f"on battery and no fresh value for {blind:.0f} s"
    if draw.lb_polls >= policy.lb_polls and not explained(reading):
        return "low battery (LB) that neither runtime nor charge explain"
    if runtime is not None and runtime <= save_s and t_s >= RUNTIME_HARD_FROM_S * scale:
        return f"the UPS itself gives {runtime:.0f} s, and {save_s:.0f} s are needed"
    if not draw.arrived and draw.prior_at >= 0.0 and t_s >= RUNTIME_HARD_FROM_S * scale:
        # the UPS still shows the mains' values: a dead battery wouldn't show before it is flat
        left = max(0.0, (draw.prior_at - draw.since) * scale - t_s)
        slow = (reading.pollfreq_s or 0.0) > UNSEEN_SLOW_S
        if left <= (UNSEEN_SPARE if slow else 1.0) * save_s:
            return f"no word of the battery yet, a prior of {left:.0f} s, and {save_s:.0f} s are needed"
    if FRAIL_FROM_S * scale <= t_s < FROM_S * scale and draw.prior_at >= 0.0:
        left = max(0.0, (draw.prior_at - draw.since) * scale - t_s)
        why, spare = _frail(feed, reading, recent=recent)
        if why and left <= spare * save_s:  # the dead ones are dark before a witness could speak
            return f"{why}: a prior of {left:.0f} s, and {save_s:.0f} s are needed"
    if cell > 0.0 and t_s >= VOLT_HARD_FROM_S * scale:
        if cell < VOLT_SAVE:
            return f"battery at {cell:.2f} V per cell"
        if cell < VOLT_SAVE_EARLY and t_s <= VOLT_EARLY_S * scale:
            return f"battery at {cell:.2f} V per cell so soon after the transfer"
        level = level_s(cell) * light(draw.load.mean) * scale
        if draw.volts.seconds < 0.0 and level <= save_s and t_s <= VOLT_EARLY_S * scale:
            return f"battery at {cell:.2f} V per cell so soon: {level:.0f} s at most, and {save_s:.0f} s are needed"
    return ""


def _frail(feed: FeedPolicy, reading: Reading, *, recent: bool) -> tuple[str, float]:
    """(why the prior of this battery counts from the first polls on, or "", how many needs it must hold)."""
    if reading.doubt:
        return f"the UPS {reading.doubt}", FRAIL_SPARE
    if recent:
        return "an outage was just before", FRAIL_SPARE
    if feed.learned_phi is not None:
        return "the battery's capacity is known", 1.0
    if feed.age_y is not None and feed.age_y > OLD_Y:
        return f"the battery is {feed.age_y:.1f} years old", FRAIL_SPARE
    return "", 1.0


def explained(reading: Reading) -> bool:
    """LB says no more than the UPS's own runtime or charge do: a threshold was set high, nothing else is known."""
    runtime, low_s = reading.runtime_s, reading.runtime_low_s
    if runtime is not None and low_s is not None and low_s <= LB_RUNTIME_MAX_S and runtime <= LB_RUNTIME_SLACK * low_s:
        return True
    charge, low_pct = reading.charge_pct, reading.charge_low_pct
    return charge is not None and low_pct is not None and charge <= low_pct + LB_CHARGE_SLACK


def _halt_now(
    policy: Policy, state: Runway, draw: Draw, *, left: float, blind: float, halt_s: float, parked_s: float
) -> str:
    """Why parked ranks should leave now, or ""."""
    if left <= halt_s + policy.margin_s:
        return f"{left:.0f} s left by the {draw.by}, and a halt needs {halt_s:.0f} s"
    cell = draw.volts.value
    if 0.0 < cell < VOLT_HALT:
        return f"battery at {cell:.2f} V per cell at idle load"
    claimed_s = (state.at - draw.lb_since) * state.scale if draw.lb_since >= 0.0 else 0.0
    doubted = left >= LB_DOUBT_LEFT * (halt_s + policy.margin_s) and claimed_s < LB_DOUBT_S * state.scale
    if draw.lb_since >= 0.0 and claimed_s >= policy.lb_halt_s and not doubted:
        return f"low battery (LB) for {claimed_s:.0f} s, parked"
    if blind > policy.blind_halt_s:
        return f"parked and no fresh value for {blind:.0f} s"
    most = policy.park_max_s if draw.volts.value > 0.0 else min(policy.park_max_s, PARKED_BLIND_S)
    if parked_s >= most:
        return f"parked for {parked_s:.0f} s, which is as long as is allowed"
    return ""
