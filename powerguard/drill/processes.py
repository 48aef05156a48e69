"""The processes of a drilled node: started, found whatever became of their parents, and killed all at once.

Every process started here, and every one that those start, carries a mark in its environment; torchrun gives each rank
a session of its own, so process groups would miss them. Power is cut by freezing all of them first, so that none
sees another die, and then killing all.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

MARK = "POWERGUARD_DRILL"
_PR_SET_CHILD_SUBREAPER = 36
_DEATH_S = 10.0  # a killed process is gone within this, unless the kernel holds it


class Survivors(RuntimeError):
    """Processes outlived a SIGKILL: nothing about power cuts can be said on this machine."""


def adopt_orphans() -> None:
    """Become the parent of whatever loses its own, so that the dead are seen as dead at once (Linux ≥ 3.4)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Herd:
    """All processes of one node, in one life of it."""

    def __init__(self) -> None:
        self._mark = f"{MARK}={uuid4().hex}"
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self, argv: Sequence[str], log: Path, *, env: Mapping[str, str | None] | None = None, niceness: int = 0
    ) -> subprocess.Popen[bytes]:
        """Run *argv* in a session of its own; its output is appended to *log*. In *env* None takes a variable away."""
        name, _, value = self._mark.partition("=")
        wanted = {**os.environ, **(env or {}), name: value}
        if niceness:
            argv = ["nice", "-n", str(niceness), *argv]
        with log.open("ab") as out:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={key: each for key, each in wanted.items() if each is not None},
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def pids(self) -> list[int]:
        """Every living process of the herd; zombies are dead."""
        mark = self._mark.encode()
        return [pid for pid in _all_pids() if mark in _environ(pid) and _alive(pid)]

    def cut(self) -> int:
        """Kill everything at once; how many processes that were. Raises Survivors if one is still there after 10 s."""
        killed = self._freeze()
        for pid in killed:
            _signal(pid, signal.SIGKILL)
        end = time.monotonic() + _DEATH_S
        while left := self.pids():
            if time.monotonic() > end:
                raise Survivors(f"still alive after SIGKILL: {left}")
            for pid in left:
                _signal(pid, signal.SIGKILL)
            time.sleep(0.01)
        self._bury(killed)
        return len(killed)

    def _freeze(self) -> set[int]:
        """Stop all, again and again until no new one appears: a process that is stopped starts no other."""
        frozen: set[int] = set()
        for _ in range(50):
            new = set(self.pids()) - frozen
            if not new:
                break
            for pid in new:
                _signal(pid, signal.SIGSTOP)
            frozen |= new
        return frozen

    def _bury(self, killed: set[int]) -> None:
        for process in self._started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_DEATH_S)
        for pid in killed - {process.pid for process in self._started}:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environ(pid: int) -> list[bytes]:
    """The environment that *pid* was started with; empty if it is gone or not ours to read."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
