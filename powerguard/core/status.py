"""One poll of a UPS, as text, becomes a Reading that may be believed.

Rules (sources: NUT's docs/new-drivers.txt and clients/upsmon.c; what 718 public device dumps really contain):

1. `ups.status` is a *set* of words: order, case and repetition mean nothing, unknown words are legal and kept.
2. OB means on battery whatever else is there. OL means mains, unless the device contradicts itself (rule 6).
   Neither of them means *unknown*, which is not mains.
3. WAIT means that upsd has no data yet: nothing is inferred, not even FSD.
4. A variable that is missing, not a plain number, a sentinel or out of its range is None, never 0; what was
   reported and not believed is noted with the reason.
5. Nothing that a UPS can say raises an exception here.
6. OL with DISCHRG, a dead input and a battery below full is on battery: some CyberPower units never say OB.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from powerguard.core.types import Comm, Reading, Sample

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_CLOCK = re.compile(r"\d+(:\d+)+")

_FAILED = re.compile(r"\b(fail|failed|failure|error|warning|bad|replace|change|ng|bt)\b")
"""In `ups.test.result`, by the words of NUT's drivers: "Done and error", "10s test failed", "Battery Bad (Replace)",
apcsmart's codes NG and BT. "InvalidTest", "Aborted" and "No test initiated" say nothing of the battery."""

TEST_MAX = 40

RUNTIME_SENTINELS = frozenset({65535.0, 599940.0, 3932100.0})
"""16-bit "unknown" (nut#731, #1740), 9999 minutes in seconds (nut#3501), 65535 minutes in seconds."""

RUNTIME_MAX_S = 86400.0
RUNTIME_LOW_MAX_S = 3600.0  # public dumps hold 3780, 7200, 59940: thresholds nobody set
CHARGE_MAX_PCT = 110.0  # 100.5 and 102.3 are rounding, 120 and 255 are garbage
CHARGE_EMPTY_PCT = 10.0  # runtime 0 is believed below this charge only
CHARGE_LOW_MAX_PCT = 50.0  # battery.charge.low = 89, 100, 345.6 exist: LB for ever
LOAD_MAX_PCT = 200.0
VOLTAGE_RATIO = (0.7, 1.25)  # of nominal; outside it is a per-cell or whole-bank mix-up (nut#3556, #3467)
VOLTAGE_MAX = 1000.0
INPUT_MAX = 700.0  # three phases at 400 V and some; -159357104 and -6437 exist
DEAD_INPUT_RATIO = 0.25  # dead inputs read 3.4 V and 6.4 V
TEMPERATURE_C = (-40.0, 100.0)
POLL_MAX_S = 3600.0


class _Range(NamedTuple):
    """Closed range of what is believed of a variable."""

    low: float
    high: float
    why: str


def parse(sample: Sample) -> Reading:
    """What *sample* says, as far as it can be believed. Never raises."""
    if sample.comm is not Comm.OK:
        return Reading(feed=sample.feed, at=sample.at, comm=sample.comm)
    tokens = frozenset(sample.variables.get("ups.status", "").upper().split())
    if "WAIT" in tokens:
        return Reading(feed=sample.feed, at=sample.at, comm=Comm.WAIT, tokens=tokens)
    notes: list[str] = []
    test_result = sample.variables.get("ups.test.result", "")
    if not tokens:
        notes.append("ups.status is missing or empty: on line or on battery is unknown")
    elif not tokens & {"OL", "OB"}:
        notes.append(f"ups.status {_short(' '.join(sorted(tokens)))} says neither OL nor OB")
    alarm = sample.variables.get("ups.alarm", "").lower()
    charge = _number(sample, "battery.charge", _Range(0.0, CHARGE_MAX_PCT, "out of 0..110"), notes)
    charge = None if charge is None else min(100.0, charge)
    input_voltage = _number(sample, "input.voltage", _Range(0.0, INPUT_MAX, "out of 0..700"), notes)
    on_battery = _on_battery(sample, tokens, charge, input_voltage, notes)
    nominal, voltage = _voltage(sample, notes)
    return Reading(
        feed=sample.feed,
        at=sample.at,
        comm=Comm.OK,
        tokens=tokens,
        on_battery=on_battery,
        low_battery="LB" in tokens or "shutdown imminent" in alarm,
        fsd="FSD" in tokens,
        testing=bool(tokens & {"CAL", "TEST"}),
        off="OFF" in tokens,
        bypass="BYPASS" in tokens or "bypass mode" in alarm or "no battery" in alarm,
        overload="OVER" in tokens,
        replace_battery="RB" in tokens or "replace battery" in alarm,
        charge_pct=charge,
        charge_low_pct=_number(
            sample, "battery.charge.low", _Range(0.0, CHARGE_LOW_MAX_PCT, "out of 0..50: LB would be for ever"), notes
        ),
        runtime_s=_runtime(sample, on_battery, charge, notes),
        runtime_low_s=_number(sample, "battery.runtime.low", _Range(0.0, RUNTIME_LOW_MAX_S, "out of 0..3600"), notes),
        load_pct=_number(sample, "ups.load", _Range(0.0, LOAD_MAX_PCT, "out of 0..200"), notes),
        voltage=voltage,
        voltage_nominal=nominal,
        input_voltage=input_voltage,
        temperature_c=_temperature(sample, notes),
        chemistry=sample.variables.get("battery.type", "").strip().lower(),
        pollfreq_s=_number(sample, "driver.parameter.pollfreq", _Range(0.1, POLL_MAX_S, "out of 0.1..3600"), notes),
        pollinterval_s=_number(
            sample, "driver.parameter.pollinterval", _Range(0.1, POLL_MAX_S, "out of 0.1..3600"), notes
        ),
        test_failed=test_result[:TEST_MAX] if _FAILED.search(test_result.lower()) else "",
        notes=tuple(notes),
    )


def _number(sample: Sample, name: str, allowed: _Range, notes: list[str]) -> float | None:
    """The variable as a number within *allowed*, or None; says in *notes* why something reported isn't believed."""
    text = sample.variables.get(name)
    if text is None or not text.strip():
        return None
    value = _plain(text)
    if value is None:
        why = "minutes, hours or seconds can't be told apart" if _CLOCK.fullmatch(text.strip()) else "not a number"
        notes.append(f"{name} {_short(text)} is ignored: {why}")
        return None
    if not allowed.low <= value <= allowed.high:
        notes.append(f"{name} {_short(text)} is ignored: {allowed.why}")
        return None
    return value


def _plain(text: str) -> float | None:
    """*text* as a finite number written as NUT writes them (ASCII digits, a dot), or None."""
    text = text.strip()
    if not text.isascii() or not _NUMBER.fullmatch(text):
        return None
    value = float(text)
    return value if abs(value) < 1e300 else None


def _short(text: str) -> str:
    """*text* quoted for a note, bounded."""
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _runtime(sample: Sample, on_battery: bool | None, charge: float | None, notes: list[str]) -> float | None:
    """battery.runtime in seconds if it can be one.

    0 is believed only on battery with the charge at its end: drivers without a runtime report 0 for ever
    (nut#2765, #2190), and "LB on mains" comes of it.
    """
    name = "battery.runtime"
    value = _number(sample, name, _Range(0.0, RUNTIME_MAX_S * 1e6, "negative"), notes)
    if value is None:
        return None
    why = ""
    if value in RUNTIME_SENTINELS:
        why = "a sentinel for unknown"
    elif value >= RUNTIME_MAX_S:
        why = "a day or more"
    elif value == 0.0 and on_battery is not True:
        why = "0 while not on battery"
    elif value == 0.0 and (charge is None or charge > CHARGE_EMPTY_PCT):
        why = "0 with a charge that isn't at its end"
    if why:
        notes.append(f"{name} {_short(sample.variables[name])} is ignored: {why}")
        return None
    return value


def _voltage(sample: Sample, notes: list[str]) -> tuple[float | None, float | None]:
    """(nominal, actual) volts of the battery; the actual one only in a believable relation to nominal."""
    allowed = _Range(1.0, VOLTAGE_MAX, "out of 1..1000")
    nominal = _number(sample, "battery.voltage.nominal", allowed, notes)
    voltage = _number(sample, "battery.voltage", allowed, notes)
    if voltage is not None and nominal is not None:
        ratio = voltage / nominal
        if not VOLTAGE_RATIO[0] <= ratio <= VOLTAGE_RATIO[1]:
            notes.append(
                f"battery.voltage {voltage:g} is ignored: {ratio:.2f} of nominal {nominal:g}, a cell isn't a bank"
            )
            return nominal, None
    return nominal, voltage


def _temperature(sample: Sample, notes: list[str]) -> float | None:
    """Degrees Celsius of the battery, else of the UPS."""
    allowed = _Range(*TEMPERATURE_C, "out of -40..100 degrees Celsius")
    battery = _number(sample, "battery.temperature", allowed, notes)
    return battery if battery is not None else _number(sample, "ups.temperature", allowed, notes)


def _on_battery(
    sample: Sample,
    tokens: frozenset[str],
    charge: float | None,
    input_voltage: float | None,
    notes: list[str],
) -> bool | None:
    """Rules 2 and 6."""
    if "OB" in tokens:
        return True
    if "OL" not in tokens:
        return None
    if "DISCHRG" in tokens and input_voltage is not None and charge is not None and charge < 100.0:
        # Float oscillation of APC BX and BK units shows DISCHRG at 100 % with a live input (nut#2212, #1970).
        nominal = _number(sample, "input.voltage.nominal", _Range(50.0, INPUT_MAX, "out of 50..700"), notes) or 100.0
        if input_voltage < DEAD_INPUT_RATIO * nominal:
            notes.append(f"OL is not believed: DISCHRG with {input_voltage:g} V at the input and {charge:g} % charge")
            return True
    return False
