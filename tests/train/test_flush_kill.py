"""SIGKILL at any instant of a save loses nothing that was durable."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from powerguard.generations import latest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

KILLS = int(os.environ.get("POWERGUARD_TEST_KILLS", "100"))
SAVER = Path(__file__).with_name("saver.py")


@pytest.mark.timeout(600)
def test_kills_at_random_instants(tmp_path):
    """After each of 100 kills, what was reported durable is there, verifies, and holds its step's values."""
    done = subprocess.run(
        [sys.executable, str(SAVER), str(tmp_path), str(KILLS), "1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert len(lines) == KILLS
    assert int(lines[-1].split("newest ")[1].split(",")[0]) > KILLS / 4


ONCE = """
import sys, torch
from powerguard.errors import DirectoryError
from powerguard.generations import generation_name, seal
from powerguard.train.flush import Flusher
f = Flusher(sys.argv[1], rank=0, world_size=1)
f.prepare({"w": torch.zeros(2_500_000)}, prove=False)
name = generation_name(2, "a")
try:
    w = f.write(f.stage({"w": torch.ones(2_500_000)}, 2), name)
    seal(sys.argv[1], name, step=2, world_size=1, shards=[w.record])
except DirectoryError as error:
    print("refused:", error)
    sys.exit(8)
"""


@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize(
    "inject",
    [
        "fsync:error=EIO:when=8",
        "fsync:error=EIO:when=9+",
        "pwrite64:error=ENOSPC:when=3+",
        "rename:signal=KILL:when=1",
        "pwrite64:retval=4096:when=2",
    ],
)
def test_real_failing_system_calls(flusher, save, tmp_path, inject):
    """The kernel's answers, injected by strace, end in success or a clear refusal, never in a wrong generation."""
    before = flusher()
    save(before, {"w": torch.zeros(1000)}, 1)
    before.close()
    call = inject.split(":")[0]
    trace = ["strace", "-f", "--seccomp-bpf", "-qq", "-o", "/dev/null", "-e", f"trace={call}", "-e", f"inject={inject}"]
    done = subprocess.run(
        [*trace, sys.executable, "-c", ONCE, str(tmp_path)], capture_output=True, text=True, check=False
    )
    found = latest(tmp_path)
    assert found.generation is not None, found.describe()
    if "retval" in inject:
        # the kernel claims to have written what it didn't: nobody can know that at the time, a load does
        assert found.generation.step == 1
        assert len(found.skipped) == 1
    elif done.returncode == 0:
        assert found.generation.step == 2
    else:
        assert done.returncode in (8, -9, 137), done.stderr[-2000:]
        assert ("refused: " in done.stdout) == (done.returncode == 8)
