"""docs/scenarios.md is kept by the code: every fault, every claim, every line that can happen."""

from __future__ import annotations

from pathlib import Path

from powerguard.drill.inject import ELSEWHERE
from powerguard.sim import faults as f
from powerguard.sim.musts import _CLAIMS
from powerguard.sim.play import play
from powerguard.sim.scenario import read

PAGE = Path(__file__).parents[1] / "docs" / "scenarios.md"
BEGIN, END = "<!-- faults: from powerguard/sim/faults.py -->\n", "<!-- end -->"


def faults_table() -> str:
    """What stands between the marks."""
    rows = ["| fault | what | also to processes |", "|---|---|---|"]
    for name, kind in sorted(f.KINDS.items(), key=lambda item: (item[1].where, item[0])):
        says = " ".join((kind.__doc__ or "").split()).replace("|", "\\|")
        own = [field for field in kind.__struct_fields__ if field not in f.Fault.__struct_fields__ and field != "feed"]
        options = "".join(f" {field}=" for field in own)
        rows.append(f"| `{name}{options}` | {says} | {'' if kind in ELSEWHERE else 'yes'} |")
    return "\n".join(rows) + "\n"


def test_the_page_lists_every_fault():
    """The table is what the code says; when this fails, put `faults_table()` between the marks."""
    text = PAGE.read_text(encoding="utf-8")

    assert faults_table() == text.partition(BEGIN)[2].partition(END)[0]


def test_the_page_names_every_claim():
    """Every `must` that can be judged is explained."""
    text = PAGE.read_text(encoding="utf-8")

    assert [] == [claim for claim in _CLAIMS if f"must {claim}" not in text]


def test_the_example_on_the_page_is_played():
    """What is shown can be played, and its claims hold."""
    text = PAGE.read_text(encoding="utf-8")
    example = next(part for part in text.split("```") if part.startswith("\n# Mains are back"))

    world, answers = play(read(example.strip("\n") + "\n"))

    assert answers[0]
    assert world.halted_at is None
