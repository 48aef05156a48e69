"""What the runway keeps of one feed: bounded values, in estimator seconds (see evidence.py)."""

from __future__ import annotations

from msgspec import Struct

from powerguard.core.discharge import Discharge
from powerguard.core.evidence import Charge, Firmware
from powerguard.core.load import Load
from powerguard.core.types import Reading
from powerguard.core.volts import Voltage


class Mains(Struct, frozen=True, omit_defaults=True):
    """What a feed said while on line."""

    charge: float = -1.0
    load: float = -1.0  # share of the rating, mean
    promise_s: float = 0.0  # reported runtime, brought to a full battery at half load; 0 = none
    cells: float = 0.0  # lead-acid cells in series; 0 = unknown
    volts_sane: bool | None = None  # the float voltage fits the cells; None = not seen on mains


class Tally(Struct, frozen=True, omit_defaults=True):
    """What the discharge is summed up from, besides its witnesses. Negative: has not happened."""

    load_sum: float = 0.0  # load times seconds ...
    seconds: float = 0.0  # ... over so many
    first_bound_s: float = -1.0
    first_bound_after_s: float = 0.0
    promised_s: float = -1.0
    charge_from: float = -1.0
    volts_least: float = 9.0
    knee_used: float = -1.0  # share used when the voltage fell off its plateau
    claimed: bool = False
    tested: bool = False
    blind_s: float = 0.0


class Draw(Struct, frozen=True, omit_defaults=True):
    """The discharge under way. Instants of things that have not happened are negative."""

    since: float = 0.0  # first poll on battery
    seen_whole: bool = False  # the mains were seen before it
    soc: float = 1.0  # charge at the start, as a share
    recent: bool = False  # the last outage isn't recharged
    charge: Charge = Charge()
    firmware: Firmware = Firmware()
    volts: Voltage = Voltage()
    load: Load = Load()
    arrived: bool = False  # the battery's values have replaced the mains'
    stepped_at: float = 0.0  # the last load step, or the transfer
    idle: bool = False  # parked by us
    settle: bool = False  # own step: witnesses answer anew once the load has settled
    carry_s: float = -1.0  # seconds carried over a step or a flap, as of *carry_at*; -1 = none
    carry_at: float = 0.0
    carry_factor: float = 1.0  # load expected by it, to the load before
    used: float = 0.0  # share of the rated runtime
    prior_at: float = -1.0  # instant of power-out by the prior
    raw: float = -1.0  # instant by everything, this poll and the two before
    raw1: float = -1.0
    raw2: float = -1.0
    deadline: float = -1.0  # their median
    by: str = ""
    lb_since: float = -1.0
    lb_polls: int = 0
    tally: Tally = Tally()


PRESENT = (-1.0, -1.0, -1.0, -1.0, -1.0)


class Runway(Struct, frozen=True, omit_defaults=True):
    """What is kept of one feed's readings."""

    scale: float = 1.0
    at: float = -1.0  # last reading of any kind; -1 = none
    ok_at: float = -1.0  # last readable one
    changed_at: float = -1.0  # last one in which a value changed
    ok: bool = False  # the last one was readable
    blind_s: float = 0.0  # unreadable on battery, in all; paid back second by second while readable
    period_s: float = 0.0  # usual time between changes on battery; 0 = not seen
    seen: tuple[float | None, ...] = (None, None, None, None, None)  # charge, runtime, load, voltage, input
    lacking: tuple[float, ...] = PRESENT  # of those, missing since; -1 = not missing
    on_battery: bool | None = None
    reading: Reading | None = None  # last readable
    mains: Mains = Mains()
    draw: Draw | None = None
    last: Discharge | None = None  # the last discharge, summed up
    discharges: int = 0  # how many were
    ended: Draw | None = None  # the last draw, for a flap
    ended_at: float = -1.0
    recover_at: float = -1.0  # until then the battery counts as not recharged
    idle_ratio: float = -1.0  # load parked to load before, as last measured


EMPTY = Runway()
