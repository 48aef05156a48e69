"""`powerguard calibrate`: real writes of the size in question, and who reads what they took."""

from __future__ import annotations

import json
import subprocess
import sys
from subprocess import PIPE

import msgspec
import pytest

from powerguard.cli import plan, run
from powerguard.cli.calibrate import CHILD, RANKS_MAX, Calibration, look_for_memory, words
from powerguard.core.policy import Policy
from powerguard.errors import StateError
from powerguard.generations import paces, scan
from powerguard.generations.paces import Save

SIZE = "20MB"


def call(capsys, *arguments: object) -> tuple[int, str, str]:
    code = run(["calibrate", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.torch
@pytest.mark.slow
def test_two_ranks_write_at_once_and_it_is_kept(tmp_path, capsys):
    """Each round's saves are kept for runs that save there; no generation appears, and no room stays taken."""
    pytest.importorskip("torch")
    code, out, err = call(capsys, tmp_path, "--state-bytes", SIZE, "--ranks", 2, "--rounds", 2, "--json")
    assert (code, err) == (0, "")
    done = msgspec.json.decode(out, type=Calibration)
    assert (done.ranks, done.rank_bytes, done.rounds, done.source) == (2, 10_000_000, 2, "cpu")
    saves = paces.read(tmp_path, paces.CALIBRATED)
    assert [save.bytes for save in saves] == [10_000_000] * 4
    assert done.write_s == max(save.write_s for save in saves) > 0
    assert min(save.stage_s for save in saves) > 0
    assert done.save_s >= Policy().flush_factor * (done.write_s + done.stage_s)
    assert scan(tmp_path) == []
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 10_000]
    assert [line.split()[0] for line in words(done)] == ["measured", "copy", "write", "need", "kept"]


@pytest.mark.torch
@pytest.mark.slow
def test_what_cannot_be_measured_is_one_line(tmp_path, capsys):
    """A run that saves there just now isn't disturbed: what the measuring process met is told."""
    pytest.importorskip("torch")
    from powerguard.train.flush import Flusher

    training = Flusher(tmp_path, rank=0, world_size=1)
    training.prepare({"a": 1}, prove=False)
    try:
        code, _, err = call(capsys, tmp_path, "--state-bytes", SIZE)
    finally:
        training.close()
    assert (code, err.count("\n"), "another running process saves" in err) == (8, 1, True)
    assert paces.read(tmp_path, paces.CALIBRATED) == ()


def test_without_a_size_or_a_directory(tmp_path, capsys):
    """A size is needed where no generation tells it, and a directory is never made by mistake."""
    code, _, err = call(capsys, tmp_path)
    assert (code, "give --state-bytes" in err) == (2, True)
    assert call(capsys, tmp_path, "--state-bytes", "many")[0] == 2
    assert call(capsys, tmp_path / "none", "--state-bytes", SIZE)[0] == 8
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("ranks", [RANKS_MAX + 1, 100_000])
def test_more_ranks_than_a_node_has_start_nothing(ranks, tmp_path, capsys):
    """The number is looked at first, before the size and the memory, and the line says what to give."""
    code, out, err = call(capsys, tmp_path, "--ranks", ranks, "--state-bytes", "many")
    assert (code, out) == (2, "")
    assert f"--ranks {ranks} isn't a number from 1 to {RANKS_MAX}; give the ranks of this node" in err
    assert "'many' isn't a size" in call(capsys, tmp_path, "--ranks", RANKS_MAX, "--state-bytes", "many")[2]


def test_an_empty_size_is_a_mistake(tmp_path, capsys):
    """A variable of a script that isn't set mustn't become the size of the newest generation."""
    code, _, err = call(capsys, tmp_path, "--state-bytes=")
    assert (code, "'' isn't a size" in err) == (2, True)


@pytest.mark.torch
def test_memory_for_all_ranks_is_looked_at_before_any_starts(tmp_path, capsys):
    """One line for all of them: each alone might still find room, and together they would take it from each other."""
    pytest.importorskip("torch")
    code, out, err = call(capsys, tmp_path, "--state-bytes", "900TB", "--ranks", 2)
    assert (code, out, err.count("\n")) == (13, "", 1)
    assert "2 ranks together take 900" in err
    assert "give a smaller --state-bytes" in err
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_fit_alone_may_not_fit_together():
    """What is free counts once, for all."""
    look_for_memory(3, 10**9, free=8 * 10**9)
    look_for_memory(8, 10**9, free=None)
    with pytest.raises(StateError, match=r"8 ranks together take 1\d\.\d\d GB and only 8\.00 GB of memory are free"):
        look_for_memory(8, 10**9, free=8 * 10**9)


@pytest.mark.torch
@pytest.mark.slow
def test_a_rank_whose_parent_has_gone_ends_silently(tmp_path):
    """A calibration that is ended leaves no tracebacks of its ranks in the terminal: nobody reads what they say."""
    pytest.importorskip("torch")
    command = [sys.executable, "-m", CHILD, str(tmp_path), "0", "1000000"]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        said = child.stderr.read()
    assert (child.returncode, said) == (0, "")


def test_check_plans_with_saves_that_were_measured(tmp_path):
    """The slowest of what saves there took, by rank and disk, is the need; without any it isn't known."""
    assert plan.kept_need(Policy(), tmp_path, None) is None
    assert plan.kept_need(Policy(), None, None) is None
    paces.keep(tmp_path, paces.rank_key(0), [Save(1000, 10.0, 0.0, at=1.0), Save(9000, 500.0, 0.0, at=2.0)])
    paces.keep(tmp_path, paces.rank_key(1), [Save(1000, 12.0, 2.0, disk_bytes=1000, at=3.0)])
    alone = plan.kept_need(Policy(), tmp_path, 1000.0)
    assert alone is not None
    assert alone.write_s == pytest.approx(14.0 * Policy().flush_factor)
    assert alone.by == "2 saves measured there, the slowest counts"
    both = plan.kept_need(Policy(), tmp_path, 2000.0)
    assert both is not None
    assert both.write_s == pytest.approx(2 * 14.0 * Policy().flush_factor)
    larger = plan.kept_need(Policy(), tmp_path, 1400.0)
    assert larger is not None
    assert larger.write_s == pytest.approx((1.4 * 12.0 + 2.0) * Policy().flush_factor)
    assert plan.kept_need(Policy(), tmp_path, 300.0) is None


def test_json_of_a_refusal_is_still_one_line_of_words(tmp_path, capsys):
    """`--json` changes the answer, not the error."""
    code, out, err = call(capsys, tmp_path, "--json")
    assert (code, out) == (2, "")
    with pytest.raises(json.JSONDecodeError):
        json.loads(err)
