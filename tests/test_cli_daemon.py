"""The real daemon as systemd and operators know it: readiness, reload, orders, one daemon a node, a clean end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from powerguard.sim.upsd import HEALTHY, SimUpsd

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[1]
WAIT_S = 30.0


class Service:
    """A daemon under a service manager that only listens, on a simulated UPS."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = Path(tempfile.mkdtemp(prefix="pg-cli-"))
        self.upsd = SimUpsd().start()
        self.upsd.replace("demo", HEALTHY)
        self.config = folder / "pg.toml"
        self.write("")
        self.manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.manager.bind(str(self.run_dir / "notify"))
        self.manager.settimeout(WAIT_S)
        self.said: list[str] = []
        self.log = folder / "log"
        env = {**os.environ, "PYTHONPATH": str(ROOT), "NOTIFY_SOCKET": str(self.run_dir / "notify"),
               "WATCHDOG_USEC": "20000000", "PYTHONUNBUFFERED": "1"}  # fmt: skip
        env.pop("WATCHDOG_PID", None)
        with self.log.open("wb") as log:
            self.daemon = subprocess.Popen(
                [sys.executable, "-m", "powerguard.cli", "run", "-c", str(self.config), "--json-logs"],
                env=env, stdout=log, stderr=log,
            )  # fmt: skip
        self.hear("READY=1")

    def write(self, policy: str) -> None:
        self.config.write_text(
            f'[node]\nname = "n"\nrun_dir = "{self.run_dir}"\nstate_dir = "{self.folder}/state"\n'
            f'[[ups]]\nname = "{self.upsd.address("demo")}"\nuser = "secondary"\npassword = "secondarypw"\n'
            f"[policy]\npoll_online_s = 0.5\npoll_battery_s = 0.3\n{policy}\n"
        )

    def hear(self, word: str) -> None:
        """Until the manager is told *word*."""
        while not self.said or word not in self.said[-1]:
            self.said.append(self.manager.recv(4096).decode())

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def call(self, *arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "powerguard.cli", *arguments, "--run-dir", str(self.run_dir)],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def close(self) -> None:
        if self.daemon.poll() is None:
            self.daemon.kill()
            self.daemon.wait(10)
        self.manager.close()
        self.upsd.close()
        shutil.rmtree(self.run_dir, ignore_errors=True)


@pytest.fixture
def service(tmp_path) -> Iterator[Service]:
    made = Service(tmp_path)
    yield made
    made.close()


def eventually(condition: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_life_under_systemd(service):
    """READY, watchdog, status, reload good and bad, SIGTERM: STOPPING, LOGOUT, exit code 0, every log line JSON."""
    service.hear("WATCHDOG=1")
    eventually(lambda: service.upsd.numlogins("demo") == 1)
    service.write("margin_s = 20")
    service.daemon.send_signal(signal.SIGHUP)
    service.hear("RELOADING=1\nMONOTONIC_USEC=")
    service.hear("READY=1")
    service.write("margin_s = -20\nhalt_S = 3")
    service.daemon.send_signal(signal.SIGHUP)
    service.hear("RELOADING=1")
    service.hear("READY=1")
    service.daemon.send_signal(signal.SIGTERM)
    service.hear("STOPPING=1")

    assert service.daemon.wait(20) == 0
    eventually(lambda: service.upsd.numlogins("demo") == 0)
    lines = service.lines()
    assert "policy.margin_s: 10.0 -> 20.0" in [line.get("what") for line in lines]
    problems = [line["what"] for line in lines if line["message"] == "problem"]
    assert len(problems) == 2
    assert lines[-1]["message"] == "stopped"
    assert "secondarypw" not in service.log.read_text()
    asked = [question for question in service.upsd.asked if question.startswith("LOG")]
    assert asked[-1] == "LOGOUT"


def test_a_running_daemon_takes_the_word_of_a_replaced_battery(service):
    """It is asked, not gone round: the daemon keeps the day, shows it, and refuses a UPS that it doesn't have."""
    code, said = service.call("battery", "replaced", "demo", "--on", "2026-05-17")
    assert (code, "battery of 2026-05-17" in said) == (0, True)
    kept = service.folder / "state" / "learned.json"
    eventually(lambda: kept.exists() and "2026-05-17" in kept.read_text())
    (battery,) = json.loads(service.call("battery", "list", "--json")[1])["batteries"]
    assert battery["installed"] == "2026-05-17"
    code, said = service.call("battery", "replaced", "other")
    assert (code, "is no UPS of this node" in said) == (1, True)


def test_orders_are_answered_with_what_came_of_them(service):
    """park and resume work and say so; flush without a job is refused with the reason and code 1."""
    eventually(lambda: json.loads(service.call("status", "--json")[1])["on_battery"] is False)

    assert service.call("flush") == (1, "powerguard: flush: no job is registered\n")
    code, said = service.call("park")
    assert (code, "the operator's order" in said) == (0, True)
    assert json.loads(service.call("status", "--json")[1])["phase"] == "parked"
    assert service.call("resume")[0] == 0
    code, said = service.call("resume")
    assert (code, said.startswith("powerguard: resume: ")) == (1, True)
    code, said = service.call("status")
    assert code == 0
    assert "no training job is registered" in said
    assert "held" in said


@pytest.mark.parametrize(
    ("folder", "why"),
    [("", "keeps its journal in"), ("run", "keeps its journal in"), ("state", "serves")],
    ids=["as it is", "own run_dir", "own state_dir"],
)
def test_a_second_daemon_of_the_node_is_refused(service, tmp_path, folder, why):
    """One daemon a run_dir and a state_dir: the second ends with one line and code 8, the first goes on."""
    config = tmp_path / "second.toml"
    text = service.config.read_text()
    config.write_text(re.sub(rf'{folder}_dir = "(.*)"', rf'{folder}_dir = "{tmp_path}/own"', text) if folder else text)
    done = subprocess.run(
        [sys.executable, "-m", "powerguard.cli", "run", "-c", str(config)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip

    assert done.returncode == 8
    assert f"another daemon {why}" in done.stderr
    assert done.stderr.count("\n") == 1
    assert service.daemon.poll() is None


def test_an_outage_is_one_line_a_fact(service):
    """On battery and back: each change is one line at its level, nothing is said at every poll."""
    eventually(lambda: json.loads(service.call("status", "--json")[1])["on_battery"] is False)
    service.upsd.set("demo", {"ups.status": "OB DISCHRG"})
    eventually(lambda: any(line["message"].startswith("on battery") for line in service.lines()))
    count = len(service.lines())
    time_until = time.monotonic() + 2.0
    while time.monotonic() < time_until:
        service.hear("WATCHDOG=1")
        service.said.append("")

    assert len(service.lines()) <= count + 1
    (line,) = [line for line in service.lines() if line["message"].startswith("on battery")]
    assert (line["level"], line["phase"]) == ("warning", "on_battery")
