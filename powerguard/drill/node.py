"""The drilled node: a real daemon and real ranks under torchrun, all in one private folder, without root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from powerguard.drill import accomplice
from powerguard.drill.daemon import DaemonProcess, environment
from powerguard.drill.plan import Plan
from powerguard.drill.processes import Herd

_SIZE = ("--batch", "4", "--length", "48", "--width", "128", "--layers", "4")
"""Of the model: 23 ms a step on one core of a 2-core cloud VM, 10 MB of state a rank."""
_RANKS_ENV = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
"""A drill takes no GPU from a job that runs here."""


def torchrun(plan: Plan, checkpoints: Path, trace: Path, pace_s: float) -> list[str]:
    """The command that trains *plan*'s run."""
    script = [
        "-m",
        "powerguard.drill.accomplice",
        "powerguard.drill.tiny_gpt",
        "--dir",
        str(checkpoints),
        "--trace",
        str(trace),
    ]
    run = ["--steps", str(plan.total_steps), "--seed", str(plan.seed), "--pace", str(pace_s)]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(plan.ranks), "--max-restarts", "0"]
    return [sys.executable, *launch, *script, *run, *_SIZE]


class Node:
    """One node in several lives, and beside it the same run that nobody interrupts."""

    def __init__(self, folder: Path, plan: Plan, feed: str, undisturbed: Path | None = None) -> None:
        """*undisturbed*: the trace of the same run, if somebody has trained it already."""
        self.folder, self._plan = folder, plan
        self.reference = undisturbed or folder / "undisturbed"
        self._trained_before = undisturbed is not None
        self.checkpoints = folder / "checkpoints"
        self.trace = folder / "trace"
        self._herd, self._other = Herd(), Herd()
        self.daemon = DaemonProcess(folder, feed, plan.policy(), self._herd)
        self.ranks: subprocess.Popen[bytes] | None = None
        self.undisturbed: subprocess.Popen[bytes] | None = None

    def train(self) -> None:
        """torchrun starts the ranks; the first life's steps are paced, a resumed run goes as fast as it can."""
        pace_s = self._plan.pace_s if self.daemon.life == 1 else 0.0
        command = torchrun(self._plan, self.checkpoints, self.trace, pace_s)
        env = environment(self.daemon.run_dir) | _RANKS_ENV
        if self.daemon.life == 1:
            env[accomplice.LATE] = accomplice.late(tuple(due.fault for due in self._plan.faults))
        self.ranks = self._herd.start(command, self.ranks_log, env=env)

    def train_undisturbed(self) -> None:
        """The same run in the time that the others leave unused, unless it is known."""
        if self._trained_before:
            return
        command = torchrun(self._plan, self.folder / "undisturbed-checkpoints", self.reference, 0.0)
        env = environment(self.folder / "nobody-there") | _RANKS_ENV
        self.undisturbed = self._other.start(command, self.undisturbed_log, env=env, niceness=5)

    @property
    def undisturbed_done(self) -> bool:
        """The undisturbed run is at its end."""
        return self._trained_before or (self.undisturbed is not None and self.undisturbed.poll() == 0)

    def cut(self) -> int:
        """The power is gone: every process at once. How many those were."""
        return self._herd.cut()

    def close(self) -> None:
        """Nothing of it is left running, and its sockets are gone."""
        self._herd.cut()
        self._other.cut()
        self.daemon.close()

    # ---- what it says ----------------------------------------------------------------------------

    @property
    def ranks_log(self) -> Path:
        """What torchrun and the ranks print in this life."""
        return self.folder / f"ranks-{self.daemon.life}.log"

    @property
    def undisturbed_log(self) -> Path:
        """The same of the other run."""
        return self.folder / "undisturbed.log"

    @property
    def journals(self) -> list[Path]:
        """Of all lives, the first one first."""
        return sorted(self.folder.glob("state-*/journal-*.jsonl"))

    def pid_of(self, rank: int) -> int:
        """The process of *rank*, from its own trace."""
        return int(last_line(self.trace / f"rank-{rank:05}.jsonl")["pid"])

    def daemon_pid(self) -> int:
        """The daemon's process."""
        return self.daemon.pid

    def daemon_again(self) -> None:
        """As systemd does when the daemon was killed."""
        self.daemon.again()

    def all_pids(self) -> list[int]:
        """Every living process of the node, but not the undisturbed run's."""
        return self._herd.pids()

    def steps(self) -> tuple[int, ...]:
        """The last step of each rank, as far as it was written; -1 = none yet."""
        lines = (last_line(self.trace / f"rank-{rank:05}.jsonl") for rank in range(self._plan.ranks))
        return tuple(int(line.get("step", -1)) for line in lines)


def last_line(path: Path) -> dict[str, int | str | float]:
    """The last whole JSON line of a file that is being written; {} if there is none."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 1024))
        for raw in reversed(file.read().split(b"\n")):
            with suppress(ValueError):
                value = json.loads(raw)
                if isinstance(value, dict):
                    return value
    return {}
