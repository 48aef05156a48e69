"""`powerguard report` and the refusals of `powerguard drill`, through the real command line."""

import pytest

from powerguard.cli import run
from powerguard.drill.cli_entry import _folder, _new_folder
from powerguard.errors import JournalError, UsageError

pytest.importorskip("matplotlib")


@pytest.mark.slow
def test_a_report_is_made_from_a_journal_alone(night, tmp_path, capsys):
    """A real outage's journal becomes a page and a picture; the line says where."""
    _, path = night(tmp_path)
    out = tmp_path / "outage.html"
    assert run(["report", path, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "halted with everything durable" in said
    assert str(out) in said
    assert "mains fail" in out.read_text()
    assert out.with_suffix(".png").exists()


def test_a_journal_without_an_outage_is_one_line(night, tmp_path, capsys):
    """Exit code of the table, and no traceback."""
    _, path = night(tmp_path, until=105.0)
    assert run(["report", path]) == JournalError.exit_code
    assert capsys.readouterr().err.count("\n") == 1


def test_an_outage_that_is_not_there_is_refused(night, tmp_path, capsys):
    """The message says how many there are."""
    _, path = night(tmp_path, plan="dip", mains_back_at=112.9, until=130.0)
    assert run(["report", path, "--outage", "2"]) == JournalError.exit_code
    assert "one outage" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["flood"], ["blackout", "--ranks", "99"], ["dip", "--kill-rank", "0"]])
def test_a_drill_that_makes_no_sense_is_refused_before_it_starts(words, capsys):
    """One line on standard error, nothing on standard output."""
    assert run(["drill", *words]) == UsageError.exit_code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1


def test_drills_begun_in_the_same_second_have_a_folder_each(tmp_path, monkeypatch):
    """None is given another's; what is empty at the end goes, what holds something stays."""
    monkeypatch.chdir(tmp_path)
    with _folder(None, "dip") as first, _folder(None, "dip") as second:
        assert first != second
        assert first.is_dir()
        assert second.is_dir()
        (first / "report.html").touch()
    assert first.is_dir()
    assert not second.exists()
    with _folder(second, "dip") as named:
        named.mkdir()
    assert second.is_dir()  # a folder that was named is its owner's
    assert [_new_folder("all").name for _ in range(3)] == ["all", "all-2", "all-3"]


def test_no_folder_can_be_made_here(tmp_path, monkeypatch, capsys):
    """A sentence that says what to do."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert run(["drill", "dip"]) == UsageError.exit_code
    assert "--out" in capsys.readouterr().err
