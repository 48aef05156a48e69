"""The rank's half of the agreement, message by message and boundary by boundary."""

from __future__ import annotations

import pytest

from powerguard.core import follow
from powerguard.core.follow import GO, Follower, Hold, Leave, Park, Place, Rest, Save
from powerguard.core.messages import (
    Ack,
    Decide,
    Exit,
    Failed,
    FromRank,
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
    SealWritten,
    Shard,
    ShardRecord,
    Staged,
    ToRank,
)

HOLD = 4.0
NAME = "step-%010d.ev-%d"


class Process:
    """One rank, driven by hand."""

    def __init__(self, step: int = 5, *, inside: bool = False) -> None:
        self.f = Follower()
        self.now = 10.0
        self.place = Place(step, inside)

    def hear(self, message: ToRank) -> tuple[FromRank, ...]:
        self.f, replies = follow.hear(self.f, message, self.place, Pace(step_s=1.0), self.now)
        return replies

    def arrive(self, step: int) -> follow.Todo:
        self.f, todo = follow.arrive(self.f, step, self.now)
        self.place = Place(step, inside=todo is not GO)
        return todo

    def say(self, deed: follow.Deed) -> None:
        self.f = follow.say(self.f, deed, self.now)

    def due(self) -> tuple[FromRank, ...]:
        self.f, ripe = follow.due(self.f, self.now)
        return ripe


def prepare(seq: int = 7, purpose: Purpose = Purpose.STOP) -> Prepare:
    return Prepare(seq, "ev", purpose, HOLD, f"ev-{seq}")


def decide(step: int, seq: int = 7, purpose: Purpose = Purpose.STOP, plan: Plan = Plan.FRESH) -> Decide:
    return Decide(seq, purpose, plan, step, NAME % (step, seq))


def shard(step: int, seq: int = 7) -> Shard:
    return Shard(seq, step, NAME % (step, seq), ShardRecord(0, "rank-00000", 1, "d"))


def test_nothing_is_asked_unless_ordered():
    """Unarmed, every boundary is passed."""
    rank = Process()
    assert not rank.f.armed
    assert rank.arrive(6) is GO


@pytest.mark.parametrize(("inside", "edge"), [(False, 6), (True, 5)])
def test_the_promised_edge_is_the_next_boundary_that_can_still_be_held(inside, edge):
    """Between boundaries it is step + 1; a thread that waits inside one can be held there."""
    rank = Process(5, inside=inside)

    assert rank.hear(prepare()) == (Promise(7, edge, Pace(step_s=1.0)),)
    assert rank.f.armed


def test_a_promise_holds_the_training_thread():
    """Below the edge it trains on; at the edge it waits, at most hold_max from its arrival there."""
    rank = Process(5)
    rank.hear(prepare())
    rank.now += 100.0
    assert rank.arrive(5) is GO
    assert rank.arrive(6) == Hold(rank.now + HOLD, "")
    rank.now += HOLD - 0.1
    assert isinstance(rank.arrive(6), Hold)


def test_a_stop_is_carried_out_at_its_step():
    """Train to T, save, say the shard, park and say so once; RESUME lets it go."""
    rank = Process(5)
    rank.hear(prepare())
    assert rank.hear(decide(8)) == (Ack(7, "Decide"),)
    assert rank.arrive(6) is GO
    assert rank.arrive(7) is GO
    assert rank.arrive(8) == Save(7, 8, NAME % (8, 7), stop=True)
    rank.say(Staged(7, 8))
    rank.say(shard(8))
    assert rank.arrive(8) == Park(7, "")
    assert [type(d) for d in rank.due()] == [Staged, Shard, Parked]
    assert rank.arrive(8) == Park(7, "")
    assert rank.hear(Resume(7, "mains back")) == (Ack(7, "Resume"),)
    assert rank.arrive(8) is GO
    assert not rank.f.armed


def test_a_snapshot_trains_on_once_staged():
    """At T it stages and goes; the shard is said later, when the write is done."""
    rank = Process(5)
    rank.hear(prepare(purpose=Purpose.SNAPSHOT))
    rank.hear(decide(6, purpose=Purpose.SNAPSHOT))
    assert rank.arrive(6) == Save(7, 6, NAME % (6, 7), stop=False)
    rank.say(Staged(7, 6))
    assert rank.arrive(6) is GO
    assert not rank.f.armed
    rank.say(shard(6))

    assert rank.f.duty is not None
    assert rank.f.duty.did(Shard)


def test_a_failed_save_parks_and_says_so():
    """A STOP whose write failed still parks: the state in memory may be all there is."""
    rank = Process(5)
    rank.hear(prepare())
    rank.hear(decide(6))
    rank.arrive(6)
    rank.say(Failed(7, 6, "EIO"))

    assert isinstance(rank.arrive(6), Park)


def test_plan_c_saves_nothing():
    """DURABLE: park at T without a new save; a SNAPSHOT of that plan asks nothing at all."""
    rank = Process(5)
    rank.hear(decide(6, plan=Plan.DURABLE))
    assert isinstance(rank.arrive(6), Park)
    other = Process(5)
    other.hear(decide(6, purpose=Purpose.SNAPSHOT, plan=Plan.DURABLE))
    assert other.arrive(6) is GO


def test_repeats_are_answered_from_memory():
    """PREPARE and DECIDE heard again bring the same promise and every deed again, and change nothing."""
    rank = Process(5)
    first = rank.hear(prepare())
    before = rank.f
    assert rank.hear(prepare()) == first
    assert rank.f.duty == before.duty
    rank.hear(decide(6))
    rank.arrive(6)
    rank.say(shard(6))
    rank.arrive(6)
    before = rank.f

    assert rank.hear(decide(6)) == (Ack(7, "Decide"), shard(6), Parked(7, 6))
    assert rank.hear(prepare()) == (Ack(7, "Decide"), shard(6), Parked(7, 6))
    assert rank.f == before


def test_a_decision_is_never_moved():
    """A second DECIDE of the same order with another step is a repeat of the first."""
    rank = Process(5)
    rank.hear(prepare())
    rank.hear(decide(6))
    rank.hear(decide(9))

    assert isinstance(rank.arrive(6), Save)


def test_alone_it_saves_at_its_edge_under_the_name_that_peers_would_use():
    """Nobody decides for hold_max: one lone save, then training goes on; equal edges give equal names."""
    rank = Process(5)
    rank.hear(prepare())
    rank.arrive(6)
    rank.now += HOLD
    assert rank.arrive(6) == Save(7, 6, NAME % (6, 7), stop=True, lone=True)
    rank.say(Staged(7, 6))
    rank.say(shard(6))
    assert rank.arrive(6) is GO
    assert not rank.f.armed
    rank.now += 1.0
    assert rank.arrive(7) is GO


def test_a_lapsed_promise_is_renewed_with_a_new_edge():
    """After the lone save a PREPARE heard again brings a promise that can still be kept, with a hold of its own."""
    rank = Process(5)
    rank.hear(prepare())
    rank.arrive(6)
    rank.now += HOLD
    rank.arrive(6)
    rank.say(shard(6))
    rank.arrive(6)
    rank.arrive(7)

    assert rank.hear(prepare()) == (Promise(7, 8, Pace(step_s=1.0)),)
    assert rank.arrive(8) == Hold(rank.now + HOLD, "")


def test_a_lone_save_at_the_stop_step_counts():
    """The decision comes late and names the step that was saved alone: the shard is told, nothing is saved twice."""
    rank = Process(5)
    rank.hear(prepare())
    rank.arrive(6)
    rank.now += HOLD
    rank.arrive(6)
    rank.say(shard(6))
    rank.arrive(6)
    rank.arrive(7)

    assert rank.hear(decide(6)) == (Ack(7, "Decide"), shard(6))
    assert isinstance(rank.arrive(8), Park)


def test_a_lone_save_at_another_step_does_not_count():
    """T is higher than the edge that was saved alone: it is saved again at T."""
    rank = Process(5)
    rank.hear(prepare())
    rank.arrive(6)
    rank.now += HOLD
    rank.arrive(6)
    rank.say(shard(6))
    rank.arrive(6)
    rank.hear(decide(9))

    assert rank.arrive(9) == Save(7, 9, NAME % (9, 7), stop=True)


@pytest.mark.parametrize(("step", "inside"), [(8, False), (9, True), (9, False)])
def test_past_the_stop_step_it_says_missed_at_once(step, inside):
    """The listener answers MISSED without the training thread, which may be stuck beyond the boundary."""
    rank = Process(step, inside=inside)

    assert rank.hear(decide(8)) == (Ack(7, "Decide"),)
    assert [type(d) for d in rank.due()] == [Missed]
    assert rank.arrive(step + 1) == Hold(rank.now + HOLD_DEFAULT, "past the stop step: waiting for a new order")


HOLD_DEFAULT = 15.0


def test_a_boundary_that_jumps_over_the_stop_step_is_missed():
    """Steps may jump (a resume): at a boundary past T nothing is saved under T's name."""
    rank = Process(5)
    rank.hear(prepare())
    rank.hear(decide(8))
    todo = rank.arrive(100)

    assert isinstance(todo, Hold)
    assert [type(d) for d in rank.due()][-1] is Missed
    rank.now += HOLD
    assert rank.arrive(100) is GO


def test_a_missed_snapshot_holds_nobody():
    """SNAPSHOT past T: said, and trained on."""
    rank = Process(9)
    rank.hear(decide(8, purpose=Purpose.SNAPSHOT))

    assert rank.arrive(10) is GO


def test_after_missed_a_new_order_holds_where_it_waits():
    """The new PREPARE is promised with the boundary where the thread stands, and its hold starts anew."""
    rank = Process(9)
    rank.hear(decide(8))
    rank.arrive(10)
    rank.now += 14.0

    assert rank.hear(prepare(8)) == (Promise(8, 10, Pace(step_s=1.0)),)
    assert rank.arrive(10) == Hold(rank.now + HOLD, "")


def test_a_parked_rank_takes_a_second_order_without_resume():
    """RESUME may be lost: a new order finds the thread parked and moves it on if its step is higher."""
    rank = Process(5)
    rank.hear(prepare())
    rank.hear(decide(6))
    rank.arrive(6)
    rank.say(shard(6))
    assert isinstance(rank.arrive(6), Park)
    rank.now += 1000.0
    assert rank.hear(prepare(8)) == (Promise(8, 6, Pace(step_s=1.0)),)
    assert rank.arrive(6) == Hold(rank.now + HOLD, "")
    rank.hear(decide(7, seq=8))
    assert rank.arrive(6) is GO

    assert rank.arrive(7) == Save(8, 7, NAME % (7, 8), stop=True)


def test_a_stop_overtakes_a_snapshot_being_written():
    """The overtaken snapshot's shard is still told, and still answered for."""
    rank = Process(5)
    rank.hear(prepare(7, Purpose.SNAPSHOT))
    rank.hear(decide(6, purpose=Purpose.SNAPSHOT))
    rank.arrive(6)
    rank.say(Staged(7, 6))
    rank.arrive(6)
    rank.hear(prepare(8))
    rank.say(shard(6))

    assert shard(6) in rank.due()
    assert rank.hear(decide(6, purpose=Purpose.SNAPSHOT)) == (Ack(7, "Decide"), Staged(7, 6), shard(6))
    assert isinstance(rank.arrive(7), Hold)


def test_an_overtaken_snapshot_that_was_not_begun_is_owned_up_to():
    """A DECIDE of an order that was overtaken before T is answered MISSED."""
    rank = Process(5)
    rank.hear(prepare(7, Purpose.SNAPSHOT))
    rank.hear(prepare(8))
    ack, missed = rank.hear(decide(6, purpose=Purpose.SNAPSHOT))

    assert (ack, type(missed)) == (Ack(7, "Decide"), Missed)


def test_stale_orders_change_nothing():
    """PREPARE and RESUME of older orders leave a newer one alone; those of an order that is over arm nothing."""
    rank = Process(5)
    rank.hear(prepare(8))
    before = rank.f.duty
    assert rank.hear(prepare(7)) == ()
    rank.hear(Resume(7, "r"))
    assert rank.f.duty == before
    rank.hear(Resume(8, "r"))
    assert rank.hear(prepare(8)) == (Ack(8, "Resume"),)
    assert rank.hear(decide(6, seq=8)) == (Ack(8, "Decide"), Ack(8, "Resume"))
    assert not rank.f.armed


def test_a_deed_is_repeated_until_acknowledged():
    """With a bounded back-off; the acknowledgement of another deed or order stops nothing."""
    rank = Process(5)
    rank.hear(prepare())
    times = []
    for _ in range(400):
        rank.now += 0.05
        times += [rank.now for _ in rank.due()]
    assert 10 <= len(times) <= 20
    rank.hear(Ack(7, "Shard"))
    rank.hear(Ack(6, "Promise"))
    assert follow.next_due(rank.f) is not None
    rank.hear(Ack(7, "Promise"))
    rank.now += 10.0
    assert rank.due() == ()
    assert follow.next_due(rank.f) is None


def test_a_seal_is_acknowledged_and_remembered():
    """SEAL is acknowledged at once; once written, a repeat is answered with SEAL WRITTEN."""
    rank = Process(5)
    rank.hear(decide(6))
    seal = Seal(7, 6, NAME % (6, 7), 1, ())
    assert rank.hear(seal) == (Ack(7, "Seal"),)
    rank.say(SealWritten(7, 6, seal.generation))

    assert rank.hear(seal) == (Ack(7, "Seal"), SealWritten(7, 6, seal.generation))


def test_quiesce_then_exit():
    """QUIESCE holds at the next boundary until EXIT, whatever else is ordered; it is answered again from memory."""
    rank = Process(5)
    rank.hear(Quiesce(9, "halt"))
    assert rank.f.armed
    assert rank.arrive(6) == Rest(9, "halt")
    rank.say(Quiesced(9))
    assert rank.hear(Quiesce(9, "halt")) == (Ack(9, "Quiesce"), Quiesced(9))
    rank.hear(Exit(9, 75, "halt"))

    assert rank.arrive(6) == Leave(75, "halt")


def test_resume_ends_a_quiesce():
    """A restarted daemon that knows of no halt can let ranks go on; before EXIT only."""
    rank = Process(5)
    rank.hear(Quiesce(9, "halt"))
    rank.hear(Resume(9, "mains back"))
    assert rank.arrive(6) is GO
    rank.hear(Quiesce(10, "halt"))
    rank.hear(Exit(10, 75, "halt"))
    rank.hear(Resume(10, "r"))

    assert isinstance(rank.arrive(7), Leave)


def test_memory_is_bounded():
    """A thousand orders leave no more behind than a few."""
    rank = Process(5)
    for seq in range(1, 1000):
        rank.hear(prepare(seq))
        rank.hear(decide(rank.place.step + 1, seq))
        step = rank.place.step + 1
        rank.arrive(step)
        rank.say(shard(step, seq))
        rank.arrive(step)
        rank.hear(Resume(seq, "r"))
        rank.arrive(step)

    assert len(rank.f.past) <= follow.PAST
    assert len(rank.f.unheard) <= 16
