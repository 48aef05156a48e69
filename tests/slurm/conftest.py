"""A real Slurm on this machine, private to the test: munged, slurmctld and slurmd with files of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

NEEDED = ("slurmctld", "slurmd", "scontrol", "sbatch", "munged", "setpriv")
CONF = """ClusterName=powerguard
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={control}
SlurmdPort={node}
AuthType=auth/munge
AuthInfo=socket={root}/munge/sock
CryptoType=crypto/munge
SlurmUser=root
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool
SlurmctldPidFile={root}/ctld.pid
SlurmdPidFile={root}/d.pid
SlurmctldLogFile={root}/ctld.log
SlurmdLogFile={root}/d.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
KillWait=5
JobRequeue=1
RequeueExit=75
PrologFlags=Alloc
Prolog={prolog}
MailProg=/bin/true
NodeName=localhost NodeAddr=127.0.0.1 NodeHostname=localhost CPUs=2 RealMemory=500 State=UNKNOWN
PartitionName=debug Nodes=localhost Default=YES MaxTime=INFINITE State=UP
"""


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Cluster:
    """One controller, one node named localhost."""

    def __init__(self, root: Path) -> None:
        self.root, self.prolog = root, root / "prolog.sh"
        self.env = {**os.environ, "SLURM_CONF": str(root / "slurm.conf")}
        for name in [name for name in self.env if name.startswith(("SLURM_JOB", "SBATCH"))]:
            del self.env[name]
        self._children: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """All three, until the node is idle."""
        for name in ("munge", "state", "spool"):
            (self.root / name).mkdir()
        key = self.root / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        shutil.chown(key, "munge", "munge")
        shutil.chown(self.root / "munge", "munge", "munge")
        self.prolog.write_text("#!/bin/sh\nexit 0\n")
        self.prolog.chmod(0o755)
        conf = CONF.format(control=_port(), node=_port(), root=self.root, prolog=self.prolog)
        (self.root / "slurm.conf").write_text(conf)
        files = [f"--{what}={self.root}/munge/{name}" for what, name in _MUNGE]
        self._child("setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", "munged", "-F", *files)
        self.until((self.root / "munge" / "sock").exists, "munged")
        self._child("slurmctld", "-D", "-c")
        self._child("slurmd", "-D", "-N", "localhost")
        self.until(lambda: self.call("sinfo", "-h", "-o", "%T", check=False).strip() == "idle", "an idle node")

    def call(self, *command: str, check: bool = True, **env: str) -> str:
        """One of Slurm's commands."""
        done = subprocess.run(command, env={**self.env, **env}, capture_output=True, text=True, timeout=60, check=False)
        assert not check or done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What slurmctld says of a job."""
        words = self.call("scontrol", "show", "job", number, "--oneliner").split()
        return dict(word.partition("=")[::2] for word in words)

    def node(self) -> str:
        """The node in one line."""
        return self.call("scontrol", "show", "node", "localhost", "--oneliner")

    def until(self, holds: Callable[[], object], what: str, within_s: float = 90.0) -> None:
        """Waits, bounded."""
        ends = time.monotonic() + within_s
        while not holds():
            log = self.root / "ctld.log"
            tail = log.read_text()[-1500:] if log.exists() else ""
            assert time.monotonic() < ends, f"no {what} within {within_s:.0f} s; {tail}"
            time.sleep(0.1)

    def _child(self, *command: str) -> None:
        out = (self.root / f"{len(self._children)}.out").open("wb")
        self._children.append(
            subprocess.Popen(command, env=self.env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        )
        out.close()

    def close(self) -> None:
        """Nothing is left."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.call("scancel", "--state=running", "--signal=KILL", "--full", check=False)
        for child in reversed(self._children):
            child.terminate()
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(10)
            if child.poll() is None:
                child.kill()
                child.wait()


_MUNGE = (("key-file", "key"), ("socket", "sock"), ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed"))


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of one node; skipped where Slurm isn't installed."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(
            f"needs {', '.join(missing)} (apt install slurmctld slurmd slurm-client munge)" if missing else "needs root"
        )
    # munged wants its folder, and all above it, closed to others' writing
    root = Path("/run") / f"powerguard-slurm-{os.getpid()}"
    root.mkdir(mode=0o755)
    each = Cluster(root)
    try:
        each.start()
        yield each
    finally:
        each.close()
        shutil.rmtree(root, ignore_errors=True)
