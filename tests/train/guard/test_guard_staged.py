"""Staged states over real processes: ranks that train together, hang and die, their deputies, and a daemon's agreement.

The ranks wait for each other in every step, as in a collective: one that dies or stops hangs the others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from powerguard.core.messages import Plan, Purpose
from powerguard.errors import StateError
from powerguard.generations import latest, verify
from powerguard.generations.ledger import Ledger

pytestmark = [pytest.mark.torch, pytest.mark.slow]

EVERY = 5


@pytest.fixture(autouse=True)
def no_deputy_stays(tmp_path, eventually) -> Iterator[None]:
    """Deputies of ranks that a test has killed would wait a quarter of an hour for a word; SIGTERM ends them."""
    yield
    for path in Path("/dev/shm").glob("powerguard-stage.*.ledger"):
        ledger = Ledger.open(path)
        deputy, mine = ledger.deputy, ledger.facts.directory.startswith(str(tmp_path))
        ledger.close()
        if mine and deputy:
            with contextlib.suppress(ProcessLookupError):
                os.kill(deputy, signal.SIGTERM)
            eventually(lambda path=path: not path.exists())


@pytest.fixture
def policy(policy):
    """Deputies are processes of their own, and on a machine with all processors busy seconds late."""
    return replace(policy, hold_max_s=10.0)


def staged(daemon) -> dict[int, tuple[int, ...]]:
    return {rank: member.staged for rank, member in daemon.job.members.items()}


def still(pid: int) -> bool:
    """No thread of the process runs any more: a signal takes effect on each of them when it comes to run."""
    states = set()
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            states.add(path.read_text().rpartition(") ")[2][0])
    return states <= {"T", "Z", "X"}


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_the_newest_step_that_all_have_staged_is_sealed_and_loads(daemon, ranks, tmp_path, eventually, sign):
    """A rank killed or stopped in an outage: what all had staged becomes a sealed generation, and training goes on
    from exactly there, on all ranks.
    """
    first = ranks(2, stage_every=EVERY, together=True)
    eventually(lambda: all(len(steps) == 2 for steps in staged(daemon).values()) and len(staged(daemon)) == 2)
    first[1].signal(sign)
    eventually(lambda: still(first[1].pid))
    daemon.order(Purpose.STOP)
    eventually(lambda: daemon.job.order.stage.value in ("sealed", "lost"))
    order = daemon.job.order
    found = latest(tmp_path / "ckpt").generation

    assert ("sealed", Plan.STAGED, 0) == (order.stage.value, order.plan, order.step % EVERY)
    assert found is not None
    assert (order.generation, True) == (found.name, found.sealed)
    assert [] == verify(found)
    daemon.resume()
    for process in first:
        process.end()
    for leftover in tmp_path.glob("ckpt.*"):
        leftover.unlink()
    second = ranks(2, together=True)
    for process in second:
        assert order.step + 1 == process.found("first")
        assert order.step * (order.step + 1) / 2 == process.found("weight")


def test_ranks_that_hang_and_promise_all_the_same_leave_what_is_staged(daemon, ranks, tmp_path, eventually):
    """Training threads that never come to the stop step, listeners that answer: the second stop takes the copies."""
    ranks(2, stage_every=EVERY, hang_at=23)
    eventually(lambda: [22, 22] == [member.step for member in daemon.job.members.values()])
    daemon.order(Purpose.STOP)
    eventually(lambda: daemon.job.order.stage.value == "lost")
    assert daemon.job.again
    daemon.order(Purpose.STOP)
    eventually(lambda: daemon.job.order.stage.value == "sealed")

    found = latest(tmp_path / "ckpt").generation
    assert found is not None
    assert (found.step, []) == (20, verify(found))


def test_all_ranks_dead_still_leave_a_generation(daemon, ranks, tmp_path, eventually):
    """Both killed at once: their deputies make what both had staged durable, and it is whole."""
    first = ranks(2, stage_every=EVERY, together=True)
    eventually(lambda: all(len(steps) == 2 for steps in staged(daemon).values()) and len(staged(daemon)) == 2)
    for process in first:
        process.signal(signal.SIGKILL)
    daemon.order(Purpose.STOP)
    eventually(lambda: daemon.job.order.stage.value in ("sealed", "lost"))
    found = latest(tmp_path / "ckpt").generation

    assert found is not None
    assert daemon.job.order.generation == found.name
    assert 0 == found.step % EVERY


def test_nothing_is_left_in_shared_memory(daemon, ranks, eventually):
    """A run that ends takes its deputy and its copies along; while it runs, the deputy is in a session of its own."""
    (process,) = ranks(1, stage_every=EVERY, steps=120, step_s=0.05)
    pid = process.pid
    eventually(lambda: daemon.job.members[0].deputy_at is not None)
    (path,) = Path("/dev/shm").glob(f"powerguard-stage.{pid}.*.ledger")
    ledger = Ledger.open(path)
    deputy = ledger.deputy
    ledger.close()
    assert os.getsid(deputy) != os.getsid(pid)
    assert os.getpgid(deputy) != os.getpgid(pid)
    eventually(lambda: process.ended() is not None)

    assert 0 == process.ended()
    eventually(lambda: not list(Path("/dev/shm").glob(f"powerguard-stage.{pid}.*")))
    eventually(lambda: not _serving(pid))


def _serving(pid: int) -> list[str]:
    lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if f"powerguard-stage.{pid}." in line]


@pytest.mark.root
def test_too_little_shared_memory_is_said_with_the_numbers(tmp_path):
    """A shelf larger than its file system is refused before a byte of it is written; none of it remains."""
    if os.geteuid() != 0:
        pytest.skip("mounts a file system: needs root")
    import torch

    from powerguard.generations.ledger import Facts
    from powerguard.train.flush import Flusher
    from powerguard.train.log import Log
    from powerguard.train.staging import Staging

    small = tmp_path / "shm"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "none", str(small)], check=False).returncode:
        pytest.skip("tmpfs can't be mounted here")
    flusher = Flusher(tmp_path / "ckpt", rank=0, world_size=1, reserve=False)
    facts = Facts("job", 0, 1, os.getpid(), str(tmp_path / "s"), str(tmp_path / "ckpt"), "optimizer_step")
    try:
        with pytest.raises(StateError, match=r"takes 2 x 0\.\d+ GB more in .*, and only 0\.\d+ GB are free"):
            Staging(flusher, {"w": torch.zeros(4_000_000)}, facts, log=Log(), folder=small)
        assert [] == list(small.iterdir())
    finally:
        flusher.close()
        subprocess.run(["umount", str(small)], check=True)


def test_a_staged_state_is_what_a_save_would_write(tmp_path, eventually):
    """Byte for byte the same shard, and the same content, as the flush engine's own copy of the state."""
    import msgspec
    import torch

    from powerguard.generations.ledger import Facts
    from powerguard.generations.record import Content
    from powerguard.generations.shelf import SlotFile, read_content, slot_path
    from powerguard.train.flush import Flusher
    from powerguard.train.log import Log
    from powerguard.train.staging import Staging

    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last))
    state = {"model": model, "odd": {"x": torch.randn(7, 3).t(), "h": torch.ones(3, dtype=torch.bfloat16), "n": 0.1}}
    flusher = Flusher(tmp_path / "ckpt", rank=0, world_size=1, reserve=False)
    shm = tmp_path / "shm"
    shm.mkdir()
    facts = Facts("job", 0, 1, os.getpid(), str(tmp_path / "s"), str(tmp_path / "ckpt"), "optimizer_step")
    staging = Staging(flusher, state, facts, log=Log(), folder=shm)
    try:
        assert staging.stage(state, 3)
        saved = flusher.stage(state, 3)
        ledger = staging.shelf.ledger
        (line,) = ledger.lines()
        held = SlotFile(slot_path(ledger, line))
        content = msgspec.json.decode(read_content(ledger, line, held), type=Content)

        assert saved.slot is not None
        assert bytes(saved.slot.view[: saved.bytes]) == bytes(held.view[: line.data_bytes])
        assert saved.content == content
        held.close()
        del saved
        eventually(lambda: ledger.deputy)
    finally:
        staging.close()
        flusher.close()
