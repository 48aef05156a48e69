"""The hook in one process: what it refuses, what it does without a daemon, and what passes between it and one."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import structlog
import torch

import powerguard
from powerguard.core import page
from powerguard.core.messages import Notice, Purpose
from powerguard.core.types import Send
from powerguard.errors import CheckpointError, DirectoryError, StateError, UsageError
from powerguard.generations import latest, scan
from powerguard.generations.paces import Save
from powerguard.train.guard import GO
from powerguard.train.saver import Writing

pytestmark = pytest.mark.torch


@pytest.fixture
def state():
    """A small training state."""
    model = torch.nn.Linear(8, 8)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "note": [1]}


@pytest.fixture
def attach(tmp_path, state):
    """Attaches guards to *state*, without a daemon unless a socket is given, and closes them."""
    made = []

    def make(given=None, **options):
        options.setdefault("socket", tmp_path / "nobody.sock")
        guard = powerguard.attach(given or state, tmp_path / "ckpt", **options)
        made.append(guard)
        return guard

    yield make
    for guard in made:
        guard.close()


def fill(state, value):
    """Makes every weight *value*."""
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.fill_(value)


def at_once(action):
    """Does *action* on another thread, so that this one can wait in a boundary."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


# ---- without a daemon ------------------------------------------------------------------------------


def test_without_a_daemon_training_goes_on(attach, capfd):
    """No socket: said once on stderr, every boundary passes, nothing waits."""
    guard = attach()
    began = time.monotonic()
    assert all(guard.boundary(step) is GO for step in range(10_000))

    assert time.monotonic() - began < 2.0
    assert (guard.connected, guard.stopped, guard.exit_code, guard.step) == (False, False, 0, 9999)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("no powerguard daemon") == 1


def test_the_page_shows_the_step(attach):
    """The one store of a boundary is what the daemon reads."""
    guard = attach()
    guard.boundary(41)

    (path,) = Path("/dev/shm").glob(f"powerguard-page.{os.getpid()}.*")
    assert page.read(path.read_bytes()) == page.Page(os.getpid(), 41)
    guard.close()
    assert not path.exists()


def test_periodic_saves_are_resumed_from(attach, state):
    """`save` in the background and waiting; `resume` gives back the newest, bit by bit, and the step after it."""
    guard = attach(keep=2)
    assert guard.resume() == 0
    for step in range(4):
        fill(state, step + 0.5)
        state["note"].append(step)
        guard.boundary(step)
        guard.save(step, wait=step == 3)
    fill(state, 99.0)
    guard.close()
    again = attach()

    assert again.resume() == 4
    assert float(state["model"].weight.detach()[0, 0]) == 3.5
    assert again.resumed.values["note"] == [1, 0, 1, 2, 3]
    assert [g.step for g in scan(again._saver.flusher.directory) if g.sealed] == [3, 2]
    assert again.step == 3
    with pytest.raises(UsageError):
        again.boundary(2)
    assert again.boundary(4) is GO


def test_resume_says_what_it_skipped(attach, state, capfd):
    """A damaged newest generation is passed over, and one line tells which and why."""
    guard = attach(keep=3)
    guard.save(0, wait=True)
    guard.save(1, wait=True)
    guard.close()
    newest = latest(guard._saver.flusher.directory).generation.path
    shard = newest / "rank-00000" / "shard.safetensors"
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    capfd.readouterr()

    assert attach().resume() == 1
    err = capfd.readouterr().err
    assert "resumed from step-0000000000" in err
    assert "step-0000000001" in err


def test_nothing_that_can_be_trusted_is_an_error(attach):
    """All generations damaged: a run doesn't start from scratch without anybody knowing."""
    guard = attach()
    guard.save(0, wait=True)
    guard.close()
    shard = latest(guard._saver.flusher.directory).generation.path / "rank-00000" / "shard.safetensors"
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)

    with pytest.raises(CheckpointError):
        attach().resume()


def test_ranks_without_a_process_group_find_the_same_generation(tmp_path, state):
    """Two ranks, no torch.distributed: each verifies every part, so damage in rank 1's part turns rank 0 away too."""
    for step in (3, 7):
        for rank in (0, 1):
            with powerguard.attach(state, tmp_path, job="j", rank=rank, world_size=2, socket="/nobody") as guard:
                flusher = guard._saver.flusher
                flusher.write(flusher.stage(state, step), f"step-{step:010d}.ev-{step}")
    for damaged, first in ((False, 8), (True, 4)):
        if damaged:
            shard = tmp_path / "step-0000000007.ev-7" / "rank-00001" / "shard.safetensors"
            data = bytearray(shard.read_bytes())
            data[-100] ^= 1
            shard.write_bytes(data)
        with powerguard.attach(state, tmp_path, job="j", rank=0, world_size=2, socket="/nobody") as guard:
            assert guard.resume() == first


# ---- misuse ----------------------------------------------------------------------------------------


def test_steps_must_not_go_back(attach):
    """A step counted per epoch is found at once; the same step again is harmless."""
    guard = attach()
    guard.boundary(5)
    guard.boundary(5)

    with pytest.raises(UsageError, match="never go back"):
        guard.boundary(4)


def test_one_guard_a_process(attach):
    """A second guard is refused, unless the first is closed; a failed attach leaves no guard behind."""
    guard = attach()
    with pytest.raises(UsageError, match="guard already"):
        attach()
    guard.close()
    with pytest.raises(StateError):
        attach({"socket": object()})

    attach()


def test_a_state_that_cannot_be_saved_is_found_at_once(attach):
    """At attach, not in the emergency."""
    with pytest.raises(StateError):
        attach({"lock": threading.Lock()})


def test_a_directory_that_cannot_be_written_is_found_at_once(tmp_path, state):
    """At attach, in words."""
    (tmp_path / "file").write_text("")

    with pytest.raises(DirectoryError):
        powerguard.attach(state, tmp_path / "file" / "x", socket="/nobody")


def test_a_step_must_be_a_whole_number(attach):
    """A float is a programming error; numpy's and torch's integers are steps."""
    guard = attach()
    with pytest.raises(TypeError):
        guard.boundary(1.5)
    guard.boundary(torch.tensor(3))

    assert guard.step == 3


def test_after_close_a_boundary_is_nothing(attach):
    """Callbacks may outlive the guard."""
    guard = attach()
    guard.boundary(3)
    guard.close()
    guard.close()

    assert guard.boundary(4) is GO


def test_mutating_marks_its_window(attach):
    """Inside it is active, outside not, also after an exception."""
    guard = attach()
    window = guard.mutating()
    assert not window.active

    def step():
        with guard.mutating():
            assert window.active
            raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        step()
    assert not window.active


def test_only_our_threads_are_there_and_they_go(attach):
    """The listener blocks all signals, and no thread outlives `close`."""
    before = set(threading.enumerate())
    guard = attach()
    (listener,) = [thread for thread in threading.enumerate() if thread.name == "powerguard-listener"]
    status = Path(f"/proc/self/task/{listener.native_id}/status").read_text()
    blocked = int(next(line for line in status.splitlines() if line.startswith("SigBlk")).split()[1], 16)
    assert blocked & (1 << (signal.SIGTERM - 1))
    assert blocked & (1 << (signal.SIGINT - 1))
    assert listener.daemon
    guard.close()

    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"save_every": "5 parsecs"}, UsageError),
        ({"save_every": 10, "job": "j", "rank": 0, "world_size": 2}, StateError),  # no name for this start of the ranks
    ],
)
def test_an_attach_that_fails_leaves_nothing_behind(attach, tmp_path, monkeypatch, options, error):
    """No thread, no page that tells of a step, no room kept on the disk, and no guard in the way of the next one."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    attach().close()
    before = set(threading.enumerate())
    with pytest.raises(error):
        attach(**options)

    assert set(threading.enumerate()) <= before
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"powerguard-page.{os.getpid()}.")]
    assert sorted(path.name for path in (tmp_path / "ckpt").rglob("*ballast*")) == []
    attach()


def test_descriptors_do_not_leak(attach):
    """Attach and close, ten times over."""
    attach().close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        attach().close()

    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_without_torch_it_is_said(tmp_path):
    """`attach` without torch: one error that names the extra; the import itself needs nothing."""
    code = (
        "import sys; sys.modules['torch'] = None; import powerguard\n"
        "from powerguard import Guard, Verdict\n"
        "try: powerguard.attach({}, '.')\n"
        "except powerguard.errors.MissingDependency as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert "pip install 'powerguard[train]'" in done.stdout, done.stderr


def test_a_log_that_cannot_be_written_hurts_nobody(attach, monkeypatch):
    """stderr closed, as under some launchers: attach, resume and close go on in silence."""
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    guard = attach()
    guard.resume()
    guard.close()


def test_a_script_that_has_set_up_structlog_gets_the_lines(attach, capsys):
    """Lines go the script's way, with its processors, when it has one."""
    lines = []

    def keep(_logger, level, event):
        lines.append((level, event))
        raise structlog.DropEvent

    structlog.configure(processors=[keep])
    try:
        attach().close()
    finally:
        structlog.reset_defaults()

    assert [event["event"] for _, event in lines][:1] == ["guard attached"]
    assert lines[0][1]["rank"] == 0


# ---- with a daemon ---------------------------------------------------------------------------------


def test_a_daemon_that_appears_later_is_found(attach, daemon, eventually, capfd):
    """Started before the daemon, the guard is connected once there is one, and says so."""
    daemon.kill()
    guard = attach(socket=daemon.path)
    assert not guard.connected
    daemon.start()
    eventually(lambda: guard.connected)
    eventually(lambda: daemon.jobs)

    assert "guarded" in capfd.readouterr().err


def test_notices_are_there_to_be_read(attach, daemon, eventually):
    """The daemon's word on the runway reaches the training code."""
    guard = attach(socket=daemon.path)
    eventually(lambda: daemon.jobs)
    notice = Notice(1, 73.5, "mains lost")
    daemon._commit(daemon.jobs, (Send(daemon.job.name, 0, notice),))
    eventually(lambda: guard.notice is not None)

    assert guard.notice == notice


def test_a_beat_a_second_says_step_and_pace(attach, daemon, eventually):
    """The daemon knows the step and what a save takes, measured at attach."""
    guard = attach(socket=daemon.path)
    guard.boundary(7)
    eventually(lambda: daemon.jobs and daemon.job.members[0].step == 7)

    assert daemon.job.members[0].pace.write_s > 0
    assert daemon.job.members[0].pace.state_bytes > 0


@pytest.mark.slow
def test_the_state_at_the_stop_step_is_what_is_saved(attach, daemon, eventually, state, tmp_path):
    """SNAPSHOT copies at T: what training does afterwards never leaks in; STOP saves what is there at T."""
    guard = attach(socket=daemon.path, job="one")
    eventually(lambda: daemon.jobs)
    for purpose, done in ((Purpose.SNAPSHOT, "snapshotted"), (Purpose.STOP, "parked")):
        daemon.order(purpose)
        step = guard.step
        if purpose is Purpose.STOP:
            # once: a second one would wait for a parking that doesn't come again
            resumer = at_once(lambda: (eventually(lambda: daemon.outcome == "parked"), daemon.resume()))
        while daemon.outcome != done:
            step += 1
            fill(state, float(step))
            assert guard.boundary(step) is GO
            if purpose is Purpose.STOP and daemon.outcome == "idle":
                break
        stopped = daemon.job.order.step
        fill(state, -1.0)
        guard._saver.flusher.load(latest(tmp_path / "ckpt").generation, state)
        assert latest(tmp_path / "ckpt").generation.step == stopped
        assert float(state["model"].weight.detach()[3, 3]) == float(stopped)
    resumer.join(60)


@pytest.mark.slow
def test_a_parked_thread_lets_others_run_and_hears_signals(attach, daemon, eventually):
    """Parked, the GIL is free, and Ctrl-C gets through."""
    guard = attach(socket=daemon.path)
    eventually(lambda: daemon.jobs)
    daemon.order(Purpose.STOP)
    eventually(lambda: guard._armed)
    counted = []

    def count_and_interrupt():
        eventually(lambda: daemon.outcome == "parked")
        ends = time.monotonic() + 0.3
        while time.monotonic() < ends:
            counted.append(1)
        os.kill(os.getpid(), signal.SIGINT)

    def train():
        for step in range(100):
            guard.boundary(step)

    # Where tests run in a shell's background, SIGINT comes ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        at_once(count_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            train()
    finally:
        signal.signal(signal.SIGINT, before)

    assert len(counted) > 1000
    assert guard._desk.busy == ""


@pytest.mark.slow
def test_a_halt_gives_a_verdict(attach, daemon, eventually):
    """QUIESCE and EXIT: the boundary answers with a truthy verdict, its reason and 75; here the process stays."""
    guard = attach(socket=daemon.path, exit_on_halt=False)
    eventually(lambda: daemon.jobs)
    daemon.order(Purpose.STOP)
    at_once(lambda: (eventually(lambda: daemon.outcome == "parked"), daemon.halt()))
    verdict, step, ends = GO, 0, time.monotonic() + 60.0
    while not verdict and time.monotonic() < ends:
        verdict = guard.boundary(step)
        step += 1

    assert (bool(verdict), verdict.code, verdict.reason) == (True, 75, "battery nearly flat")
    assert (guard.stopped, guard.exit_code) == (True, 75)


@pytest.mark.slow
def test_a_write_that_fails_is_reported_and_training_lives(attach, daemon, eventually, state):
    """A state that can't be saved any more: FAILED with the reason, the order lost, RESUME lets training go on."""
    guard = attach(socket=daemon.path)
    eventually(lambda: daemon.jobs)
    state["model"].hidden = None
    guard._saver.state = {"lock": threading.Lock()}
    daemon.order(Purpose.STOP)
    at_once(lambda: (eventually(lambda: daemon.outcome == "lost"), daemon.resume()))
    step = 0
    while daemon.outcome != "idle":
        guard.boundary(step)
        step += 1

    assert "couldn't write" in daemon.job.why
    assert not daemon.job.again


@pytest.mark.slow
def test_a_stop_gives_the_snapshot_up_only_if_time_is_short(attach, daemon, eventually, tmp_path):
    """With time for both the snapshot being written is finished first; without, it is given up for the stop."""
    guard = attach(socket=daemon.path)
    saver = guard._saver
    for budget_s, given_up in ((None, False), (1000.0, False), (12.0, True), (5.0, False)):
        for _ in range(32):
            saver.flusher.meter.wrote(Save(1, 10.0, 0.0))  # as if a write took ten seconds
        writing = saver._writing = Writing(1, 10.0)
        threading.Timer(0.2, writing.done.set).start()
        saver._make_way(budget_s)
        assert writing.given_up.is_set() is given_up
