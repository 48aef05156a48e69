"""A live drill: real gloo training under a real daemon, drilled through the real command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from powerguard.drill import compare
from powerguard.drill.daemon import environment
from powerguard.drill.node import torchrun
from powerguard.drill.plan import choose
from powerguard.drill.processes import Herd
from powerguard.drill.trial import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]

PLAN = replace(choose("dip"), steps=120)
RANKS_ENV = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def live(daemon, out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`powerguard drill --live` against *daemon*."""
    command = [sys.executable, "-m", "powerguard.cli", "drill", "--live", "--run-dir", str(daemon.process.run_dir)]
    return subprocess.run(
        [*command, "--out", str(out), *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def herd():
    """Processes of a test, all gone after it."""
    each = Herd()
    try:
        yield each
    finally:
        each.cut()


def test_a_live_drill_changes_no_bit_of_training(ups, powerguard_daemon, herd, tmp_path):
    """Ranks stop at one step, are flushed and verified, go on in place, and every loss and parameter is the same."""
    env = environment(powerguard_daemon.process.run_dir) | RANKS_ENV
    command = torchrun(PLAN, tmp_path / "checkpoints", tmp_path / "drilled", 0.1)
    ranks = herd.start(command, tmp_path / "ranks.log", env=env)
    wait_for(lambda: min(powerguard_daemon.steps(), default=0) >= 8, 240.0, "the ranks to train")

    unasked = live(powerguard_daemon, tmp_path / "unasked")
    done = live(powerguard_daemon, tmp_path / "live", "--yes", "--json")

    assert 2 == unasked.returncode
    assert "say --yes" in unasked.stderr

    assert 0 == done.returncode, done.stderr
    result = json.loads(done.stdout)
    assert (result["verdict"], result["verified"], result["ok"]) == ("resumed in place", True, True)
    (parts,) = result["parts"]
    assert parts["same_processes"] is True
    assert parts["ranks"] == 2
    assert parts["bytes"] > 1_000_000
    assert all(parts[name] >= 0.0 for name in ("agree_s", "step_s", "stage_s", "write_s", "fsync_s", "seal_s"))
    assert result["need_s"] > 0.0
    assert result["spare_s"] == pytest.approx(result["runway_s"] - result["need_s"] - 1.5, abs=1.0)
    page = (tmp_path / "live" / "report.html").read_text()
    assert "Live drill" in page
    assert not powerguard_daemon.halted

    wait_for(lambda: ranks.poll() is not None, 300.0, "the run to finish")
    undrilled = torchrun(PLAN, tmp_path / "other", tmp_path / "undrilled", 0.0)
    other = herd.start(undrilled, tmp_path / "undrilled.log", env=environment(tmp_path / "nobody") | RANKS_ENV)
    wait_for(lambda: other.poll() is not None, 300.0, "the undrilled run to finish")
    drilled = compare.read(tmp_path / "drilled")
    compared = compare.compare(compare.read(tmp_path / "undrilled"), drilled, ranks=2, steps=PLAN.total_steps)

    assert (0, 0) == (ranks.returncode, other.returncode)
    assert [1, 1] == [len(drilled[rank]) for rank in (0, 1)]
    assert compared.bit_exact, compared.difference
    assert compared.losses_compared == 2 * PLAN.total_steps


def test_a_live_drill_is_refused_where_it_would_be_in_the_way(ups, powerguard_daemon, tmp_path):
    """Without a job, on battery, without a daemon: one line, no folder, and nothing was ordered."""
    powerguard_daemon.wait_for("online", 120.0)
    nobody = live(powerguard_daemon, tmp_path / "none", "--yes")
    ups.cut_mains()
    wait_for(lambda: powerguard_daemon.status.get("on_battery") is True, 120.0, "the outage to be seen")
    dark = live(powerguard_daemon, tmp_path / "none", "--yes")
    ups.restore_mains()
    command = [sys.executable, "-m", "powerguard.cli", "drill", "--live", "--run-dir", str(tmp_path)]
    away = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert (1, 1, 10) == (nobody.returncode, dark.returncode, away.returncode)
    assert "no training job is registered" in nobody.stderr
    assert "on battery" in dark.stderr
    assert [1, 1, 1] == [done.stderr.count("\n") for done in (nobody, dark, away)]
    assert not (tmp_path / "none").exists()
