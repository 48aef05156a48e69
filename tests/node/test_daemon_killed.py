"""The real daemon, killed with SIGKILL in each phase of an outage and started anew, goes on with the same event."""

from __future__ import annotations

import json
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

from powerguard.core.messages import Prepare, Purpose
from powerguard.core.types import Halt, Phase, Send
from powerguard.errors import JournalError
from powerguard.journal import Tick, read
from powerguard.node.ask import CONTROL_SOCKET, Ask, ask
from powerguard.sim.upsd import HEALTHY, SimUpsd

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0
POLICY = """
[policy]
snapshot = "always"
snapshot_after_s = 0.5
poll_online_s = 0.4
poll_battery_s = 0.3
resume_after_s = 1.5
margin_s = 2
flush_default_s = 3
flush_max_s = 30
prepare_max_s = 1
hold_max_s = 12
seal_max_s = 2
halt_s = 10
exit_wait_s = 1.5
blind_save_s = 30
blind_halt_s = 20
time_scale = 0.1
"""


class Rig:
    """A simulated upsd, the real daemon, two scripted ranks in processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = Path(tempfile.mkdtemp(prefix="pg-kill-"))  # short: a socket's path has 107 bytes
        self.state, self.marker = folder / "state", folder / "halted"
        self.env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        self.upsd = SimUpsd().start()
        self.upsd.replace("demo", {**HEALTHY, "battery.runtime": "900", "battery.voltage": "27.0"})
        halt = folder / "halt"
        halt.write_text(f"#!/bin/sh\necho x >> {self.marker}\n")
        halt.chmod(0o755)
        self.config = folder / "pg.toml"
        self.config.write_text(
            f'[node]\nname = "n"\nrun_dir = "{self.run}"\nstate_dir = "{self.state}"\n'
            f'[[ups]]\nname = "{self.upsd.address("demo")}"\n{POLICY}'
            f'[halt]\nmethod = "command"\ncommand = ["{halt}"]\n[log]\nformat = "json"\n'
        )
        self.daemon: subprocess.Popen[bytes] | None = None
        self.ranks: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        with (self.folder / "daemon.log").open("ab") as log:
            self.daemon = subprocess.Popen(
                [sys.executable, "-m", "powerguard.cli", "run", "-c", str(self.config), "--really"],
                env=self.env, cwd=self.folder, stdout=log, stderr=log,
            )  # fmt: skip
        wait(self._answers, self)

    def _answers(self) -> bool:
        assert self.daemon is not None
        assert self.daemon.poll() is None, (self.folder / "daemon.log").read_text()[-3000:]
        try:
            return ask(self.run / CONTROL_SOCKET, Ask("status"), 1.0).ok
        except Exception:
            return False

    def train(self) -> None:
        for rank in range(2):
            command = [sys.executable, str(Path(__file__).with_name("scripted_rank.py")), str(self.run / "ranks.sock")]
            log = self.folder / f"rank-{rank}.jsonl"
            self.ranks.append(subprocess.Popen([*command, "job", str(rank), "2", str(log)], env=self.env))
        wait(lambda: len(self.status()["jobs"]) == 1 and len(self.status()["jobs"][0]["ranks"]) == 2, self)
        wait(lambda: all((r["step"] or 0) > 3 for r in self.status()["jobs"][0]["ranks"]), self)

    def kill(self) -> None:
        assert self.daemon is not None
        self.daemon.send_signal(signal.SIGKILL)
        self.daemon.wait(10)

    def status(self) -> dict:
        return ask(self.run / CONTROL_SOCKET, Ask("status"), 5.0).data

    def ticks(self) -> list[Tick]:
        found: list[Tick] = []
        for path in sorted(self.state.glob("journal-*")):
            try:
                found += [r for r in read(path).records if isinstance(r, Tick)]
            except JournalError:
                continue  # its head is being written
        return found

    def heard(self, rank: int) -> list[dict]:
        return [json.loads(line) for line in (self.folder / f"rank-{rank}.jsonl").read_text().splitlines()]

    def close(self) -> None:
        for process in (self.daemon, *self.ranks):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait(10)
        self.upsd.close()
        shutil.rmtree(self.run, ignore_errors=True)


def wait(condition: Callable[[], object], rig: Rig) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, (rig.folder / "daemon.log").read_text()[-3000:]
        time.sleep(0.02)


@pytest.fixture
def rig(tmp_path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


PHASES = [Phase.ONLINE, Phase.ON_BATTERY, Phase.FLUSHING, Phase.PARKED, Phase.HALTING]


def once_each() -> list:
    """A kill in one phase alone: a quarter of a minute each, behind POWERGUARD_TEST_PHASES=all."""
    skip = pytest.mark.skipif(os.environ.get("POWERGUARD_TEST_PHASES") != "all", reason="POWERGUARD_TEST_KILLS=all")
    return [pytest.param([phase], marks=skip) for phase in PHASES]


@pytest.mark.parametrize("at", [PHASES, *once_each()], ids=lambda at: "+".join(p.value for p in at))
def test_killed_in_a_phase_it_goes_on_with_the_same_event(rig, at):
    """One event, one stop at one step, everything durable and sealed, ranks leave with 75, one order to power off."""
    rig.start()
    rig.train()

    def reach(phase: Phase) -> None:
        wait(lambda: phase in {tick.phase for tick in rig.ticks()}, rig)
        if phase in at:
            rig.kill()
            rig.start()

    if Phase.ONLINE in at:
        rig.kill()
        rig.start()
        wait(lambda: rig.status()["jobs"], rig)
    rig.upsd.set("demo", {"ups.status": "OB DISCHRG", "battery.charge": "90", "battery.runtime": "600"})
    reach(Phase.ON_BATTERY)
    rig.upsd.set("demo", {"ups.status": "OB DISCHRG LB", "battery.charge": "20", "battery.runtime": "30"})
    reach(Phase.FLUSHING)
    reach(Phase.PARKED)
    rig.upsd.set("demo", {"battery.charge": "5", "battery.runtime": "4"})
    reach(Phase.HALTING)
    wait(rig.marker.exists, rig)
    codes = [rank.wait(20) for rank in rig.ranks]

    ticks = rig.ticks()
    actions = [action for tick in ticks for action in tick.actions]
    stops = {
        m.seq
        for a in actions
        if isinstance(a, Send) and isinstance(m := a.message, Prepare) and m.purpose is Purpose.STOP
    }
    assert len(stops) == 1
    assert len({tick.state.event for tick in ticks if tick.state is not None and tick.state.event}) == 1
    assert sum(isinstance(action, Halt) for action in actions) == 1
    assert codes == [75, 75]
    for rank in range(2):
        heard = rig.heard(rank)
        assert {m["seq"] for m in heard if m["is"] == "Prepare" and m["purpose"] == "stop"} <= stops
        decided = {(m["seq"], m["step"]) for m in heard if m["is"] == "Decide" and m["purpose"] == "stop"}
        assert len(decided) == 1
        assert heard[-1]["step"] == next(iter(decided))[1]
    sealed = {m["generation"] for m in rig.heard(0) if m["is"] == "Sealed"}
    assert any(stop == int(name.rpartition("-")[2]) for name in sealed for stop in stops)
