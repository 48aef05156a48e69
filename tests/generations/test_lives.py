"""The book of a run's lives."""

from __future__ import annotations

import pytest

from powerguard.generations import lives
from powerguard.generations.lives import ANNOUNCED, FINISHED, Life


@pytest.mark.parametrize(
    ("ended", "resumed", "lost"),
    [("", 79, 20), (ANNOUNCED, 99, 0), ("failed: ValueError", -1, 50), (FINISHED, 79, 0), ("", 120, 0)],
)
def test_an_end_costs_the_steps_after_the_one_resumed_from(ended, resumed, lost):
    """In steps, seconds and GPU-hours; at most what this life had trained; nothing where training was over."""
    life = Life(started_at=0.0, seen_at=1000.0, first_step=50, step=99, trained_s=100.0, world_size=8, ended=ended)
    settled = lives.settle(life, resumed, now=1300.0)

    assert (settled.lost_steps, settled.lost_s) == (lost, 2.0 * lost)
    assert settled.gpu_hours == pytest.approx(2.0 * lost * 8 / 3600)
    assert settled.down_s == 300.0


def test_what_is_written_is_read_back_whatever_is_torn(tmp_path):
    """A power cut in the middle of a line loses that line."""
    one = Life(started_at=1.0, seen_at=2.0, step=5, ended=FINISHED)
    assert lives.current(tmp_path) is None
    assert lives.past(tmp_path) == ()
    lives.write_current(tmp_path, one)
    lives.bury(tmp_path, one)
    with open(tmp_path / ".powerguard" / "lives" / "past.jsonl", "ab") as file:
        file.write(b'{"started_at":3')
    lives.bury(tmp_path, one)

    assert lives.current(tmp_path) == one
    assert lives.past(tmp_path) == (one, one)


def test_a_directory_that_cant_be_written_stops_nobody(tmp_path):
    """The book is for people; a run doesn't end for it."""
    (tmp_path / "file").write_text("")
    lives.write_current(tmp_path / "file", Life(0.0, 0.0))
    lives.bury(tmp_path / "file", Life(0.0, 0.0))

    assert lives.past(tmp_path / "file") == ()
