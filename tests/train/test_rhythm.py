"""Periodic saves by themselves: when they are due, what they leave, and what the record says of them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import powerguard  # noqa: E402
from powerguard.core.messages import Pace  # noqa: E402
from powerguard.errors import DirectoryError, UsageError  # noqa: E402
from powerguard.generations import generation_name, lives, scan  # noqa: E402
from powerguard.generations.lives import ANNOUNCED, FINISHED, Life  # noqa: E402
from powerguard.train.rhythm import FIRST_STEPS, GROWTH, Rhythm, seconds  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("text", "value"), [("90s", 90.0), ("5min", 300.0), ("1.5h", 5400.0), ("30d", 2592000.0), (7, 7.0)]
)
def test_times_as_people_write_them(text, value):
    """With units, or in seconds."""
    assert seconds(text, "mtbf") == value


@pytest.mark.parametrize("text", ["", "soon", "5 parsecs", "-1s", "0", "nan", 0, "0steps"])
def test_what_is_no_time_is_refused(tmp_path, text):
    """With what to give."""
    with pytest.raises(UsageError, match="save_every="):
        Rhythm(text, tmp_path, 1, Pace)


def test_a_number_of_steps_is_kept_over_restarts(tmp_path):
    """Saves fall on multiples, wherever the run began."""
    rhythm = Rhythm(10, tmp_path, 1, Pace)
    dues = []
    for began in (-1, 0, 9, 10, 13):
        rhythm.begin(began)
        dues.append(rhythm.due)

    assert dues == [0, 10, 10, 20, 20]


def test_an_interval_of_time_becomes_steps_and_grows_in_bounds(tmp_path, monkeypatch):
    """The first by a fixed number, each at most four times the one before; waiting for an outage is no step's time."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    rhythm = Rhythm("100s", tmp_path, 1, Pace)
    rhythm.begin(-1)
    dues = []
    for _ in range(4):
        dues.append(rhythm.due)
        step = rhythm.due
        now[0] += 0.5 * (step - rhythm._last) + 1000.0
        rhythm.waited(1000.0)
        rhythm.saved(step, 0, str)

    first = FIRST_STEPS - 1
    assert dues == [
        first,
        first + GROWTH * FIRST_STEPS,
        first + GROWTH * FIRST_STEPS + 200,
        first + GROWTH * FIRST_STEPS + 400,
    ]


def test_auto_is_rarer_the_more_failures_are_announced(tmp_path):
    """By the record in the directory: three announced ends and one without a word; and never faster than the disk."""
    pace = Pace(stage_s=2.0, write_s=30.0, fsync_s=1.0)
    plain = Rhythm("auto", tmp_path, 1, lambda: pace, "10d").optimum_s()
    for ended in (ANNOUNCED, ANNOUNCED, ANNOUNCED, ""):
        lives.bury(tmp_path, Life(started_at=0.0, seen_at=0.0, step=9, trained_s=10.0, ended=ended, settled=True))
    corrected = Rhythm("auto", tmp_path, 1, lambda: pace, "10d").optimum_s()
    busy = Rhythm("auto", tmp_path, 1, lambda: Pace(stage_s=1e-6, write_s=30.0, fsync_s=1.0), "10d").optimum_s()

    assert plain == pytest.approx(1860, rel=0.02)
    assert corrected == pytest.approx(2 * plain, rel=0.02)
    assert busy == 31.0


def attach(folder, **options):
    """A guard of a small state, without a daemon."""
    state = {"model": torch.nn.Linear(4, 4)}
    return powerguard.attach(state, folder, socket=folder / "nobody.sock", prove=False, reserve=False, **options)


def test_boundaries_save_by_themselves(tmp_path):
    """`save_every=4`: sealed generations of steps 4 and 8, and the run goes on after the newest."""
    with attach(tmp_path, save_every=4) as guard:
        guard.resume()
        for step in range(10):
            guard.boundary(step)

    assert [(g.step, g.sealed) for g in scan(tmp_path)] == [(8, True), (4, True)]
    with attach(tmp_path, save_every=4) as guard:
        assert guard.resume() == 9


@pytest.mark.parametrize("fails", [(10,), (20,), (40,), (10, 20), (30, 40)])
def test_a_save_that_fails_costs_no_other(tmp_path, capfd, fails):
    """What stands in the way of a write in the background: the log names its step, and the others are taken."""
    with attach(tmp_path, save_every=10, keep=9) as guard:
        guard.resume()
        for step in fails:  # a file where the generation's folder goes
            (tmp_path / generation_name(step, f"p{guard._checkpointer().attempt}")).write_text("")
        for step in range(45):
            guard.boundary(step)

    told = [line for line in capfd.readouterr().err.splitlines() if "a periodic save failed" in line]
    assert {g.step for g in scan(tmp_path) if g.sealed} == {0, 10, 20, 30, 40} - set(fails)
    assert len(told) == len(fails)
    assert all(f"step={step}" in line for step, line in zip(fails, told, strict=True))


def test_what_a_save_met_is_raised_by_the_next_that_is_called_for(tmp_path):
    """Also if an order waited for it in between."""
    with attach(tmp_path) as guard:
        guard.resume()
        (tmp_path / generation_name(1, f"p{guard._checkpointer().attempt}")).write_text("")
        guard.save(1)
        guard._saver.quiet(60.0)
        with pytest.raises(DirectoryError):
            guard.save(2, wait=True)


@pytest.mark.parametrize(("code", "ended"), [(None, FINISHED), (0, FINISHED), (3, "failed: SystemExit")])
def test_leaving_with_code_0_is_an_end_as_good_as_any(tmp_path, code, ended):
    """`sys.exit(guard.exit_code)` inside of the context."""
    guard = attach(tmp_path)
    guard.resume()
    guard.boundary(0)
    with pytest.raises(SystemExit), guard:
        sys.exit(code)

    assert lives.current(tmp_path).ended == ended


def test_a_life_that_ends_without_a_word_is_told_by_the_next(tmp_path, capfd):
    """Steps, seconds and GPU-hours that it cost, in the log, in the record and in `powerguard costs`."""
    with attach(tmp_path, save_every=4) as guard:
        guard.resume()
        for step in range(8):
            guard.boundary(step)
    dead = Life(
        started_at=1.0, seen_at=time.time(), step=29, trained_s=60.0, world_size=1, saves=2, blocked_s=0.2, every="4"
    )
    lives.write_current(tmp_path, dead)
    with attach(tmp_path, save_every=4) as guard:
        guard.resume()
        guard.boundary(5)
    past = lives.past(tmp_path)

    assert [(life.ended, life.lost_steps, life.lost_s) for life in past] == [("", 25, 50.0)]
    assert "the run was interrupted (without a word)" in capfd.readouterr().err
    words = [sys.executable, "-m", "powerguard.cli", "costs", str(tmp_path), "--every", "10s", "--json"]
    told = json.loads(subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout)
    assert (told["lost_steps"], told["lost_s"], told["interruptions"], told["announced"]) == (25, 50.0, 1, 0)
    asked = next(one for one in told["choices"] if one["what"] == "asked for")
    assert asked["lost_s"] == 5.0
    assert lives.current(tmp_path).ended == FINISHED


RANKS = """
import sys, time, torch, torch.distributed as dist, torch.multiprocessing as mp
import powerguard
def rank(r, folder, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=r, world_size=2)
    with powerguard.attach({"model": torch.nn.Linear(2, 2)}, folder, socket=folder + "/nobody", job="j",
                           save_every="1s", prove=False, reserve=False, keep=99) as guard:
        guard.resume()
        for step in range(100):
            time.sleep(0.02 if r == 0 else 0.001)        # ranks disagree on what a step takes
            guard.boundary(step)
            if step % 10 == 0:
                dist.barrier()
if __name__ == "__main__":
    mp.spawn(rank, (sys.argv[1], sys.argv[2]), nprocs=2)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_save_after_the_same_steps(tmp_path):
    """An interval of time, measured differently by each: every generation is whole."""
    import socket

    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    subprocess.run([sys.executable, str(script), str(folder), str(port)], check=True, timeout=240, cwd=Path.cwd())
    found = scan(folder)

    assert len(found) >= 2
    assert all(g.whole and g.sealed and g.world_size == 2 for g in found)
