"""What a rank has measured of itself."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from powerguard.core.messages import Pace
from powerguard.generations.paces import SAVES, Save
from powerguard.train.pace import STEPS, PaceMeter, StepWatch


def test_nothing_measured_is_nothing_said():
    """Zero stands for not measured."""
    assert PaceMeter().pace() == Pace()


def test_few_measurements_give_the_slowest():
    """With a handful of saves the slowest one counts, never the mean."""
    meter = PaceMeter()
    for seconds in (1.0, 9.0, 2.0):
        meter.staged(seconds / 10, 100)
        meter.wrote(Save(200, seconds, seconds / 2))

    assert meter.pace() == Pace(0.0, 0.9, 9.0, 4.5, 200)


def test_a_hundred_saves_give_the_99th_percentile():
    """One save in a hundred that took minutes isn't what a save takes; two in a hundred are."""
    meter = PaceMeter()
    for number in range(SAVES):
        meter.wrote(Save(200, 120.0 if number == 50 else 1.0, 0.1))
    assert meter.pace().write_s == 1.0
    meter.wrote(Save(200, 60.0, 0.1))
    assert meter.pace().write_s == 60.0


def test_many_steps_give_a_high_quantile():
    """One step in a thousand that took minutes (an evaluation) doesn't make every step slow."""
    meter = PaceMeter()
    for number in range(STEPS):
        meter.step(120.0 if number == 100 else 1.0 + number / 1000)

    assert 1.2 < meter.pace().step_s < 1.3


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True)))
def test_pace_is_always_finite(values):
    """Whatever is measured, what is said is finite, not negative, and of bounded memory."""
    meter = PaceMeter()
    for value in values:
        meter.step(value)
        meter.staged(value, -1)
        meter.wrote(Save(5, value, value))
    pace = meter.pace()

    assert all(math.isfinite(x) and x >= 0 for x in (pace.step_s, pace.stage_s, pace.write_s, pace.fsync_s))


def test_old_saves_are_forgotten():
    """A disk that has become fast again is believed after a while."""
    meter = PaceMeter()
    meter.wrote(Save(1, 100.0, 1.0))
    for _ in range(SAVES):
        meter.wrote(Save(1, 1.0, 0.0))

    assert meter.pace().write_s == 1.0


def test_a_save_alone_on_the_disk_counts_as_with_all_ranks_at_once():
    """Four ranks share a disk: what one wrote alone takes four times as long, what all wrote at once no longer."""
    meter = PaceMeter()
    meter.shared_by(4)
    meter.wrote(Save(100, 1.0, 0.1, disk_bytes=100))
    assert meter.pace().write_s == 4.0
    assert meter.pace().fsync_s == 0.4
    together = PaceMeter()
    together.shared_by(4)
    together.wrote(Save(100, 3.0, 0.1, disk_bytes=400))
    together.wrote(Save(100, 2.0, 0.1, disk_bytes=0))  # a network's: not known, so as it was
    assert together.pace().write_s == 3.0


def test_what_earlier_runs_measured_counts_and_ages():
    """Recalled saves are there before the first one of this run, and give way to new ones."""
    meter = PaceMeter()
    meter.recall([Save(10, 7.0, 0.5, stage_s=0.3)], 10)
    assert meter.pace() == Pace(0.0, 0.3, 7.0, 0.5, 10)
    assert meter.new_saves() == ()
    meter.staged(0.2, 10)
    for _ in range(SAVES):
        meter.wrote(Save(10, 1.0, 0.1))
    assert meter.pace().write_s == 1.0
    new = meter.new_saves()
    assert len(new) == SAVES
    assert new[0] == Save(10, 1.0, 0.1, stage_s=0.2)  # what its copy took belongs to it
    assert new[1] == Save(10, 1.0, 0.1)


def test_looking_now_and_then_times_steps():
    """Steps between two looks share the time; a step longer than the looks counts whole."""
    meter = PaceMeter()
    watch = StepWatch(meter)
    watch.look(10, 0.0)
    watch.look(20, 1.0)
    assert meter.pace().step_s == 0.1
    watch.look(20, 2.0)
    watch.look(20, 3.0)
    watch.look(21, 4.5)

    assert meter.pace().step_s == 3.5


def test_waits_and_starts_are_no_steps():
    """Neither the time before the first step, nor a park, nor a resume to another step is a step's."""
    meter = PaceMeter()
    watch = StepWatch(meter)
    watch.look(-1, 0.0)
    watch.look(0, 500.0)
    watch.skip()
    watch.look(1, 900.0)
    watch.look(0, 901.0)

    assert meter.pace() == Pace()
