"""Drills as an operator runs them: a real daemon, real torch ranks, a power cut, and the same run afterwards."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from powerguard.generations import latest
from powerguard.sim.nut import missing

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_gpt.py"
FIELDS = {
    "scenario",
    "verdict",
    "ranks",
    "stop_step",
    "resumed_step",
    "lost_steps",
    "bit_exact",
    "flush_s",
    "spare_s",
    "report",
}


def drill(tmp_path, *words):
    """Runs a drill; its exit code, and the last line of its output."""
    command = [sys.executable, "-m", "powerguard.cli", "drill", *words, "--json", "--out", str(tmp_path / "drill")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    lines = done.stdout.splitlines()
    assert lines, done.stderr
    result = json.loads(lines[-1])
    assert set(result) == FIELDS
    assert Path(result["report"]).read_text().startswith("<!doctype html>")
    nothing_left(tmp_path)
    return done, result


def nothing_left(tmp_path):
    """No process that mentions this drill's folder is alive."""
    mine = str(tmp_path).encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        assert mine not in command or path.parent.name == str(os.getpid()), command


DRILLS = {
    "test_a_blackout_is_survived": ["blackout"],
    "test_a_dip_costs_one_snapshot": ["dip"],
    "test_a_blip_is_resumed_in_place": ["blip"],
    "test_a_killed_rank_is_told_as_it_is": ["blackout", "--kill-rank", "1"],
    "test_a_blackout_through_real_nut_is_survived": ["blackout", "--nut"],
}


@pytest.fixture(scope="module")
def drills(request, tmp_path_factory):
    """Those that are asked for, two at a time: most of a drill is waiting. By the test's name, folder and result."""
    asked = [item.name for item in request.session.items if item.name in DRILLS and item.module is request.module]
    folders = {name: tmp_path_factory.mktemp(name) for name in asked}
    with ThreadPoolExecutor(2) as pool:
        begun: dict[str, Future] = {
            name: pool.submit(drill, folders[name], *DRILLS[name])
            for name in asked
            if not ("--nut" in DRILLS[name] and missing())
        }
        yield {name: (folders[name], future) for name, future in begun.items()}
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def drilled(request, drills):
    """Its folder, how its drill ended, and what that said of itself."""
    if request.node.name not in drills:
        pytest.skip(missing())
    folder, future = drills[request.node.name]
    return folder, *future.result()


def test_a_blackout_is_survived(drilled):
    """Stopped at one step, sealed, halted before the battery was flat, resumed there, the same run in every bit."""
    _, done, result = drilled
    assert (done.returncode, result["verdict"]) == (0, "survived"), done.stderr
    assert result["resumed_step"] == result["stop_step"] > 15
    assert (result["lost_steps"], result["bit_exact"], result["ranks"]) == (0, True, 2)
    assert result["flush_s"] > 0
    assert result["spare_s"] > 0


def test_a_dip_costs_one_snapshot(drilled):
    """Mains back soon: nobody stopped, nothing lost."""
    _, done, result = drilled
    assert (done.returncode, result["verdict"]) == (0, "survived"), done.stderr
    assert result["stop_step"] is None
    assert (result["lost_steps"], result["bit_exact"]) == (0, True)


def test_a_blip_is_resumed_in_place(drilled):
    """Mains back while parked: the same processes go on."""
    _, done, result = drilled
    assert (done.returncode, result["verdict"]) == (0, "survived"), done.stderr
    assert result["resumed_step"] == result["stop_step"]
    assert (result["lost_steps"], result["bit_exact"]) == (0, True)


def test_a_killed_rank_is_told_as_it_is(drilled):
    """The node still halts in time, the newest whole generation resumes, and the verdict doesn't claim more."""
    folder, done, result = drilled
    assert (done.returncode, result["verdict"]) == (16, "survived with loss"), done.stderr
    assert result["lost_steps"] > 0
    assert result["bit_exact"] is True
    newest = json.loads((folder / "drill" / "facts.json").read_text())["newest_step"]
    assert result["resumed_step"] == newest


@pytest.mark.nut
def test_a_blackout_through_real_nut_is_survived(drilled):
    """The same with upsd and dummy-ups between the UPS and the daemon."""
    _, done, result = drilled
    assert (done.returncode, result["verdict"]) == (0, "survived"), done.stderr


def test_an_interrupted_drill_leaves_nothing_behind(tmp_path):
    """Ctrl-C while ranks train: every process is gone, and so are the sockets."""
    out = tmp_path / "drill"
    command = [sys.executable, "-m", "powerguard.cli", "drill", "blackout", "--out", str(out)]
    # Where tests run in a shell's background, SIGINT comes ignored, and Python would leave it so.
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    end = time.monotonic() + 60
    while not list(out.glob("trace/rank-*.jsonl")):
        assert time.monotonic() < end, "ranks never started"
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    nothing_left(tmp_path)
    config = (out / "daemon-1.toml").read_text()
    run_dir = next(line for line in config.splitlines() if line.startswith("run_dir")).split('"')[1]
    assert not Path(run_dir).exists()


def test_the_example_survives_a_blackout_under_the_fixtures(blackout):
    """What the documentation promises of the pytest plugin, with the example that it ships."""
    command = [sys.executable, EXAMPLE, "--dir", "{checkpoints}", "--save", "{out}/model.pt"]
    size = ["--steps", "140", "--batch", "2", "--width", "64", "--layers", "2", "--pace", "0.05"]
    survival = blackout.run([*command, *size], env={"OMP_NUM_THREADS": "1"}, within_s=180.0)
    survival.assert_resumed_exactly()
    assert latest(blackout.folder / "checkpoints").generation.step == survival.stop_step
