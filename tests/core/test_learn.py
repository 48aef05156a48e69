"""What discharges teach of a battery, and what they must not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.json import decode, encode
from msgspec.structs import replace

from powerguard.core.discharge import Discharge
from powerguard.core.learn import EVIDENCE, YEAR_DAYS, Record, decayed, learn, proven_now, trusted
from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.runway import EMPTY, absorb, bound
from powerguard.core.types import Comm, Reading
from powerguard.sim.battery import SimUps, UpsSpec

EMPTY_RECORD = Record("ups@host")

WHOLE = Discharge(
    lasted_s=600.0,
    load_pct=60.0,
    used=0.60,
    basis="promised",
    basis_s=1000.0,
    soc=1.0,
    volts_least=1.76,
    volts_last=1.76,
    knee_used=0.57,
)
"""From full to the knee, with six tenths of the rated runtime."""

PARTIAL = replace(WHOLE, volts_least=1.98, volts_last=1.98, knee_used=None)


def test_a_whole_discharge_measures_the_capacity():
    """To the knee of the voltage: the share used there, over 0.95."""
    record = learn(EMPTY_RECORD, WHOLE, day=10.0)

    assert record.phi == pytest.approx(0.57 / 0.95)
    assert 10.0 == record.phi_day
    assert "measured" == record.lessons[-1].what


@pytest.mark.parametrize(
    "change",
    [
        {"knee_used": None, "volts_last": 1.98},  # mains came back before the end
        {"volts_last": 1.95},  # the voltage recovered: a dip, no knee
        {"soc": 0.7},  # not from full
        {"load_pct": 12.0},
        {"load_pct": None},
        {"blind_s": 200.0},
        {"knee_used": None, "volts_last": None, "low_battery": True},  # LB is a claim
    ],
)
def test_a_censored_discharge_only_proves_a_lower_bound(change):
    """Anything less than whole teaches that there was at least so much, never that there was less."""
    known = Record("ups@host", phi=0.9, phi_day=9.0, basis="promised", basis_s=1000.0)
    record = learn(known, replace(WHOLE, **change), day=10.0)

    assert 0.9 == record.phi
    assert 0.60 == record.proven
    assert "proven" == record.lessons[-1].what


def test_a_battery_that_dies_early_is_measured_as_poor():
    """A weak block that takes the UPS down after a tenth of the rated time is what the next outage must expect."""
    record = learn(EMPTY_RECORD, replace(WHOLE, lasted_s=60.0, used=0.08, knee_used=0.076), day=10.0)
    feed = trusted(record, FeedPolicy("ups@host"), 11.0)

    assert feed.learned_phi == pytest.approx(0.08, rel=0.01)


@pytest.mark.parametrize("change", [{"seen_whole": False}, {"lasted_s": 8.0, "used": 0.01}])
def test_what_says_nothing_teaches_nothing(change):
    """A blip, or a discharge whose beginning wasn't seen, is kept as evidence and changes nothing."""
    record = learn(EMPTY_RECORD, replace(PARTIAL, **change), day=10.0)

    assert record.phi is None
    assert record.proven is None
    assert "nothing" == record.lessons[-1].what


@given(
    st.lists(
        st.builds(
            lambda used, soc, load, lasted: replace(PARTIAL, used=used, soc=soc, load_pct=load, lasted_s=lasted),
            st.floats(0.0, 1.2), st.floats(0.0, 1.0), st.floats(0.0, 100.0), st.floats(1.0, 4000.0),
        ),
        max_size=20,
    )
)  # fmt: skip
def test_partial_discharges_never_lower_what_is_known(discharges):
    """Whatever comes short of the end, neither the measured capacity nor the proven share ever falls."""
    record = Record("ups@host", phi=0.8, phi_day=0.0, proven=0.3, basis="promised", basis_s=1000.0)
    for discharge in discharges:
        new = learn(record, discharge, day=0.0)
        if "replaced" != new.lessons[-1].what:
            assert new.phi == record.phi
            assert (new.proven or 0.0) >= (record.proven or 0.0)
        record = new


def test_a_better_proof_replaces_a_lesser_one():
    """The largest share that was survived is the one that counts."""
    record = EMPTY_RECORD
    for used in (0.2, 0.5, 0.3):
        record = learn(record, replace(PARTIAL, used=used), day=10.0)

    assert 0.5 == record.proven


def test_a_proof_above_the_measure_lifts_it():
    """A battery that gave 0.7 isn't a battery of 0.6, whatever was measured."""
    record = learn(learn(EMPTY_RECORD, WHOLE, day=10.0), replace(PARTIAL, used=0.7), day=10.0)

    assert 0.7 == decayed(record, 10.0, 2.0)


def test_capacity_decays_with_age():
    """5 % a year to the age of three, 15 % a year after; an unknown age counts as old."""
    record = Record("ups@host", phi=1.0, phi_day=0.0)
    year = YEAR_DAYS

    assert decayed(record, 2 * year, 3.0) == pytest.approx(0.95**2)
    assert decayed(record, 2 * year, 4.0) == pytest.approx(0.95 * 0.85)
    assert decayed(record, 2 * year, 7.0) == pytest.approx(0.85**2)
    assert decayed(record, 2 * year, None) == pytest.approx(0.85**2)
    assert 1.0 == decayed(record, -5.0, 2.0)
    assert proven_now(Record("u", proven=0.5), year, None) == pytest.approx(0.425)


def test_a_new_date_of_installation_begins_anew():
    """The operator's word: what was learned of the old battery isn't told of the new one."""
    record = learn(Record("ups@host", installed="2022-05-01"), WHOLE, day=10.0)
    old, new = FeedPolicy("ups@host", "2022-05-01"), FeedPolicy("ups@host", "2026-01-10")

    assert trusted(record, old, 10.0).learned_phi == pytest.approx(0.6)
    assert new == trusted(record, new, 10.0)


def test_a_jump_is_another_battery():
    """Half as much again as the old one could ever give: the measure is dropped, the proof stays."""
    record = learn(learn(EMPTY_RECORD, WHOLE, day=10.0), replace(PARTIAL, used=0.95), day=20.0, age_y=4.0)

    assert record.phi is None
    assert 0.95 == record.proven
    assert "replaced" == record.lessons[-1].what


def test_shares_are_told_in_the_basis_of_the_record():
    """The UPS promises half as much meanwhile: the same seconds are half the share."""
    record = learn(EMPTY_RECORD, WHOLE, day=10.0)
    later = learn(record, replace(PARTIAL, basis_s=500.0, used=0.9), day=11.0)

    assert 0.45 == later.proven
    assert 1000.0 == later.basis_s


def test_a_promise_is_pinned_when_shares_of_it_are_used():
    """Shares of a promise come with the promise: rated points at half and full load."""
    feed = trusted(learn(EMPTY_RECORD, WHOLE, day=10.0), FeedPolicy("ups@host"), 10.0)

    assert feed.rated[0] == (50.0, 1000.0)
    assert feed.rated[1][1] == pytest.approx(1000.0 / 2.0**1.15)


def test_shares_of_a_promise_say_nothing_of_a_table():
    """A vendor's table that was configured since is another unit: the record is left aside."""
    feed = FeedPolicy("ups@host", rated=((50.0, 900.0), (100.0, 400.0)))

    assert feed == trusted(learn(EMPTY_RECORD, WHOLE, day=10.0), feed, 10.0)
    own = replace(WHOLE, basis="rated", basis_s=900.0)
    assert trusted(learn(EMPTY_RECORD, own, day=10.0), feed, 10.0).learned_phi is not None


def test_another_feeds_record_teaches_nothing():
    """A record is of one UPS."""
    feed = FeedPolicy("other@host")

    assert feed == trusted(learn(EMPTY_RECORD, WHOLE, day=10.0), feed, 10.0)


def test_the_evidence_is_kept_and_bounded():
    """The last lessons are kept, newest last, and a round trip through JSON keeps the record."""
    record = EMPTY_RECORD
    for day in range(3 * EVIDENCE):
        record = learn(record, PARTIAL, day=float(day))

    assert EVIDENCE == len(record.lessons)
    assert 3.0 * EVIDENCE - 1 == record.lessons[-1].day
    assert record == decode(encode(record), type=Record)


@pytest.mark.slow
@pytest.mark.parametrize("phi", [1.0, 0.7, 0.45])
def test_what_is_learned_from_a_simulated_discharge_is_the_truth(phi):
    """A UPS that believes its battery new, drained once to the knee: the share learned is the share that was left."""
    spec = UpsSpec(full_load_s=400.0, phi=phi)
    ups, policy, feed, state, now = SimUps(spec, 1, load_pct=60.0), Policy(), FeedPolicy("ups@host"), EMPTY, 1000.0
    new = SimUps(UpsSpec(full_load_s=400.0), 1, load_pct=60.0)
    began = rated = new.truth_s(60.0)
    end = 0.0
    for i in range(100_000):
        mains = i < 20
        ups.step(2.0, mains=mains, load_pct=60.0)
        if not ups.alive:
            break
        now += 2.0
        if i == 20:
            began = now
        report = ups.report
        reading = Reading(
            feed="ups@host", at=now, comm=Comm.OK, on_battery=not mains, charge_pct=report.charge_pct,
            runtime_s=report.runtime_s, load_pct=report.load_pct, voltage=report.voltage, voltage_nominal=48.0,
        )  # fmt: skip
        state = absorb(policy, feed, state, reading, now)
        end = now - began
    last = absorb(
        policy, feed, state, Reading(feed="ups@host", at=now + 2, comm=Comm.OK, on_battery=False), now + 2
    ).last
    assert last is not None

    record = learn(EMPTY_RECORD, last, day=1.0)

    assert record.phi == pytest.approx(end / rated, rel=0.12)
    taught = trusted(record, feed, 1.0)
    sure = bound(policy, taught, absorb(policy, taught, EMPTY, reading_on_line(), 1.0), 1.0, save_s=0.0, halt_s=0.0)
    assert sure.runway_s is not None
    assert 0.6 * end < sure.runway_s <= end


def reading_on_line() -> Reading:
    """A healthy UPS on mains at 60 % load that promises what it likes."""
    return Reading(
        feed="ups@host", at=1.0, comm=Comm.OK, on_battery=False, charge_pct=100.0, runtime_s=5000.0, load_pct=60.0
    )
