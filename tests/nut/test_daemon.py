"""The whole daemon beside a real upsd and a real upsmon: the primary waits for us, and NUT may fall over meanwhile."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from powerguard.node.ask import CONTROL_SOCKET, Ask, ask
from powerguard.sim.nut import RealNut

HEALTHY = {"ups.status": "OL", "battery.charge": "100", "battery.runtime": "1200", "ups.load": "35"}
POLICY = """[policy]
poll_online_s = 0.4
poll_battery_s = 0.3
halt_s = 6
exit_wait_s = 1
margin_s = 2
hold_max_s = 8
resume_after_s = 2
"""
UPSMON = """
MONITOR demo@{host}:{port} 1 primary primarypw primary
MINSUPPLIES 1
SHUTDOWNCMD "/bin/touch {flag}"
POWERDOWNFLAG {killpower}
POLLFREQ 1
POLLFREQALERT 1
HOSTSYNC 60
DEADTIME 15
FINALDELAY 0
RUN_AS_USER {user}
"""


class Rig:
    """A real NUT of its own, and the daemon as a process; it halts into a file."""

    def __init__(self, folder: Path, nut: RealNut) -> None:
        self.nut, self.folder = nut, folder
        self.run_dir = Path(tempfile.mkdtemp(prefix="pg-nut-"))  # a socket's path is short
        self.halted, self.shutdown = folder / "halted", nut.directory / "state" / "shutdown"
        text = f'[node]\nrun_dir = "{self.run_dir}"\nstate_dir = "{folder}/state"\n'
        text += f'[[ups]]\nname = "{nut.address("demo")}"\nuser = "secondary"\npassword = "secondarypw"\n{POLICY}'
        text += f'[halt]\nmethod = "command"\ncommand = ["/bin/touch", "{self.halted}"]\ndelay_shutdown = false\n'
        (folder / "pg.toml").write_text(text)
        with (folder / "daemon.log").open("wb") as log:
            self.daemon = subprocess.Popen(
                [sys.executable, "-m", "powerguard.cli", "run", "-c", str(folder / "pg.toml"), "--really"],
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}, stdout=log, stderr=log,
            )  # fmt: skip
        self.until(lambda: self.status()["feeds"][0]["login_held"], "the LOGIN")

    def status(self) -> dict:
        return ask(self.run_dir / CONTROL_SOCKET, Ask("status"), 5.0).data

    def until(self, condition: Callable[[], object], what: str, within_s: float = 40.0) -> None:
        ends = time.monotonic() + within_s
        while True:
            try:
                if condition():
                    return
            except Exception as err:
                what = f"{what} ({err})" if str(err) not in what else what
            assert time.monotonic() < ends, f"{what}\n{(self.folder / 'daemon.log').read_text()[-3000:]}"
            time.sleep(0.05)

    def close(self) -> None:
        if self.daemon.poll() is None:
            self.daemon.kill()
        self.daemon.wait(10)
        shutil.rmtree(self.run_dir, ignore_errors=True)


@pytest.fixture
def rig(tmp_path) -> Iterator[Rig]:
    with RealNut({"demo": HEALTHY}, maxage_s=3) as nut:
        one = Rig(tmp_path, nut)
        yield one
        one.close()


def test_the_primary_waits_for_us_and_we_log_out_last(rig):
    """FSD by a real upsmon: the node is told to halt, the LOGIN outlives that and a SIGTERM, and only when we are gone
    the primary shuts its own host down."""
    nut = rig.nut
    nut.start_upsmon(
        UPSMON.format(
            host=nut.host, port=nut.port, flag=rig.shutdown, killpower=nut.directory / "state" / "killpower",
            user=nut.as_user or "root",
        )
    )  # fmt: skip
    rig.until(lambda: nut.ask("GET NUMLOGINS demo") == "NUMLOGINS demo 2", "both to be logged in")
    nut.set("demo", {"ups.status": "OB DISCHRG LB"})
    rig.until(rig.halted.exists, "the halt")
    rig.daemon.send_signal(signal.SIGTERM)
    asked_at = time.monotonic()

    assert "FSD" in nut.ask("GET VAR demo ups.status")
    while not rig.shutdown.exists():
        assert time.monotonic() < asked_at + 40.0
        time.sleep(0.05)
    assert "stopped code=0" in (rig.folder / "daemon.log").read_text()  # the last that it does
    assert 0 == rig.daemon.wait(5.0)  # its connection ends a moment before it does


@pytest.mark.parametrize("victim", ["upsd", "demo"])
def test_nut_may_die_in_mid_outage(rig, victim):
    """upsd, or its driver, is killed on battery and comes back: the same outage, no order, and logged in again."""
    nut = rig.nut
    nut.set("demo", {"ups.status": "OB DISCHRG", "battery.charge": "98"})
    rig.until(lambda: rig.status()["phase"] == "on_battery", "the outage")
    event = rig.status()["event"]
    nut.stop(victim, signal.SIGKILL)
    rig.until(lambda: rig.status()["feeds"][0]["comm"] != "ok", "the loss")
    assert (rig.status()["phase"], rig.status()["event"]) == ("on_battery", event)
    nut.start_upsd() if victim == "upsd" else nut.start_driver("demo")

    rig.until(lambda: rig.status()["feeds"][0]["comm"] == "ok", "the values")
    rig.until(lambda: rig.status()["feeds"][0]["login_held"], "the LOGIN")
    assert (rig.status()["phase"], rig.status()["event"]) == ("on_battery", event)
    nut.set("demo", {"ups.status": "OL", "battery.charge": "97"})
    rig.until(lambda: rig.status()["phase"] == "online", "mains")
    assert not rig.halted.exists()
