"""A simulated power cut leaves no process alive."""

import os
import signal
import sys
import time

from powerguard.drill.processes import Herd, adopt_orphans

FAMILY = """
import os, subprocess, sys, time
child = "import time; time.sleep(60)"
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
print("ready", flush=True)
time.sleep(60)
"""


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


def test_a_cut_reaches_children_in_other_sessions_and_orphans(tmp_path):
    """A child in its own session and a daemonised grandchild die with their parent, at once."""
    adopt_orphans()
    herd = Herd()
    log = tmp_path / "log"
    herd.start([sys.executable, "-c", FAMILY], log)
    wait_for(lambda: b"ready" in log.read_bytes() and len(herd.pids()) >= 3)
    assert herd.cut() >= 3
    assert herd.pids() == []


def test_a_cut_reaches_a_process_that_ignores_everything_else(tmp_path):
    """SIGTERM ignored, or stopped: cut all the same."""
    herd = Herd()
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
    )
    log = tmp_path / "log"
    process = herd.start([sys.executable, "-c", stubborn], log)
    wait_for(lambda: b"ready" in log.read_bytes())
    os.kill(process.pid, signal.SIGSTOP)
    assert herd.cut() == 1
    assert process.returncode == -signal.SIGKILL


def test_a_cut_touches_nobody_else(tmp_path):
    """Two nodes on one machine: cutting one leaves the other alone."""
    one, two = Herd(), Herd()
    for herd in (one, two):
        herd.start([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log")
    wait_for(lambda: one.pids() and two.pids())
    one.cut()
    assert one.pids() == []
    assert len(two.pids()) == 1
    two.cut()


def test_a_cut_of_nothing_is_nothing():
    """An empty herd is cut without complaint."""
    assert Herd().cut() == 0
