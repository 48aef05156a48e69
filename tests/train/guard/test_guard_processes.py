"""Ranks in processes of their own, over real sockets, with a daemon that comes and goes. No collective anywhere."""

from __future__ import annotations

import os
import signal
import time

import pytest

from powerguard.core.messages import Decide, Prepare, Promise, Purpose, Seal, SealWritten, Shard
from powerguard.generations import latest, verify

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def expected(step):
    """The weight after all steps up to *step*."""
    return float(sum(range(step + 1)))


def newest(tmp_path):
    """The newest generation that is whole and verifies."""
    return latest(tmp_path / "ckpt").generation


def steps_at(daemon):
    """The stop step of the order at hand."""
    return daemon.job.order.step


def test_a_snapshot_is_taken_at_one_step_while_training_goes_on(tmp_path, daemon, ranks, eventually):
    """SNAPSHOT: one sealed generation of one step; no rank waits longer than for its copy and the decision."""
    processes = ranks(3)
    daemon.order(Purpose.SNAPSHOT)
    eventually(lambda: daemon.outcome == "snapshotted")
    step = steps_at(daemon)
    eventually(lambda: all(process.step > step + 5 for process in processes))

    generation = newest(tmp_path)
    assert (generation.step, generation.sealed, generation.world_size) == (step, True, 3)
    assert verify(generation) == []
    assert max(line["waited"] for process in processes for line in process.lines() if "waited" in line) < 2.0


def test_a_stop_parks_all_at_one_step_and_resume_goes_on_in_place(tmp_path, daemon, ranks, eventually):
    """STOP: all wait at T with a durable state; RESUME: they train on, nothing lost; a second outage is a new order."""
    processes = ranks(2)
    for outage in (1, 2):
        daemon.order(Purpose.STOP)
        eventually(lambda: daemon.outcome == "parked")
        step = steps_at(daemon)
        time.sleep(0.3)
        assert [process.step for process in processes] == [step - 1, step - 1]  # noted after the boundary
        assert newest(tmp_path).step == step
        daemon.resume()
        eventually(lambda step=step: all(process.step > step + 5 for process in processes))
        assert daemon.outcome == "idle"
        assert newest(tmp_path).tag == f"ev-{outage}"
    for process in processes:
        assert [line["step"] for line in process.lines() if "step" in line] == list(range(process.step + 1))


def test_a_halt_ends_all_with_75_and_the_next_run_goes_on(tmp_path, daemon, ranks, eventually):
    """Snapshot, stop, halt: every rank leaves with code 75; a new run resumes after the stop step with its weights."""
    processes = ranks(2)
    daemon.order(Purpose.SNAPSHOT)
    eventually(lambda: daemon.outcome == "snapshotted")
    daemon.order(Purpose.STOP)
    eventually(lambda: daemon.outcome == "parked")
    step = steps_at(daemon)
    daemon.halt()

    assert [process.wait() for process in processes] == [75, 75]
    assert {process.found("verdict") for process in processes} == {"battery nearly flat"}
    daemon.kill()
    daemon.journal = b"{}"  # the node was off
    daemon.start()
    again = ranks(2, steps=step + 4, wait=False)
    assert [process.wait() for process in again] == [0, 0]
    assert [process.found("first") for process in again] == [step + 1, step + 1]
    assert [process.found("weight") for process in again] == [expected(step)] * 2


@pytest.mark.parametrize("teardown", [{"teardown_s": 60.0}, {"raise": True}, {"raise": True, "bare": True}])
def test_no_teardown_keeps_a_halted_rank_alive(daemon, ranks, eventually, teardown):
    """A teardown that hangs or raises: the process is gone within the grace, with the code that requeues."""
    (process,) = ranks(1, exit_grace_s=1.0, **teardown)
    daemon.order(Purpose.STOP)
    eventually(lambda: daemon.outcome == "parked")
    began = time.monotonic()
    daemon.halt()

    assert process.wait() == 75
    assert time.monotonic() - began < 10.0


@pytest.mark.parametrize("moment", [Prepare, Decide, Seal])
def test_the_daemon_dies_after_it_spoke_and_comes_back(tmp_path, daemon, ranks, eventually, moment):
    """Killed once PREPARE, DECIDE or SEAL was on its way: restarted, it ends the same order and gives no other."""
    processes = ranks(2)
    armed = [True]

    def on_send(send):
        if armed and isinstance(send.message, moment) and daemon.sent and isinstance(daemon.sent[-1][1], moment):
            armed.clear()
            daemon.kill_soon()

    if moment is Seal:

        def on_send(send):
            if armed and isinstance(send.message, Seal):
                armed.clear()
                daemon.kill_soon()

    daemon.on_send = on_send
    seq = daemon.order(Purpose.STOP)
    eventually(lambda: not armed)
    daemon.kill()
    time.sleep(0.3)
    daemon.start()
    eventually(lambda: daemon.outcome == "parked")

    assert (daemon.job.order.seq, len({p.step for p in processes})) == (seq, 1)
    assert newest(tmp_path).step == steps_at(daemon)
    daemon.resume()
    step = steps_at(daemon)
    eventually(lambda: all(process.step > step + 3 for process in processes))


def test_the_daemon_dies_without_a_journal_and_learns_the_job_again(tmp_path, daemon, ranks, eventually):
    """State lost altogether: the ranks greet the new daemon, and the next order succeeds."""
    ranks(2)
    daemon.kill()
    daemon.journal = b"{}"
    daemon.start()
    eventually(lambda: daemon.jobs and len(daemon.job.members) == 2)
    daemon.order(Purpose.STOP)
    eventually(lambda: daemon.outcome == "parked")

    assert newest(tmp_path).step == steps_at(daemon)


def test_alone_after_the_promise_ranks_save_at_their_edge(tmp_path, daemon, ranks, eventually, policy):
    """The daemon promises were made to never comes back: each rank saves at its edge and trains on."""
    processes = ranks(2, step_s=0.2)
    daemon.on_send = lambda send: daemon.kill_soon() if isinstance(send.message, Decide) else None
    daemon.order(Purpose.STOP)
    eventually(lambda: not daemon._alive.is_set())
    daemon.kill()
    edges = [
        max(r.message.edge for r in daemon.heard if r.rank == n and isinstance(r.message, Promise)) for n in (0, 1)
    ]
    eventually(lambda: all(process.step > edge + 2 for process, edge in zip(processes, edges, strict=True)))
    waits = [max(line["waited"] for line in process.lines() if "waited" in line) for process in processes]

    assert all(policy.hold_max_s * 0.9 <= wait <= policy.hold_max_s + 5.0 for wait in waits)
    for rank, edge in enumerate(edges):
        assert (tmp_path / "ckpt" / f"step-{edge:010d}.ev-1" / f"rank-{rank:05d}").exists()
    if edges[0] == edges[1]:
        assert newest(tmp_path).step == edges[0]


def test_a_killed_rank_loses_the_order_by_name_and_the_rest_parks(tmp_path, daemon, ranks, eventually):
    """SIGKILL of rank 1 before the stop: "lost", naming it; the others park; the snapshot before is what is resumed."""
    processes = ranks(3)
    daemon.order(Purpose.SNAPSHOT)
    eventually(lambda: daemon.outcome == "snapshotted")
    step = steps_at(daemon)
    processes[1].signal(signal.SIGKILL)
    daemon.order(Purpose.STOP)
    eventually(lambda: daemon.outcome == "lost")

    assert "rank 1 died" in daemon.job.why
    eventually(lambda: daemon.job.order.parts[0].parked and daemon.job.order.parts[2].parked)
    assert newest(tmp_path).step == step


def test_a_rank_killed_while_writing_is_named(daemon, ranks, eventually):
    """SIGKILL between DECIDE and the shard: the order is lost at once, nobody waits for the dead."""
    processes = ranks(2, step_s=0.5)
    daemon.on_send = lambda send: (
        os.kill(processes[1].pid, signal.SIGKILL)
        if isinstance(send.message, Decide) and processes[1].ended() is None
        else None
    )
    daemon.order(Purpose.STOP)
    eventually(lambda: daemon.outcome == "lost")

    assert "rank 1 died" in daemon.job.why
    assert not daemon.job.again


def test_a_stopped_rank_is_promised_for_and_takes_part_once_it_wakes(tmp_path, daemon, ranks, eventually, policy):
    """SIGSTOP: its page promises for it; the others wait at T; SIGCONT, and the stop completes or is made anew."""
    processes = ranks(2)
    processes[1].signal(signal.SIGSTOP)
    daemon.order(Purpose.STOP)
    eventually(lambda: isinstance(daemon.job.order.parts[1].edge, int) and daemon.job.order.parts[1].by_page)
    assert daemon.outcome == "underway"
    processes[1].signal(signal.SIGCONT)
    eventually(lambda: daemon.outcome in ("parked", "lost"))
    while daemon.job.again:
        daemon.order(Purpose.STOP)
        eventually(lambda: daemon.outcome in ("parked", "lost"))

    assert daemon.outcome == "parked"
    assert newest(tmp_path).step == steps_at(daemon)


def test_a_rank_that_holds_the_gil_takes_part(tmp_path, daemon, ranks, eventually):
    """Two seconds without the GIL: promised for from the page, and the generation is whole in the end."""
    processes = ranks(2, hog_at=30, hog_s=2.0)
    eventually(lambda: processes[0].step >= 28)
    time.sleep(0.1)
    daemon.order(Purpose.STOP)
    eventually(lambda: daemon.outcome in ("parked", "lost"))
    while daemon.job.again:
        daemon.order(Purpose.STOP)
        eventually(lambda: daemon.outcome in ("parked", "lost"))

    assert daemon.outcome == "parked"
    assert newest(tmp_path).step == steps_at(daemon)


def test_a_rank_that_joins_late_is_in_the_next_order(tmp_path, daemon, ranks, eventually):
    """Ordered before rank 1 had registered: lost, said; once it is there a new order succeeds."""
    ranks(2, only=(0,))
    daemon.order(Purpose.STOP)
    eventually(lambda: daemon.outcome == "lost")
    assert "rank 1 of 2 never registered" in daemon.job.why
    ranks(2, only=(1,), wait=False)
    eventually(lambda: daemon.job.again, 60.0)
    daemon.order(Purpose.STOP)
    eventually(lambda: daemon.outcome == "parked")

    assert newest(tmp_path).world_size == 2


def test_a_forked_child_is_not_the_rank(daemon, ranks, eventually):
    """A child that calls the guard is told off and ends without a word to the daemon; the rank goes on as before."""
    (process,) = ranks(1, fork_at=10)
    eventually(lambda: process.found("forked"))
    eventually(lambda: process.step > 15)

    assert "forked child" in process.found("child")
    assert daemon.job.members[0].alive
    daemon.order(Purpose.STOP)
    eventually(lambda: daemon.outcome == "parked")
    assert steps_at(daemon) < 10**6


def test_a_run_that_ends_says_so(daemon, ranks, eventually):
    """The loop is done: BYE, code 0, and the job is nobody's."""
    (process,) = ranks(1, steps=20)
    assert process.wait() == 0
    eventually(lambda: not daemon.job.alive)

    assert daemon.job.members[0].gone == "left (finished)"


def test_another_rank_seals_if_the_first_dies_after_its_shard(tmp_path, daemon, ranks, eventually):
    """Rank 0 is killed when it is asked to seal: rank 1 writes the seal, and the generation is whole."""
    processes = ranks(2)
    daemon.on_send = lambda send: (
        processes[0].signal(signal.SIGKILL)
        if isinstance(send.message, Seal) and send.rank == 0 and processes[0].ended() is None
        else None
    )
    daemon.order(Purpose.STOP)
    eventually(lambda: daemon.outcome == "parked")

    assert newest(tmp_path).sealed
    assert [r.rank for r in daemon.heard if isinstance(r.message, SealWritten)][-1] in (0, 1)
    assert {r.rank for r in daemon.heard if isinstance(r.message, Shard)} == {0, 1}
