"""What saves have taken, kept beside the generations."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from powerguard.generations import paces
from powerguard.generations.paces import SAVES, Save, together


def test_saves_are_kept_by_rank_and_a_calibration_counts_for_all(tmp_path):
    """Each rank finds its own and what was calibrated, oldest first."""
    own, other, calibrated = Save(5, 1.0, 0.1, at=3.0), Save(5, 2.0, 0.1, at=2.0), Save(5, 9.0, 0.1, at=1.0)
    paces.keep(tmp_path, paces.rank_key(0), [own])
    paces.keep(tmp_path, paces.rank_key(1), [other])
    paces.keep(tmp_path, paces.CALIBRATED, [calibrated])
    assert paces.known(tmp_path, 0) == (calibrated, own)
    assert paces.known(tmp_path, 7) == (calibrated,)


def test_the_newest_hundred_are_kept(tmp_path):
    """The file stays small."""
    paces.keep(tmp_path, "a", [Save(1, float(number), 0.0) for number in range(250)])
    kept = paces.read(tmp_path, "a")
    assert len(kept) == SAVES
    assert kept[-1].write_s == 249.0


def test_what_can_t_be_read_or_written_stops_nothing(tmp_path):
    """Damage, nonsense and a directory that isn't one are nothing known."""
    assert paces.read(tmp_path / "none", "a") == ()
    paces.keep(tmp_path, "a", [Save(1, 1.0, 1.0)])
    path = tmp_path / ".powerguard" / "pace" / "a.json"
    for data in (
        b"",
        b"\xff",
        b"[1]",
        b'[{"bytes":0,"write_s":1,"fsync_s":1}]',
        b'[{"bytes":5,"write_s":-1,"fsync_s":0}]',
    ):
        path.write_bytes(data)
        assert paces.read(tmp_path, "a") == ()
    (tmp_path / "file").write_text("")
    paces.keep(tmp_path / "file", "a", [Save(1, 1.0, 1.0)])


def test_only_saves_of_a_like_size_tell_something():
    """Time goes with the bytes within a factor of two; a state of another order tells nothing."""
    saves = [Save(100, 1.0, 0.1, 200, 0.5), Save(10, 1.0, 0.1), Save(1000, 1.0, 0.1)]
    assert paces.like(saves, 150) == (Save(150, 1.5, 0.1, 300, 0.75),)


@given(st.integers(1, 10**12), st.integers(0, 10**13), st.integers(0, 64))
def test_sharing_a_disk_never_makes_a_save_faster(size, disk_bytes, sharers):
    """The factor is between 1 and the number of ranks, and 1 where all wrote at once already."""
    factor = together(Save(size, 1.0, 0.0, disk_bytes), sharers)
    assert 1.0 <= factor <= max(1, sharers)
    if disk_bytes >= sharers * size:
        assert factor == 1.0
