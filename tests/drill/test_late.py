"""What a report says was late."""

from __future__ import annotations

import pytest

from powerguard.core.policy import FeedPolicy, Policy
from powerguard.drill.curves import bandwidth, series
from powerguard.drill.late import late
from powerguard.drill.moments import moments
from powerguard.drill.told import from_journal
from powerguard.journal import read
from powerguard.sim import faults as f
from powerguard.sim.rank import RankSpec
from powerguard.sim.world import JobSpec, World

FAST = RankSpec(step_s=0.5, stage_s=0.1, write_s=2.0, fsync_s=0.2)


def parked(*faults: f.Fault) -> World:
    """A node whose operator parks it at 130 s."""
    world = World(Policy(feeds=(FeedPolicy("ups"),)), jobs=(JobSpec("gpt", speed=FAST),), faults=faults)
    world.at(130.0, lambda: world.command("park"))
    world.run(170.0)
    return world


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (f.WriteSlow(at=125.0, rank=1, factor=6.0), ("the flush took", "rank 1 was durable")),
        (f.GilHeld(at=129.5, for_s=4.0, rank=0), ("rank 0 hadn't promised when step",)),
        (f.WriteFails(at=125.0, rank=0), ("was never sealed",)),
    ],
    ids=("slow", "deaf", "failed"),
)
def test_what_was_late_is_named(fault, words, keep, tmp_path):
    """A slow rank, one that didn't answer, a flush that came to nothing."""
    told = late(moments(read(keep(parked(fault), tmp_path))))

    for word in words:
        assert any(word in text for text in told), (word, told)


def test_nothing_was_late(keep, tmp_path):
    """A plain stop is on time, and the page says so."""
    path = keep(parked(), tmp_path)

    assert () == late(moments(read(path)))
    story = from_journal(path)
    assert story.zero == "a stop was ordered"
    assert story.title.startswith("Stop of")


def test_the_rate_of_writing(keep, tmp_path):
    """Two ranks write 1 GiB each in 2.2 s, beside each other."""
    rates = bandwidth(moments(read(keep(parked(), tmp_path))))

    assert max(rate for _, rate in rates) == pytest.approx(2 * (1 << 30) / 2.2 / 1e6)
    assert 0.0 == rates[-1][1]


@pytest.mark.slow
def test_an_outage_has_all_its_curves(night, tmp_path):
    """Runway, that of parked ranks, what the UPS says, need and spare: none of them is empty, none above the UPS's."""
    _, path = night(tmp_path)
    curves = series(moments(read(path)))

    assert all((curves.runway_s, curves.idle_s, curves.reported_s, curves.need_s, curves.spare_s, curves.write_mbps))
