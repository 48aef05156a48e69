"""One discharge in numbers: what was promised, what was used, how it ended. Seconds are real seconds."""

from __future__ import annotations

from msgspec import Struct


class Discharge(Struct, frozen=True, omit_defaults=True):
    """The time a feed spent on battery, summed up when the mains came back (or so far)."""

    lasted_s: float
    load_pct: float | None = None  # mean
    used: float = 0.0  # share of the rated runtime that was used, each second counted at its own load
    basis: str = ""  # what "rated" was: "rated" (configured), "promised" (by the UPS on mains), "default"
    basis_s: float = 0.0  # rated runtime at half load by that basis
    soc: float = 1.0  # charge at the start as a share
    charge_from_pct: float | None = None
    charge_to_pct: float | None = None
    promised_s: float | None = None  # runtime reported first on battery
    reported_s: float | None = None  # and last
    bound_s: float | None = None  # the first bound that was given ...
    bound_after_s: float | None = None  # ... so long after the transfer
    volts_least: float | None = None  # per cell
    volts_last: float | None = None
    knee_used: float | None = None  # *used* when the voltage fell off its plateau; None = it didn't
    low_battery: bool = False  # LB was claimed
    tested: bool = False  # a self-test or calibration, not an outage
    replace_battery: bool = False  # or its last self-test failed
    seen_whole: bool = True  # the transfer itself was seen
    blind_s: float = 0.0  # without a fresh value
