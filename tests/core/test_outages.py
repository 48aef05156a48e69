"""How long outages last: the documented prior, and what one's own outages make of it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.json import decode, encode

from powerguard.core.outages import DEFAULT, STRENGTH, Outages, back_within, hazard, learn, survival

DATA = Path(__file__).parent.parent / "data"


@pytest.mark.parametrize(
    ("seconds", "share"),
    [
        (0, 1.0),
        (2, 0.86),
        (5, 0.66),
        (10, 0.53),
        (20, 0.41),
        (30, 0.35),
        (60, 0.28),
        (300, 0.20),
        (900, 0.175),
        (1800, 0.14),
    ],
)
def test_the_prior_is_the_documented_one(seconds, share):
    """The shares of outages that last longer, as the module's docstring and its sources have them."""
    assert survival(DEFAULT, seconds) == pytest.approx(share, abs=0.006)


@pytest.mark.parametrize(("seconds", "rate"), [(10, 0.033), (30, 0.012), (120, 0.002), (300, 0.00035)])
def test_the_hazard_falls_as_an_outage_lasts(seconds, rate):
    """The longer it has lasted, the longer it will."""
    assert hazard(DEFAULT, seconds) == pytest.approx(rate, rel=0.1)


@pytest.mark.parametrize(("seconds", "share"), [(10, 0.62), (30, 0.43), (60, 0.29), (120, 0.15), (200, 0.05)])
def test_the_chance_to_be_back_within_five_minutes(seconds, share):
    """Of outages that have lasted so long, the share that is over five minutes after it began."""
    assert back_within(DEFAULT, seconds, 300 - seconds) == pytest.approx(share, abs=0.006)


@given(st.lists(st.floats(0.5, 1e6), max_size=30), st.floats(0.0, 1e6), st.floats(0.0, 1e6))
def test_it_is_a_distribution_whatever_was_learned(durations, a, b):
    """Survival falls from 1 to 0, the hazard is never negative, chances are chances."""
    outages = learn(DEFAULT, durations)
    low, high = sorted((a, b))

    assert 1.0 >= survival(outages, low) >= survival(outages, high) >= 0.0
    assert hazard(outages, high) >= 0.0
    assert -1e-9 <= back_within(outages, low, high - low) <= 1.0
    assert sum(outages.counts) == pytest.approx(STRENGTH + len(durations))
    assert all(count >= 0.0 for count in outages.counts)


def test_the_hazard_is_the_slope_of_the_survival():
    """-S'/S, by difference."""
    outages = learn(DEFAULT, [5.0, 70.0, 80.0, 4000.0])
    for t in (3.0, 15.0, 100.0, 5000.0):
        h = 1e-4 * t
        slope = (survival(outages, t - h) - survival(outages, t + h)) / (2 * h)
        assert hazard(outages, t) == pytest.approx(slope / survival(outages, t), rel=1e-3)


def test_a_weak_grid_is_learned():
    """52 outages of one site, median 77 s: what is expected between 20 s and 5 min follows them."""
    with (DATA / "ge_outage_durations.csv").open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    durations = [float(row["on_battery_s"]) for row in rows if row["end"] == "mains_back"]
    censored = [float(row["on_battery_s"]) for row in rows if row["end"] != "mains_back"]
    outages = learn(DEFAULT, durations, censored)
    share = sum(each > 60.0 for each in durations) / len(durations)

    assert 52 == len(durations) + len(censored)
    assert survival(DEFAULT, 60.0) < 0.30 < survival(outages, 60.0)
    assert survival(outages, 60.0) == pytest.approx(share, abs=0.20)
    assert back_within(outages, 30.0, 270.0) > 1.3 * back_within(DEFAULT, 30.0, 270.0)


def test_an_outage_that_we_did_not_see_end_counts_as_longer():
    """A node that halted at 600 s knows only that it lasted longer: the repairs gain, the sags don't."""
    seen, unseen = learn(DEFAULT, [600.0]), learn(DEFAULT, [], [600.0])

    assert unseen.counts[3] > seen.counts[3]
    assert unseen.counts[0] == pytest.approx(DEFAULT.counts[0])
    assert sum(unseen.counts) == pytest.approx(STRENGTH + 1.0)


def test_it_survives_a_round_trip():
    """Kept as JSON."""
    outages = learn(DEFAULT, [3.0, 1e9])

    assert outages == decode(encode(outages), type=Outages)
