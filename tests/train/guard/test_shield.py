"""What a launcher's signals do to an emergency save: nothing, until it is durable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from powerguard.core.messages import Purpose
from powerguard.generations import scan
from powerguard.train.shield import DEFERRED, shielded

pytestmark = [pytest.mark.torch, pytest.mark.slow]

RANK = """
import os, subprocess, sys, time, torch
import powerguard
from powerguard.train import single

folder, socket = sys.argv[1:]

class Worn:
    "Part of the state: in the emergency save, the launcher kills the process group while it is being taken apart."
    def state_dict(self):
        if single._current is not None and single._current._desk.stopping:
            # by a stranger: of their parent's SIGTERM workers die quietly
            subprocess.run(["kill", "-TERM", "--", f"-{os.getpgrp()}"], start_new_session=True)
            for worker in loader_iterator._workers:
                while open(f"/proc/{worker.pid}/stat").read().rpartition(")")[2].split()[0] != "Z":
                    time.sleep(0.01)             # dead; torch's SIGCHLD handler raises here
        return {"whole": True}
    def load_state_dict(self, state):
        pass

loader = torch.utils.data.DataLoader(list(range(10**6)), num_workers=1)
loader_iterator = iter(loader)
guard = powerguard.attach({"model": torch.nn.Linear(8, 8), "worn": Worn()}, folder, job="job", rank=0, world_size=1,
                          socket=socket)
for step in range(10**9):
    next(loader_iterator)
    time.sleep(0.01)
    guard.boundary(step)
"""


@pytest.mark.timeout(300)
def test_a_process_group_is_killed_in_the_middle_of_a_save(tmp_path, daemon, eventually):
    """As torchrun does it (killpg, workers and all): the save becomes durable, only then the rank dies of SIGTERM."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    words = [sys.executable, str(script), str(tmp_path / "checkpoints"), str(daemon.path)]
    with (tmp_path / "log").open("wb") as log:
        rank = subprocess.Popen(words, start_new_session=True, stdout=log, stderr=log)
    try:
        said = (tmp_path / "log").read_text
        eventually(
            lambda: (
                rank.poll() is not None or any(m.step > 2 for j in daemon.jobs.values() for m in j.members.values())
            ),
            120.0,
        )
        assert rank.poll() is None, said()
        daemon.order(Purpose.STOP)

        assert rank.wait(120.0) == -signal.SIGTERM, said()
        (generation,) = scan(tmp_path / "checkpoints")
        assert generation.whole
    finally:
        rank.kill()
        rank.wait()


def test_what_was_kept_comes_afterwards_and_handlers_are_as_before():
    """Each signal once, in its own handler."""
    got = []
    before = {number: signal.signal(number, lambda number, _frame: got.append(number)) for number in DEFERRED}
    try:
        mine = [signal.getsignal(number) for number in DEFERRED]
        with shielded():
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD):
                os.kill(os.getpid(), number)
            within = list(got)
        after = [signal.getsignal(number) for number in DEFERRED]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

    assert within == []
    assert sorted(got) == sorted([signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD])
    assert mine == after


def test_off_the_main_thread_it_is_nothing():
    """Only the main thread may set handlers; a save on another goes on without."""
    done = []

    def save():
        with shielded():
            done.append(True)

    thread = threading.Thread(target=save)
    thread.start()
    thread.join(60)

    assert done == [True]
