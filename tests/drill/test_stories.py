"""The scenarios that come with powerguard, through the command line that plays them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from powerguard.cli import run
from powerguard.drill import stories, suite
from powerguard.drill.plan import PLANS
from powerguard.errors import DrillFailed, UsageError

GOOD = """# A dip.

job gpt ranks=2 step_s=1 write_s=4
must never stop
must train

t=10 ups status="OB DISCHRG"
t=30 ups status="OL CHRG"
t=50
----
"""


def test_what_there_is(capsys):
    """At least forty stories, and every drill on real processes, each with what it shows; no name twice."""
    assert 0 == run(["drill", "--list", "--json"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert len([line for line in lines if line["world"] == "pure"]) >= 40
    assert set(PLANS) == {line["scenario"] for line in lines if line["world"] == "processes"}
    assert len(lines) == len({line["scenario"].replace("-", "_") for line in lines})
    assert all(line["says"] for line in lines)


def test_one_story_by_its_name(capsys):
    """In either spelling; told act by act, or as one line of JSON."""
    assert 0 == run(["drill", "lb-early"])
    assert "lb_early: held" in capsys.readouterr().out
    assert 0 == run(["drill", "lb_early", "--json"])
    assert {"scenario": "lb_early", "world": "pure", "verdict": "held", "why": []} == json.loads(
        capsys.readouterr().out
    )


def test_a_story_of_ones_own(tmp_path, capsys):
    """Held: 0. A claim that doesn't hold: 16, with what was instead. An answer that differs: the same."""
    path = tmp_path / "mine.txt"
    path.write_text(GOOD)
    assert 0 == run(["drill", str(path)])
    assert "mine: held" in capsys.readouterr().out

    path.write_text(GOOD.replace("must never stop", "must halt"))
    assert DrillFailed.exit_code == run(["drill", str(path), "--json"])
    assert ["must halt: there was no halt"] == json.loads(capsys.readouterr().out)["why"]

    path.write_text(GOOD + "t=10.1 something else\n")
    assert DrillFailed.exit_code == run(["drill", str(path), "--json"])
    assert "told otherwise" in json.loads(capsys.readouterr().out)["why"][0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (GOOD.replace("must train", "must fly"), "nobody knows how to judge"),
        (GOOD.replace("job gpt", "moon gpt"), "is no set-up"),
        (GOOD.replace("t=10 ups", "t=x ups"), "isn't an instant"),
        ("\x00\xff", "line 1"),
    ],
)
def test_a_story_with_a_mistake(text: str, why: str, tmp_path, capsys):
    """One line that says where, and exit code 2."""
    path = tmp_path / "bad.txt"
    path.write_text(text)

    assert UsageError.exit_code == run(["drill", str(path)])
    said = capsys.readouterr()
    assert why in said.err
    assert 1 == said.err.count("\n")
    assert "" == said.out


def _never_ends() -> None:
    with stories._at_most(0.05):
        while True:
            pass


def test_a_story_that_is_lost_and_one_that_hangs_are_told(tmp_path):
    """Neither ends the others: each is a line with its reason."""
    path = tmp_path / "long.txt"
    path.write_text(GOOD)
    lines = {line.scenario: line for line in suite.pure({"gone": tmp_path / "gone.txt", "long": path})}

    assert (False, stories.BROKEN) == (lines["gone"].ok, lines["gone"].verdict)
    assert (True, stories.HELD) == (lines["long"].ok, lines["long"].verdict)
    with pytest.raises(stories._Hung):
        _never_ends()


def test_lines_are_read_back():
    """What `drill all` prints is JSON, and words for people."""
    line = suite.Line("dip", "pure", False, "broken", ("must halt: there was no halt",), 0.5)

    assert "dip" == json.loads(suite.as_json(line))["scenario"]
    assert "BROKEN" in suite.in_words(line)
    assert "there was no halt" in suite.in_words(line)
    assert ["dip"] == json.loads(suite.as_json(suite.Summary(2, 1, ("dip",), 1.0)))["broken"]


def test_a_folder_with_a_drill_in_it_is_not_used_again(tmp_path, capsys):
    """A second drill there would be judged by the first one's traces."""
    (tmp_path / "trace").mkdir()

    assert UsageError.exit_code == run(["drill", "dip", "--out", str(tmp_path)])
    assert "holds a drill already" in capsys.readouterr().err


def test_the_stories_are_in_the_package_or_in_the_checkout():
    """Where they are looked for, they are."""
    assert Path(__file__).parents[1] / "scenarios" == stories.folder() or "scenarios" == stories.folder().name
    assert stories.find("whole-outage") == stories.paths()["whole_outage"]
    with pytest.raises(UsageError, match="no drill is called"):
        stories.find("flood")
