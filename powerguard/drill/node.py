"""The drilled node: a real daemon and real ranks under torchrun, all in one private folder, without root."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from powerguard.drill.plan import Plan
from powerguard.drill.processes import Herd
from powerguard.errors import DrillFailed

_PACKAGE = Path(__file__).resolve().parent.parent
_SIZE = ("--batch", "4", "--length", "48", "--width", "128", "--layers", "4")
"""Of the model: 23 ms a step on one core of a 2-core cloud VM, 10 MB of state a rank."""

# what another job in this shell would tell our ranks
_FOREIGN = ("SLURM_JOB_ID", "POWERGUARD_JOB_ID", "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE")


def torchrun(plan: Plan, checkpoints: Path, trace: Path, pace_s: float) -> list[str]:
    """The command that trains *plan*'s run."""
    script = ["-m", "powerguard.drill.tiny_gpt", "--dir", str(checkpoints), "--trace", str(trace)]
    run = ["--steps", str(plan.total_steps), "--seed", str(plan.seed), "--pace", str(pace_s)]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(plan.ranks), "--max-restarts", "0"]
    return [sys.executable, *launch, *script, *run, *_SIZE]


class Node:
    """One node in several lives. *folder* keeps what it wrote; sockets are in a short-lived folder of their own."""

    def __init__(self, folder: Path, plan: Plan, feed: str) -> None:
        self.folder, self._plan, self._feed = folder, plan, feed
        self.life = 0
        self.checkpoints = folder / "checkpoints"
        self.trace = folder / "trace"
        self.marker = folder / "halted"
        # a socket's path has at most 107 bytes
        self.run_dir = Path(tempfile.mkdtemp(prefix="pg-drill-"))
        self._herd = Herd()
        self._reference = Herd()
        self.daemon: subprocess.Popen[bytes] | None = None
        self.ranks: subprocess.Popen[bytes] | None = None
        self.reference: subprocess.Popen[bytes] | None = None

    # ---- lives -----------------------------------------------------------------------------------

    def boot(self) -> None:
        """The daemon starts; its journal is a new one, as a new boot's is."""
        self.life += 1
        self.marker.unlink(missing_ok=True)
        self.state_dir.mkdir(parents=True, exist_ok=True)
        config = self.folder / f"daemon-{self.life}.toml"
        config.write_text(self.configuration())
        command = [sys.executable, "-m", "powerguard.cli", "run", "-c", str(config), "--really"]
        self.daemon = self._herd.start(command, self.log("daemon"), env=self._env())

    def train(self) -> None:
        """torchrun starts the ranks; the first life's steps are paced, a resumed run goes as fast as it can."""
        pace_s = self._plan.pace_s if self.life == 1 else 0.0
        command = torchrun(self._plan, self.checkpoints, self.trace, pace_s)
        self.ranks = self._herd.start(command, self.log("ranks"), env=self._env())

    def train_reference(self) -> None:
        """The same run with nobody to interrupt it, in the time that the others leave unused."""
        command = torchrun(self._plan, self.folder / "reference-checkpoints", self.folder / "reference", 0.0)
        env = {**self._env(), "POWERGUARD_RUN_DIR": str(self.folder / "nobody-there")}
        self.reference = self._reference.start(command, self.folder / "reference.log", env=env, niceness=19)

    def cut(self) -> int:
        """The power is gone: every process at once. How many those were."""
        return self._herd.cut()

    def shut_down(self, within_s: float) -> None:
        """The daemon is asked to end, as systemd would."""
        if self.daemon is not None and self.daemon.poll() is None:
            self.daemon.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.daemon.wait(within_s)

    def close(self) -> None:
        """Nothing of it is left running, and its sockets are gone."""
        self._herd.cut()
        self._reference.cut()
        shutil.rmtree(self.run_dir, ignore_errors=True)

    # ---- what it says ----------------------------------------------------------------------------

    @property
    def state_dir(self) -> Path:
        """Of this life's daemon."""
        return self.folder / f"state-{self.life}"

    @property
    def journals(self) -> list[Path]:
        """Of all lives, the first one first."""
        return sorted(self.folder.glob("state-*/journal-*.jsonl"))

    def log(self, name: str) -> Path:
        """What "daemon" or "ranks" printed in this life."""
        return self.folder / f"{name}-{self.life}.log"

    def check_daemon(self, *, halted: bool) -> None:
        """DrillFailed with its last words if the daemon ended, unless the node has *halted*."""
        if self.daemon is not None and self.daemon.poll() is not None and not halted:
            raise DrillFailed(f"the daemon ended with {self.daemon.returncode}", todo=tail(self.log("daemon")))

    def pid_of(self, rank: int) -> int:
        """The process of *rank*, from its own trace."""
        return int(last_line(self.trace / f"rank-{rank:05}.jsonl")["pid"])

    def steps(self) -> tuple[int, ...]:
        """The last step of each rank, as far as it was written."""
        lines = (last_line(self.trace / f"rank-{rank:05}.jsonl") for rank in range(self._plan.ranks))
        return tuple(int(line.get("step", 0)) for line in lines)

    # ---- how it is set up ------------------------------------------------------------------------

    def configuration(self) -> str:
        """The daemon's file."""
        policy = "\n".join(f"{key} = {json.dumps(value)}" for key, value in self._plan.policy().items())
        touch = shutil.which("touch") or "/usr/bin/touch"
        return (
            f'[node]\nname = "drill"\nrun_dir = "{self.run_dir}"\nstate_dir = "{self.state_dir}"\n\n'
            f'[[ups]]\nname = "{self._feed}"\n\n[policy]\n{policy}\n\n'
            f'[halt]\nmethod = "command"\ncommand = ["{touch}", "{self.marker}"]\n\n[log]\nformat = "json"\n'
        )

    def _env(self) -> dict[str, str | None]:
        env: dict[str, str | None] = {
            **dict.fromkeys(_FOREIGN),
            "POWERGUARD_RUN_DIR": str(self.run_dir),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",  # a drill takes no GPU from a job that runs here
            "PYTHONUNBUFFERED": "1",
        }
        if (_PACKAGE.parent / "pyproject.toml").exists():  # a checkout, which need not be installed
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_PACKAGE.parent), os.environ.get("PYTHONPATH"))))
        return env


def tail(path: Path, lines: int = 12) -> str:
    """The last lines of a log, for an error message."""
    with suppress(OSError):
        return f"{path} ends with:\n" + "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    return f"{path} is empty"


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
