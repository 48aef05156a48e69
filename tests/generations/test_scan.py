"""A restart finds the newest generation that can be trusted, and says what it passed over."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from powerguard.errors import CheckpointError, DirectoryError, StateError
from powerguard.generations import generation_name, latest, resumes, scan, seal
from powerguard.generations.names import SEAL, parse_generation
from powerguard.generations.scan import look
from powerguard.generations.seal import seal_if_whole


def test_nothing_is_found_where_nothing_is(tmp_path):
    """An empty or missing directory holds no generation, and that is no error."""
    assert scan(tmp_path) == []
    assert scan(tmp_path / "missing") == []
    assert not latest(tmp_path / "missing")


def test_a_file_for_a_directory_is_one_clear_error(tmp_path):
    """A directory that can't be listed isn't taken for an empty one."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DirectoryError):
        scan(tmp_path / "file")


def test_the_newest_step_wins(make, tmp_path):
    """Order is by step, whatever was written last."""
    make(20)
    make(3)
    assert [g.step for g in scan(tmp_path)] == [20, 3]
    assert latest(tmp_path).generation.step == 20


def test_among_equal_steps_the_newest_written_wins(make, tmp_path):
    """Two attempts at one step: the later one counts."""
    make(7, tag="a")
    second = make(7, tag="b")
    assert latest(tmp_path).generation.path == second


def test_an_unsealed_generation_with_all_its_records_counts(make, tmp_path):
    """A cut between the last shard and the seal costs nothing."""
    make(1)
    make(2, sealed=False)
    found = latest(tmp_path)
    assert found.generation.step == 2
    assert not found.generation.sealed


def test_a_missing_rank_is_passed_over_with_the_reason(make, tmp_path):
    """A generation that lacks a rank is skipped, and how many are there is said."""
    make(1)
    make(2, sealed=False, ranks=range(1))
    found = latest(tmp_path)
    assert found.generation.step == 1
    assert "only 1 of 2 ranks" in found.describe()


def test_a_rank_folder_of_another_generation_is_detected(make, tmp_path):
    """Mixing two generations is detected before a byte of data is read."""
    one, two = make(1), make(2, sealed=False)
    shutil.rmtree(two / "rank-00000")
    shutil.copytree(one / "rank-00000", two / "rank-00000")
    found = look(two)
    assert not found.whole
    assert any("is of step-0000000001" in problem for problem in found.problems)


def test_another_world_size_is_passed_over(make, tmp_path):
    """A run of four ranks doesn't take a generation of two."""
    make(1, world_size=4)
    make(2, world_size=2)
    found = latest(tmp_path, world_size=4)
    assert found.generation.step == 1
    assert "written by 2 ranks" in found.describe()


def test_a_seal_of_too_few_ranks_is_refused(make, tmp_path):
    """A seal can't be written over less than all ranks."""
    folder = make(1, sealed=False)
    shards = look(folder).shards
    with pytest.raises(CheckpointError, match="1 ranks of 2"):
        seal(tmp_path, folder.name, step=1, world_size=2, shards=shards[:1])
    with pytest.raises(CheckpointError):
        seal(tmp_path, folder.name, step=1, world_size=2, shards=[shards[0], shards[0]])
    assert not (folder / SEAL).exists()


def test_a_seal_over_a_shard_that_is_not_there_is_refused(make, tmp_path):
    """The rank that seals looks before it vouches."""
    folder = make(1, sealed=False)
    shards = look(folder).shards
    shutil.rmtree(folder / "rank-00001")
    with pytest.raises(CheckpointError, match="rank-00001"):
        seal(tmp_path, folder.name, step=1, world_size=2, shards=shards)


def test_the_last_rank_seals(make, tmp_path):
    """Without a daemon, whoever finds all ranks done seals, and twice does no harm."""
    folder = make(1, sealed=False)
    assert seal_if_whole(tmp_path, folder.name).sealed
    assert seal_if_whole(tmp_path, folder.name).sealed


def test_a_worn_generation_is_passed_over_for_an_older_one(make, tmp_path):
    """A generation that was resumed from again and again without getting further isn't taken for ever."""
    make(1)
    newest = make(2)
    for _ in range(resumes.CAP):
        assert latest(tmp_path).generation.step == 2
        resumes.count(tmp_path, newest.name)
    found = latest(tmp_path)
    assert found.generation.step == 1
    assert "without getting further" in found.describe()


def test_a_worn_generation_is_better_than_none(make, tmp_path):
    """If nothing older is left, the worn one is taken: a run from scratch loses more."""
    newest = make(2)
    for _ in range(resumes.CAP + 3):
        resumes.count(tmp_path, newest.name)
    assert latest(tmp_path).generation.step == 2


def test_getting_further_forgets_the_count(make, tmp_path):
    """Blackouts between which training went on don't wear a generation out."""
    newest = make(2)
    resumes.count(tmp_path, newest.name)
    resumes.forget(tmp_path, newest.name)
    assert resumes.read(tmp_path) == {}


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": "x"}', b"\xff\xfe", b"[]"])
def test_a_damaged_count_never_blocks_a_load(make, tmp_path, content):
    """The file of counts may hold anything."""
    newest = make(2)
    resumes.count(tmp_path, newest.name)
    (tmp_path / ".powerguard" / "resumes" / "counts.json").write_bytes(content)
    assert latest(tmp_path).generation.step == 2
    assert resumes.count(tmp_path, newest.name) == 1


@pytest.mark.parametrize("name", ["step-1.x", "step-0000000001", "step-0000000001.", "gen-1", "step-0000000001.a/b"])
def test_other_names_are_no_generations(name):
    """What we didn't name isn't ours."""
    assert parse_generation(name) is None


def test_names_are_checked_when_made():
    """A step or tag that can't be a name is refused."""
    assert generation_name(3, "e-1") == "step-0000000003.e-1"
    for step, tag in ((-1, "a"), (10**15, "a"), (1, ""), (1, "a/b"), (1, "..")):
        with pytest.raises(StateError):
            generation_name(step, tag)


@pytest.mark.slow
def test_looking_at_generations_needs_no_torch(make, tmp_path):
    """Listing and verifying work in an environment without torch."""
    make(1)
    code = (
        "import sys; from powerguard.generations import latest; "
        f"assert latest({str(tmp_path)!r}).generation.step == 1; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ})
