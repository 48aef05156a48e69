"""Three hosts, each with its own UPS, its own daemon and two ranks of one job; a shared folder for checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from powerguard.core.job import Order, Stage
from powerguard.core.messages import Purpose
from powerguard.errors import JournalError
from powerguard.journal import Tick, read
from powerguard.node import keyring
from powerguard.node.ask import CONTROL_SOCKET, Ask, ask
from powerguard.node.dial import new_pair
from powerguard.node.keyring import Trusted
from powerguard.sim.upsd import HEALTHY, SimUpsd
from tests.nodes.hosts import Hosts

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 90.0
START_S = 240.0
"""Six interpreters that import torch at once, on two cores that others use too."""
PORT = 9812
RANKS = 2  # on each host
POLICY = """
[policy]
snapshot = "always"
snapshot_after_s = 0.5
poll_online_s = 0.4
poll_battery_s = 0.3
resume_after_s = 1.5
margin_s = 2
flush_default_s = 3
flush_max_s = 60
prepare_max_s = 2
hold_max_s = 15
seal_max_s = 3
halt_s = 15
exit_wait_s = 3
park_max_s = 600
blind_save_s = 300
blind_halt_s = 300
time_scale = 0.1
"""
OUTAGE = {"ups.status": "OB DISCHRG", "battery.charge": "90", "battery.runtime": "600"}
LOW = {"ups.status": "OB DISCHRG LB", "battery.charge": "20", "battery.runtime": "30"}
EMPTY = {"battery.charge": "5", "battery.runtime": "4"}


class Host:
    """One node: a UPS, a daemon, ranks."""

    def __init__(self, rig: Rig, number: int) -> None:
        self.rig, self.number, self.name = rig, number, f"node{number}"
        self.folder = rig.folder / self.name
        self.folder.mkdir()
        self.run = Path(tempfile.mkdtemp(prefix=f"pg-{number}-"))  # short: a socket's path has 107 bytes
        self.state, self.marker = self.folder / "state", self.folder / "halted"
        self.upsd: SimUpsd = rig.hosts.inside(number, lambda: SimUpsd().start())
        self.upsd.replace("demo", {**HEALTHY, "battery.runtime": "900", "battery.voltage": "27.0"})
        self.daemon: subprocess.Popen[bytes] | None = None
        self.own = new_pair(self.name)
        keyring.keep_own(self.folder / "keys", self.own)
        halt = self.folder / "halt"
        halt.write_text(f"#!/bin/sh\necho x >> {self.marker}\n")
        halt.chmod(0o755)
        self.config = self.folder / "pg.toml"
        self.config.write_text(
            f'[node]\nname = "{self.name}"\nrun_dir = "{self.run}"\nstate_dir = "{self.state}"\n'
            f'[[ups]]\nname = "{self.upsd.address("demo")}"\n{rig.policy}'
            f'[peers]\nlisten = ":{PORT}"\nkeys = "{self.folder}/keys"\n'
            f'[halt]\nmethod = "command"\ncommand = ["{halt}"]\ndelay_shutdown = false\n[log]\nformat = "json"\n'
        )

    def start(self) -> None:
        """Starts the daemon, again after a kill as systemd would."""
        command = [sys.executable, "-m", "powerguard.cli", "run", "-c", str(self.config), "--really"]
        with (self.folder / "daemon.log").open("ab") as log:
            self.daemon = subprocess.Popen(
                self.rig.hosts.command(self.number, command), env=self.rig.env, cwd=self.folder, stdout=log, stderr=log
            )

    def kill(self) -> None:
        """SIGKILL for the daemon."""
        assert self.daemon is not None
        self.daemon.send_signal(signal.SIGKILL)
        self.daemon.wait(30)

    def status(self) -> dict:
        """The daemon's word; empty while it doesn't answer."""
        try:
            return ask(self.run / CONTROL_SOCKET, Ask("status"), 2.0).data
        except Exception:
            return {}

    @property
    def phase(self) -> str:
        return str(self.status().get("phase", "?"))

    def ticks(self) -> list[Tick]:
        """The decisions in its journal."""
        found: list[Tick] = []
        for path in sorted(self.state.glob("journal-*")):
            try:
                found += [record for record in read(path).records if isinstance(record, Tick)]
            except JournalError:
                continue  # its head is being written
        return found

    def order(self) -> Order | None:
        """The job's order, as its journal last had it."""
        states = [tick.state for tick in self.ticks() if tick.state is not None and "job" in tick.state.jobs]
        return states[-1].jobs["job"].order if states else None

    def seen(self, stage: Stage) -> bool:
        """Whether its journal says that a STOP has come as far as *stage*."""
        return any(
            order is not None and order.purpose is Purpose.STOP and order.stage is stage
            for tick in self.ticks()
            if tick.state is not None and "job" in tick.state.jobs
            for order in [tick.state.jobs["job"].order]
        )

    def log(self) -> str:
        """The end of the daemon's log."""
        path = self.folder / "daemon.log"
        return path.read_text()[-6000:] if path.exists() else ""

    def close(self) -> None:
        if self.daemon is not None and self.daemon.poll() is None:
            self.daemon.kill()
            self.daemon.wait(30)
        self.upsd.close()
        shutil.rmtree(self.run, ignore_errors=True)


class Rank:
    """A rank's process, be it a child of this one or of the nursery."""

    def __init__(self, own: subprocess.Popen[bytes] | None = None, exited: Path = Path()) -> None:
        self._own, self._exited = own, exited

    def poll(self) -> int | None:
        """Its exit code; None while it lives."""
        if self._own is not None:
            return self._own.poll()
        return int(self._exited.read_text()) if self._exited.exists() and self._exited.read_text() else None

    def close(self) -> None:
        """Ends it, if this is its parent."""
        if self._own is not None and self._own.poll() is None:
            self._own.send_signal(signal.SIGCONT)
            self._own.kill()
        if self._own is not None:
            self._own.wait(30)


class Rig:
    """The whole. `start`, `train`, then whatever the test does to it."""

    def __init__(self, folder: Path, count: int = 3, *, park: bool = False) -> None:
        self.folder, self.count = folder, count
        self.policy = POLICY + ('on_battery = "park"\n' if park else "")
        self.checkpoints = folder / "checkpoints"
        self.env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        self.hosts = Hosts(count)
        self.nodes: list[Host] = []
        self.ranks: list[Rank] = []
        self._nursery: subprocess.Popen[bytes] | None = None
        try:
            self.nodes += [Host(self, number) for number in range(count)]
        except BaseException:
            self.close()
            raise
        for one in self.nodes:
            for other in self.nodes:
                if other is not one:
                    public = Trusted(other.name, other.own.public, (Hosts.address(other.number),))
                    keyring.trust(one.folder / "keys", public)

    def start(self) -> None:
        """All daemons, until they answer."""
        for node in self.nodes:
            node.start()
        self.wait(lambda: all(node.status() for node in self.nodes), "daemons answer")

    def train(self, *, gloo: bool, wish: dict | None = None) -> None:
        """Two ranks on each host, until all train and every daemon knows of all."""
        world = self.count * RANKS
        specs = []
        for rank in range(world):
            number, local = divmod(rank, RANKS)
            socket = str(self.nodes[number].run / "ranks.sock")
            env = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": Hosts.address(0),
                "MASTER_PORT": "29511",
                "POWERGUARD_JOB_ID": "job",
                "GLOO_SOCKET_IFNAME": "eth0",
            }
            log = str(self.folder / f"rank-{rank}.jsonl")
            errors, exited = self.folder / f"rank-{rank}.err", self.folder / f"rank-{rank}.exit"
            errors.touch()
            if gloo:
                specs.append(
                    {
                        "host": self.hosts.names[number], "env": env, "log": log, "err": str(errors),
                        "exit": str(exited), "folder": str(self.checkpoints), "socket": socket, "wish": wish or {},
                    }
                )  # fmt: skip
                self.ranks.append(Rank(exited=exited))
                continue
            words = [str(Path(__file__).with_name("light_rank.py")), log, str(self.checkpoints), socket]
            with errors.open("ab") as err:
                command = self.hosts.command(number, [sys.executable, *words, json.dumps(wish or {})])
                child = subprocess.Popen(command, env={**self.env, **env}, cwd=self.folder, stdout=err, stderr=err)
                self.ranks.append(Rank(child))
        if gloo:
            command = [sys.executable, "-m", "tests.nodes.nursery", json.dumps(specs)]
            with (self.folder / "nursery.err").open("ab") as err:
                self._nursery = subprocess.Popen(command, env=self.env, cwd=ROOT, stdout=err, stderr=err)
        self.wait(lambda: all(self.step(rank) > 3 for rank in range(world)), "ranks train", START_S)
        self.wait(lambda: self.known() == world, "the leader knows all ranks")

    def known(self) -> int:
        """Ranks that the daemon on the master address knows."""
        return sum(len(job["ranks"]) for job in self.nodes[0].status().get("jobs", ()))

    def heard(self, rank: int) -> list[dict]:
        """What a rank has written down."""
        path = self.folder / f"rank-{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def step(self, rank: int) -> int:
        """The last step of a rank."""
        return max((event["step"] for event in self.heard(rank) if "step" in event), default=-1)

    def pid(self, rank: int) -> int:
        """Of a rank's Python process."""
        return next(event["pid"] for event in self.heard(rank) if "pid" in event)

    def exits(self, within_s: float = WAIT_S) -> list[int]:
        """The exit codes of all ranks, once they have left."""
        self.wait(lambda: all(rank.poll() is not None for rank in self.ranks), "ranks leave", within_s)
        return [rank.poll() or 0 for rank in self.ranks]

    def wait(self, condition: Callable[[], object], what: str, within_s: float = WAIT_S) -> None:
        """Until it holds, or fails with the logs."""
        end = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < end, f"not within {within_s:.0f} s: {what}\n{self.story()}"
            time.sleep(0.05)

    def story(self) -> str:
        """What a failed test shows."""
        parts = [f"---- {node.name} ({node.phase})\n{node.log()}" for node in self.nodes]
        for rank in range(len(self.ranks)):
            err = (self.folder / f"rank-{rank}.err").read_text()[-600:]
            parts.append(f"---- rank {rank}: {self.heard(rank)[-2:]} code {self.ranks[rank].poll()}\n{err}")
        return "\n".join(parts)

    def stop(self, rank: int, *, on: bool) -> None:
        """SIGSTOP for a rank's process, or SIGCONT."""
        os.kill(self.pid(rank), signal.SIGSTOP if on else signal.SIGCONT)

    def said(self, words: str) -> bool:
        """Whether some daemon has written that into its log."""
        return any(words in (node.folder / "daemon.log").read_text() for node in self.nodes)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        if self._nursery is not None:
            if self._nursery.poll() is None:
                self._nursery.terminate()
            self._nursery.wait(60)
        for node in self.nodes:
            node.close()
        self.hosts.close()
