"""The policy benchmark measures what it says, and its short cuts change nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from policy import ours, study, world
from policy.outcome import Outcome, Sums
from policy.peers import PEERS, play_peer, upsmon
from policy.study import OURS, Setting

from powerguard.core.status import parse
from powerguard.core.types import Comm, Sample
from powerguard.sim.population import FLAWS, TUNING, models, outage

NEEDS = (20.0, 60.0, 120.0, 300.0)


@pytest.fixture(scope="module")
def market():
    """The models that constants are tuned on."""
    return models(TUNING)


@pytest.mark.slow
def test_readings_are_what_the_parser_makes_of_the_variables(market):
    """The reading spelled out for speed is `status.parse` of the UPS's own variables, on mains and on battery."""
    for n in range(60):
        story = outage(TUNING, market, n)
        ups = world.SimUps(story.spec, story.seed, load_pct=story.load.mains_pct)
        for i in range(60):
            ups.step(5.0, mains=i < 3, load_pct=story.load.mains_pct)
            if not ups.alive:
                break
            parsed = parse(Sample(world.FEED, float(i), Comm.OK, ups.variables()))
            mine = world.reading_of(ups, float(i))

            for name in mine.__struct_fields__:
                if name != "notes":
                    assert getattr(mine, name) == getattr(parsed, name), (n, i, name)


@pytest.mark.slow
@pytest.mark.parametrize("flaw", ["none", "gaps"])
def test_sharing_the_view_between_needs_changes_nothing(market, flaw, monkeypatch):
    """The four needs decided together end as each decided alone, with a view of the node of its own at each poll."""
    tracks = [world.run(outage(TUNING, market, n, FLAWS[flaw]), sustained=True) for n in range(12)]
    together = [ours.play_ours(track, NEEDS, learned=False) for track in tracks]
    monkeypatch.setattr(ours, "_shared", lambda *_: None)
    alone = [{need: ours.play_ours(track, (need,), learned=False)[need] for need in NEEDS} for track in tracks]

    assert alone == together


def test_the_oracle_saves_and_waits_as_long_as_it_can(market):
    """At its last chance a stop saves and halts; one poll later it doesn't."""
    checked = 0
    for n in range(40):
        track = world.run(outage(TUNING, market, n), sustained=True)
        load, last = track.outage.load, world.last_chance(track, 60.0)
        stages = [(60.0 * track.outage.flush_x, load.flush_pct), (track.outage.halt_s, load.halt_pct)]
        if 0 <= last < len(track.polls) - 1:
            checked += 1

            assert world.survives(track.polls[last].ups, stages) == 2
            assert world.survives(track.polls[last + 1].ups, stages) < 2
    assert checked > 20


def test_upsmon_wants_both_words(market):
    """OB and LB at a poll of its own, or no data for 15 s; never LB before the battery is low by the UPS's own word."""
    told = 0
    for n in range(20):
        track = world.run(outage(TUNING, market, n), sustained=True)
        stop = upsmon(track.polls, 60.0)
        never = [poll for poll in track.polls if not poll.reading.low_battery and poll.reading.comm is Comm.OK]

        assert upsmon(never, 60.0) is None
        if stop is not None:
            told += 1
            silent = [poll.reading.comm is Comm.STALE for poll in track.polls[max(0, stop - 7) : stop + 1]]
            assert track.polls[stop].reading.low_battery or all(silent)
    assert told > 10


def test_a_lost_run_trained_for_nothing():
    """Lost: nothing durable. An early snapshot saves the run, and what was trained up to it."""
    sums = Sums()
    lost = Outcome(trained_s=500.0, out=True)
    early = Outcome(trained_s=10.0, out=True, early=True)
    saved = Outcome(trained_s=400.0, final=True, halted=True)
    for each in (lost, early, saved):
        sums.add_sustained(each, oracle_s=500.0, maintained=each is saved, note={})
    row = sums.row()

    assert (row["lost"], row["early_only"], row["saved_not_halted"]) == (1, 1, 0)
    assert row["kept_pct"] == pytest.approx(100 * 410 / 1500)
    assert row["maintained_kept_pct"] == pytest.approx(80.0)


def test_an_irrevocable_rule_halts_though_mains_are_back(market):
    """A timer of 30 s halts a node whose outage lasts 40 s; a revocable rule that saves for longer doesn't."""
    story = next(s for s in (outage(TUNING, market, n) for n in range(500)) if 40 < s.lasts_s < 60 and s.maintained)
    track = world.run(story, sustained=False)
    timer, trusting = PEERS[1], PEERS[5]
    stop = timer.stop(track.polls, 60.0)

    assert stop is not None
    assert play_peer(timer, track, 60.0, stop).halted
    assert not play_peer(trusting, track, 60.0, stop).halted
    assert play_peer(trusting, track, 60.0, None).final


@pytest.mark.slow
def test_a_study_is_the_same_however_it_is_split():
    """One process or two, the same sums; every policy meets every outage, the oracle loses nothing."""
    names = (*(peer.name for peer in PEERS), *OURS)
    setting = Setting(seed=TUNING, sustained=8, rides=12, needs=(20.0, 300.0), names=names)
    one, two = study.study(setting, 1), study.study(setting, 2)
    rows = one.rows()

    assert rows == two.rows()
    assert len(rows) == 2 * (len(names) + 1)
    assert all(row["lost"] == 0 and row["kept_pct"] == pytest.approx(100) for row in rows if row["policy"] == "oracle")
    assert len({(row["need_s"], row["sustained"], row["rides"]) for row in rows}) == 2
