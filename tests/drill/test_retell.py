"""A journal becomes a scenario that is told as the night was."""

from __future__ import annotations

import pytest

from powerguard.cli import run
from powerguard.core.types import Phase
from powerguard.drill import stories
from powerguard.drill.moments import moments, turns
from powerguard.drill.outages import pick
from powerguard.drill.retell import scenario
from powerguard.errors import JournalError
from powerguard.journal import read
from powerguard.sim.play import play
from powerguard.sim.scenario import read as read_scenario

pytestmark = pytest.mark.slow


def phases(world) -> list[Phase]:
    """The phases of a world in order."""
    found = [Phase.ONLINE]
    for entry in world.entries:
        phase = entry.decision.state.phase
        if phase is not found[-1]:
            found.append(phase)
    return found


def test_an_outage_is_retold(night, tmp_path, capsys):
    """The same phases in the same order at about the same instants, and what held then holds in the story."""
    world, path = night(tmp_path)
    out = tmp_path / "night.txt"

    assert 0 == run(["scenario", path, "--out", str(out), "--every", "0.5"])

    story = read_scenario(out.read_text())
    again, _ = play(story)
    assert phases(world) == phases(again)
    begun = {m.tick.phase: m.tick.at for m in turns(moments(read(path)))}
    retold = {entry.decision.state.phase: entry.at for entry in reversed(again.entries)}
    lead = begun[Phase.ON_BATTERY] - min(e.at for e in again.entries if e.decision.state.phase is Phase.ON_BATTERY)
    for phase in (Phase.FLUSHING, Phase.HALTING):
        first = min(entry.at for entry in again.entries if entry.decision.state.phase is phase)
        assert first + lead == pytest.approx(begun[phase], abs=3.0), phase
    assert retold
    assert "must halt" in out.read_text()
    assert stories.HELD == stories.tell(out).verdict
    assert f"scenario: {out}" in capsys.readouterr().out


def test_a_dip_is_retold_as_a_dip(night, tmp_path):
    """No stop and no halt, in the claims too."""
    _, path = night(tmp_path, plan="dip", mains_back_at=112.9, until=130.0)

    text = scenario(pick([read(path)]))

    assert "must never halt\nmust never stop\n" in text
    again, _ = play(read_scenario(text))
    assert Phase.ONLINE is again.phase
    assert again.halted_at is None


def test_a_journal_without_an_outage(night, tmp_path, capsys):
    """Refused in words: there is none to choose from."""
    _, path = night(tmp_path, until=105.0)

    assert JournalError.exit_code == run(["scenario", path])
    assert (
        f"powerguard: {path}: no outage is in this journal; name the journal of another day\n"
        == capsys.readouterr().err
    )
