"""The power side of a drill: mains that can be cut, a simulated UPS in real time, and what became of its battery."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from msgspec import Struct

from powerguard.sim.battery import SimUps

TICK_S = 0.1
_DIES_S = 5.0
Publish = Callable[[Mapping[str, str]], None]


def boottime() -> float:
    """CLOCK_BOOTTIME seconds, as the daemon's instants."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Truth(Struct, frozen=True):
    """The battery itself at one instant: what no daemon can know."""

    at: float
    mains: bool
    load_pct: float
    charge_pct: float  # of the cells, not as reported
    runway_s: float  # until the output goes off at this load, were the mains away from now on


class Supply:
    """Steps the UPS on a thread of its own and publishes its variables. Every method may be called from any thread."""

    def __init__(self, ups: SimUps, publish: Publish, clock: Callable[[], float], load_pct: float) -> None:
        self.truths: list[Truth] = []
        self.flat_at: float | None = None  # the output went off
        self._ups, self._publish, self._clock = ups, publish, clock
        self._load_pct = load_pct
        self._mains = True
        self._times = 1.0
        self._flap = (0.0, 0.0, 0.0)  # from, until, half a period
        self._dead = False
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._flat = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supply", daemon=True)

    def start(self) -> Supply:
        """The UPS is on; its variables are published before this returns."""
        self._publish(self._ups.variables())
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def cut_mains(self) -> float:
        """The mains fail; the instant."""
        return self._switch(mains=False)

    def restore_mains(self) -> float:
        """The mains are back; the instant. A UPS that was off powers its output again."""
        self._dead = False
        self._flat.clear()
        self.lapse(1.0)
        return self._switch(mains=True)

    def _switch(self, *, mains: bool) -> float:
        with self._lock:
            self._mains = mains
            return self._clock()

    def flap(self, period_s: float, for_s: float) -> None:
        """From now on mains and battery change every *period_s*, for so long (0 = for ever); then all is as it was."""
        with self._lock:
            now = self._clock()
            self._flap = (now, now + for_s if for_s > 0.0 else float("inf"), max(TICK_S, period_s))

    def die(self) -> float:
        """The output goes off at once, whatever the battery holds; the instant."""
        with self._lock:
            self._dead = True
        self._flat.wait(_DIES_S)
        return self.flat_at or self._clock()

    def load(self, load_pct: float) -> None:
        """What hangs on the UPS from now on."""
        with self._lock:
            self._load_pct = load_pct

    def lapse(self, times: float) -> None:
        """From now on the battery ages *times* as fast: for the wait until a node that is off loses its power."""
        with self._lock:
            self._times = times

    @property
    def flat(self) -> bool:
        """The battery is flat and the output off."""
        return self._flat.is_set()

    @property
    def charge_pct(self) -> float:
        """Of the battery itself."""
        return 100.0 * self._ups.battery.soc

    def truth_s(self, load_pct: float | None = None) -> float:
        """Seconds until the output goes off on battery, at the present load or at *load_pct*."""
        return self._ups.truth_s(self._load_pct if load_pct is None else load_pct)

    def _mains_now(self, now: float) -> bool:
        begin, end, half_s = self._flap
        return int((now - begin) / half_s) % 2 == 1 if begin <= now < end else self._mains

    def _run(self) -> None:
        last = self._clock()
        while not self._stop.wait(TICK_S):
            now = self._clock()
            with self._lock:
                mains, load_pct, times = self._mains_now(now), self._load_pct, self._times
            self._ups.step(times * (now - last), mains, load_pct)
            last = now
            self._publish(self._ups.variables())
            battery = 100.0 * self._ups.battery.soc
            self.truths.append(Truth(now, mains, load_pct, battery, self._ups.truth_s(load_pct)))
            if (self._dead or not self._ups.alive) and not self._flat.is_set():
                self.flat_at = now
                self._flat.set()
