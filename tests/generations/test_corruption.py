"""Whatever is damaged, it is detected and the right generation is taken instead."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import msgspec
import pytest

from powerguard.generations import latest, scan, verify
from powerguard.generations.names import RECORD, SEAL, SHARD
from powerguard.generations.record import Record, decode, encode


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_whole_generation_has_no_problems(make, tmp_path):
    """What was written verifies."""
    make(1)
    assert verify(scan(tmp_path)[0]) == []


@pytest.mark.slow
def test_a_flipped_byte_anywhere_is_detected(make, tmp_path):
    """Any of 200 random bytes of the newest generation's files, flipped, makes the one before it the newest."""
    make(1)
    bad = make(2, size=5000)
    dice = random.Random(1)
    places = [(path, at) for path in files(bad) for at in range(path.stat().st_size)]
    for path, at in dice.sample(places, 200):
        good = path.read_bytes()
        data = bytearray(good)
        data[at] ^= 1 << dice.randrange(8)
        path.write_bytes(data)
        found = latest(tmp_path)
        assert found.generation.step == 1, (path.name, at)
        assert len(found.skipped) == 1
        path.write_bytes(good)
    assert latest(tmp_path).generation.step == 2


@pytest.mark.parametrize("name", [SHARD, RECORD])
@pytest.mark.parametrize("keep", [0, 1, 1023, 1024, 2999])
def test_a_truncated_file_is_detected(make, tmp_path, name, keep):
    """A file cut short anywhere, also at a chunk's edge."""
    make(1)
    path = make(2) / "rank-00001" / name
    path.write_bytes(path.read_bytes()[: min(keep, path.stat().st_size - 1)])
    assert latest(tmp_path).generation.step == 1


def test_a_file_with_bytes_appended_is_detected(make, tmp_path):
    """Sizes are part of what is checked."""
    make(1)
    path = make(2) / "rank-00001" / SHARD
    path.write_bytes(path.read_bytes() + b"\0")
    assert latest(tmp_path).generation.step == 1


def test_zeros_instead_of_data_are_detected(make, tmp_path):
    """What a cut leaves of unwritten blocks: the right size, all zeros."""
    make(1)
    path = make(2) / "rank-00000" / SHARD
    path.write_bytes(bytes(path.stat().st_size))
    assert latest(tmp_path).generation.step == 1


@pytest.mark.parametrize("what", ["folder", SHARD, RECORD])
@pytest.mark.parametrize("sealed", [True, False])
def test_swapped_ranks_are_detected(make, tmp_path, what, sealed):
    """Two ranks' folders or files exchanged, in a sealed and in an unsealed generation."""
    make(1)
    folder = make(2, sealed=sealed)
    one, two = folder / "rank-00000", folder / "rank-00001"
    if what != "folder":
        one, two = one / what, two / what
    one.rename(folder / "aside")
    two.rename(one)
    (folder / "aside").rename(two)
    assert latest(tmp_path).generation.step == 1


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("what", ["folder", SHARD, RECORD])
def test_a_rank_of_another_generation_is_detected(make, tmp_path, what, sealed):
    """A rank's folder or file taken from an older generation of the same sizes."""
    old, new = make(1), make(2, sealed=sealed)
    source, target = old / "rank-00001", new / "rank-00001"
    if what == "folder":
        shutil.rmtree(target)
        shutil.copytree(source, target)
    else:
        shutil.copy(source / what, target / what)
    assert latest(tmp_path).generation.step == 1


@pytest.mark.parametrize("sealed", [True, False])
def test_a_duplicated_rank_is_detected(make, tmp_path, sealed):
    """Rank 0 a second time in rank 1's place."""
    make(1)
    folder = make(2, sealed=sealed)
    shutil.rmtree(folder / "rank-00001")
    shutil.copytree(folder / "rank-00000", folder / "rank-00001")
    assert latest(tmp_path).generation.step == 1


def rewrite(folder: Path, **changes: object) -> None:
    """A record that is whole in itself, and says something else."""
    record = decode((folder / RECORD).read_bytes(), Record, "it")
    (folder / RECORD).write_bytes(encode(msgspec.structs.replace(record, **changes))[0])


def test_a_record_that_wasn_t_sealed_is_detected(make, tmp_path):
    """A record that is valid, of that generation and rank, but not the one that the seal is over."""
    make(1)
    rewrite(make(2) / "rank-00001", written_at=1009.0)  # the same length
    assert latest(tmp_path).generation.step == 1


@pytest.mark.parametrize("change", [{"attempt": "b"}, {"world_size": 3}, {"unit": "epoch"}])
def test_ranks_that_don_t_agree_are_detected(make, tmp_path, change):
    """Without a seal, the records must be of one run."""
    make(1)
    rewrite(make(2, sealed=False) / "rank-00001", **change)
    assert latest(tmp_path).generation.step == 1


def test_a_seal_of_another_generation_is_detected(make, tmp_path):
    """A seal vouches for one name only."""
    old, new = make(1), make(2)
    shutil.copy(old / SEAL, new / SEAL)
    assert latest(tmp_path).generation.step == 1


def test_only_the_ranks_asked_for_are_read(make, tmp_path):
    """Each rank may verify its own data, and still sees what names and records tell of the others."""
    folder = make(2)
    path = folder / "rank-00001" / SHARD
    path.write_bytes(bytes(path.stat().st_size))
    generation = scan(tmp_path)[0]
    assert verify(generation, ranks=[0]) == []
    assert [problem.rank for problem in verify(generation, ranks=[1])] == [1]
    assert latest(tmp_path, verify_ranks=[0])
    assert not latest(tmp_path)


def test_problems_name_the_place(make, tmp_path):
    """The operator is told which rank's shard is bad, and where."""
    path = make(2) / "rank-00001" / SHARD
    data = bytearray(path.read_bytes())
    data[1500] ^= 1
    path.write_bytes(data)
    (problem,) = verify(scan(tmp_path)[0])
    assert str(problem) == "rank-00001's shard doesn't match its checksum in bytes 1024 to 2048"
