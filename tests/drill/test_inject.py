"""Faults done to real processes and to a real NUT server's answers."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from powerguard.drill import accomplice
from powerguard.drill.inject import ELSEWHERE, SHARD_MAX_BYTES, FaultyUps, Injector, children, refuse
from powerguard.drill.plan import PLANS
from powerguard.errors import UsageError
from powerguard.sim import faults as f
from powerguard.sim.battery import SimUps, UpsSpec
from powerguard.sim.clock import FakeClock
from powerguard.sim.upsd import SimUpsd

PARENT = "import subprocess, sys; subprocess.Popen(['sleep', '60']); print('ready', flush=True); sys.stdin.read()"


class Target:
    """Two processes: rank 0 with a child, and a daemon."""

    def __init__(self) -> None:
        self.again = 0
        self.rank = subprocess.Popen(
            [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self.daemon = subprocess.Popen(["sleep", "60"])
        assert self.rank.stdout is not None
        assert b"ready\n" == self.rank.stdout.readline()

    def pid_of(self, rank: int) -> int:
        assert 0 == rank
        return self.rank.pid

    def daemon_pid(self) -> int:
        return self.daemon.pid

    def daemon_again(self) -> None:
        self.again += 1

    def all_pids(self) -> list[int]:
        return [self.rank.pid, self.daemon.pid]

    def close(self) -> None:
        for pid in children(self.rank.pid):
            subprocess.run(["kill", "-9", str(pid)], check=False)
        for process in (self.rank, self.daemon):
            process.kill()
            process.wait(30)
        for stream in (self.rank.stdin, self.rank.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def target():
    each = Target()
    yield each
    each.close()


def state(pid: int) -> str:
    """One letter, as ps shows it; "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def wait_for(condition, within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
def test_processes_are_stopped_and_go_on(target):
    """A rank and the whole node sleep for their time; the daemon too."""
    clock = FakeClock(100.0)
    injector = Injector(target, None, clock)
    for fault, pids in (
        (f.RankStopped(for_s=2.0), [target.rank.pid]),
        (f.DaemonStopped(for_s=2.0), [target.daemon.pid]),
        (f.Suspended(for_s=2.0), target.all_pids()),
    ):
        injector.begin(fault)
        wait_for(lambda pids=pids: all(state(pid) == "T" for pid in pids))
        clock.advance(1.0)
        injector.look()
        assert all(state(pid) == "T" for pid in pids)
        clock.advance(1.5)
        injector.look()
        wait_for(lambda pids=pids: all(state(pid) not in "TZ" for pid in pids))


RANK = """import sys, threading, time

def tick(name):
    while True:
        sys.stdout.write(name)
        sys.stdout.flush()
        time.sleep(0.02)

threading.Thread(target=tick, args=("l",), daemon=True).start()
tick("t")
"""


@pytest.fixture
def willing(tmp_path):
    """A rank that takes part in a drill: its training thread writes `t`, its listener `l`."""
    (tmp_path / "rank_script.py").write_text(RANK)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}", "RANK": "0", accomplice.LATE: "0:0.1"}
    command = [sys.executable, "-m", "powerguard.drill.accomplice", "rank_script"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, bufsize=0) as process:
        yield process
        process.kill()


def ticks(process, least: int) -> str:
    """What is written from now on, at least so much."""
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    process.stdout.read()
    said = b""

    def enough() -> bool:
        nonlocal said
        said += process.stdout.read() or b""
        return len(said) >= least

    wait_for(enough)
    return said.decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "who_runs"), [(f.InEval(for_s=2.0), "l"), (f.GilHeld(for_s=2.0), ""), (f.InCompile(for_s=2.0), "l")]
)
def test_a_rank_takes_part_in_what_cannot_be_done_to_it(willing, fault, who_runs):
    """In evaluation the listener runs alone, with the interpreter held nobody does, and afterwards both again."""

    class Rank:
        def pid_of(self, rank: int) -> int:
            assert 0 == rank
            return willing.pid

    clock = FakeClock(100.0)
    injector = Injector(Rank(), None, clock)
    assert set(ticks(willing, 50)) == {"t", "l"}
    injector.begin(fault)
    wait_for(lambda: silent(willing) or who_runs)
    if who_runs:
        wait_for(lambda: set(ticks(willing, 20)) == {who_runs})
    else:
        assert not willing.stdout.read()
    clock.advance(2.5)
    injector.look()
    assert set(ticks(willing, 50)) == {"t", "l"}


def silent(process) -> bool:
    """It has written nothing for a fifth of a second."""
    process.stdout.read()
    time.sleep(0.2)
    return not process.stdout.read()


@pytest.mark.slow
def test_a_full_disk_is_a_limit_that_ends(target):
    """The rank may still write a little, and everything again when its time is over."""
    clock = FakeClock(100.0)
    injector = Injector(target, None, clock)
    before = resource.prlimit(target.rank.pid, resource.RLIMIT_FSIZE)

    injector.begin(f.DiskFull(for_s=5.0))
    during = resource.prlimit(target.rank.pid, resource.RLIMIT_FSIZE)
    clock.advance(6.0)
    injector.look()

    assert SHARD_MAX_BYTES == during[0]
    assert before == resource.prlimit(target.rank.pid, resource.RLIMIT_FSIZE)


@pytest.mark.slow
def test_processes_are_killed(target):
    """Loader workers, the daemon (which is started again after its time), and a rank."""
    clock = FakeClock(100.0)
    injector = Injector(target, None, clock)
    (worker,) = children(target.rank.pid)

    injector.begin(f.LoaderWorkersDead())
    wait_for(lambda: state(worker) in ("Z", ""))
    assert state(target.rank.pid) not in ("Z", "")
    injector.begin(f.DaemonOom(down_s=6.0))
    wait_for(lambda: target.daemon.poll() is not None)
    clock.advance(5.0)
    injector.look()
    assert 0 == target.again
    clock.advance(1.5)
    injector.look()
    assert 1 == target.again
    injector.begin(f.RankDead())
    wait_for(lambda: target.rank.poll() is not None)


def test_what_a_client_is_told_through_faults():
    """The values are changed as in the pure world, the link is broken as it is there, and both end."""
    clock = FakeClock(100.0)
    ups = SimUps(UpsSpec.small(60.0, 70.0), 1, load_pct=70.0)
    with SimUpsd() as upsd:
        said = FaultyUps("rack", ups, upsd, clock)
        said.publish(ups.variables())
        true = float(upsd.variables("rack")["battery.runtime"])
        said.ail(f.RuntimeScaled(factor=2.0, for_s=10.0), clock())
        said.ail(f.Waits(for_s=20.0), clock() + 10.0)
        said.publish(ups.variables())
        assert 2.0 * true == pytest.approx(float(upsd.variables("rack")["battery.runtime"]), rel=0.05)
        clock.advance(11.0)
        said.publish(ups.variables())
        assert {"ups.status": "WAIT"} == upsd.variables("rack")
        clock.advance(20.0)
        said.ail(f.DriverGone(), clock())
        said.publish(ups.variables())
        said.mend()
        said.publish(ups.variables())
        assert true == pytest.approx(float(upsd.variables("rack")["battery.runtime"]), rel=0.05)


def test_what_cannot_be_done_is_refused_beforehand():
    """Every fault is either done to processes or refused with its reason; the drills that ship use the former."""
    for name, kind in f.KINDS.items():
        if kind in ELSEWHERE:
            with pytest.raises(UsageError, match=name):
                refuse((kind(),))
        else:
            refuse((kind(),))
    with pytest.raises(UsageError, match="journals"):
        refuse((f.DaemonKilled(journal_lost=True),))
    for plan in PLANS.values():
        refuse(tuple(due.fault for due in plan.faults))
