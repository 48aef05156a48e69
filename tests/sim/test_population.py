"""The population: as assumed, seeded, and stressed one flaw at a time."""

from __future__ import annotations

import math
from statistics import median

import pytest
from msgspec.structs import asdict, replace

from powerguard.sim.battery import SimUps
from powerguard.sim.population import (
    FLAWS,
    REPORTING,
    TUNING,
    Outage,
    duration_s,
    models,
    outage,
    repair_s,
)

MANY = 3000


@pytest.fixture(scope="module")
def market():
    """The models that constants are tuned on."""
    return models(TUNING)


@pytest.fixture(scope="module")
def outages(market):
    """Many outages of them."""
    return [outage(TUNING, market, n) for n in range(MANY)]


def share(outages, true) -> float:
    """Of the outages for which it is so."""
    return sum(map(true, outages)) / len(outages)


def test_same_seed_same_population(market):
    """A seed gives the same models and outages for ever, in any order; another seed gives others."""
    again = models(TUNING)
    one = [outage(TUNING, market, n) for n in (5, 3, 9)]
    other = [outage(TUNING, again, n) for n in (9, 5, 3)]

    assert market == again
    assert {each.n: each for each in one} == {each.n: each for each in other}
    assert models(REPORTING) != market
    assert outage(REPORTING, models(REPORTING), 5) != one[0]


def test_tuning_and_reporting_share_no_model(market):
    """What a policy is judged on was never seen in tuning."""
    assert not {each.spec.full_load_s for each in market} & {each.spec.full_load_s for each in models(REPORTING)}


def test_models_are_as_device_dumps_have_them(market):
    """Shares within sampling error: promised full-load runtime 283 s in the median of 113 dumps (10 % below 139 s),
    whole minutes in 42 % of the runtimes, a fifth with battery packs, an eighth lithium."""
    full = sorted(model.spec.full_load_s for model in market)
    minutes = [model.spec.firmware.runtime_quantum_s for model in market]
    known = [quantum for quantum in minutes if quantum is not None]

    assert 260 <= full[len(full) // 2] <= 420
    assert 130 <= full[len(full) // 10] <= 260
    assert known.count(60.0) / len(known) == pytest.approx(0.42, abs=0.08)
    assert sum(model.spec.chemistry == "lfp" for model in market) / len(market) == pytest.approx(0.12, abs=0.05)
    assert sum(m.spec.firmware.voltage_quantum_v is None for m in market) / len(market) == pytest.approx(0.11, abs=0.05)
    assert sum(model.spec.firmware.lb == "never" for model in market) / len(market) == pytest.approx(0.06, abs=0.04)


def test_batteries_age(outages):
    """New ones have their capacity, most still have 80 % at three years, few do at six; a few hold a weak block."""
    lead = [each for each in outages if each.spec.chemistry == "vrla"]
    young = [each.spec.phi for each in lead if each.age_y < 1]
    three = [each.spec.phi for each in lead if 2.5 < each.age_y < 3.5]
    old = [each.spec.phi for each in lead if each.age_y > 6]

    assert 0.95 < median(young) < 1.05
    assert 0.82 < median(three) < 0.97
    assert median(old) < 0.70
    assert 0.01 < share(outages, lambda each: each.weak) < 0.05
    assert share(outages, lambda each: each.recent) == pytest.approx(0.12, abs=0.02)


def test_maintained_ones_last(outages):
    """A maintained UPS is younger than four years, charged, with no weak block: hardly any is flat in two minutes."""
    kept = [each for each in outages if each.maintained]
    short = [each for each in kept if SimUps(each.spec).truth_s(each.load.train_pct) < 120]

    assert 0.5 < len(kept) / len(outages) < 0.65
    assert len(short) / len(kept) < 0.02


def test_some_batteries_are_past_saving(outages):
    """2 % of all are flat within the first seconds: no policy saves there, and none may be judged by them."""
    dead = share(outages, lambda each: SimUps(each.spec).truth_s(each.load.train_pct) < 10)

    assert 0.01 < dead < 0.04


def test_durations_follow_the_prior():
    """Half of the events are over in 10 s, a fifth outlasts five minutes, repairs take about two hours in the mean."""
    import random

    rng = random.Random(1)
    lasts = sorted(duration_s(rng) for _ in range(20_000))
    later = sorted(repair_s(rng, 0.0) for _ in range(20_000))

    def beyond(seconds: float) -> float:
        return sum(each > seconds for each in lasts) / len(lasts)

    assert beyond(2) == pytest.approx(0.86, abs=0.02)
    assert beyond(10) == pytest.approx(0.53, abs=0.02)
    assert beyond(60) == pytest.approx(0.28, abs=0.02)
    assert beyond(300) == pytest.approx(0.20, abs=0.02)
    assert sum(later) / len(later) / 60 == pytest.approx(123, rel=0.1)
    assert all(repair_s(rng, 5000.0) > 5000.0 for _ in range(100))


def test_loads_are_those_of_gpu_nodes(outages):
    """A flush draws less than training, idle less than a flush; the cap takes its share from the node alone."""
    for each in outages:
        load = each.load

        assert load.halt_pct < load.flush_pct < load.train_pct
        assert load.idle_pct < load.flush_pct
        assert load.other_pct <= 0.25 * load.train_pct + 1e-9
        assert load.capped(0.75) - load.other_pct == pytest.approx(0.75 * (load.train_pct - load.other_pct))


ALIKE = {
    "n",
    "seed",
    "load",
    "age_y",
    "age_known",
    "rated",
    "weak",
    "recent",
    "learned_phi",
    "lasts_s",
    "halt_s",
    "gap_at",
}


@pytest.mark.parametrize("name", [name for name in FLAWS if name != "none"])
def test_a_flaw_changes_what_it_names_and_nothing_else(market, name):
    """The story is the same in everything but the flaw, so rows of two runs compare outage by outage."""
    flaws = FLAWS[name]
    for n in range(40):
        plain, flawed = outage(TUNING, market, n), outage(TUNING, market, n, flaws)
        if flaws.swing is not None:
            assert flawed.load.swing == flaws.swing
            flawed = replace(flawed, load=replace(flawed.load, swing=plain.load.swing))

        assert {key: asdict(plain)[key] for key in ALIKE} == {key: asdict(flawed)[key] for key in ALIKE}
        assert plain.spec.phi == flawed.spec.phi
        assert flawed.flush_x == pytest.approx(plain.flush_x * flaws.need_factor)


def first(name: str, market, true) -> tuple[Outage, Outage]:
    """(plain, flawed) of the first outage for which it is so."""
    return next(
        (plain, outage(TUNING, market, plain.n, FLAWS[name]))
        for plain in (outage(TUNING, market, n) for n in range(500))
        if true(plain)
    )


def test_each_flaw_bites(market):
    """Runtime 1.4 times too high, no voltage, 30 s between values, no LB and a belief in new ones, a shorter life."""
    old, high = first("runtime-1.4x", market, lambda each: each.spec.firmware.absurd_runtime_s is None)
    assert high.spec.firmware.belief == pytest.approx(1.4 * old.spec.firmware.belief)
    assert first("no-voltage", market, lambda _: True)[1].spec.firmware.voltage_quantum_v is None
    assert first("refresh-30s", market, lambda _: True)[1].spec.firmware.refresh_s == 30.0
    _, never = first("never-learns", market, lambda each: each.spec.phi < 0.6)
    assert never.spec.firmware.lb == "never"
    assert never.spec.firmware.belief > 0.7
    for name in ("cutoff-1.75", "resistance"):
        plain, worse = first(name, market, lambda each: each.spec.chemistry == "vrla" and not each.weak)
        assert SimUps(worse.spec).truth_s(90) < SimUps(plain.spec).truth_s(90)
    gaps = [outage(TUNING, market, n, FLAWS["gaps"]).gap_s for n in range(500)]
    assert sum(gap == 60.0 for gap in gaps) / len(gaps) == pytest.approx(0.30, abs=0.06)
    assert not any(math.isinf(gap) for gap in gaps)
