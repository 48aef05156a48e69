"""A small daemon (the real agreement on the real bus, commanded by hand) and ranks in processes of their own."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import queue
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from powerguard.core import agree
from powerguard.core.job import Job
from powerguard.core.messages import Purpose
from powerguard.core.policy import Policy
from powerguard.core.types import Actions, Announce, RankReport, Send
from powerguard.node.bus import Bus

pytest.importorskip("torch")

RANK_SCRIPT = Path(__file__).parent / "rank_script.py"


class Daemon:
    """Serves a socket from a thread. Its state lives in *journal*: `kill` and `start` are a crash and a restart."""

    def __init__(self, path: Path, policy: Policy) -> None:
        self.path, self.policy = path, policy
        self.journal = b"{}"
        self.sent: list[tuple[int, object]] = []
        self.heard: list[RankReport] = []
        self.said: list[Announce] = []
        self.seq = 0
        self.on_send: Callable[[Send], object] = bool
        self._lock = threading.RLock()
        self._alive = threading.Event()
        self._thread: threading.Thread | None = None
        self._bus: Bus | None = None

    def start(self) -> Daemon:
        self._inbox: queue.SimpleQueue[RankReport] = queue.SimpleQueue()
        self._bus = Bus(self.path, put=self._inbox.put, clock=time.monotonic)
        self._alive.set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def kill(self) -> None:
        """Ends at once: what it had in its hands is lost, what it had journalled isn't."""
        self._alive.clear()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if self._bus is not None:
            self._bus.close(0.0)
        self._bus = None

    def kill_soon(self) -> None:
        """As `kill`, for use from within `on_send`."""
        self._alive.clear()

    @property
    def jobs(self) -> dict[str, Job]:
        return msgspec.json.decode(self.journal, type=dict[str, Job])

    @property
    def job(self) -> Job:
        (job,) = self.jobs.values()
        return job

    @property
    def outcome(self) -> str:
        return self.job.outcome

    def _run(self) -> None:
        while self._alive.is_set():
            reports = []
            with contextlib.suppress(queue.Empty):
                reports.append(self._inbox.get(timeout=0.02))
                while True:
                    reports.append(self._inbox.get_nowait())
            with self._lock:
                self.heard += reports
                now = time.monotonic()
                assert self._bus is not None
                jobs, actions = agree.absorb(self.policy, self.jobs, reports, self._bus.pages(now), now, node="test")
                for name, job in jobs.items():
                    jobs[name], more = agree.tick(self.policy, job, now, budget_s=None)
                    actions += more
                self._commit(jobs, actions)

    def _commit(self, jobs: dict[str, Job], actions: tuple[Actions, ...]) -> None:
        self.journal = msgspec.json.encode(jobs)
        for action in actions:
            if isinstance(action, Announce):
                self.said.append(action)
            if not isinstance(action, Send) or self._bus is None:
                continue
            self.on_send(action)
            if not self._alive.is_set():
                return
            self.sent.append((action.rank, action.message))
            self._bus.send(action.job, action.rank, action.message)

    def _command(self, change: Callable[[Job], agree.Outcome]) -> None:
        with self._lock:
            job, actions = change(self.job)
            self._commit({job.name: job}, actions)

    def order(self, purpose: Purpose, *, budget_s: float | None = None) -> int:
        self.seq += 1
        seq, now = self.seq, time.monotonic()
        self._command(
            lambda job: agree.order(
                self.policy, job, seq=seq, event="ev", purpose=purpose, budget_s=budget_s, reason="mains lost", now=now
            )
        )
        return seq

    def resume(self) -> None:
        self._command(lambda job: agree.resume(self.policy, job, "mains back", time.monotonic()))

    def halt(self) -> None:
        self._command(lambda job: agree.quiesce(self.policy, job, self.seq, "battery nearly flat", time.monotonic()))
        self._command(lambda job: agree.leave(self.policy, job, 75, "battery nearly flat", time.monotonic()))


@pytest.fixture
def policy() -> Policy:
    """Short bounds, so that a test sees them pass."""
    return Policy(prepare_max_s=1.0, hold_max_s=3.0, seal_max_s=2.0, exit_wait_s=3.0, flush_max_s=20.0)


@pytest.fixture
def daemon(tmp_path: Path, policy: Policy) -> Iterator[Daemon]:
    """A running daemon; a test may kill and start it."""
    running = Daemon(tmp_path / "d.sock", policy).start()
    yield running
    running.kill()


NURSERY = multiprocessing.get_context("forkserver")
NURSERY.set_forkserver_preload(
    ["torch", "torch._dynamo", "powerguard.train.attach", "powerguard.train.saver", "powerguard.train.resume"]
)


class Process:
    """A rank in a process of its own, with the log of what it did.

    *bare*: an interpreter of its own, which takes seconds to start; else a child of a process that has imported torch.
    """

    def __init__(self, folder: Path, socket: Path, rank: int, world: int, options: dict[str, object]) -> None:
        self.rank = rank
        self.log = folder / f"rank-{rank}-{time.monotonic_ns()}.log"
        self.err = self.log.with_suffix(".err")
        bare = options.pop("bare", False)
        wish = json.dumps({"dir": str(folder / "ckpt"), "socket": str(socket), "rank": rank, "world": world, **options})
        if bare:
            with self.err.open("wb") as err:
                self.child: Any = subprocess.Popen([sys.executable, str(RANK_SCRIPT), str(self.log), wish], stderr=err)
        else:
            self.child = NURSERY.Process(
                target=runpy.run_path,
                args=(str(RANK_SCRIPT), {"LOG": str(self.log), "WISH": wish, "ERR": str(self.err)}, "rank"),
            )
            self.child.start()

    @property
    def pid(self) -> int:
        return int(self.child.pid)

    def ended(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self.child.poll() if isinstance(self.child, subprocess.Popen) else self.child.exitcode

    def lines(self) -> list[dict[str, object]]:
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in self.log.read_text().splitlines(True) if line.endswith("\n")]
        return []

    @property
    def step(self) -> int:
        """The newest step it has completed."""
        return max((int(str(line["step"])) for line in self.lines() if "step" in line), default=-1)

    def found(self, key: str) -> object:
        return next((line[key] for line in self.lines() if key in line), None)

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, within_s: float = 90.0) -> int:
        ends = time.monotonic() + within_s
        while (code := self.ended()) is None:
            assert time.monotonic() < ends, f"rank {self.rank} still runs: {self.err.read_text()[-2000:]}"
            time.sleep(0.01)
        return code

    def end(self) -> None:
        if self.ended() is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)
            self.wait()


@pytest.fixture
def ranks(tmp_path: Path, daemon: Daemon, eventually: Callable[..., None]) -> Iterator[Callable[..., list[Process]]]:
    """Starts ranks and waits until they train and are registered."""
    started: list[Process] = []

    def start(
        world: int, *, wait: bool = True, only: tuple[int, ...] | None = None, **options: object
    ) -> list[Process]:
        chosen = range(world) if only is None else only
        new = [Process(tmp_path, daemon.path, rank, world, options) for rank in chosen]
        started.extend(new)
        if wait:
            eventually(lambda: all(process.step >= 1 or _dead(process) for process in new), 60.0)
            eventually(lambda: daemon.jobs and {p.rank for p in new} <= set(daemon.job.members), 20.0)
        return new

    yield start
    for process in started:
        process.end()


def _dead(process: Process) -> bool:
    if process.ended() is None:
        return False
    raise AssertionError(f"rank {process.rank} ended: {process.err.read_text()[-2000:]}")


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Waits, bounded, until a condition holds; patient, for machines that do other things as well."""

    def wait(condition: Callable[[], object], within_s: float = 60.0) -> None:
        ends = time.monotonic() + within_s
        while not (value := condition()):
            assert time.monotonic() < ends, f"not within {within_s} s; last seen: {value!r}"
            time.sleep(0.02)

    return wait
