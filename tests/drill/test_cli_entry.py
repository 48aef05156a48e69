"""`powerguard report` and the refusals of `powerguard drill`, through the real command line."""

import json
from pathlib import Path

import pytest

from powerguard.cli import run
from powerguard.drill.cli_entry import _folder, _new_folder
from powerguard.errors import DirectoryError, JournalError, UsageError

pytest.importorskip("matplotlib")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory, with a file in it that is no folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    return tmp_path


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


@pytest.mark.parametrize("every", ["nan", "-1", "inf"])
def test_seconds_that_are_none_are_refused(night, tmp_path, capsys, every):
    """And nothing is told of the outage."""
    _, path = night(tmp_path)
    capsys.readouterr()

    assert run(["scenario", path, "--every", every]) == 2
    said = capsys.readouterr()
    assert ("", True) == (said.out, f"--every {every} isn't a number of seconds" in said.err)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("out", "why"),
    [
        ("nowhere/x.html", "No such file or directory"),
        (".", "Is a directory"),
        ("/dev/full", "No space left on device"),
        ("file/x.html", "Not a directory"),
    ],
)
def test_a_report_that_cant_be_written_says_so(out, why, night, here, capsys):
    """One line with the place, the reason and what to do."""
    _, path = night(here)

    assert run(["report", path, "--out", out]) == DirectoryError.exit_code
    assert f"powerguard: {out} can't be written: {why}; name another file with --out\n" == capsys.readouterr().err


@pytest.mark.slow
def test_a_report_that_cant_be_written_here_says_so(night, tmp_path, monkeypatch, capsys):
    """The place that nobody named is no better than one that was."""
    _, path = night(tmp_path)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    assert run(["report", path]) == DirectoryError.exit_code
    said = capsys.readouterr().err
    assert f"powerguard: {Path(path).stem}.html can't be written: No such file or directory; name another" in said


def test_a_scenario_that_cant_be_written_says_so(night, tmp_path, capsys):
    """As a report."""
    _, path = night(tmp_path, plan="dip", mains_back_at=112.9, until=130.0)

    assert run(["scenario", path, "--out", str(tmp_path)]) == DirectoryError.exit_code
    said = capsys.readouterr().err
    assert f"powerguard: {tmp_path} can't be written: Is a directory; name another file with --out\n" == said


@pytest.mark.parametrize("name", ["dip", "all"])
@pytest.mark.parametrize(
    ("out", "why"), [("file", "Not a directory"), ("file/x", "Not a directory"), ("/proc/x", "No such file")]
)
@pytest.mark.usefixtures("here")
def test_a_drill_that_has_no_folder_doesnt_begin(name, out, why, capsys):
    """Nothing is started or played: the place is tried first."""
    assert run(["drill", name, "--out", out]) == DirectoryError.exit_code
    said = capsys.readouterr()
    assert "" == said.out
    assert said.err.startswith(f"powerguard: {out} can't be written: {why}")
    assert said.err.endswith("; name another folder with --out\n")


def of_another_day(path: str, day: str, boot: str) -> str:
    """The journal *path* as of another boot, begun at noon of *day*; the name that it has then."""
    first, rest = Path(path).read_text().split("\n", 1)
    head = json.loads(first) | {"created": f"{day}T12:00:00.000+00:00", "boot": boot}
    named = Path(path).with_name(f"journal-{day.replace('-', '')}T120000Z-{boot}-0.jsonl")
    Path(path).unlink()
    named.write_text(json.dumps(head) + "\n" + rest)
    return str(named)


@pytest.fixture
def state_dir(night, tmp_path):
    """(the folder, its journals by day): a dip, a blackout, a dip and a quiet day; the names aren't in that order."""
    folder = tmp_path / "state"
    folder.mkdir()
    dip = {"plan": "dip", "mains_back_at": 112.9, "until": 130.0}
    days = [
        of_another_day(night(folder, **story)[1], f"2026-01-0{n}", boot)
        for n, (boot, story) in enumerate(
            [("dddddddd", dip), ("cccccccc", {}), ("bbbbbbbb", dip), ("aaaaaaaa", {"until": 105.0})], 1
        )
    ]
    (folder / "learned.json").write_text("{}")
    return folder, days


@pytest.mark.parametrize("as_folder", [True, False])
def test_the_last_outage_of_several_journals(as_folder, state_dir, capsys):
    """A folder, or files in any order; a journal without an outage is passed over, and which was taken is said."""
    folder, days = state_dir

    assert run(["scenario", *([str(folder)] if as_folder else reversed(days))]) == 0
    said = capsys.readouterr()
    assert f"powerguard: outage 3 of 3: {days[2]}\n" == said.err
    assert "must never stop" in said.out


def test_outages_of_several_journals_are_counted_in_order_of_time(state_dir, capsys):
    """The second of them all is the blackout; there are three."""
    folder, days = state_dir

    assert run(["scenario", str(folder), "--outage", "2"]) == 0
    said = capsys.readouterr()
    assert f"powerguard: outage 2 of 3: {days[1]}\n" == said.err
    assert "must halt" in said.out
    assert run(["scenario", str(folder), "--outage", "4"]) == JournalError.exit_code
    assert "4 journals: there is no outage 4, they have 3 outages; choose 1 to 3\n" in capsys.readouterr().err


@pytest.mark.slow
def test_a_report_of_several_is_named_as_the_journal_that_it_is_of(state_dir, tmp_path, monkeypatch, capsys):
    """And lies here."""
    folder, days = state_dir
    monkeypatch.chdir(tmp_path)

    assert run(["report", str(folder), "--outage", "2"]) == 0
    assert f"report: {Path(days[1]).stem}.html\n" in capsys.readouterr().out
    assert "halted with everything durable" in (tmp_path / f"{Path(days[1]).stem}.html").read_text()


@pytest.mark.parametrize("command", ["report", "scenario"])
def test_a_folder_without_a_journal(command, tmp_path, capsys):
    """Says what is looked for."""
    assert run([command, str(tmp_path)]) == JournalError.exit_code
    assert "no journal-*.jsonl is in this folder; name the daemon's state_dir" in capsys.readouterr().err


@pytest.mark.slow
def test_damaged_lines_are_told(night, tmp_path, capsys):
    """On standard error, and in the page that is kept; a file of nothing else counts as well where others are whole."""
    _, path = night(tmp_path)
    lines = Path(path).read_text().splitlines(keepends=True)
    lines[10] = lines[10][:40] + "\n"
    Path(path).write_text("".join(lines) + '{"k":"tick","n"')
    out = tmp_path / "x.html"

    assert run(["report", path, "--out", str(out)]) == 0
    assert f"powerguard: 2 damaged lines of {path} left out\n" == capsys.readouterr().err
    assert "damaged lines</th>" in out.read_text()
    (tmp_path / "journal-noise.jsonl").write_text("noise\n")
    assert run(["scenario", str(tmp_path)]) == 0
    assert "powerguard: 3 damaged lines of 2 journals left out\n" in capsys.readouterr().err


def test_damage_is_told_where_no_outage_is_left(night, tmp_path, capsys):
    """It may have been in what is lost."""
    _, path = night(tmp_path, until=105.0)
    Path(path).write_text(Path(path).read_text() + '{"k":"tick","n"')

    assert run(["report", path]) == JournalError.exit_code
    said = capsys.readouterr().err
    assert f"{path}: no outage is in this journal (1 damaged line of {path} left out); name the" in said
    assert 1 == said.count("\n")


@pytest.mark.parametrize("text", ["", "# Prose alone.\n", "policy poll_online_s=2\nmust never stop\n"])
def test_a_story_of_nothing_is_refused(text, tmp_path, capsys):
    """What never happens can't hold."""
    (tmp_path / "story.txt").write_text(text)

    assert run(["drill", str(tmp_path / "story.txt")]) == UsageError.exit_code
    said = capsys.readouterr()
    assert "" == said.out
    assert "the story has no line that begins with t=" in said.err


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
        assert named.is_dir()
    assert second.is_dir()  # a folder that was named is its owner's
    assert [_new_folder("all").name for _ in range(3)] == ["all", "all-2", "all-3"]


def test_no_folder_can_be_made_here(tmp_path, monkeypatch, capsys):
    """A sentence that says what to do."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert run(["drill", "dip"]) == DirectoryError.exit_code
    assert "--out" in capsys.readouterr().err
