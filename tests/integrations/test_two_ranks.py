"""Two real gloo ranks under a framework's own DDP: stopped after one step, though one is ahead; resumed bit by bit.

Accelerate here, in seconds. The Trainer's and Lightning's, each with a whole blackout, are in test_examples.py.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate", reason="accelerate isn't installed (make setup)")
pytest.importorskip("torchdata", reason="torchdata isn't installed (make setup)")

from powerguard.core.job import complete  # noqa: E402
from powerguard.core.messages import Purpose  # noqa: E402
from powerguard.generations import scan  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("accelerate_rank.py")
AT = 5
PATIENCE_S = 60.0


def start(folder, daemon):
    """Both ranks, as a launcher starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    ranks = []
    for rank in range(2):
        mine = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (folder / f"{rank}.log").open("wb") as log:
            command = [sys.executable, str(SCRIPT), str(folder), str(daemon.path)]
            ranks.append(subprocess.Popen(command, env=mine, stdout=log, stderr=subprocess.STDOUT))
    return ranks


def until(holds, ranks, folder):
    """Until *holds*; fails with a rank's last words where one ends badly, or after a minute."""
    ends = time.monotonic() + PATIENCE_S
    while not holds():
        broken = [rank for rank in ranks if rank.poll() not in (None, 0)]
        words = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
        assert not broken, words
        assert time.monotonic() < ends, words
        time.sleep(0.01)


def test_two_ranks_stop_after_one_step_and_come_back_bit_by_bit(tmp_path, outage):
    """The order finds rank 1 a boundary ahead: both stop after that step, and every later one is as if nobody had."""
    daemon, ranks = outage.daemon, start(tmp_path, outage.daemon)
    try:
        until(lambda: all((tmp_path / f"at-{rank}").exists() for rank in range(2)), ranks, tmp_path)
        until(lambda: any(complete(job) for job in daemon.jobs.values()), ranks, tmp_path)
        daemon.order(Purpose.STOP)
        until(lambda: daemon.job.order.step >= 0, ranks, tmp_path)
        (tmp_path / "ordered").touch()
        until(lambda: daemon.outcome == "parked", ranks, tmp_path)
        daemon.halt()
        until(lambda: all(rank.poll() == 0 for rank in ranks), ranks, tmp_path)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()

    (saved,) = scan(tmp_path / "run")
    assert (saved.whole, saved.sealed, saved.world_size) == (True, True, 2)
    assert saved.step == AT + 1
    for rank in range(2):
        lives = torch.load(tmp_path / f"lives-{rank}.pt")
        (whole, _), (before, halted), (after, end) = (lives[name] for name in ("whole", "cut", "again"))
        assert (halted, end) == (saved.step, -1)
        assert (min(after), max(before)) == (saved.step + 1, saved.step)
        together = before | after
        assert {step: torch.equal(weight, together[step]) for step, weight in whole.items()} == dict.fromkeys(
            range(1, 13), True
        )
