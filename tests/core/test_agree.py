"""The daemon's half of the agreement, order by order, with every message given by hand."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from powerguard.core import agree
from powerguard.core.job import Job, Stage, complete, fresh_s, not_durable, quiet, unparked, writing_s
from powerguard.core.messages import (
    Ack,
    Beat,
    Bye,
    Decide,
    Exit,
    Failed,
    FromRank,
    Hello,
    Missed,
    Pace,
    Parked,
    Plan,
    Prepare,
    Promise,
    Purpose,
    Quiesce,
    Quiesced,
    Resume,
    Seal,
    Sealed,
    SealWritten,
    Shard,
    ShardRecord,
    Staged,
    Welcome,
)
from powerguard.core.policy import Policy
from powerguard.core.types import Actions, Announce, PageReport, RankReport, Send

POLICY = Policy()
PACE = Pace(step_s=1.0, stage_s=1.0, write_s=4.0, fsync_s=1.0)


class Node:
    """A daemon's view of one job, driven by hand."""

    def __init__(self, world: int = 2, *, registered: int | None = None, step: int = 5) -> None:
        self.now = 50.0
        self.world = world
        self.jobs: dict[str, Job] = {}
        self.sent: list[tuple[int, object]] = []
        self.said: list[Announce] = []
        for rank in range(world if registered is None else registered):
            self.hello(rank, step=step)

    @property
    def job(self) -> Job:
        return self.jobs["j"]

    def note(self, actions: tuple[Actions, ...]) -> None:
        self.sent += [(a.rank, a.message) for a in actions if isinstance(a, Send)]
        self.said += [a for a in actions if isinstance(a, Announce)]

    def hello(self, rank: int, *, pid: int | None = None, step: int = 5, world: int | None = None) -> None:
        pid = 100 + rank if pid is None else pid
        self.hear(rank, Hello("j", rank, rank, world or self.world, pid, "/ckpt", step=step, pace=PACE))

    def hear(self, rank: int, *messages: FromRank) -> None:
        reports = [RankReport("j", rank, self.now, message) for message in messages]
        self.jobs, actions = agree.absorb(POLICY, self.jobs, reports, (), self.now, node="n1", phase="online")
        self.note(actions)
        if "j" in self.jobs:
            self.tick()

    def page(self, rank: int, step: int, *, alive: bool = True, pid: int = 0) -> None:
        self.jobs, actions = agree.absorb(
            POLICY, self.jobs, (), [PageReport("j", rank, self.now, step, alive, pid)], self.now
        )
        self.note(actions)
        if "j" in self.jobs:
            self.tick()

    def tick(self, after: float = 0.0, budget_s: float | None = None) -> None:
        self.now += after
        # a restart at every instant: the state goes through the journal's encoding
        job = msgspec.json.decode(msgspec.json.encode(self.job), type=Job)
        assert job == self.job
        self.jobs["j"], actions = agree.tick(POLICY, job, self.now, budget_s=budget_s)
        self.note(actions)

    def order(self, purpose: Purpose, seq: int = 7, budget_s: float | None = None) -> None:
        self.jobs["j"], actions = agree.order(
            POLICY, self.job, seq=seq, event="ev", purpose=purpose, budget_s=budget_s, reason="mains lost", now=self.now
        )
        self.note(actions)

    def resume(self) -> None:
        self.jobs["j"], actions = agree.resume(POLICY, self.job, "mains back", self.now)
        self.note(actions)

    def quiesce(self) -> None:
        self.jobs["j"], actions = agree.quiesce(POLICY, self.job, 9, "halt", self.now)
        self.note(actions)

    def leave(self) -> None:
        self.jobs["j"], actions = agree.leave(POLICY, self.job, 75, "halt", self.now)
        self.note(actions)

    def take(self, kind: type | None = None) -> list[tuple[int, object]]:
        """What was sent since the last look, of one kind if given."""
        sent, self.sent = self.sent, []
        return [(rank, message) for rank, message in sent if kind is None or isinstance(message, kind)]

    def decided(self, purpose: Purpose = Purpose.STOP, edges: tuple[int, ...] = (6, 7), seq: int = 7) -> Decide:
        self.order(purpose, seq)
        for rank, edge in enumerate(edges):
            self.hear(rank, Promise(seq, edge))
        decisions = [m for _, m in self.take(Decide)]
        assert isinstance(decisions[0], Decide)
        return decisions[0]

    def durable(self, decide: Decide, *ranks: int) -> None:
        for rank in ranks:
            self.hear(rank, shard(decide, rank))


def shard(decide: Decide, rank: int) -> Shard:
    return Shard(decide.seq, decide.step, decide.generation, ShardRecord(rank, f"rank-{rank:05d}", 10, "d"))


def test_the_stop_step_is_the_highest_promised_edge():
    """T = max(edge), and the generation's name carries the step, the event and the order's number."""
    node = Node()

    decide = node.decided(edges=(6, 9))

    assert decide.step == 9
    assert decide.generation == "step-0000000009.ev-7"
    assert Plan.FRESH is decide.plan


def test_nothing_is_decided_before_everybody_promised():
    """One missing promise holds the decision back for prepare_max_s."""
    node = Node()
    node.order(Purpose.STOP)
    node.hear(0, Promise(7, 6))
    node.tick(POLICY.prepare_max_s - 0.1)

    assert node.take(Decide) == []
    assert node.job.outcome == "underway"


def test_a_silent_rank_is_promised_for_from_its_page():
    """After prepare_max_s the page speaks, with a slack of two steps."""
    node = Node()
    node.order(Purpose.STOP)
    node.hear(0, Promise(7, 6))
    node.page(1, step=11)
    node.tick(POLICY.prepare_max_s)

    decisions = node.take(Decide)
    assert {0, 1} == {rank for rank, _ in decisions}
    assert {13} == {m.step for _, m in decisions if isinstance(m, Decide)}


def test_a_stop_runs_to_parked():
    """Promise, decide, shards, seal by rank 0, sealed to all, parked."""
    node = Node()
    decide = node.decided()
    node.durable(decide, 1)
    assert node.take(Seal) == []
    node.durable(decide, 0)

    ((sealer, seal),) = node.take(Seal)
    assert sealer == 0
    assert isinstance(seal, Seal)
    assert [record.rank for record in seal.shards] == [0, 1]
    node.hear(0, SealWritten(7, 7, decide.generation))
    assert {0, 1} == {rank for rank, _ in node.take(Sealed)}
    assert node.job.outcome == "underway"
    node.hear(0, Parked(7, 7))
    assert unparked(node.job) == (1,)
    node.hear(1, Parked(7, 7))
    assert node.job.outcome == "parked"
    assert node.job.saved is not None
    assert (7, decide.generation) == (node.job.saved.step, node.job.saved.generation)
    assert [a.text for a in node.said] == ["generation is durable"]


def test_a_snapshot_runs_to_snapshotted():
    """A snapshot is over with its seal; nobody parks."""
    node = Node()
    decide = node.decided(Purpose.SNAPSHOT)
    node.hear(0, Staged(7, 7))
    node.durable(decide, 0, 1)
    node.hear(0, SealWritten(7, 7, decide.generation))

    assert node.job.outcome == "snapshotted"


def test_deeds_are_acknowledged_even_if_nobody_waits_for_them():
    """A stale deed is acknowledged, so that the rank stops repeating it; it changes nothing."""
    node = Node()
    before = node.job.order
    node.take()
    node.hear(0, Parked(3, 4), Missed(3, 4, "w"))

    assert [(0, Ack(3, "Parked")), (0, Ack(3, "Missed"))] == node.take(Ack)
    assert before == node.job.order


@pytest.mark.parametrize("times", [1, 2, 3])
def test_every_message_twice_is_once(times):
    """Repeats of promises, shards, seals and acknowledgements lead to the same state."""
    node = Node()
    node.order(Purpose.STOP)
    for _ in range(times):
        node.hear(0, Promise(7, 6))
    for _ in range(times):
        node.hear(1, Promise(7, 7))
    decide = Decide(7, Purpose.STOP, Plan.FRESH, 7, "step-0000000007.ev-7")
    for _ in range(times):
        node.hear(0, Ack(7, "Decide"), shard(decide, 0))
    for _ in range(times):
        node.hear(1, shard(decide, 1), Parked(7, 7))
    for _ in range(times):
        node.hear(0, SealWritten(7, 7, decide.generation), Parked(7, 7))

    assert node.job.outcome == "parked"
    assert len(node.said) == 1


def test_orders_are_repeated_with_a_bounded_back_off():
    """Unanswered, PREPARE and DECIDE go out again and again, ever more rarely, and stop when answered."""
    node = Node(1)
    node.order(Purpose.STOP)
    node.hear(0, Promise(7, 6))
    node.take()
    sent = []
    for _ in range(1000):
        node.tick(0.1)
        sent += [node.now for _ in node.take(Decide)]

    gaps = [round(b - a, 3) for a, b in itertools.pairwise(sent)]
    assert 30 <= len(sent) <= 60
    assert gaps == sorted(gaps)
    node.hear(0, Parked(7, 6), shard(Decide(7, Purpose.STOP, Plan.FRESH, 6, "step-0000000006.ev-7"), 0))
    node.take()
    for _ in range(100):
        node.tick(0.1)
    assert node.take(Decide) == []


def test_a_dead_rank_loses_a_snapshot_and_the_others_train_on():
    """With a rank dead before the decision a SNAPSHOT is lost at once, named, and held ranks are released."""
    node = Node(3)
    node.order(Purpose.SNAPSHOT)
    node.hear(0, Promise(7, 6))
    node.page(1, 5, alive=False)
    node.hear(2, Promise(7, 6))

    assert node.job.outcome == "lost"
    assert node.job.why == "rank 1 died"
    assert [(0, Resume(7, "rank 1 died")), (2, Resume(7, "rank 1 died"))] == node.take(Resume)
    assert not node.job.again


def test_a_dead_rank_loses_a_stop_and_the_others_park():
    """With a rank dead before the decision the rest still parks at one step, saving nothing new."""
    node = Node(3)
    node.order(Purpose.STOP)
    node.page(1, 5, alive=False)
    node.hear(0, Promise(7, 6))
    node.hear(2, Promise(7, 8))

    decisions = node.take(Decide)
    assert node.job.outcome == "lost"
    assert {0, 2} == {rank for rank, _ in decisions}
    assert {(8, Plan.DURABLE)} == {(m.step, m.plan) for _, m in decisions if isinstance(m, Decide)}
    node.hear(0, Parked(7, 8))
    assert unparked(node.job) == (2,)


def test_a_rank_that_dies_after_its_shard_is_no_loss():
    """What is durable stays durable: the others finish, and the lowest living rank seals."""
    node = Node()
    decide = node.decided()
    node.durable(decide, 0)
    node.page(0, 7, alive=False)
    assert node.job.outcome == "underway"
    node.durable(decide, 1)

    assert [rank for rank, _ in node.take(Seal)] == [1]


def test_bye_counts_as_gone():
    """A rank that has left can't deliver; the reason says how it left."""
    node = Node()
    node.decided()
    node.hear(1, Bye("finished"))

    assert (node.job.outcome, node.job.why) == ("lost", "rank 1 left (finished)")


@pytest.mark.parametrize("purpose", list(Purpose))
def test_missed_asks_for_a_new_order(purpose):
    """A rank past T makes the order lost, and worth another try under a new number."""
    node = Node()
    node.decided(purpose)
    node.hear(1, Missed(7, 9, "step 9 is past"))

    assert node.job.outcome == "lost"
    assert "rank 1" in node.job.why
    assert node.job.again
    again = node.decided(purpose, edges=(9, 9), seq=8)
    assert again.step == 9
    assert node.job.outcome == "underway"


def test_failed_is_not_tried_again():
    """A rank that can't write (full disk) makes the order lost for good."""
    node = Node()
    node.decided()
    node.hear(0, Failed(7, 7, "no space left on device"))

    assert (node.job.outcome, node.job.again) == ("lost", False)
    assert "no space left" in node.job.why


def test_an_incomplete_world_is_said_honestly():
    """A rank that never registered is waited for as long as a promise, then named."""
    node = Node(3, registered=2)
    assert not complete(node.job)
    node.order(Purpose.STOP)
    node.hear(0, Promise(7, 6))
    node.hear(1, Promise(7, 6))
    assert node.job.outcome == "underway"
    node.tick(POLICY.prepare_max_s)

    assert (node.job.outcome, node.job.why) == ("lost", "rank 2 of 3 never registered")
    assert not_durable(node.job) == (0, 1, 2)


def test_a_late_joiner_takes_part():
    """HELLO while promises are collected: the rank is asked like the others, and its edge counts."""
    node = Node(2, registered=1)
    node.order(Purpose.STOP)
    node.hear(0, Promise(7, 6))
    node.take()
    node.hello(1)

    assert [rank for rank, _ in node.take(Prepare)] == [1]
    node.hear(1, Promise(7, 9))
    assert {9} == {m.step for _, m in node.take(Decide) if isinstance(m, Decide)}


def test_a_joiner_after_the_decision_is_told_it_and_makes_a_new_order_possible():
    """HELLO after T was decided without it: it gets the decision as it stands, and a new order may succeed."""
    node = Node(2, registered=1)
    node.order(Purpose.STOP)
    node.hear(0, Promise(7, 6))
    node.tick(POLICY.prepare_max_s)
    assert not node.job.again
    node.take()
    node.hello(1)

    assert [rank for rank, m in node.take(Decide)] == [1]
    assert node.job.again


def test_a_restarted_process_cannot_deliver_what_the_old_one_owed():
    """A new pid under the same rank: the order is lost, named, and worth a new one."""
    node = Node()
    node.decided()
    node.hello(1, pid=999, step=-1)

    assert (node.job.outcome, node.job.why) == ("lost", "rank 1 was started anew")
    assert node.job.again


def test_a_restarted_process_is_only_asked_to_park():
    """Its state, even at T, doesn't belong into the generation of the processes that promised."""
    node = Node()
    decide = node.decided()
    node.durable(decide, 0)
    node.take()
    node.hello(1, pid=999, step=-1)

    assert [(rank, m.plan) for rank, m in node.take(Decide) if isinstance(m, Decide) and rank == 1] == [
        (1, Plan.DURABLE)
    ]
    node.durable(decide, 1)
    assert not_durable(node.job) == (1,)
    assert node.job.outcome == "lost"


def test_a_job_started_anew_is_idle():
    """Once no process that was given the order lives any more, the order is nobody's."""
    node = Node()
    node.decided()
    node.page(0, 6, alive=False)
    node.page(1, 6, alive=False)
    node.hello(0, pid=998)

    assert node.job.outcome == "idle"


def test_a_late_joiner_that_was_given_the_order_keeps_it_alive():
    """The others die: the order stays, so that the joiner, parked by it, can be released."""
    node = Node(2, registered=1)
    node.order(Purpose.STOP)
    node.hear(0, Promise(7, 6))
    node.tick(POLICY.prepare_max_s)
    node.hello(1)
    node.page(0, 6, alive=False)
    node.hello(1)
    node.take()
    node.resume()

    assert [rank for rank, _ in node.take(Resume)] == [1]


def test_a_reconnect_is_told_at_once():
    """HELLO of the same process: the demand is made anew without waiting for the back-off."""
    node = Node()
    node.decided()
    node.take()
    node.hello(1)

    assert [rank for rank, m in node.take(Decide)] == [1]


def test_a_page_of_a_process_that_was_replaced_kills_nobody():
    """A late look at the old pid says nothing of the new one."""
    node = Node()
    node.hello(1, pid=999)
    node.page(1, 5, alive=False, pid=101)

    assert complete(node.job)


def test_strangers_are_asked_for_hello():
    """A restarted daemon without a journal greets whoever speaks and learns the job again."""
    node = Node(1, registered=0)
    node.hear(0, Beat(4))
    assert [(0, Welcome("n1", "online", 0, hello=True))] == node.take()
    node.hello(0)
    assert [(0, Welcome("n1", "online", 0))] == node.take()


@pytest.mark.parametrize(("job", "rank", "world"), [("x", 0, 2), ("j", 1, 2), ("j", 0, 0)])
def test_a_hello_that_contradicts_its_sender_is_ignored(job, rank, world):
    """The sender's identity is the bus's word; a HELLO for somebody else, or beyond its world, registers nobody."""
    hello = Hello(job, rank, 0, world, 1, "/c")
    jobs, actions = agree.absorb(POLICY, {}, [RankReport("j", 0, 1.0, hello)], (), 1.0)

    assert (jobs, actions) == ({}, ())


def test_another_rank_seals_if_the_first_does_not_answer():
    """After seal_max_s the next living rank is asked; whoever answers first counts."""
    node = Node(3)
    decide = node.decided(edges=(6, 7, 7))
    node.durable(decide, 0, 1, 2)
    node.take()
    node.tick(POLICY.seal_max_s)
    assert [rank for rank, _ in node.take(Seal)] == [1]
    node.hear(1, Failed(7, 7, "EIO"))
    assert [rank for rank, _ in node.take(Seal)] == [2]
    node.hear(0, SealWritten(7, 7, decide.generation))

    assert Stage.SEALED is node.job.order.stage
    assert node.job.order.sealed_by == 0


def test_nobody_seals():
    """If no rank writes the seal the generation is whole by its records, and that is said."""
    node = Node()
    decide = node.decided()
    node.durable(decide, 0, 1)
    node.hear(0, Parked(7, 7))
    node.hear(1, Parked(7, 7))
    for _ in range(5):
        node.tick(POLICY.seal_max_s)

    assert node.job.outcome == "parked"
    assert "no rank wrote the seal" in node.job.why
    assert node.take(Sealed) == []


def test_shards_that_do_not_belong_do_not_count():
    """Another step, another generation, another rank's record, another order: none of them completes the generation."""
    node = Node()
    decide = node.decided()
    other = ShardRecord(0, "rank-00000", 1, "d")
    node.hear(0, Shard(7, 6, decide.generation, other), Shard(7, 7, "step-0000000007.ev-6", other))
    node.hear(0, Shard(6, 7, decide.generation, other))
    node.hear(1, shard(decide, 1))

    assert not_durable(node.job) == (0,)
    node.hear(0, Shard(7, 7, decide.generation, ShardRecord(1, "rank-00001", 1, "d")))
    assert node.job.outcome == "lost"


def test_resume_rearms():
    """RESUME goes to all until acknowledged; the job is idle, and a second outage is a new order."""
    node = Node()
    decide = node.decided()
    node.durable(decide, 0, 1)
    node.hear(0, SealWritten(7, 7, decide.generation), Parked(7, 7))
    node.hear(1, Parked(7, 7))
    node.take()
    node.resume()
    assert [(0, Resume(7, "mains back")), (1, Resume(7, "mains back"))] == node.take(Resume)
    assert node.job.outcome == "idle"
    node.hear(0, Ack(7, "Resume"))
    node.tick(1.0)
    assert [rank for rank, _ in node.take(Resume)] == [1]
    node.hear(1, Ack(7, "Resume"))
    second = node.decided(edges=(20, 21), seq=8)

    assert (second.seq, second.step) == (8, 21)


def test_an_order_is_given_once():
    """The same number, or an older one, changes nothing: a repeat isn't a second order."""
    node = Node()
    node.decided()
    before = node.job
    node.order(Purpose.STOP, seq=7)
    node.order(Purpose.SNAPSHOT, seq=6)

    assert before == node.job


def test_a_snapshot_never_overtakes_a_stop():
    """While a STOP isn't over, a SNAPSHOT is nothing."""
    node = Node()
    node.decided()
    node.order(Purpose.SNAPSHOT, seq=8)

    assert Purpose.STOP is node.job.order.purpose


def test_a_stop_overtakes_a_snapshot_whose_write_still_counts():
    """Shards and seal of the overtaken snapshot that come in late make it a sealed generation all the same."""
    node = Node()
    first = node.decided(Purpose.SNAPSHOT)
    node.hear(0, Staged(7, 7))
    node.hear(1, Staged(7, 7))
    node.now += 1.0
    assert writing_s(node.job, node.now) == 4.0
    stop = node.decided(edges=(9, 9), seq=8)
    assert stop.seq == 8
    assert writing_s(node.job, node.now) == 4.0
    node.durable(first, 0, 1)
    assert [(rank, m.seq) for rank, m in node.take(Seal) if isinstance(m, Seal)] == [(0, 7)]
    node.hear(0, SealWritten(7, 7, first.generation))
    node.hear(0, Ack(7, "Sealed"))
    node.hear(1, Ack(7, "Sealed"))
    node.tick(0.1)

    assert node.job.saved is not None
    assert first.generation == node.job.saved.generation
    assert node.job.earlier is None
    assert writing_s(node.job, node.now) == 0.0
    assert node.job.outcome == "underway"


def test_a_snapshot_that_nobody_had_begun_is_let_go():
    """Overtaken before anything was staged, a snapshot is dropped."""
    node = Node()
    node.decided(Purpose.SNAPSHOT)
    node.order(Purpose.STOP, seq=8)

    assert node.job.earlier is None


def test_too_little_time_keeps_the_snapshot_of_the_outage():
    """Measured, a fresh save doesn't fit, and a snapshot of this event exists: the ranks only park (plan C)."""
    node = Node()
    first = node.decided(Purpose.SNAPSHOT)
    node.durable(first, 0, 1)
    node.hear(0, SealWritten(7, 7, first.generation))
    node.order(Purpose.STOP, seq=8, budget_s=5.0)
    node.hear(0, Promise(8, 8))
    node.hear(1, Promise(8, 8))

    assert fresh_s(node.job, node.job.order, 8) == pytest.approx(7.0)
    assert {Plan.DURABLE} == {m.plan for _, m in node.take(Decide) if isinstance(m, Decide)}
    assert node.job.outcome == "lost"
    assert not node.job.again


@pytest.mark.parametrize("budget_s", [None, 5.0, 50.0])
def test_with_nothing_to_fall_back_on_a_fresh_save_is_always_tried(budget_s):
    """However little time is left, trying loses nothing."""
    node = Node()
    node.order(Purpose.STOP, budget_s=budget_s)
    node.hear(0, Promise(7, 6))
    node.hear(1, Promise(7, 6))

    assert {Plan.FRESH} == {m.plan for _, m in node.take(Decide) if isinstance(m, Decide)}


def test_a_flush_that_never_ends_is_given_up():
    """Nothing is waited for without bound: after flush_max_s the order is lost, naming who wasn't durable."""
    node = Node()
    decide = node.decided()
    node.durable(decide, 0)
    node.tick(POLICY.flush_max_s)

    assert node.job.outcome == "lost"
    assert "rank 1" in node.job.why


def test_a_lost_order_is_sealed_if_its_shards_come_after_all():
    """What the ranks had begun to write counts whenever it arrives."""
    node = Node()
    decide = node.decided()
    node.durable(decide, 0)
    node.tick(POLICY.flush_max_s)
    node.durable(decide, 1)
    node.hear(0, SealWritten(7, 7, decide.generation), Parked(7, 7))
    node.hear(1, Parked(7, 7))

    assert node.job.outcome == "parked"


def test_exit_waits_for_every_living_peer():
    """Nobody is told to exit before all have quiesced; the dead needn't."""
    node = Node(3)
    node.page(2, 5, alive=False)
    node.quiesce()
    assert [rank for rank, _ in node.take(Quiesce)] == [0, 1]
    node.leave()
    node.hear(0, Quiesced(9))
    assert node.take(Exit) == []
    assert not quiet(node.job)
    node.hear(1, Quiesced(9))

    assert quiet(node.job)
    assert [(0, Exit(9, 75, "halt")), (1, Exit(9, 75, "halt"))] == node.take(Exit)


def test_the_wait_for_quiet_is_bounded():
    """A rank that never quiesces delays the exit by exit_wait_s, not more."""
    node = Node()
    node.quiesce()
    node.leave()
    node.hear(0, Quiesced(9))
    node.tick(POLICY.exit_wait_s - 0.1)
    assert node.take(Exit) == []
    node.tick(0.2)

    assert [rank for rank, _ in node.take(Exit)] == [0, 1]


def test_leave_without_quiesce_quiesces_first():
    """LEAVE alone never skips the first phase."""
    node = Node(1)
    node.leave()

    assert [Quiesce] == [type(m) for _, m in node.take()[1:]]


def test_there_is_no_way_back_from_quiesce():
    """Once the halt is ordered neither RESUME nor a new order changes anything."""
    node = Node()
    node.quiesce()
    before = node.job
    node.resume()
    node.order(Purpose.SNAPSHOT)

    assert before == node.job


@pytest.mark.parametrize("ordered", [True, False])
def test_a_halt_that_is_called_off_releases_everybody(ordered):
    """RECALL: with an order or without, RESUME carries the newest number said, so that it ends QUIESCE at the ranks."""
    node = Node()
    if ordered:
        node.decided()
    node.quiesce()
    node.leave()
    node.take()
    node.jobs["j"], actions = agree.recall(POLICY, node.job, "a dry run", node.now)
    node.note(actions)

    assert node.take(Resume) == [(0, Resume(9, "a dry run")), (1, Resume(9, "a dry run"))]
    assert (node.job.outcome, node.job.quiesce, node.job.leave) == ("idle", None, None)
    assert node.decided(seq=10).seq == 10


def test_a_rank_that_registers_while_leaving_is_called_too():
    """A late joiner in the middle of the halt is quiesced and told to exit like the others."""
    node = Node(2, registered=1)
    node.quiesce()
    node.hear(0, Quiesced(9))
    node.leave()
    node.take()
    node.hello(1)
    assert [rank for rank, _ in node.take(Quiesce)] == [1]
    node.hear(1, Quiesced(9))

    assert [rank for rank, _ in node.take(Exit)] == [1]


def test_a_dead_job_is_forgotten():
    """A minute after its last process was heard, the job is no more."""
    node = Node(1)
    node.page(0, 5, alive=False)
    node.now += agree.FORGET_S + 1.0
    node.jobs, _ = agree.absorb(POLICY, node.jobs, (), (), node.now)

    assert node.jobs == {}


def test_a_changed_world_size_drops_what_is_beyond():
    """An elastic restart with fewer ranks: the job's world is what the newest HELLO says."""
    node = Node(3)
    node.hello(0, pid=900, world=2)

    assert node.job.world_size == 2
    assert {0, 1} == set(node.job.members)


def test_next_at_is_never_in_the_past_and_never_missed():
    """Sleeping exactly until `next_at` loses no resend, bound or rotation against ticking all the time."""
    node = Node(3)
    node.order(Purpose.STOP)
    node.hear(0, Promise(7, 6))
    node.hear(1, Promise(7, 6))
    start = node.now
    for _ in range(100):
        at = agree.next_at(POLICY, node.job, node.now)
        if at is None:
            break
        assert at > node.now
        node.tick(at - node.now)

    assert node.job.order.step == 7
    assert node.now - start > POLICY.prepare_max_s


def test_pace_is_not_erased_by_silence():
    """A beat without measurements leaves the measured ones."""
    node = Node(1)
    node.hear(0, Beat(9))

    assert (node.job.members[0].pace, node.job.members[0].step) == (PACE, 9)
