"""An outage as a UPS tells it through NUT's own driver for it, to a real daemon that halts into a file."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from powerguard.drill.daemon import DaemonProcess, last_words
from powerguard.drill.plan import PLANS
from powerguard.drill.processes import Herd
from powerguard.errors import DrillFailed
from powerguard.node.ask import CONTROL_SOCKET, Ask, ask

WAIT_S = 180.0


class Device(Protocol):
    """A UPS that can be told what to be, and whose connection can be cut."""

    def show(self, *, on_battery: bool, low: bool, minutes: int, charge: int) -> None:
        """Its state from now on."""

    def silence(self) -> None:
        """Nothing is heard of it any more."""

    def speak(self) -> None:
        """It is heard again."""


def outage(name: str, device: Device, address: str, say: Callable[[str], None]) -> None:
    """Mains, a short outage, silence on mains, an outage to the halt; *address* is of its upsd. Raises DrillFailed."""
    herd = Herd()
    with tempfile.TemporaryDirectory(prefix="powerguard-rig-") as folder:
        daemon = DaemonProcess(Path(folder), address, PLANS["blackout"].policy(), herd)
        try:
            daemon.start()
            say(f"{name}: {_tell(device, _Watch(name, daemon))}")
        finally:
            herd.cut()
            daemon.close()


def _tell(device: Device, watch: _Watch) -> str:
    watch.until("mains", lambda seen: "OL" in seen["tokens"])
    device.show(on_battery=True, low=False, minutes=30, charge=90)
    edge = watch.until("the outage", lambda seen: seen["phase"] == "on_battery" and seen["on_battery"])
    values = watch.until("its values", lambda seen: (seen["charge_pct"], seen["runtime_s"]) == (90, 1800))
    device.show(on_battery=False, low=False, minutes=30, charge=90)
    back = watch.until("mains again", lambda seen: seen["phase"] == "online")
    device.silence()
    silent = watch.until("the silence to be told", lambda seen: seen["comm"] != "ok")
    device.speak()
    watch.until("it again", lambda seen: seen["comm"] == "ok" and seen["phase"] == "online")
    if watch.daemon.marker.exists():
        raise DrillFailed(f"{watch.name}: a halt on mains")
    device.show(on_battery=True, low=True, minutes=1, charge=9)
    halted = watch.halted()
    return (
        f"on battery {edge:.1f} s after it said so (all its values after {edge + values:.1f} s), on line again after "
        f"{back:.1f} s, its silence told after {silent:.1f} s and no reason to halt, low battery: halted after "
        f"{halted:.1f} s"
    )


class _Watch:
    """Waits for what the daemon says of its only UPS."""

    def __init__(self, name: str, daemon: DaemonProcess) -> None:
        self.name, self.daemon = name, daemon

    def until(self, what: str, holds: Callable[[dict[str, Any]], bool]) -> float:
        """Seconds until it *holds* of the daemon's phase and its feed."""
        begun = time.monotonic()
        seen: dict[str, Any] = {}
        while not (seen and holds(seen)):
            self.daemon.check()
            if time.monotonic() - begun > WAIT_S:
                raise DrillFailed(
                    f"{self.name}: waited {WAIT_S:.0f} s for {what}; the last seen: {seen}",
                    todo=last_words(self.daemon.log),
                )
            time.sleep(0.1)
            if self.daemon.listening:
                status = ask(self.daemon.run_dir / CONTROL_SOCKET, Ask("status")).data
                if status["feeds"]:  # none until it was heard from
                    seen = {"phase": status["phase"], **status["feeds"][0]}
        return time.monotonic() - begun

    def halted(self) -> float:
        """Seconds until the daemon has had the node halted."""
        begun = time.monotonic()
        while not self.daemon.marker.exists():
            if time.monotonic() - begun > WAIT_S:
                raise DrillFailed(
                    f"{self.name}: no halt within {WAIT_S:.0f} s of a low battery",
                    todo=last_words(self.daemon.log),
                )
            time.sleep(0.05)
        return time.monotonic() - begun
