"""What a UPS says of itself: belief, not truth.

Three kinds are in the field. *coulomb* counts charge against a capacity that it believes in (and learns only from a
full discharge, which a system that halts in time never gives it). *voltage* maps the loaded volts to a charge: it
plunges at once, lingers, and falls off a cliff. *qx* reports volts only, and NUT's driver guesses the rest the same way
(`drivers/nutdrv_qx.c`). All of them quantise, lag, and refresh only now and then.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy

from msgspec import Struct

Curve = Callable[[float], float]
"""Seconds that a new and full battery carries a load given as a share of the rating."""


class FirmwareSpec(Struct, frozen=True):
    """One model's ways. Quanta are what values are rounded down to; None or 0 where a value isn't reported."""

    kind: str = "coulomb"  # or "voltage", "qx"
    belief: float = 1.0  # capacity it believes in, as a share of the new battery's, any error of gain included
    refresh_s: float = 2.0  # all but the status bits change only this often (driver.parameter.pollfreq)
    runtime_quantum_s: float | None = 1.0
    charge_quantum_pct: float | None = 1.0
    voltage_quantum_v: float | None = 0.1
    load_quantum_pct: float = 1.0
    filter_s: float = 5.0  # its load and volts are averaged over this long
    absurd_runtime_s: float | None = None  # reports this instead, always
    full_until: float = 1.0  # charge shows 100 % until the believed charge falls below this share
    low_runtime_s: float = 120.0  # battery.runtime.low
    low_charge_pct: float = 10.0  # battery.charge.low
    lb: str = "claim"  # LB at the low limits; "knee": by volts only; "never"; "at once" with the transfer
    knee_v: float = 0.0  # volts per cell below which it raises LB as well; 0 = doesn't look
    knee_snaps: bool = False  # and corrects its charge to at most 10 %
    empty_v: float = 1.733  # volts per cell mapped to 0 and 100 %: nutdrv_qx maps 10.4 and 13.0 V of a 12 V block
    full_v: float = 2.167


class Report(Struct):
    """The values as last refreshed; None = not reported."""

    charge_pct: float | None = None
    runtime_s: float | None = None
    voltage: float | None = None
    load_pct: float = 0.0
    input_v: float = 230.0
    at: float = 0.0  # UPS time of the refresh


def _down(value: float, quantum: float) -> float:
    return math.floor(value / quantum + 1e-9) * quantum


class Firmware:
    """One UPS's belief, moved on by `advance`; `report` is what the driver last fetched, `low` its LB."""

    __slots__ = ("_curve", "_next", "_p", "_series", "_soc", "_v", "low", "now", "report", "spec")

    def __init__(
        self, spec: FirmwareSpec, curve: Curve, series: int, *, soc: float, p: float, v: float, phase: float
    ) -> None:
        self.spec = spec
        self._curve = curve
        self._series = series
        self._soc = soc
        self._p = p
        self._v = v
        self.now = 0.0
        self._next = spec.refresh_s * phase
        self.low = False
        self.report = Report()
        self._refresh(v, mains=True)

    def copy(self) -> Firmware:
        """An independent twin."""
        twin = object.__new__(Firmware)
        for name in Firmware.__slots__:
            setattr(twin, name, getattr(self, name))
        twin.report = copy(self.report)
        return twin

    @property
    def soc(self) -> float:
        """The charge it believes in, 0..1."""
        return self._soc

    def advance(self, dt_s: float, *, mains: bool, p: float, v: float, charged: float) -> None:
        """*dt_s* at output *p* showing *v* volts a cell; *charged* is the share of capacity put back on mains."""
        spec = self.spec
        self.now += dt_s
        blend = dt_s / (dt_s + spec.filter_s)
        self._p += (p - self._p) * blend
        self._v += (v - self._v) * blend
        if mains:
            self._soc = min(1.0, self._soc + charged)
            self.low = self.low and self._soc * 100.0 <= spec.low_charge_pct  # "OL CHRG LB" after an outage
        else:
            if spec.kind != "voltage":
                self._soc = max(0.0, self._soc - dt_s / (self._curve(max(p, 0.01)) * spec.belief))
            self._raise_low(v)
        if self.now >= self._next:
            self._next += spec.refresh_s * max(1.0, math.ceil((self.now - self._next) / spec.refresh_s))
            self._refresh(v, mains=mains)

    def _raise_low(self, v: float) -> None:
        spec = self.spec
        if self.low or spec.lb == "never":
            return
        claims = False
        if spec.lb == "claim":
            charge = self._charge(mains=False)
            claims = charge * 100.0 <= spec.low_charge_pct or self._runtime(charge) <= spec.low_runtime_s
        knee = v < spec.knee_v
        if knee and spec.knee_snaps:
            self._soc = min(self._soc, 0.1)
        self.low = spec.lb == "at once" or claims or knee

    def _charge(self, *, mains: bool) -> float:
        spec = self.spec
        if mains or spec.kind == "coulomb":
            return self._soc
        mapped = min(1.0, max(0.0, (self._v - spec.empty_v) / (spec.full_v - spec.empty_v)))
        if spec.kind == "voltage":
            self._soc = mapped
            return mapped
        return min(self._soc, mapped)

    def _runtime(self, charge: float) -> float:
        return charge * self._curve(max(self._p, 0.01)) * self.spec.belief

    def _refresh(self, v: float, *, mains: bool) -> None:
        spec, report = self.spec, self.report
        charge = self._charge(mains=mains)
        report.at = self.now
        report.load_pct = _down(self._p * 100.0 + spec.load_quantum_pct / 2, spec.load_quantum_pct)
        report.input_v = 230.0 if mains else 0.0
        if spec.runtime_quantum_s is not None:
            report.runtime_s = _down(self._runtime(charge), spec.runtime_quantum_s)
        if spec.absurd_runtime_s is not None:
            report.runtime_s = spec.absurd_runtime_s
        if spec.charge_quantum_pct is not None:
            shown = 1.0 if charge >= spec.full_until else charge / spec.full_until
            report.charge_pct = _down(shown * 100.0, spec.charge_quantum_pct)
        if spec.voltage_quantum_v is not None:
            volts = v * self._series
            report.voltage = _down(volts + spec.voltage_quantum_v / 2, spec.voltage_quantum_v)
