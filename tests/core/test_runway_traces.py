"""Discharges that really happened, replayed: the bound against the seconds that were left.

Shipped traces are in tests/data with their licence. Others that are public but carry none are told here by their key
points only, in our own numbers.
"""

from __future__ import annotations

import csv
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from powerguard.core.learn import Record, learn
from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.runway import EMPTY, Bound, absorb, bound
from powerguard.core.types import Comm, Reading

DATA = Path(__file__).parent.parent / "data"
NAME = "ups@host"


def rows(name: str) -> list[dict[str, str]]:
    """A trace without its comments."""
    with (DATA / name).open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def reading(at: float, on_battery: bool, **values: float | str | None) -> Reading:
    """One poll that could be read."""
    return Reading(feed=NAME, at=at, comm=Comm.OK, on_battery=on_battery, **values)


def replay(readings: list[Reading], feed: FeedPolicy) -> list[tuple[float, Bound]]:
    """The bound at each reading on battery."""
    policy, state, said = Policy(), EMPTY, []
    for each in readings:
        state = absorb(policy, feed, state, each, each.at)
        if each.on_battery:
            said.append((each.at, bound(policy, feed, state, each.at, save_s=60.0, halt_s=45.0)))
    return said


def between(points: list[tuple[float, float]], t: float) -> float:
    """Linear between *points*."""
    for (t0, v0), (t1, v1) in pairwise(points):
        if t <= t1:
            return v0 + (v1 - v0) * (t - t0) / (t1 - t0)
    return points[-1][1]


@pytest.mark.slow
@pytest.mark.parametrize("chemistry", ["", "li-ion"])
def test_upsplus_from_79_percent_to_the_dark(chemistry):
    """Lithium board, charge in whole percents: never above the truth, about a quarter of it in the middle."""
    trace = rows("upsplus_full_discharge.csv")
    readings = [
        reading(float(row["t_s"]), True, charge_pct=float(row["remaining_pct"]), voltage=float(row["volts_mV"]) / 1000)
        for row in trace
    ]
    end = readings[-1].at
    given = [
        (end - at, each.runway_s)
        for at, each in replay(readings, FeedPolicy(NAME, chemistry=chemistry))
        if each.runway_s is not None
    ]

    assert 2890 < len(given)
    assert sum(mine <= truth for truth, mine in given) >= 0.99 * len(given)
    assert 0.20 < median(mine / truth for truth, mine in given if truth > 0) < 0.60
    assert 0.30 < median(mine / truth for truth, mine in given[: len(given) // 2]) < 0.60


@pytest.mark.parametrize("age_y", [None, 1.0])
def test_a_ups_that_shows_nothing_left_for_the_last_quarter(age_y):
    """22 minutes promised, charge 0 after 35, dark after 47: never above the truth, a third of it early."""
    volts = [(0.0, 13.1), (60.0, 12.5), (1000.0, 12.2), (1900.0, 11.8), (2400.0, 11.4), (2700.0, 10.9), (2820.0, 10.5)]
    story = [
        reading(-10.0, False, charge_pct=100.0, runtime_s=1320.0, load_pct=17.0, voltage=13.4, voltage_nominal=12.0)
    ]
    for t in range(2, 2820, 7):
        share = max(0.0, 1.0 - t / 2100.0)
        story.append(
            reading(
                float(t), True, charge_pct=float(round(100 * share)), runtime_s=round(1320 * share) or None,
                load_pct=17.0 + (t % 3 == 0), voltage=round(between(volts, t), 1), voltage_nominal=12.0,
            )
        )  # fmt: skip
    given = [
        (2820.0 - at, each.runway_s)
        for at, each in replay(story, FeedPolicy(NAME, age_y=age_y))
        if each.runway_s is not None
    ]

    assert all(mine <= truth for truth, mine in given)
    assert 0.25 < median(mine / truth for truth, mine in given[: len(given) // 2]) < 0.60


def test_a_micro_outage_teaches_no_capacity():
    """105 s on battery with a dip of the voltage: no alarm, and nothing learned but a lower bound."""
    values = {"load_pct": 25.0, "voltage_nominal": 12.0}
    story = [reading(-5.0, False, voltage=13.7, **values)]
    story += [reading(7.0 * i, True, voltage=13.1 if i < 8 else 12.5, **values) for i in range(15)]
    story += [reading(107.0, False, voltage=13.3, **values)]
    policy, feed, state = Policy(), FeedPolicy(NAME), EMPTY
    for each in story:
        state = absorb(policy, feed, state, each, each.at)
        assert "" == bound(policy, feed, state, each.at, save_s=60.0, halt_s=45.0).save_now
    assert state.last is not None

    record = learn(Record(NAME), state.last, day=1.0)

    assert record.phi is None
    assert "proven" == record.lessons[-1].what


def test_mains_values_that_linger_promise_nothing():
    """27 s after the plug was pulled all values were still the mains': until the volts move, the prior speaks."""
    mains = {"charge_pct": 100.0, "runtime_s": 2808.0, "load_pct": 14.0, "voltage": 13.5, "voltage_nominal": 12.0}
    story = [reading(-10.0, False, **mains), *(reading(float(t), True, **mains) for t in range(0, 26, 2))]
    story += [reading(float(t), True, **(mains | {"voltage": 12.8, "load_pct": 15.0})) for t in range(26, 40, 2)]
    said = replay(story, FeedPolicy(NAME))

    assert {"", "prior"} == {each.by for at, each in said if at < 26.0}
    assert "prior" != said[-1][1].by


def test_an_absurd_runtime_at_no_load_is_not_believed():
    """683 minutes at 27 % charge and 0 % load: the bound is far below, from the charge and the prior."""
    values = {"charge_pct": 27.0, "runtime_s": 41004.0, "load_pct": 0.0, "voltage": 25.7, "voltage_nominal": 24.0}
    said = replay([reading(8.0 + 2 * i, True, **values) for i in range(30)], FeedPolicy(NAME))

    assert said[-1][1].runway_s is not None
    assert said[-1][1].runway_s < 2000.0


def test_a_load_that_shows_only_on_battery_is_taken_at_once():
    """13 % on mains, 32 % on battery: the prior is that of 32 %."""
    story = [reading(at, False, charge_pct=100.0, load_pct=13.0) for at in (-30.0, -2.0)]
    story += [reading(2.0 * i, True, charge_pct=100.0, load_pct=13.0) for i in range(2)]
    story += [reading(2.0 * i, True, charge_pct=99.0, load_pct=32.0) for i in range(2, 12)]
    said = replay(story, FeedPolicy(NAME))

    assert said[-1][1].runway_s == pytest.approx(0.38 * 150.0 * 0.32**-1.15 - 24.0, abs=8.0)


def test_a_second_outage_with_half_a_recharge_gets_less():
    """36 minutes, three hours of recharge, then the UPS lasted 14: the second bound never passes that."""
    policy, feed, state = Policy(), FeedPolicy(NAME), EMPTY
    now, lasts = 0.0, 0.0
    worst: list[float] = []
    for lasts, rest_s, promise in ((2170.0, 3 * 3600.0, 2400.0), (845.0, 100.0, 2200.0)):
        for _ in range(10):
            now += 5.0
            each = reading(now, False, charge_pct=100.0, runtime_s=promise, load_pct=20.0)
            state = absorb(policy, feed, state, each, now)
        began, worst = now, []
        while now < began + lasts:
            now += 5.0
            share = 1.0 - (now - began) / promise
            each = reading(now, True, charge_pct=round(100.0 * share), runtime_s=round(promise * share), load_pct=20.0)
            state = absorb(policy, feed, state, each, now)
            given = bound(policy, feed, state, now, save_s=60.0, halt_s=45.0).runway_s
            if given is not None:
                worst.append(given - (began + lasts - now))
        now += 5.0
        state = absorb(policy, feed, state, reading(now, False, charge_pct=80.0, runtime_s=promise, load_pct=20.0), now)
        now += rest_s

    assert max(worst) <= 0.0


def test_a_gauge_flag_that_flaps_never_makes_the_bound_grow():
    """Mains said back and away again every 30 s for an hour, while the charge falls: the bound falls too."""
    policy, feed, state = Policy(), FeedPolicy(NAME, chemistry="li-ion"), EMPTY
    given, now, charge = [], 0.0, 60.0
    for i in range(720):
        now += 5.0
        charge -= 0.08
        on_battery = (i // 6) % 2 == 0
        each = reading(now, on_battery, charge_pct=round(charge, 1), load_pct=40.0)
        state = absorb(policy, feed, state, each, now)
        if on_battery and i > 12:
            left = bound(policy, feed, state, now, save_s=60.0, halt_s=45.0).runway_s
            assert left is not None
            given.append(left)

    assert max(given[len(given) // 2 :]) <= max(given[: len(given) // 2])
    assert 0.0 == given[-1]
