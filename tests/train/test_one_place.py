"""Whether ranks see one directory."""

from __future__ import annotations

import os

import pytest

from powerguard.errors import DirectoryError
from powerguard.train.one_place import OLD_S, WITHIN_S, find_mark, leave_mark


def test_a_mark_that_shows_late_is_waited_for(tmp_path):
    """A network file system takes its time; what never shows is refused, and not before the time is over."""
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds
        if now[0] > WITHIN_S / 2:
            assert leave_mark(tmp_path, "a")

    find_mark(tmp_path, "a", rank=1, clock=lambda: now[0], sleep=sleep)
    assert WITHIN_S / 2 < now[0] < WITHIN_S
    with pytest.raises(DirectoryError, match=r"node of rank 1 isn't the one that rank 0 sees(?s:.*)all nodes share"):
        find_mark(tmp_path, "b", rank=1, clock=lambda: now[0], sleep=sleep)
    assert now[0] > 1.5 * WITHIN_S


def test_old_marks_go_and_one_that_cant_be_left_is_none(tmp_path):
    """Those of other starts that may still be looked for stay."""
    for name in ("old", "new"):
        assert leave_mark(tmp_path, name)
    place = next(tmp_path.rglob("old")).parent
    os.utime(place / "old", (0, 0))
    assert leave_mark(tmp_path, "newest")

    assert {"new", "newest"} == {mark.name for mark in place.iterdir()}
    assert OLD_S > WITHIN_S
    (tmp_path / "file").write_text("")
    assert not leave_mark(tmp_path / "file", "a")
