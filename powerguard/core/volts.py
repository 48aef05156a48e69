"""What the voltage of a lead-acid battery says about the seconds left: a witness by the rules of `evidence.py`.

Its level is independent of everything that a firmware believes; its slope speaks once the plateau is over. Seconds are
estimator seconds; the sources of the constants are named as in `evidence.py`.
"""

from __future__ import annotations

from msgspec import Struct

from powerguard.core.evidence import CHARGE_FROM_S

VOLT_FROM_S = 40.0  # population: the dip of the first minute and the step of a load change are over
VOLT_LOW = 1.80  # below this the level speaks at once
VOLT_SLOPE_BELOW = 1.94  # the plateau has no slope worth the name
VOLT_SLOPE_FLOOR = 1.74
VOLT_SLOPE_FACTOR = 0.40  # population: the knee is steeper than any line
VOLT_FAST_S, VOLT_SLOW_S = 8.0, 40.0
VOLT_LIGHT, VOLT_LIGHT_EXPONENT, VOLT_LIGHT_MOST = 0.30, 0.75, 2.5
"""Below this load the same volts last longer: by Eaton's table 2.9 times as long at 20 % of the load as at full load,
1.7 times at 50 %. Less is counted on; a quarter of simulated batteries, the small and old ones, hold less even so."""
VOLT_SLOPE_LEAST = 1e-6  # volts per cell and second; less is flat

VOLT_LEFT = (
    (1.70, 0.0),
    (1.79, 45.0),
    (1.854, 120.0),  # Eaton BladeUPS manual, table 15, full load, one cabinet: 2, 3, 4, 5 minutes left
    (1.891, 180.0),
    (1.918, 240.0),
    (1.941, 300.0),
    (1.960, 400.0),
    (1.975, 500.0),
    (2.000, 800.0),
    (2.160, 2720.0),  # the last slope goes on
)
"""Volts per cell under load, seconds left; the row of the highest rate, which is the cautious one elsewhere."""


class Voltage(Struct, frozen=True):
    """Volts per cell, two moving means of them and the lags of the means: slope = difference of one over the other."""

    seconds: float = -1.0
    at: float = 0.0
    value: float = -1.0
    fast: float = 0.0
    slow: float = 0.0
    fast_lag: float = 0.0
    slow_lag: float = 0.0
    seen_at: float = 0.0  # last believed, whether it had anything to say or not


def see_voltage(
    was: Voltage, value: float, now: float, *, dt: float, since_step: float, fresh: bool, lighter: float = 1.0
) -> Voltage:
    """*value* volts per cell, *since_step* seconds after the transfer or the last load step; *lighter*: `light`."""
    if was.value < 0.0 or since_step < CHARGE_FROM_S:
        fast = slow = value
        fast_lag = slow_lag = 0.0
    else:
        quick, lazy = dt / (VOLT_FAST_S + dt), dt / (VOLT_SLOW_S + dt)
        fast = was.fast + (value - was.fast) * quick
        slow = was.slow + (value - was.slow) * lazy
        fast_lag = (was.fast_lag + dt) * (1.0 - quick)
        slow_lag = (was.slow_lag + dt) * (1.0 - lazy)
    early = since_step < VOLT_FROM_S and value >= VOLT_LOW
    if early or (not fresh and was.seconds >= 0.0):  # the first answer may come of a value that stands still
        return Voltage(was.seconds, was.at, value, fast, slow, fast_lag, slow_lag, now)
    seconds = lighter * level_s(value)
    if since_step >= VOLT_FROM_S and value < VOLT_SLOPE_BELOW and slow_lag - fast_lag > 1.0:
        fall = (slow - fast) / (slow_lag - fast_lag)
        if fall > VOLT_SLOPE_LEAST:
            seconds = min(seconds, VOLT_SLOPE_FACTOR * max(0.0, value - VOLT_SLOPE_FLOOR) / fall)
    return Voltage(seconds, now, value, fast, slow, fast_lag, slow_lag, now)


def light(load: float) -> float:
    """How many times as long as at full load the same volts last at *load*, a share of the rating; unknown is full."""
    if not 0.0 < load < VOLT_LIGHT:
        return 1.0
    return min(VOLT_LIGHT_MOST, float((VOLT_LIGHT / load) ** VOLT_LIGHT_EXPONENT))


def level_s(value: float) -> float:
    """Seconds left at *value* volts per cell under load, by `VOLT_LEFT`."""
    low_v, low_s = VOLT_LEFT[0]
    if value <= low_v:
        return 0.0
    for high_v, high_s in VOLT_LEFT:
        if value <= high_v:
            return low_s + (high_s - low_s) * (value - low_v) / (high_v - low_v) if high_v > low_v else high_s
        low_v, low_s = high_v, high_s
    return low_s
