"""A simulated feed: what one UPS says, by a script or by a battery, and what is wrong with it or on the way to it."""

from __future__ import annotations

from msgspec import Struct

from powerguard.core.types import Comm, Sample
from powerguard.sim import faults as f
from powerguard.sim.battery import SimUps

ON_MAINS = {"ups.status": "OL", "battery.charge": "100", "battery.runtime": "1200", "ups.load": "40"}
"""What a scripted UPS says until it is told otherwise."""


class Ramp(Struct, frozen=True):
    """A variable that moves evenly between two instants, in steps of a report every *every_s*."""

    name: str
    begin_at: float
    end_at: float
    begin: float
    end: float
    every_s: float = 10.0

    def value(self, now: float) -> str:
        """The value at *now*, which is within the ramp or after it."""
        if now >= self.end_at:
            return f"{self.end:g}"
        reported = self.begin_at + self.every_s * int((now - self.begin_at) / self.every_s)
        share = (reported - self.begin_at) / (self.end_at - self.begin_at)
        return f"{round(self.begin + share * (self.end - self.begin), 3):g}"


class SimFeed:
    """One feed. With *ups* the battery speaks, else the script: `say`, `ramp` and `link`."""

    def __init__(self, name: str, *, ups: SimUps | None = None, faults: tuple[f.UpsFault, ...] = ()) -> None:
        self.name = name
        self.ups = ups
        self.faults = tuple(fault for fault in faults if fault.feed in ("", name))
        self.mains = True
        self._script = dict(ON_MAINS) if ups is None else {}
        self._ramps: dict[str, Ramp] = {}
        self._comm, self._detail = Comm.OK, ""
        self._kept: dict[str, str] | None = None
        self._edge_at: float | None = None

    # ---- the script --------------------------------------------------------------------------------

    def say(self, variables: dict[str, str]) -> None:
        """From now on it reports these; an empty value takes the variable away."""
        for name, value in variables.items():
            self._ramps.pop(name, None)
            if value:
                self._script[name] = value
            else:
                self._script.pop(name, None)

    def ramp(self, ramp: Ramp) -> None:
        """A variable moves by itself from now on."""
        self._ramps[ramp.name] = ramp

    def link(self, comm: Comm, detail: str = "") -> None:
        """How upsd answers from now on."""
        self._comm, self._detail = comm, detail

    # ---- the readings ------------------------------------------------------------------------------

    def step(self, dt_s: float, now: float, load_pct: float) -> None:
        """Time passes for the battery behind it."""
        if self.ups is not None:
            mains = self.mains
            for fault in self.faults:
                if isinstance(fault, f.MainsFlap) and fault.active(now):
                    mains = int((now - fault.at) / fault.period_s) % 2 == 1
            self.ups.step(dt_s, mains, load_pct)

    def sample(self, now: float) -> Sample:
        """One poll at *now*."""
        comm, detail, variables = self._comm, self._detail, self._variables(now)
        on_battery = "OB" in variables.get("ups.status", "").split()
        if not on_battery:
            self._edge_at = None
        elif self._edge_at is None:
            self._edge_at = now
        for fault in self.faults:
            if fault.step >= 0 or not (fault.active(now) or isinstance(fault, f.CommLostOnEdge)):
                continue
            comm, detail = self._linked(fault, comm, detail, now)
            variables = _lie(fault, variables, now)
        variables = self._frozen(variables, now)
        if comm is not Comm.OK:
            variables = {"ups.status": "WAIT"} if comm is Comm.WAIT else {}
        return Sample(self.name, now, Comm.OK if comm is Comm.WAIT else comm, variables, detail)

    def _variables(self, now: float) -> dict[str, str]:
        if self.ups is not None:
            return self.ups.variables()
        for name, ramp in list(self._ramps.items()):
            self._script[name] = ramp.value(now)
            if now >= ramp.end_at:
                del self._ramps[name]
        variables = dict(self._script)
        for fault in self.faults:
            if isinstance(fault, f.MainsFlap) and fault.active(now):
                on_battery = int((now - fault.at) / fault.period_s) % 2 == 0
                variables["ups.status"] = "OB DISCHRG" if on_battery else "OL CHRG"
        return variables

    def _linked(self, fault: f.UpsFault, comm: Comm, detail: str, now: float) -> tuple[Comm, str]:
        if isinstance(fault, f.CommLostOnEdge):
            lost = self._edge_at is not None and self._edge_at >= fault.at and not (fault.seen and self._edge_at == now)
            if lost and (fault.for_s <= 0.0 or now < (self._edge_at or 0.0) + fault.for_s):
                return Comm.STALE, "ERR DATA-STALE"
            return comm, detail
        return _LINKS.get(type(fault), (comm, detail))

    def _frozen(self, variables: dict[str, str], now: float) -> dict[str, str]:
        """The values of before, where stale ones are served as fresh."""
        whole = any(isinstance(fault, f.StatusStale) and fault.active(now) for fault in self.faults)
        numbers = any(isinstance(fault, f.StaleServed) and fault.active(now) for fault in self.faults)
        if not (whole or numbers):
            self._kept = dict(variables)
            return variables
        kept = dict(self._kept or variables)
        if not whole:
            kept["ups.status"] = variables.get("ups.status", "")
        return kept


_LINKS: dict[type[f.UpsFault], tuple[Comm, str]] = {
    f.DataStale: (Comm.STALE, "ERR DATA-STALE"),
    f.DriverGone: (Comm.DRIVER_GONE, "ERR DRIVER-NOT-CONNECTED"),
    f.UpsdGone: (Comm.UNREACHABLE, "connection refused"),
    f.HalfOpen: (Comm.UNREACHABLE, "no answer in time"),
    f.Silent: (Comm.UNREACHABLE, "no answer in time"),
    f.UpsdRefuses: (Comm.REFUSED, "ERR UNKNOWN-UPS"),
    f.Waits: (Comm.WAIT, ""),
}


def _lie(fault: f.UpsFault, variables: dict[str, str], now: float) -> dict[str, str]:
    """What the UPS says, with one thing wrong in it."""
    words = variables.get("ups.status", "").split()
    on_battery = "OB" in words
    if isinstance(fault, f.TokensReordered):
        words = [word.lower() if i % 2 else word for i, word in enumerate(reversed(words))]
    elif isinstance(fault, f.RuntimeSentinel):
        return {**variables, "battery.runtime": fault.value}
    elif isinstance(fault, f.RuntimeScaled) and "battery.runtime" in variables:
        return {**variables, "battery.runtime": f"{float(variables['battery.runtime']) * fault.factor:.0f}"}
    elif isinstance(fault, f.RuntimeJumps) and "battery.runtime" in variables:
        up = int((now - fault.at) / fault.period_s) % 2 == 0
        value = float(variables["battery.runtime"]) * (fault.factor if up else 1.0 / fault.factor)
        return {**variables, "battery.runtime": f"{value:.0f}"}
    elif isinstance(fault, f.Missing):
        return {name: value for name, value in variables.items() if name != fault.name}
    elif isinstance(fault, f.ChargeCliff) and "battery.charge" in variables:
        charge = float(variables["battery.charge"])
        return {**variables, "battery.charge": f"{min(charge, fault.to) if charge <= fault.below else charge:g}"}
    elif isinstance(fault, f.LowBatteryEarly) and on_battery and "LB" not in words:
        words.append("LB")
    elif isinstance(fault, f.LowBatteryNever):
        words = [word for word in words if word != "LB"]
    elif isinstance(fault, f.LowBatteryFlash) and not on_battery and (now - fault.at) % fault.period_s < 2.0:
        words += ["LB", "RB"]
    elif isinstance(fault, f.CalibrationStuck):
        words.append("CAL")
    elif isinstance(fault, f.FsdSet):
        words.insert(0, "FSD")
    else:
        return variables
    return {**variables, "ups.status": " ".join(words)}
