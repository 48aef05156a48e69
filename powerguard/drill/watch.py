"""Watching a drilled node: what its journal, its ranks and its UPS say, noted, shown, and answered with a load."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from msgspec import Struct

from powerguard.core.messages import Prepare, Purpose, SealWritten
from powerguard.core.state import State
from powerguard.core.types import Phase, Send
from powerguard.drill.curves import need_of, runway_of
from powerguard.drill.daemon import last_words
from powerguard.drill.inject import Injector
from powerguard.drill.marks import Log
from powerguard.drill.moments import Follower, Moment
from powerguard.drill.node import Node
from powerguard.drill.plan import After, Due, Plan
from powerguard.drill.screen import Glance, Screen
from powerguard.drill.supply import Supply
from powerguard.errors import DrillFailed
from powerguard.sim import faults as f

LOOK_S = 0.1
LAPSE_S = 3.0
"""Once the node is off, the rest of the battery is spent in about this long."""
_OFF = "no power"


class Times(Struct):
    """When things happened, CLOCK_BOOTTIME; None = they did not."""

    mains_cut_at: float = 0.0
    mains_back_at: float | None = None
    snapshot_at: float | None = None
    stop_at: float | None = None
    fault_at: float | None = None  # the first one was begun
    parked_at: float | None = None
    killed_at: float | None = None
    halted_at: float | None = None
    power_cut_at: float | None = None
    boot_at: float | None = None
    online_at: float | None = None  # again, after the outage


class Watch:
    """One pair of eyes. `look` is one glance at everything; the waits look on and on."""

    def __init__(
        self,
        plan: Plan,
        node: Node,
        supply: Supply,
        injector: Injector,
        *,
        screen: Screen,
        clock: Callable[[], float],
    ) -> None:
        self.plan, self.node, self.supply, self.screen, self.clock = plan, node, supply, screen, clock
        self.injector = injector
        self._waiting = list(plan.faults)
        self.times = Times()
        self.phase = "starting"
        self._state: State | None = None
        self._follower, self._log = Follower(node.folder), Log()

    # ---- waits -----------------------------------------------------------------------------------

    def wait(self, done: Callable[[], bool], within_s: float, what: str) -> None:
        """Look on until *done*. DrillFailed after *within_s*, or when the daemon is no more."""
        end = self.clock() + within_s
        while not done():
            if self.clock() > end:
                logs = "; ".join(last_words(path) for path in (self.node.ranks_log, self.node.daemon.log))
                raise DrillFailed(f"waited {within_s:.0f} s for {what}, in vain", todo=logs)
            self.look()
            time.sleep(LOOK_S)

    def linger(self, seconds: float) -> None:
        """Look on for so long."""
        end = self.clock() + seconds
        while self.clock() < end:
            self.look()
            time.sleep(LOOK_S)

    # ---- lives of the node -----------------------------------------------------------------------

    def boot(self) -> None:
        """A new life of the node: its daemon listens when this returns."""
        self.phase, self._state = "starting", None
        daemon = self.node.daemon
        daemon.start()
        self._follower, self._log = Follower(daemon.state_dir), Log()
        self.wait(lambda: daemon.listening, self.plan.waits.daemon_s, "the daemon to listen")
        self.phase = Phase.ONLINE.value

    def off(self) -> None:
        """The node has no power from now on."""
        self.look()
        self.times.power_cut_at = self.clock()
        count = self.node.cut()
        self.phase, self._state = _OFF, None
        self.screen.show(self._glance())
        self.screen.say(f"BATTERY FLAT, THE POWER IS CUT: {count} processes killed at once, none is left", "bad")

    # ---- one look --------------------------------------------------------------------------------

    def look(self) -> None:
        """What is new in the journal, the halt, the ranks; the load follows."""
        if self.phase != _OFF:
            if self.times.halted_at is None and not self._daemon_may_be_down:
                self.node.daemon.check()
            for moment in self._follower.new():
                self._note(moment)
            self._note_halt()
            self._kill_if_due()
            self._faults()
        self.screen.show(self._glance())
        self.supply.load(self._load_pct())

    def _note(self, moment: Moment) -> None:
        tick, was = moment.tick, self.phase
        self.phase, self._state = tick.phase.value, moment.state
        if self.node.daemon.life == 1:
            if tick.phase is Phase.PARKED and self.times.parked_at is None:
                self.times.parked_at = tick.at
            if tick.phase is Phase.ONLINE and was not in (Phase.ONLINE.value, "starting"):
                self.times.online_at = tick.at
            if self.times.stop_at is None and any(_stops(action) for action in tick.actions):
                self.times.stop_at = tick.at
            if self.times.snapshot_at is None and self.times.mains_cut_at:
                sealed = (r.at for r in tick.seen.reports if isinstance(r.message, SealWritten))
                self.times.snapshot_at = next(sealed, None)
        self.screen.show(self._glance())
        for event in self._log.lines(moment):
            tone = "bad" if event.level == "error" else "save" if "durable" in event.text else "plain"
            # "parked: every rank is durable" says it all; "parked: parked: ..." says it twice
            text = event.reason if event.reason.startswith(event.text) else event.text
            self.screen.say(text + (f": {event.reason}" if event.reason not in ("", text) else ""), tone)

    def _note_halt(self) -> None:
        """The halt command leaves a file, whose time is the wall clock's."""
        if self.times.halted_at is not None or self.node.daemon.life > 1 or not self.node.daemon.marker.exists():
            return
        self.times.halted_at = self.node.daemon.marker.stat().st_mtime - time.time() + self.clock()
        left_s = self.supply.truth_s()
        self.screen.say(f"the node is off, {left_s:.1f} s before the battery is flat", "good")
        self.supply.load(self.plan.loads.halted)
        self.supply.lapse(max(1.0, self.supply.truth_s(self.plan.loads.halted) / LAPSE_S))

    def _kill_if_due(self) -> None:
        rank, since = self.plan.kill_rank, self.times.snapshot_at
        if rank is None or since is None or self.times.killed_at is not None:
            return
        if self.clock() >= since + self.plan.kill_after_s:
            os.kill(self.node.pid_of(rank), signal.SIGKILL)
            self.times.killed_at = self.clock()
            self.screen.say(f"rank {rank} is killed by the drill", "bad")

    def _faults(self) -> None:
        """Begins each fault of the plan when it is due."""
        for due in [due for due in self._waiting if self._due(due)]:
            self._waiting.remove(due)
            what = self._power(due.fault) or self.injector.begin(due.fault)
            self.times.fault_at = self.times.fault_at or self.clock()
            self.screen.say(f"FAULT: {what}", "bad")
        self.injector.look()

    def _power(self, fault: f.Fault) -> str:
        """Does a fault of the power itself; what was done, or ""."""
        if isinstance(fault, f.PowerCut):
            self.supply.die()
            return "the UPS dies"
        if isinstance(fault, f.MainsFlap):
            self.supply.flap(fault.period_s, fault.for_s)
            return f"the mains flap every {fault.period_s:g} s"
        return ""

    def _due(self, due: Due) -> bool:
        times, fault = self.times, due.fault
        if fault.step >= 0:
            return self.node.steps()[fault.rank] >= fault.step
        moments = {
            After.MAINS_CUT: times.mains_cut_at or None,
            After.SNAPSHOT: times.snapshot_at,
            After.STOP: times.stop_at,
            After.PARKED: times.parked_at,
        }
        since = moments[due.after]
        return since is not None and self.clock() >= since + fault.at

    @property
    def _daemon_may_be_down(self) -> bool:
        return any(isinstance(due.fault, f.DaemonDown) for due in self.plan.faults)

    def _glance(self) -> Glance:
        known = self._state is not None and self.phase != _OFF
        return Glance(
            phase=self.phase,
            charge_pct=self.supply.charge_pct,
            runway_s=runway_of(self._state) if known and self._state else None,
            need_s=need_of(self._state) if known and self._state else None,
            steps=self.node.steps(),
        )

    def _load_pct(self) -> float:
        loads = self.plan.loads
        if self.phase == _OFF or (self.times.halted_at is not None and self.node.daemon.life == 1):
            return loads.halted
        by_phase = {"flushing": loads.flushing, "parked": loads.parked, "halting": loads.parked}
        return by_phase.get(self.phase, loads.training)


def _stops(action: object) -> bool:
    message = action.message if isinstance(action, Send) else None
    return isinstance(message, Prepare) and message.purpose is Purpose.STOP
