"""The stories in scenarios/ are told by the core as they are written."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from powerguard.sim.musts import broken
from powerguard.sim.play import main, play
from powerguard.sim.scenario import ScenarioError, load, read, render
from powerguard.sim.seq import to_seq
from powerguard.sim.world import World

STORIES = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))
STORY = """# A dip.

feed ups age_y=2
job gpt ranks=2 step_s=1 write_s=8

t=10 ups status="OB DISCHRG"
t=10..60 ups charge=100..94
# remark
t=35
----
what was

t=50 ups status="OL CHRG"
t=90
----
nothing
"""


LONG = [path for path in STORIES if "battery=" in path.read_text(encoding="utf-8")]  # a simulated battery, to its end
CRASHED = [path for path in STORIES if path not in LONG or path.stem in ("whole_outage", "unequal_ranks", "two_jobs")]
PLAYED = [pytest.param(path, id=path.stem, marks=pytest.mark.slow if path in LONG else ()) for path in STORIES]


@lru_cache
def played(path: Path) -> tuple[World, list[list[str]]]:
    """Each story is played once."""
    return play(load(path))


@pytest.mark.parametrize("path", PLAYED)
def test_story(path: Path):
    """The answer of the core to each act is the written one; `make golden` rewrites it."""
    _, answers = played(path)

    assert path.read_text(encoding="utf-8") == render(load(path), answers)


@pytest.mark.slow
@pytest.mark.parametrize("path", CRASHED, ids=lambda path: path.stem)
def test_story_survives_a_crash_at_every_step(path: Path):
    """With the state sent through JSON after every decision, the story is told in the same words."""
    scenario = load(path)

    _, answers = play(scenario, through_json=True)

    assert path.read_text(encoding="utf-8") == render(scenario, answers)


def test_there_are_enough_stories():
    """At least the stories that the rules were made from."""
    assert len(STORIES) >= 80
    assert all(load(path).title for path in STORIES)


def test_a_rewritten_story_is_stable(tmp_path: Path):
    """Rewriting puts the answers in, keeps every other word, and changes nothing the second time."""
    path = tmp_path / "dip.txt"
    path.write_text(STORY, encoding="utf-8")

    assert main([str(path)]) == 1
    assert main(["--rewrite", str(path)]) == 0
    once = path.read_text(encoding="utf-8")
    assert main([str(path)]) == 0

    assert "snapshot: on battery for 10 s" in once
    assert "# remark\n" in once
    written = [line for line in STORY.splitlines() if line not in ("what was", "nothing")]
    assert written == [line for line in once.splitlines() if line in written]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("t=1 ups status=OB\n", "without ----"),
        ("----\nx\n", "an answer to nothing"),
        ("t=x ups status=OB\n----\n", "isn't an instant"),
        ("t=1 ups status='OB\n----\n", "No closing quotation"),
        ("t=5 ups status=OB\n----\n\nt=1 ups status=OL\n----\n", "goes back"),
        ("t=1 ups status=OB\n----\n\nfeed late\n", "before the first act"),
        ("status=OB\n", "neither a set-up nor an instant"),
    ],
)
def test_a_story_that_cannot_be_read(text: str, why: str):
    """A mistake in a file is named with its line."""
    with pytest.raises(ScenarioError, match=why) as caught:
        read(text)

    assert "line" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("policy margin=3", "no option margin"),
        ("policy margin_s=three", "float"),
        ("feed ups colour=red", "no option colour"),
        ("job", "needs a name"),
        ("job gpt ranks=x", "int"),
        ("moon full=true", "is no set-up"),
        ("t=1 fault moonquake", "no such fault"),
        ("t=1 fault rank-dead pid=3", "no option pid"),
        ("t=1 ups feed=other status=OB", "no feed other"),
        ("t=1 ups comm=bad", "not a valid Comm"),
        ("t=1..9 ups charge=100", "doesn't move"),
        ("t=1 earthquake", "can't happen"),
    ],
)
def test_a_story_that_cannot_be_played(line: str, why: str, tmp_path: Path, capsys):
    """What doesn't exist is refused in words, by exit code 2 of the command."""
    text = f"{line}\nt=1\n----\n" if not line.startswith("t=") else f"{line}\n----\n"
    path = tmp_path / "bad.txt"
    path.write_text(text, encoding="utf-8")

    assert main([str(path)]) == 2
    assert why in capsys.readouterr().err


def test_export_to_dummy_ups():
    """The UPS of a story becomes a sequence for dummy-ups: every change at its time, nothing after the last one."""
    text = to_seq(read(STORY, "dip"), "ups")
    lines = text.splitlines()

    assert lines[0] == "# A dip."
    assert "ups.status: OL" in lines[: lines.index("TIMER 10")]
    assert lines.index("ups.status: OB DISCHRG") > lines.index("TIMER 10")
    assert lines[-1:] == ["TIMER 86400"]
    seconds = [int(line.split()[1]) for line in lines if line.startswith("TIMER")]
    assert sum(seconds[:-1]) == 60
    with pytest.raises(ScenarioError, match="no feed rack"):
        to_seq(read(STORY, "dip"), "rack")


def test_every_story_with_a_script_can_be_exported():
    """All but the stories with a simulated battery can be told by dummy-ups."""
    told = 0
    for path in STORIES:
        scenario = load(path)
        name = next((line.words[1] for line in scenario.setup if line.words[0] == "feed"), "ups")
        if "battery=" not in path.read_text(encoding="utf-8"):
            told += to_seq(scenario, name).startswith("# ")

    assert told >= 20


@pytest.mark.parametrize("path", PLAYED)
def test_what_must_hold_of_a_story(path: Path):
    """Every story says what must hold of it, and it holds: read from the world that it left, not from its words."""
    scenario = load(path)
    world, _ = played(path)

    assert scenario.musts
    assert [] == broken(scenario, world)


@pytest.mark.parametrize(
    ("must", "why"),
    [
        ("halt", "there was no halt"),
        ("stop times=1", "there was no stop"),
        ("never snapshot", "snapshot at 20.1 s"),
        ("snapshot times=2", "1 times"),
        ("snapshot before=20", "not before 20 s"),
        ("snapshot after=30", "not after 30 s"),
        ("save gpt step=40", "of step 18, not 40"),
        ("lose at_most=1", "and step 18 is whole"),
        ("end parked", "it ends on_battery"),
        ("park", "isn't parked"),
        ("say flood", "nobody said 'flood'"),
        ("never say 'ON BATTERY'", "was said"),
    ],
)
def test_a_claim_that_does_not_hold(must: str, why: str):
    """Each claim can fail, and says what was instead."""
    scenario = read(STORY.replace("\n\nt=10 ups", f"\nmust {must}\n\nt=10 ups", 1).partition("t=50")[0])
    world, _ = play(scenario)

    found = broken(scenario, world)

    assert 1 == len(found)
    assert why in found[0]


@pytest.mark.parametrize(
    ("must", "why"),
    [
        ("fly", "nobody knows how to judge"),
        ("", "nobody knows how to judge"),
        ("never train", "nobody knows how to judge"),
        ("save", "takes one word more"),
        ("halt soon", "takes no other word"),
        ("halt by=3", "no option by"),
        ("halt before=soon", "isn't a number"),
        ("lose", "needs at_most"),
        ("end asleep", "is no phase"),
        ("save rack", "no job rack"),
    ],
)
def test_a_claim_that_nobody_can_judge(must: str, why: str):
    """A claim with a mistake in it is refused in words, with its line."""
    scenario = read(f"job gpt\nmust {must}\n\nt=1\n----\n")

    with pytest.raises(ScenarioError, match=f"line 2.*{why}"):
        broken(scenario, play(scenario)[0])
