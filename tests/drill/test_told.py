"""The story that a journal tells is what happened, by the journal alone."""

from pathlib import Path

import pytest

from powerguard.drill.moments import moments, outages
from powerguard.drill.told import from_journal
from powerguard.errors import JournalError
from powerguard.journal import read

CUT = 110.0


@pytest.fixture(scope="module")
def blackout(night, tmp_path_factory):
    return night(tmp_path_factory.mktemp("journal"))


def texts(story):
    return [mark.text for mark in story.marks]


def test_a_blackout_is_told_from_its_journal(blackout):
    """Phases in order, the marks of what happened, and the words for how it ended."""
    world, path = blackout
    assert world.halted_at is not None
    story = from_journal(path)
    assert story.zero_at == pytest.approx(CUT, abs=1.0)
    assert [span.phase for span in story.spans] == ["online", "on_battery", "flushing", "parked", "halting"]
    assert texts(story)[0] == "mains fail"
    assert texts(story)[-1] == "halt"
    for word in ("snapshot sealed", "stop ordered", "flush sealed", "parked"):
        assert any(text.startswith(word) for text in texts(story)), word
    assert story.verdict == "halted with everything durable"
    assert story.why


def test_the_stop_step_is_the_one_that_was_saved(blackout):
    """The step at the mark of the flush is the newest whole generation's."""
    world, path = blackout
    sealed = next(text for text in texts(from_journal(path)) if text.startswith("flush sealed"))
    assert sealed.endswith(f"step {world.newest('gpt')}")


def test_what_was_believed_is_what_the_daemon_believed(blackout):
    """The journal holds no runway; decided anew, it is the daemon's own at every decision."""
    world, path = blackout
    told = {moment.tick.at: moment.state for moment in moments(read(path))}
    compared = 0
    for entry in world.entries:
        if entry.at in told and told[entry.at] is not None:
            assert told[entry.at].power == entry.decision.state.power
            assert told[entry.at].need == entry.decision.state.need
            compared += 1
    assert compared > 50


def test_curves_are_of_the_outage(blackout):
    """Charge falls, the runway meets the need, ranks count up: each with points, in order of time."""
    _, path = blackout
    story = from_journal(path)
    curves = story.series
    for points in (curves.charge_pct, curves.load_pct, curves.runway_s, curves.need_s, curves.spare_s):
        assert len(points) > 5
        assert [at for at, _ in points] == sorted(at for at, _ in points)
    assert curves.charge_pct[-1][1] < curves.charge_pct[0][1]
    assert {steps.rank for steps in story.steps} == {0, 1}
    assert all(at >= CUT for at, _ in curves.runway_s)


def test_mains_that_come_back_are_told(night, tmp_path):
    """A dip: trained through, with one snapshot, and the return of the mains marked."""
    _, path = night(tmp_path, plan="dip", mains_back_at=CUT + 2.9, until=130.0)
    story = from_journal(path)
    assert story.verdict == "trained through"
    assert "mains back" in texts(story)
    assert not any("stop" in text for text in texts(story))
    assert [span.phase for span in story.spans] == ["online", "on_battery", "online"]


def test_mains_back_while_parked_are_told(night, tmp_path):
    """A blip: stopped, and went on in place."""
    world, path = night(tmp_path, plan="blip", mains_back_at=CUT + 5.0, until=150.0)
    assert world.halted_at is None
    story = from_journal(path)
    assert story.verdict == "stopped, and went on in place"
    assert texts(story)[-1] == "resumed in place"


def test_a_journal_torn_anywhere_still_tells_a_story(blackout, tmp_path):
    """Cut after any line, or in the middle of one: the outage so far, or one line that says there is none."""
    world, path = blackout
    whole = Path(path).read_bytes()
    torn = tmp_path / "journal-torn.jsonl"
    for share in (0.3, 0.5, 0.7, 0.9, 0.97):
        torn.write_bytes(whole[: int(len(whole) * share)])
        if not outages(moments(read(torn))):
            with pytest.raises(JournalError, match="no outage"):
                from_journal(torn)
            continue
        story = from_journal(torn)
        assert story.verdict
        assert story.spans[-1].end <= world.now


def test_a_quiet_journal_has_no_story(night, tmp_path):
    """No outage: one clear line, not an empty page."""
    _, path = night(tmp_path, until=105.0)
    with pytest.raises(JournalError, match="no outage"):
        from_journal(path)
    assert outages([]) == []


def test_the_log_has_each_turn_with_its_reason_and_each_order_once(blackout):
    """Every phase that was entered is a line with a reason; an order to two ranks is one line, however often sent."""
    _, path = blackout
    log = from_journal(path).events
    for phase in ("on battery", "flushing", "parked", "halting"):
        (turn,) = [event for event in log if event.text == phase]
        assert turn.reason
    orders = [event.text for event in log if event.text.startswith(("PREPARE", "DECIDE", "SEAL"))]
    assert len(orders) == len(set(orders))
    assert sum(text.startswith("DECIDE") for text in orders) == 2
    assert all(text.endswith("to rank 0, 1") for text in orders if text.startswith("DECIDE"))


def test_parked_ranks_are_shown_with_the_runway_that_they_are_judged_by(blackout):
    """While parked the curve is the idle runway, and the need is the halt alone."""
    world, path = blackout
    story = from_journal(path)
    shown = dict(story.series.runway_s)
    parked = [e for e in world.entries if e.decision.state.phase.value == "parked" and e.at in shown]
    assert parked
    for entry in parked:
        power = entry.decision.state.power
        assert shown[entry.at] == (power.runway_s if power.idle_runway_s is None else power.idle_runway_s)
        assert dict(story.series.need_s)[entry.at] == entry.decision.state.need.halt_s
