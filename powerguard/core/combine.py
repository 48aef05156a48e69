"""The instant of power-out by all that is known, the bound's rules of combination (they are told in `runway.py`)."""

from __future__ import annotations

import math
from typing import NamedTuple

from powerguard.core import capacity
from powerguard.core.bound import FROM_S
from powerguard.core.draw import Draw, Mains
from powerguard.core.evidence import RUNTIME_LOAD_EXPONENT, Charge, Firmware
from powerguard.core.load import Load
from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.types import Reading
from powerguard.core.volts import Voltage, level_s

# Population: tuned on 20,000 simulated outages (see evidence.py), checked on others. Estimator seconds.
BOTH, ONE, IDLE = 0.80, 0.60, 0.50
IDLE_FROM_S = 24.0  # after parking, the stretched bound holds so long
STRETCH_MAX = 4.0  # published tables: 4.4-4.7 at 30 % of the load
STRETCH_TRUST = 0.8  # of a load that is expected, not measured
RECENT_RUNTIME = 0.65  # of a runtime reported soon after another outage
PLATEAU_V = 1.95  # per cell under load: at full load six minutes are left (Eaton's table), at less load more
PLATEAU_SHARE = 0.5  # of what voltage and plain runtime say; rates of a gauge or a runtime alone don't go below it
LOAD_SHOWS_S = 8.0  # firmware filters its load for 3-30 s; so long after a refresh a park shows in it
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


def combine(
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
    trusted = poll.mains.volts_sane and not poll.reading.doubt
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


def median(a: float, b: float, c: float) -> float:
    """Of three; of fewer (negative ones are missing) the least."""
    if b < 0.0:
        return a
    if c < 0.0:
        return min(a, b)
    return max(min(a, b), min(max(a, b), c))


def prior_s(poll: Poll, draw: Draw, charge: Charge, *, used: float, rated: float, basis: str) -> float:
    """Seconds left by what is known beforehand: (sure share - used share) of the rated runtime.

    A UPS of unknown size is sized by its own charge: since the first change seen, it can't have fallen faster than by
    the points seen and one step more.
    """
    reading = poll.reading
    phi = capacity.phi_of(poll.feed, reading.chemistry, reading.voltage, doubted=bool(reading.doubt))
    left = max(0.0, phi * draw.soc - used) * rated
    if basis == "default" and charge.first_at >= 0.0 and poll.now > charge.first_at:
        fastest = (charge.first - charge.value + charge.quantum) / (poll.now - charge.first_at)
        spent = (draw.tally.charge_from - charge.value) / 100.0
        if fastest > 0.0:
            left = max(left, (phi * draw.soc - spent) * 100.0 / fastest)
    return left


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
