"""The need is reckoned by the slowest rank, never by the mean, and never by a measure that isn't there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard.core.job import Job, Member, Order, Part
from powerguard.core.messages import Pace, Purpose, ShardRecord
from powerguard.core.need import reckon
from powerguard.core.policy import Policy

POLICY = Policy(flush_factor=1.25, flush_default_s=60.0, halt_s=45.0)
FAST = Pace(step_s=1.0, stage_s=0.4, write_s=4.0, fsync_s=0.8)
SLOW = Pace(step_s=3.0, stage_s=0.4, write_s=40.0, fsync_s=0.8)


def job(name: str, *paces: Pace, **options: object) -> Job:
    """A job with one living rank for each pace."""
    members = {rank: Member(rank, len(paces), 100 + rank, pace=pace, step=5) for rank, pace in enumerate(paces)}
    return Job(name, len(paces), members=members, **options)  # type: ignore[arg-type]


def writing(purpose: Purpose, staged_at: float, *, durable: bool = False) -> Order:
    """An order whose rank 0 staged at an instant."""
    record = ShardRecord(0, "rank-00000", 1, "d") if durable else None
    return Order(7, "e", purpose, 0.0, {0: Part(edge=1, staged_at=staged_at, shard=record)}, step=6)


def test_no_job_needs_only_the_halt():
    """With nobody to save, the need is the halt."""
    need = reckon(POLICY, {}, 0.0)

    assert (need.save_s, need.total_s, need.by, need.measured) == (0.0, 45.0, "no job", True)


def test_the_slowest_rank_counts():
    """Three fast ranks don't make up for a slow one; the step may take twice, for a rank that is behind."""
    need = reckon(POLICY, {"gpt": job("gpt", FAST, FAST, SLOW, FAST)}, 0.0)

    assert need.by == "gpt rank 2"
    assert need.write_s == pytest.approx(1.25 * 40.8)
    assert need.step_s == pytest.approx(2 * 3.0)
    assert need.flush_s == pytest.approx(1.25 * 41.2)
    assert need.save_s == pytest.approx(6.0 + 1.25 * 41.2)
    assert need.total_s == pytest.approx(need.save_s + 45.0)
    assert need.measured


def test_a_rank_that_has_measured_nothing_is_not_free():
    """The default stands in where a rank has no measure and the measured ones are quicker than it."""
    blank = reckon(POLICY, {"gpt": job("gpt", FAST, Pace())}, 0.0)
    slower = reckon(POLICY, {"gpt": job("gpt", SLOW, SLOW, Pace())}, 0.0)

    assert (blank.write_s, blank.measured, blank.by) == (60.0, False, "gpt rank 1, nothing measured: the default")
    assert not slower.measured
    assert slower.write_s == 60.0
    assert reckon(Policy(flush_default_s=30.0), {"gpt": job("gpt", SLOW, Pace())}, 0.0).write_s > 50.0


def test_the_dead_need_nothing():
    """A rank that is gone doesn't count, and a job without a living rank isn't there."""
    gone = {rank: Member(rank, 2, 9, pace=SLOW, gone="died") for rank in range(2)}
    half = job("gpt", FAST, SLOW)
    half = Job("gpt", 2, members={**half.members, 1: Member(1, 2, 9, pace=SLOW, gone="left (finished)")})

    assert reckon(POLICY, {"gpt": Job("gpt", 2, members=gone)}, 0.0).save_s == 0.0
    assert reckon(POLICY, {"gpt": half}, 0.0).write_s == pytest.approx(1.25 * 4.8)


def test_jobs_share_the_disk():
    """Two jobs flush at once: the longer step, and both writes."""
    need = reckon(POLICY, {"a": job("a", FAST), "b": job("b", SLOW)}, 0.0)

    assert need.by == "b rank 0"
    assert need.write_s == pytest.approx(1.25 * (4.8 + 40.8))
    assert need.step_s == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("order", "now", "pending"),
    [
        (writing(Purpose.SNAPSHOT, 10.0), 10.0, 4.8),
        (writing(Purpose.SNAPSHOT, 10.0), 12.0, 2.8),
        (writing(Purpose.SNAPSHOT, 10.0), 99.0, 0.0),
        (writing(Purpose.SNAPSHOT, 10.0, durable=True), 10.0, 0.0),
        (writing(Purpose.STOP, 10.0), 10.0, 0.0),
        (None, 10.0, 0.0),
    ],
)
def test_a_snapshot_that_is_being_written_counts_where_it_is_longer(order: Order | None, now: float, pending: float):
    """The stop's write waits for the snapshot's, or the snapshot is kept; a stop doesn't wait for itself."""
    need = reckon(POLICY, {"gpt": job("gpt", FAST, order=order)}, now)

    assert need.pending_s == pytest.approx(pending)
    assert need.save_s == pytest.approx(2.0 + max(1.25 * 5.2, pending))


def test_a_snapshot_that_a_stop_overtook_is_in_the_way():
    """The write that began before the stop still has to end."""
    overtaken = job("gpt", FAST, order=writing(Purpose.STOP, 11.0), earlier=writing(Purpose.SNAPSHOT, 10.0))

    assert reckon(POLICY, {"gpt": overtaken}, 11.0).pending_s == pytest.approx(3.8)


seconds = st.floats(0.0, 500.0)
paces = st.builds(Pace, seconds, seconds, seconds, seconds)


@given(st.lists(paces, min_size=1, max_size=6), paces)
def test_one_more_rank_never_lowers_the_need(measured: list[Pace], more: Pace):
    """Adding a rank never makes the need smaller, and no rank alone needs more than the job."""
    fewer = reckon(POLICY, {"gpt": job("gpt", *measured)}, 0.0)
    all_of_them = reckon(POLICY, {"gpt": job("gpt", *measured, more)}, 0.0)

    assert all_of_them.total_s >= fewer.total_s - 1e-9
    for pace in measured:
        assert reckon(POLICY, {"gpt": job("gpt", pace)}, 0.0).total_s <= fewer.total_s + 1e-9
