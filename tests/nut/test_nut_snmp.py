"""An SNMP UPS: a simulated agent, NUT's snmp-ups, and our reader behind it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from powerguard.core.types import Comm
from powerguard.node.ups_line import UpsAddress
from powerguard.sim.nut import Driver, RealNut, missing

absent = [name for name in ("snmpsim", "pysmi") if importlib.util.find_spec(name) is None]
WHY = missing("snmp-ups") or (f"not installed: {', '.join(absent)} (dependency group snmp)" if absent else "")
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY)

U = "1.3.6.1.2.1.33.1."
GET_SYS_OBJECT_ID = bytes.fromhex("302602010104067075626c6963a019020101020100020100300e300c06082b060102010102000500")
"""An SNMPv2c GET of sysObjectID, community `public`."""

INTEGER, STRING, OID, GAUGE, TICKS = 2, 4, 6, 66, 67


def rfc1628(*, battery: int = 2, source: int = 3, minutes: int = 42, charge: int = 100, input_v: int = 230) -> str:
    """The records of a UPS by RFC 1628: *battery* 2 normal 3 low, *source* 3 mains 5 battery."""
    rows = [
        ("1.3.6.1.2.1.1.1.0", STRING, "Simulated RFC 1628 UPS"), ("1.3.6.1.2.1.1.2.0", OID, "1.3.6.1.2.1.33"),
        ("1.3.6.1.2.1.1.3.0", TICKS, 1000), ("1.3.6.1.2.1.1.5.0", STRING, "sim"),
        (U + "1.1.0", STRING, "SimCo"), (U + "1.2.0", STRING, "Sim 10k"), (U + "1.3.0", STRING, "1.0"),
        (U + "1.4.0", STRING, "2.0"), (U + "1.5.0", STRING, "sim"), (U + "1.6.0", STRING, "gpu node"),
        (U + "2.1.0", INTEGER, battery), (U + "2.2.0", INTEGER, 0), (U + "2.3.0", INTEGER, minutes),
        (U + "2.4.0", INTEGER, charge), (U + "2.5.0", INTEGER, 540), (U + "2.6.0", INTEGER, 0),
        (U + "3.2.0", INTEGER, 1), (U + "3.3.1.2.1", INTEGER, 500), (U + "3.3.1.3.1", INTEGER, input_v),
        (U + "4.1.0", INTEGER, source), (U + "4.2.0", INTEGER, 500), (U + "4.3.0", INTEGER, 1),
        (U + "4.4.1.2.1", INTEGER, 230), (U + "4.4.1.3.1", INTEGER, 30), (U + "4.4.1.4.1", INTEGER, 690),
        (U + "4.4.1.5.1", INTEGER, 35), (U + "6.1.0", GAUGE, 0), (U + "9.3.0", INTEGER, 230),
    ]  # fmt: skip
    rows.sort(key=lambda row: tuple(map(int, row[0].split("."))))
    return "".join(f"{oid}|{tag}|{value}\n" for oid, tag, value in rows)


class Agent:
    """A simulated SNMP agent, community `public`."""

    def __init__(self, folder: Path) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
            trial.bind(("127.0.0.1", 0))
            self.port: int = trial.getsockname()[1]
        self.data = folder / "data"
        self.data.mkdir()
        self.show(rfc1628())
        program = shutil.which("snmpsim-command-responder", path=str(Path(sys.executable).parent))
        assert program
        user = ["--process-user=root", "--process-group=root"] if os.geteuid() == 0 else []
        self.log = folder / "agent.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [program, f"--data-dir={self.data}", f"--cache-dir={folder / 'cache'}", *user,
                 f"--agent-udpv4-endpoint=127.0.0.1:{self.port}"],
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._warm_up()

    def _warm_up(self) -> None:
        """The first answer takes over a second, for which snmp-ups (no retries) would not wait."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.settimeout(0.2)
            ends = time.monotonic() + 20
            while True:
                assert time.monotonic() < ends, self.log.read_text()
                assert self.process.poll() is None, self.log.read_text()
                with contextlib.suppress(OSError):
                    asking.sendto(GET_SYS_OBJECT_ID, ("127.0.0.1", self.port))
                    asking.recv(1500)
                    return

    def show(self, records: str) -> None:
        """Other values from now on."""
        fresh = self.data / "public.new"
        fresh.write_text(records)
        fresh.replace(self.data / "public.snmprec")

    def stop(self) -> None:
        """Nobody answers any more."""
        self.process.terminate()
        self.process.wait(10)


@pytest.fixture
def agent(tmp_path):
    """A UPS on mains."""
    made = Agent(tmp_path)
    yield made
    if made.process.poll() is None:
        made.stop()


def test_an_snmp_ups_from_mains_to_silence(agent, listen):
    """On line, on battery, low battery in the order `LB OB`, and stale once the agent is gone."""
    options = {
        "port": f"127.0.0.1:{agent.port}", "community": "public", "snmp_version": "v2c", "mibs": "ietf",
        "pollfreq": "1", "snmp_retries": "0", "snmp_timeout": "1",
    }  # fmt: skip
    with RealNut({"rack": Driver("snmp-ups", options)}) as nut:
        listener = listen(address=UpsAddress.parse(nut.address("rack")), user="secondary", password="secondarypw")
        sample = listener.comm(Comm.OK)
        assert sample.variables["ups.status"] == "OL"
        assert float(sample.variables["battery.runtime"]) == 42 * 60
        assert sample.variables["driver.parameter.pollfreq"] == "1"
        agent.show(rfc1628(battery=3, source=5, minutes=3, charge=18, input_v=0))
        sample = listener.until(lambda sample: "LB" in sample.variables.get("ups.status", ""))[-1]
        assert sample.variables["ups.status"] == "LB OB"
        listener.until(lambda sample: sample.variables.get("battery.charge") == "18")
        agent.stop()
        listener.comm(Comm.STALE)
        assert listener.reader.login_held
        assert listener.reader.close()
