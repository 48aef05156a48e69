"""Old generations go only when enough newer ones are sealed, and a cut in the middle does no harm."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

from powerguard.errors import DirectoryError
from powerguard.generations import latest, resumes, retire, scan, verify
from powerguard.generations.disk import Disk
from powerguard.generations.retire import sweep


class Failing(Disk):
    """Raises at the n-th call that changes anything, and at all later ones: as after a power cut."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.calls = 0

    def _count(self) -> None:
        self.calls += 1
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.EIO, "cut")

    def mkdir(self, path: Path) -> None:
        self._count()
        super().mkdir(path)

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._count()
        super().unlink(path)

    def rmdir(self, path: Path) -> None:
        self._count()
        super().rmdir(path)

    def fsync(self, fd: int) -> None:
        self._count()
        super().fsync(fd)


def steps(directory: Path) -> list[int]:
    return [generation.step for generation in scan(directory)]


def test_the_newest_sealed_ones_stay(make, tmp_path):
    """With keep=2, two sealed ones stay and all that is older goes, with its space."""
    for step in (1, 2, 3, 4):
        make(step)
    assert sorted(["step-0000000001.e1-1", "step-0000000002.e1-1"]) == sorted(retire(tmp_path, 2))
    assert steps(tmp_path) == [4, 3]
    assert list((tmp_path / ".powerguard" / "trash").iterdir()) == []


def test_nothing_goes_before_enough_are_sealed(make, tmp_path):
    """One sealed and any number of unsealed generations: nothing is deleted."""
    make(1)
    make(2, sealed=False)
    make(3, sealed=False, ranks=range(1))
    assert retire(tmp_path, 2) == []
    assert steps(tmp_path) == [3, 2, 1]


def test_what_isn_t_sealed_is_never_counted(make, tmp_path):
    """A newer generation that is still being written doesn't push the only sealed one out."""
    make(1)
    make(2, sealed=False, ranks=range(1))
    assert retire(tmp_path, 1) == []
    assert steps(tmp_path) == [2, 1]


def test_leftovers_go_with_their_time(make, tmp_path):
    """A save that a crash cut short is cleared away once newer ones are sealed."""
    make(1, sealed=False, ranks=range(1))
    make(2)
    make(3)
    assert retire(tmp_path, 2) == ["step-0000000001.e1-1"]


def test_a_damaged_seal_doesn_t_count(make, tmp_path):
    """A generation whose shard is gone doesn't push out one that is there."""
    make(1)
    make(2)
    (make(3) / "rank-00000" / "shard.safetensors").unlink()
    assert retire(tmp_path, 2) == []
    assert steps(tmp_path) == [3, 2, 1]


def test_a_worn_generation_doesn_t_count(make, tmp_path):
    """After a fall back, the one passed over doesn't push out the ones that are used."""
    make(1)
    make(2)
    worn = make(9)
    for _ in range(resumes.CAP):
        resumes.count(tmp_path, worn.name)
    assert retire(tmp_path, 2) == []
    assert latest(tmp_path).generation.step == 2


def test_a_run_that_begins_anew_keeps_its_own(make, tmp_path):
    """Beside an older one that got further: its newest stay, and what it is writing; so do the older one's newest."""
    for step in (40, 50):
        make(step, tag="old-1")
    for step in (10, 20, 30):
        make(step, tag="new-1")
        begun = tmp_path / f"step-{step + 1:010d}.new-1"
        begun.mkdir()
        retire(tmp_path, 2)
        assert begun.exists()
        begun.rmdir()
    assert [50, 40, 30, 20] == steps(tmp_path)
    for step in (45, 55, 60):
        make(step, tag="new-1")
        retire(tmp_path, 2)
    assert [60, 55] == steps(tmp_path)


def test_every_cut_leaves_a_whole_newest(make, tmp_path):
    """Whichever call the power fails at, the newest still verifies, and the next retirement clears up."""
    made = 0
    for at in range(100):
        for _ in range(3):
            made += 1
            make(made)
        disk = Failing(at)
        with contextlib.suppress(DirectoryError):
            retire(tmp_path, 2, disk=disk)
        newest = latest(tmp_path).generation
        assert newest.step == made
        assert len([g for g in scan(tmp_path) if g.whole and not verify(g)]) >= 2
        if disk.calls <= at:
            break
    assert 10 < at < 99
    retire(tmp_path, 2)
    assert steps(tmp_path) == [made, made - 1]
    assert list((tmp_path / ".powerguard" / "trash").iterdir()) == []


def test_sweeping_where_nothing_is(tmp_path):
    """Clearing up an empty directory is fine."""
    sweep(tmp_path)
