"""Rig: an outage as an SNMP UPS tells it, from the agent to the daemon's halt."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hil.virtual.snmp import MIBS, UPS, Agent, driver
from powerguard.drill.daemon import DaemonProcess
from powerguard.drill.plan import PLANS
from powerguard.drill.processes import Herd
from powerguard.errors import DrillFailed
from powerguard.node.ask import CONTROL_SOCKET, Ask, ask
from powerguard.sim.nut import RealNut

WAIT_S = 60.0


def outage(mib: str, say: Callable[[str], None]) -> None:
    """Mains, a short outage, an agent that falls silent on mains, and an outage to the halt. Raises DrillFailed."""
    herd = Herd()
    with (
        Agent(UPS[mib]()) as agent,
        RealNut({"rack": driver(agent, mib)}) as nut,
        tempfile.TemporaryDirectory(prefix="powerguard-snmp-") as folder,
    ):
        daemon = DaemonProcess(Path(folder), nut.address("rack"), PLANS["blackout"].policy(), herd)
        try:
            daemon.start()
            _tell(_Story(mib, agent, daemon), say)
        finally:
            herd.cut()
            daemon.close()


class _Story:
    """Waits for what the daemon says of its only UPS."""

    def __init__(self, mib: str, agent: Agent, daemon: DaemonProcess) -> None:
        self.mib, self.agent, self.daemon = mib, agent, daemon

    def show(self, **values: Any) -> None:
        self.agent.show(UPS[self.mib](**values))

    def until(self, what: str, holds: Callable[[dict[str, Any]], bool]) -> float:
        """Seconds until the status *holds*."""
        begun = time.monotonic()
        status: dict[str, Any] = {}
        while not (status and holds(status)):
            self.daemon.check()
            if time.monotonic() - begun > WAIT_S:
                raise DrillFailed(f"{MIBS[self.mib]}: waited {WAIT_S:.0f} s for {what}; the last status: {status}")
            time.sleep(0.1)
            if self.daemon.listening:
                status = ask(self.daemon.run_dir / CONTROL_SOCKET, Ask("status")).data
        return time.monotonic() - begun

    def halted(self) -> float:
        """Seconds until the daemon has had the node halted."""
        begun = time.monotonic()
        while not self.daemon.marker.exists():
            if time.monotonic() - begun > WAIT_S:
                raise DrillFailed(f"{MIBS[self.mib]}: no halt within {WAIT_S:.0f} s of a low battery")
            time.sleep(0.05)
        return time.monotonic() - begun


def _tell(story: _Story, say: Callable[[str], None]) -> None:
    def feed(status: dict[str, Any]) -> dict[str, Any]:
        first: dict[str, Any] = status["feeds"][0]
        return first

    story.until("mains", lambda status: feed(status)["tokens"] == ["OL"])
    story.show(on_battery=True, minutes=30, charge=90)
    edge = story.until("the outage", lambda status: status["phase"] == "on_battery" and feed(status)["on_battery"])
    story.until("its values", lambda status: (feed(status)["charge_pct"], feed(status)["runtime_s"]) == (90, 1800))
    story.show()
    back = story.until("mains again", lambda status: status["phase"] == "online")
    story.agent.stop()
    silent = story.until("the silence to be told", lambda status: feed(status)["comm"] != "ok")
    story.agent.start()
    story.until("the agent again", lambda status: feed(status)["comm"] == "ok" and status["phase"] == "online")
    if story.daemon.marker.exists():
        raise DrillFailed(f"{MIBS[story.mib]}: a halt on mains")
    story.show(on_battery=True, low=True, minutes=1, charge=9)
    halted = story.halted()
    say(
        f"{MIBS[story.mib]}: on battery {edge:.1f} s after the agent said so, on line again after {back:.1f} s, its "
        f"silence told after {silent:.1f} s and no reason to halt, low battery: halted after {halted:.1f} s"
    )
