"""A simulated UPS: a battery that tells the truth to nobody, and a firmware that reports what it believes.

    ups = SimUps(UpsSpec(full_load_s=300.0, age_y=3.0), seed=1)
    ups.step(1.0, mains=False, load_pct=70.0)
    ups.alive, ups.variables()

Deterministic for a spec and a seed. Needs nothing but the standard library and msgspec.
"""

from __future__ import annotations

import math
from functools import lru_cache
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from powerguard.sim.cells import CHEMISTRIES, Battery, Cells, Losses, build
from powerguard.sim.firmware import Firmware, FirmwareSpec, Report

_STEP_S = 1.0  # the load's power is constant within one inner step


class UpsSpec(Struct, frozen=True):
    """One UPS: what was bought, what the years made of it, and how it reports."""

    model: str = "Sim 3000"
    chemistry: str = "vrla"
    full_load_s: float = 300.0  # new and charged, at 100 % load
    rated_w: float = 3000.0
    blocks: int = 4  # 12 V blocks (16 / 4 cells of LFP) in series
    age_y: float | None = None  # for battery.date only; what age did is *phi*
    phi: float = 1.0  # present capacity as a share of the new battery's
    resistance: float = 1.0  # on top of what *phi* implies
    weakest: float = 1.0  # the worst block's capacity as a share of the others'
    opens: bool = False  # it fails open when exhausted, else it is forced through
    soc: float = 1.0  # charge at the start
    cutoff_v: float | None = None  # volts per cell; None = the chemistry's
    losses: Losses = Losses()
    recharge_s: float = 6 * 3600.0  # from empty to 80 %
    tau_s: float | None = None  # diffusion time of the wells; None = the chemistry's
    temperature_c: float | None = None  # reported only
    tells_type: bool = True  # battery.type is reported
    firmware: FirmwareSpec = FirmwareSpec()

    @classmethod
    def small(cls, runtime_s: float = 40.0, load_pct: float = 70.0) -> UpsSpec:
        """For drills: carries *load_pct* for *runtime_s*; an honest firmware that refreshes every 0.5 s."""
        firmware = FirmwareSpec(
            refresh_s=0.5,
            filter_s=0.5,
            low_runtime_s=round(0.2 * runtime_s, 1),
            low_charge_pct=15.0,
            voltage_quantum_v=0.01,
        )
        spec = cls(model="Sim Small", tau_s=runtime_s, resistance=0.3, recharge_s=10 * runtime_s, firmware=firmware)
        low, high = runtime_s * 0.2, runtime_s * 2.0
        for _ in range(40):
            middle = (low + high) / 2.0
            dc = spec.losses.dc(load_pct / 100.0)
            if Battery(_cells(replace(spec, full_load_s=middle))).lasts_s(dc) < runtime_s:
                low = middle
            else:
                high = middle
        spec = replace(spec, full_load_s=high)
        return replace(spec, firmware=replace(firmware, belief=runtime_s / rated_runtime_s(spec, load_pct)))

    @property
    def nominal_v(self) -> float:
        """battery.voltage.nominal: 12 V a block."""
        return 12.0 * self.blocks

    @property
    def series(self) -> int:
        """Cells in series: 6 of lead-acid or 4 of LFP in a block."""
        return self.blocks * (4 if self.chemistry == "lfp" else 6)


@lru_cache(maxsize=4096)
def _cells(spec: UpsSpec) -> Cells:
    return build(
        CHEMISTRIES[spec.chemistry],
        spec.full_load_s,
        phi=spec.phi,
        resistance=spec.resistance,
        cutoff_v=spec.cutoff_v,
        weakest=spec.weakest,
        blocks=spec.blocks,
        opens=spec.opens,
        tau_s=spec.tau_s,
    )


def rated_runtime_s(spec: UpsSpec, load_pct: float) -> float:
    """What the vendor's table says: seconds that a new, charged battery carries *load_pct*."""
    new = build(CHEMISTRIES[spec.chemistry], spec.full_load_s, blocks=spec.blocks, tau_s=spec.tau_s)
    return Battery(new).lasts_s(spec.losses.dc(load_pct / 100.0))


_GRID = tuple(0.02 * 1.25**i for i in range(19))  # 2 % ... 111 % of the rating


class RatedCurve:
    """`rated_runtime_s` by interpolation, linear in the logarithms: what a firmware has in its ROM."""

    __slots__ = ("_logs",)

    def __init__(self, chemistry: str, full_load_s: float, losses: Losses, tau_s: float | None) -> None:
        new = Battery(build(CHEMISTRIES[chemistry], full_load_s, tau_s=tau_s))
        self._logs = tuple(math.log(max(new.lasts_s(losses.dc(p)), 0.1)) for p in _GRID)

    def __call__(self, p: float) -> float:
        place = math.log(max(p, _GRID[0]) / _GRID[0]) / math.log(1.25)
        i = min(int(place), len(_GRID) - 2)
        return math.exp(self._logs[i] + (self._logs[i + 1] - self._logs[i]) * (place - i))


rated_curve = lru_cache(maxsize=4096)(RatedCurve)


class SimUps:
    """One UPS on one clock. `step` moves it; the rest only looks."""

    __slots__ = ("_p", "alive", "battery", "firmware", "mains", "spec")

    def __init__(self, spec: UpsSpec, seed: int = 0, *, load_pct: float = 50.0) -> None:
        rng = Random(seed)
        self.spec = spec
        self.battery = Battery(_cells(spec), spec.soc)
        self.mains = True
        self.alive = True  # the output is powered
        self._p = load_pct / 100.0
        curve = rated_curve(spec.chemistry, spec.full_load_s, spec.losses, spec.tau_s)
        float_v = CHEMISTRIES[spec.chemistry].float_v
        self.firmware = Firmware(
            spec.firmware, curve, spec.series, soc=spec.soc, p=self._p, v=float_v, phase=rng.random()
        )

    def copy(self) -> SimUps:
        """An independent twin, for a branch of a story."""
        twin = object.__new__(SimUps)
        for name in SimUps.__slots__:
            setattr(twin, name, getattr(self, name))
        twin.battery = self.battery.copy()
        twin.firmware = self.firmware.copy()
        return twin

    def step(self, dt_s: float, mains: bool, load_pct: float) -> None:
        """*dt_s* with *load_pct* on the output; mains or battery for the whole of it.

        A flat battery switches the output off, and it stays off until mains are back.
        """
        self._p = load_pct / 100.0
        self.mains = mains
        if mains:
            self._on_mains(dt_s)
            return
        dc = self.spec.losses.dc(self._p)
        left = dt_s
        while left > 1e-9 and self.alive:
            dt = min(left, _STEP_S)
            left -= dt
            self.battery.discharge(dt, dc)
            self.firmware.advance(dt, mains=False, p=self._p, v=self.battery.cell_v(dc), charged=0.0)
            self.alive = not self.battery.flat(dc)

    def _on_mains(self, dt_s: float) -> None:
        before = self.battery.soc
        self.battery.charge(dt_s, self.spec.recharge_s)
        float_v = CHEMISTRIES[self.spec.chemistry].float_v
        charged = self.battery.soc - before
        self.firmware.advance(dt_s, mains=True, p=self._p, v=float_v, charged=charged)
        self.alive = True

    @property
    def report(self) -> Report:
        """The numbers as last refreshed."""
        return self.firmware.report

    @property
    def status(self) -> str:
        """ups.status, which is refreshed at every poll."""
        if self.mains:
            words = ["OL"]
            if self.firmware.soc < 0.99:
                words.append("CHRG")
        else:
            words = ["OB", "DISCHRG"]
        if self.firmware.low:
            words.append("LB")
        return " ".join(words)

    def truth_s(self, load_pct: float | None = None) -> float:
        """Seconds until the output goes off, on battery from now at this load: what only a simulation knows."""
        p = self._p if load_pct is None else load_pct / 100.0
        return self.battery.lasts_s(self.spec.losses.dc(p)) if self.alive else 0.0

    def variables(self) -> dict[str, str]:
        """What upsd lists for it, formatted as NUT's drivers do; what isn't reported is missing."""
        spec, firmware, report = self.spec, self.spec.firmware, self.report
        values = {
            "battery.charge": _text(report.charge_pct, 0),
            "battery.charge.low": f"{firmware.low_charge_pct:g}",
            "battery.runtime": _text(report.runtime_s, 0),
            "battery.runtime.low": f"{firmware.low_runtime_s:g}",
            "battery.temperature": _text(spec.temperature_c, 1),
            "battery.type": ("LiFePO4" if spec.chemistry == "lfp" else "PbAc") if spec.tells_type else "",
            "battery.voltage": _text(report.voltage, 2 if (firmware.voltage_quantum_v or 1) < 0.1 else 1),
            "battery.voltage.nominal": f"{spec.nominal_v:.1f}",
            "device.mfr": "powerguard",
            "device.model": spec.model,
            "device.type": "ups",
            "driver.name": "powerguard-sim",
            "driver.parameter.pollfreq": f"{firmware.refresh_s:g}",
            "driver.parameter.pollinterval": f"{min(2.0, firmware.refresh_s):g}",
            "input.voltage": f"{report.input_v:.1f}",
            "output.voltage": f"{(230.0 if self.alive else 0.0):.1f}",
            "ups.load": f"{report.load_pct:g}",
            "ups.mfr": "powerguard",
            "ups.model": spec.model,
            "ups.realpower.nominal": f"{spec.rated_w:g}",
            "ups.status": self.status,
        }
        return {name: value for name, value in values.items() if value}


def _text(value: float | None, places: int) -> str:
    return "" if value is None else f"{value:.{places}f}"
