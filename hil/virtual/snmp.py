"""Rig: an SNMP UPS. A simulated agent speaks RFC 1628 or PowerNet, NUT's snmp-ups reads it, the daemon reads NUT."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType

from hil.virtual.outage import outage
from powerguard.errors import PowerguardError
from powerguard.sim import nut

Row = tuple[str, int | str, str | int]
"""OID, tag (a number of SNMP, or one with a variation module of snmpsim), value."""

INTEGER, STRING, OID, GAUGE, TICKS = 2, 4, 6, 66, 67
_SYSTEM = "1.3.6.1.2.1.1."
_RFC1628 = "1.3.6.1.2.1.33."
_POWERNET = "1.3.6.1.4.1.318.1.1.1."

MIBS = {"ietf": "RFC 1628", "apcc": "PowerNet"}
"""snmp-ups's names, and the world's."""


def missing() -> str:
    """Why there can be no such rig here; "" if there can."""
    absent = [name for name in ("snmpsim", "pysmi") if importlib.util.find_spec(name) is None]
    return nut.missing("upsd", "snmp-ups") or (
        f"not installed: {', '.join(absent)} (dependency group snmp)" if absent else ""
    )


def rfc1628(*, on_battery: bool = False, low: bool = False, minutes: int = 42, charge: int = 100) -> list[Row]:
    """A UPS by RFC 1628."""
    u = _RFC1628 + "1."
    return [
        (_SYSTEM + "1.0", STRING, "Simulated RFC 1628 UPS"), (_SYSTEM + "2.0", OID, "1.3.6.1.2.1.33"),
        (_SYSTEM + "3.0", TICKS, 1000), (_SYSTEM + "5.0", STRING, "sim"),
        (u + "1.1.0", STRING, "SimCo"), (u + "1.2.0", STRING, "Sim 10k"), (u + "1.3.0", STRING, "1.0"),
        (u + "1.4.0", STRING, "2.0"), (u + "1.5.0", STRING, "sim"), (u + "1.6.0", STRING, "gpu node"),
        (u + "2.1.0", INTEGER, 3 if low else 2), (u + "2.2.0", INTEGER, 0), (u + "2.3.0", INTEGER, minutes),
        (u + "2.4.0", INTEGER, charge), (u + "2.5.0", INTEGER, 10 * _volts(on_battery, low)), (u + "2.6.0", INTEGER, 0),
        (u + "3.2.0", INTEGER, 1), (u + "3.3.1.2.1", INTEGER, 500),
        (u + "3.3.1.3.1", INTEGER, 0 if on_battery else 230),
        (u + "4.1.0", INTEGER, 5 if on_battery else 3), (u + "4.2.0", INTEGER, 500), (u + "4.3.0", INTEGER, 1),
        (u + "4.4.1.2.1", INTEGER, 230), (u + "4.4.1.3.1", INTEGER, 30), (u + "4.4.1.4.1", INTEGER, 690),
        (u + "4.4.1.5.1", INTEGER, 35), (u + "6.1.0", GAUGE, 0), (u + "9.3.0", INTEGER, 230),
    ]  # fmt: skip


def powernet(*, on_battery: bool = False, low: bool = False, minutes: int = 42, charge: int = 100) -> list[Row]:
    """An APC Smart-UPS by the PowerNet MIB. upsBasicOutputStatus: 2 on line, 3 on battery."""
    a = _POWERNET
    return [
        (_SYSTEM + "1.0", STRING, "APC Web/SNMP Management Card"), (_SYSTEM + "2.0", OID, "1.3.6.1.4.1.318.1.3.27"),
        (_SYSTEM + "3.0", TICKS, 1000), (a + "1.1.1.0", STRING, "Smart-UPS X 3000"), (a + "1.1.2.0", STRING, "sim"),
        (a + "1.2.1.0", STRING, "UPS 09.3"), (a + "1.2.2.0", STRING, "01/02/24"), (a + "1.2.3.0", STRING, "SIM0001"),
        (a + "2.1.1.0", INTEGER, 3 if low else 2), (a + "2.1.2.0", TICKS, 0), (a + "2.1.3.0", STRING, "01/02/24"),
        (a + "2.2.1.0", GAUGE, charge), (a + "2.2.2.0", GAUGE, 25), (a + "2.2.3.0", TICKS, minutes * 6000),
        (a + "2.2.4.0", INTEGER, 1), (a + "2.2.7.0", INTEGER, 48), (a + "2.2.8.0", INTEGER, _volts(on_battery, low)),
        (a + "3.2.1.0", GAUGE, 0 if on_battery else 230), (a + "3.2.4.0", GAUGE, 50), (a + "3.2.5.0", INTEGER, 1),
        (a + "4.1.1.0", INTEGER, 3 if on_battery else 2), (a + "4.2.1.0", GAUGE, 230), (a + "4.2.2.0", GAUGE, 50),
        (a + "4.2.3.0", GAUGE, 35), (a + "4.2.4.0", GAUGE, 3), (a + "5.2.1.0", INTEGER, 230),
        (a + "5.2.8.0", TICKS, 12000), (a + "5.2.10.0", TICKS, 2000), (a + "7.2.3.0", INTEGER, 1),
        (a + "8.1.0", INTEGER, 1), (a + "11.1.1.0", STRING, "0001010000000000001" + 45 * "0"),
    ]  # fmt: skip


def _volts(on_battery: bool, low: bool) -> int:
    """Of a battery of 48 V."""
    return 45 if low else 50 if on_battery else 54


UPS: Mapping[str, Callable[..., list[Row]]] = {"ietf": rfc1628, "apcc": powernet}


def writable(oid: str, value: int) -> Row:
    """An integer that SNMP can set, and that keeps what it was set to."""
    return (oid, f"{INTEGER}:writecache", f"value={value}")


class Agent:
    """A simulated SNMP agent on this host, with the community `public`, which is up when entered."""

    def __init__(self, rows: Iterable[Row]) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
            trial.bind(("127.0.0.1", 0))
            self.port: int = trial.getsockname()[1]
        self._folder = Path(tempfile.mkdtemp(prefix="powerguard-snmp-"))
        self._data = self._folder / "data"
        self._data.mkdir()
        self._shown_at_s = 0
        self.show(rows)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Agent:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def show(self, rows: Iterable[Row]) -> None:
        """Other values from now on. The agent reads them when the file's time is another *second* than it was, and
        builds its index anew only for a file that isn't older than it; so each file is dated one later than any."""
        ordered = sorted(rows, key=lambda row: tuple(map(int, row[0].split("."))))
        fresh = self._data / "public.new"
        fresh.write_text("".join(f"{oid}|{tag}|{value}\n" for oid, tag, value in ordered))
        self._shown_at_s = max(self._shown_at_s, int(time.time())) + 1
        os.utime(fresh, (self._shown_at_s, self._shown_at_s))
        fresh.replace(self._data / "public.snmprec")

    def start(self) -> None:
        """Returns when it answers."""
        import snmpsim

        program = shutil.which("snmpsim-command-responder", path=str(Path(sys.executable).parent))
        if program is None:
            raise PowerguardError("snmpsim-command-responder isn't beside this Python")
        user = ["--process-user=root", "--process-group=root"] if os.geteuid() == 0 else []
        variation = Path(snmpsim.__file__).parent / "variation"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [program, f"--data-dir={self._data}", f"--cache-dir={self._folder / 'cache'}", *user,
                 f"--agent-udpv4-endpoint=127.0.0.1:{self.port}", f"--variation-modules-dir={variation}",
                 f"--variation-module-options=writecache:file:{self._folder / 'written'}"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._warm_up()

    def stop(self) -> None:
        """Nobody answers any more."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(20)
        self._process = None

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _log(self) -> Path:
        return self._folder / "agent.log"

    def _warm_up(self, within_s: float = 60.0) -> None:
        """The first answer takes over a second, for which snmp-ups without retries would not wait."""
        ends = time.monotonic() + within_s
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.settimeout(0.2)
            while True:
                ended = self._process is None or self._process.poll() is not None
                if ended or time.monotonic() > ends:
                    raise PowerguardError("the SNMP agent doesn't answer", todo=self._log.read_text()[-800:])
                with contextlib.suppress(OSError):
                    asking.sendto(GET_SYS_OBJECT_ID, ("127.0.0.1", self.port))
                    asking.recv(1500)
                    return


GET_SYS_OBJECT_ID = bytes.fromhex("302602010104067075626c6963a019020101020100020100300e300c06082b060102010102000500")
"""An SNMPv2c GET of sysObjectID, community `public`."""


def driver(agent: Agent, mib: str) -> nut.Driver:
    """snmp-ups for *agent*, as quick as it can be: by default it looks every 30 s, and tries five times."""
    options = {
        "port": f"127.0.0.1:{agent.port}", "community": "public", "mibs": mib, "pollfreq": "1", "snmp_retries": "0",
        "snmp_timeout": "2", "snmp_version": "v1" if mib == "apcc" else "v2c",
    }  # fmt: skip
    return nut.Driver("snmp-ups", options)


class SnmpUps:
    """The UPS behind *agent*, as a rig's device."""

    def __init__(self, agent: Agent, mib: str) -> None:
        self._agent, self._mib = agent, mib

    def show(self, *, on_battery: bool, low: bool, minutes: int, charge: int) -> None:
        self._agent.show(UPS[self._mib](on_battery=on_battery, low=low, minutes=minutes, charge=charge))

    def silence(self) -> None:
        self._agent.stop()

    def speak(self) -> None:
        self._agent.start()


def rig(mib: str, say: Callable[[str], None]) -> None:
    """An outage as an SNMP UPS tells it. Raises DrillFailed."""
    with Agent(UPS[mib]()) as agent, nut.RealNut({"rack": driver(agent, mib)}) as running:
        outage(MIBS[mib], SnmpUps(agent, mib), running.address("rack"), say)
