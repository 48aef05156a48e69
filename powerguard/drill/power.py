"""The UPS of a drill, served: by the simulated upsd in this process, or through a real upsd with dummy-ups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from msgspec.structs import replace

from powerguard.drill.inject import FaultyUps
from powerguard.drill.plan import Plan
from powerguard.drill.supply import Supply, boottime
from powerguard.sim.battery import SimUps, UpsSpec
from powerguard.sim.nut import RealNut
from powerguard.sim.upsd import SimUpsd

UPS = "drill"
_REFRESH_S, _FILTER_S = 0.3, 0.1
"""Of the simulated UPS's values: at a time scale of 0.1 these are 3 s and 1 s."""
_NUT_EVERY_S = 1.0
"""dummy-ups looks at its file once a second; more writes would only be in its way."""


class SimulatedUps:
    """A UPS in real time with a NUT server of its own, to be made to fail."""

    def __init__(self, supply: Supply, upsd: SimUpsd) -> None:
        self.supply, self.upsd = supply, upsd
        self.address = upsd.address(UPS)  # "drill@127.0.0.1:PORT", as in the daemon's configuration

    def cut_mains(self) -> float:
        """The mains fail; the instant, CLOCK_BOOTTIME."""
        return self.supply.cut_mains()

    def restore_mains(self) -> float:
        """The mains are back; the instant."""
        return self.supply.restore_mains()

    def load(self, load_pct: float) -> None:
        """What hangs on it, in percent of its rating."""
        self.supply.load(load_pct)

    @property
    def flat(self) -> bool:
        """The battery is flat and the output off."""
        return self.supply.flat

    def fault(self, kind: str, *, times: int | None = None, after: int = 0, seconds: float = 0.0) -> None:
        """The server fails in a way of `sim.upsd` ("stale", "driver-gone", "silent", "cut", "refuse", ...)."""
        self.upsd.fault(kind, times=times, after=after, seconds=seconds)

    def clear(self) -> None:
        """All faults end."""
        self.upsd.clear()


@contextmanager
def simulated(runtime_s: float = 60.0, load_pct: float = 70.0, seed: int = 1) -> Iterator[SimulatedUps]:
    """A UPS on line whose battery carries *load_pct* for *runtime_s*."""
    ups = SimUps(UpsSpec.small(runtime_s, load_pct), seed, load_pct=load_pct)
    with SimUpsd() as upsd, _supply(ups, lambda v: upsd.replace(UPS, v), boottime, load_pct) as supply:
        yield SimulatedUps(supply, upsd)


@contextmanager
def power(plan: Plan, clock: Callable[[], float]) -> Iterator[tuple[Supply, str, FaultyUps | None]]:
    """The mains, the UPS and its server, running; with the address that the daemon is to ask, and what can be made to
    lie between them (not with a real upsd).

    Raises MissingDependency without NUT where the plan wants it.
    """
    spec = UpsSpec.small(plan.runtime_s, plan.loads.training)
    refresh_s = _NUT_EVERY_S if plan.nut else _REFRESH_S
    spec = replace(spec, firmware=replace(spec.firmware, refresh_s=refresh_s, filter_s=_FILTER_S))
    ups = SimUps(spec, plan.seed, load_pct=plan.loads.training)
    if not plan.nut:
        with SimUpsd() as upsd:
            said = FaultyUps(UPS, ups, upsd, clock)
            with _supply(ups, said.publish, clock, plan.loads.training) as supply:
                yield supply, upsd.address(UPS), said
        return
    with RealNut({UPS: _fit(ups.variables())}) as nut:
        publish = _Sparing(lambda variables: nut.set(UPS, _fit(variables)), clock)
        with _supply(ups, publish, clock, plan.loads.training) as supply:
            yield supply, nut.address(UPS), None


@contextmanager
def _supply(
    ups: SimUps, publish: Callable[[Mapping[str, str]], None], clock: Callable[[], float], load_pct: float
) -> Iterator[Supply]:
    supply = Supply(ups, publish, clock, load_pct)
    try:
        yield supply.start()
    finally:
        supply.close()


def _fit(variables: Mapping[str, str]) -> dict[str, str]:
    """What dummy-ups may show: `driver.*` is its own."""
    return {name: value for name, value in variables.items() if not name.startswith("driver.")}


class _Sparing:
    """Publishes at most once a second, and at once when the status changes."""

    def __init__(self, publish: Callable[[Mapping[str, str]], None], clock: Callable[[], float]) -> None:
        self._publish, self._clock = publish, clock
        self._at, self._status = float("-inf"), ""

    def __call__(self, variables: Mapping[str, str]) -> None:
        now, status = self._clock(), variables.get("ups.status", "")
        if now - self._at >= _NUT_EVERY_S or status != self._status:
            self._at, self._status = now, status
            self._publish(variables)
