"""A real daemon for a drill or a test: `powerguard run` in a private folder, halting into a file, without root."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from powerguard.drill.processes import Herd
from powerguard.errors import DrillFailed

_PACKAGE = Path(__file__).resolve().parent.parent


class DaemonProcess:
    """The daemon of one node in several lives. *folder* keeps what it writes; its sockets are elsewhere."""

    def __init__(self, folder: Path, feed: str, policy: Mapping[str, float | str], herd: Herd) -> None:
        self.folder, self.feed, self.policy = folder, feed, dict(policy)
        self.life = 0
        self.marker = folder / "halted"  # the file that the halt command makes
        # a socket's path has at most 107 bytes
        self.run_dir = Path(tempfile.mkdtemp(prefix="pg-drill-"))
        self._herd = herd
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """A new life with a new journal, as after a boot."""
        self.life += 1
        self.marker.unlink(missing_ok=True)
        self.state_dir.mkdir(parents=True, exist_ok=True)
        self._config.write_text(self.configuration())
        self.again()

    def again(self) -> None:
        """The same life goes on in a new process, from its journal."""
        command = [sys.executable, "-m", "powerguard.cli", "run", "-c", str(self._config), "--really"]
        self._process = self._herd.start(command, self.log, env=environment(self.run_dir))

    @property
    def _config(self) -> Path:
        return self.folder / f"daemon-{self.life}.toml"

    @property
    def pid(self) -> int:
        """Its process; 0 without one."""
        return 0 if self._process is None else self._process.pid

    def stop(self, within_s: float) -> None:
        """The daemon is asked to end, as systemd would."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(within_s)

    def close(self) -> None:
        """Its sockets are gone. Ending the process is the herd's."""
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def check(self) -> None:
        """DrillFailed with its last words if it ended."""
        if self._process is not None and self._process.poll() is not None:
            raise DrillFailed(f"the daemon ended with {self._process.returncode}", todo=last_words(self.log))

    @property
    def listening(self) -> bool:
        """It can be asked."""
        return (self.run_dir / "control.sock").exists()

    @property
    def state_dir(self) -> Path:
        """Where this life's journal is."""
        return self.folder / f"state-{self.life}"

    @property
    def log(self) -> Path:
        """What this life prints."""
        return self.folder / f"daemon-{self.life}.log"

    def configuration(self) -> str:
        """Its file."""
        policy = "\n".join(f"{key} = {json.dumps(value)}" for key, value in self.policy.items())
        touch = shutil.which("touch") or "/usr/bin/touch"
        return (
            f'[node]\nname = "drill"\nrun_dir = "{self.run_dir}"\nstate_dir = "{self.state_dir}"\n\n'
            f'[[ups]]\nname = "{self.feed}"\n\n[policy]\n{policy}\n\n'
            f'[halt]\nmethod = "command"\ncommand = ["{touch}", "{self.marker}"]\ndelay_shutdown = false\n\n'
            '[log]\nformat = "json"\n'
        )


def environment(run_dir: Path) -> dict[str, str | None]:
    """What a process of the node needs to find this daemon, and this powerguard; None takes a variable away."""
    env: dict[str, str | None] = {"POWERGUARD_SOCKET": str(run_dir / "ranks.sock"), "PYTHONUNBUFFERED": "1"}
    # what another job in this shell would tell our ranks
    env |= dict.fromkeys(("SLURM_JOB_ID", "POWERGUARD_JOB_ID", "MASTER_ADDR", "MASTER_PORT"))
    env |= dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"))
    if (_PACKAGE.parent / "pyproject.toml").exists():  # a checkout, which need not be installed
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    return env


def last_words(path: Path) -> str:
    """The end of a log, in one line, for an error message."""
    with suppress(OSError):
        lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
        if lines:
            return f"{path} ends with: {lines[-1][:300]}"
    return f"{path} is empty"
