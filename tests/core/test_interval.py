"""The interval of periodic saves."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard.core.interval import PRIOR_WEIGHT, learned_mtbf_s, optimum_s, overhead, unannounced_mtbf_s

BLOCKED = st.floats(1e-3, 100.0)
MTBF = st.floats(3600.0, 1e8)


@given(BLOCKED, MTBF, st.floats(1.2, 10.0))
def test_no_other_interval_costs_noticeably_less(blocked_s, mtbf_s, factor):
    """Daly's optimum is one of the overhead to first order, within what the order leaves out."""
    best = optimum_s(blocked_s, mtbf_s)
    least = overhead(best, blocked_s, mtbf_s)

    assert least <= overhead(best * factor, blocked_s, mtbf_s)
    assert least <= overhead(best / factor, blocked_s, mtbf_s) * 1.01


@pytest.mark.parametrize(("blocked_s", "minutes"), [(40.0, 15.7), (6.0, 6.1)])
def test_it_is_youngs_for_short_saves(blocked_s, minutes):
    """Young's sqrt(2 C M), with one failure in 3.09 h as Meta had on 16,384 GPUs (Llama 3): 15.7 and 6.1 min."""
    assert math.sqrt(2 * blocked_s * 3.09 * 3600) / 60 == pytest.approx(minutes, rel=0.01)
    assert optimum_s(blocked_s, 3.09 * 3600) / 60 == pytest.approx(minutes, rel=0.05)


@given(BLOCKED, MTBF, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_the_more_is_announced_the_fewer_saves_pay_but_never_none(blocked_s, mtbf_s, one, other):
    """The share of announced failures stretches the interval, and leaves it finite."""
    low, high = sorted((one, other))
    intervals = [optimum_s(blocked_s, unannounced_mtbf_s(mtbf_s, share)) for share in (low, high)]

    assert intervals == sorted(intervals)
    assert math.isfinite(intervals[-1])


@given(st.floats(0, 1e9), st.integers(0, 1000))
def test_a_record_outweighs_the_prior_in_time(ran_s, failures):
    """Nothing known: the prior. Then between it and what was seen, and falling with each failure."""
    prior = 30 * 86400.0
    learned = learned_mtbf_s(ran_s, failures, prior)

    assert learned_mtbf_s(0.0, 0, prior) == prior
    assert learned_mtbf_s(ran_s, failures + 1, prior) < learned
    assert 0.0 < learned <= ran_s / PRIOR_WEIGHT + prior


def test_what_costs_nothing_may_be_done_always():
    """No blocking: no reason to wait; blocking for ever: once in a mean time between failures."""
    assert optimum_s(0.0, 1000.0) == 0.0
    assert optimum_s(5000.0, 1000.0) == 1000.0
