"""What the runway promises whatever a UPS says: laws over random stories."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.json import decode, encode
from msgspec.structs import replace

from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.runway import EMPTY, Bound, Runway, absorb, bound, load_step
from powerguard.core.status import parse
from powerguard.core.types import Comm, Reading, Sample

NAME = "ups@host"
POLICIES = [Policy(), Policy(time_scale=0.1)]
FEEDS = [
    FeedPolicy(NAME),
    FeedPolicy(NAME, age_y=3.5),
    FeedPolicy(NAME, chemistry="lfp"),
    FeedPolicy(NAME, rated=((50.0, 900.0), (100.0, 300.0))),
    FeedPolicy(NAME, learned_phi=0.7),
    FeedPolicy(NAME, proven_phi=0.5, age_y=6.0),
]


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    """Whole numbers mostly, as UPSes report them."""
    return st.one_of(
        st.integers(int(low), int(high)).map(float), st.floats(low, high, allow_nan=False, allow_infinity=False)
    )


def maybe(strategy: st.SearchStrategy[float]) -> st.SearchStrategy[float | None]:
    """The value, or (one time in four) nothing."""
    return st.one_of(strategy, strategy, strategy, st.none())


@st.composite
def readings(draw: st.DrawFn) -> Reading:
    """Any reading that `status.parse` can give, without its instant."""
    comm = draw(st.sampled_from([Comm.OK] * 8 + [Comm.STALE, Comm.UNREACHABLE, Comm.WAIT]))
    if comm is not Comm.OK:
        return Reading(feed=NAME, at=0.0, comm=comm)
    return Reading(
        feed=NAME,
        at=0.0,
        comm=comm,
        on_battery=draw(st.sampled_from([True] * 12 + [False, None])),
        low_battery=draw(st.sampled_from([False, False, False, True])),
        overload=draw(st.sampled_from([False, False, False, True])),
        replace_battery=draw(st.sampled_from([False, False, False, True])),
        testing=draw(st.sampled_from([False, False, False, True])),
        test_failed=draw(st.sampled_from(["", "", "", "Failed"])),
        charge_pct=draw(maybe(numbers(0.0, 100.0))),
        charge_low_pct=draw(maybe(numbers(0.0, 50.0))),
        runtime_s=draw(maybe(numbers(0.0, 86399.0))),
        runtime_low_s=draw(maybe(numbers(0.0, 3600.0))),
        load_pct=draw(maybe(numbers(0.0, 200.0))),
        voltage=draw(maybe(numbers(16.0, 30.0))),
        voltage_nominal=draw(st.sampled_from([24.0, 24.0, None])),
        input_voltage=draw(maybe(numbers(0.0, 240.0))),
        chemistry=draw(st.sampled_from(["", "pbac", "lifepo4"])),
        pollfreq_s=draw(st.sampled_from([None, None, 2.0, 30.0])),
    )


def discharge(seed: int) -> list[tuple[float, Reading]]:
    """(gap, reading): a UPS that runs down more or less as UPSes do, with what goes wrong on the way."""
    rng = Random(seed)
    charge, runtime = rng.uniform(30.0, 100.0), rng.uniform(60.0, 4000.0)
    load, cell = rng.uniform(5.0, 100.0), rng.uniform(1.9, 2.12)
    quantum, gap = rng.choice([1.0, 60.0]), rng.choice([0.5, 2.0, 2.0, 5.0])
    wild = rng.random() < 0.5
    story = [
        Reading(
            feed=NAME, at=0.0, comm=Comm.OK, on_battery=False, charge_pct=100.0, runtime_s=runtime, load_pct=load,
            voltage=27.3, voltage_nominal=24.0,
        )
        for _ in range(rng.randrange(4))
    ]  # fmt: skip
    for _ in range(rng.randint(5, 60)):
        charge -= rng.choice([0.0, 0.0, 0.5, 1.0, 1.0, 2.0, 12.0, -2.0] if wild else [0.0, 0.5])
        runtime -= rng.choice([0.0, 2.0, 2.0, 6.0, 60.0, -30.0] if wild else [2.0])
        cell -= rng.choice([0.0, 0.0, 0.004, 0.01, -0.01, 0.05] if wild else [0.0, 0.0, 0.002])
        whole = Reading(
            feed=NAME,
            at=0.0,
            comm=Comm.OK,
            on_battery=True,
            charge_pct=min(100.0, max(0.0, float(round(charge)))),
            runtime_s=max(0.0, quantum * round(runtime / quantum)),
            load_pct=float(round(load * rng.choice([1.0, 1.0, 1.1, 0.5 if wild else 1.0]))),
            voltage=round(cell * 12.0, 1),
            voltage_nominal=24.0,
        )
        story.append(rng.choice([whole] * 6 + [lacking(whole), replace(whole, comm=Comm.STALE)]))
    return [(rng.choice([gap] * 12 + [12.0, 30.0, 120.0]), reading) for reading in story]


def lacking(reading: Reading) -> Reading:
    """The reading without its numbers."""
    return replace(reading, charge_pct=None, runtime_s=None, load_pct=None, voltage=None, input_voltage=None)


gaps = st.sampled_from([0.1, 0.5, 2.0, 2.0, 2.0, 2.0, 5.0, 12.0, 30.0, 120.0])
seeds = st.integers(0, 2**32)
anything = st.lists(st.tuples(gaps, readings()), min_size=1, max_size=25)
stories = st.one_of(anything, seeds.map(discharge), seeds.map(discharge), seeds.map(discharge))
setups = st.tuples(st.sampled_from(POLICIES), st.sampled_from(FEEDS))


def answer(setup: tuple[Policy, FeedPolicy], state: Runway, now: float) -> Bound:
    return bound(setup[0], setup[1], state, now, save_s=130.0, halt_s=45.0)


def deadline(setup: tuple[Policy, FeedPolicy], state: Runway, now: float) -> float | None:
    """The instant of power-out as bounded; None = unknown."""
    left = answer(setup, state, now).runway_s
    return None if left is None else now + left


@pytest.mark.slow
@given(setups, stories, seeds)
@settings(max_examples=60, deadline=None)
def test_any_readings_give_a_finite_bound_or_a_reason(setup, story, seed):
    """Whatever comes in, the bound is finite and not negative, or unknown with a reason; on battery only early."""
    policy, feed = setup
    state, now, rng = EMPTY, 1000.0, Random(seed)
    for gap, reading in story:
        now += gap
        state = absorb(policy, feed, state, replace(reading, at=now), now)
        if rng.random() < 0.06:
            state = load_step(state, now, rng.choice([0.25, 0.75, 1.5]))
        later = now + gap / 2
        said = answer(setup, state, later)

        assert said.reason
        assert said.blind_s >= 0.0
        if said.runway_s is None:
            assert said.idle_runway_s is None
            assert state.draw is None or said.settling_s >= 0.0
            if state.draw is not None:
                assert later - state.draw.since * policy.time_scale <= 16.0 * policy.time_scale + 1e-6
        else:
            assert said.idle_runway_s is not None
            assert 0.0 <= said.runway_s <= said.idle_runway_s < math.inf
        assert all(math.isfinite(value) for value in said.evidence.values())


@pytest.mark.slow
@given(setups, stories, st.data())
@settings(max_examples=60, deadline=None)
def test_between_readings_the_bound_falls_with_the_clock(setup, story, data):
    """With no new reading a second that passes takes a second from the bound, until nothing is left."""
    policy, feed = setup
    state, now = EMPTY, 1000.0
    for gap, reading in story:
        now += gap
        state = absorb(policy, feed, state, replace(reading, at=now), now)
    if state.draw is None:
        return
    first = answer(setup, state, now)
    wait = data.draw(gaps)
    second = answer(setup, state, now + wait)
    if first.runway_s is not None:
        assert second.runway_s == pytest.approx(max(0.0, first.runway_s - wait), abs=1e-6)


@pytest.mark.slow
@given(setups, stories)
@settings(max_examples=150, deadline=None)
def test_the_deadline_recedes_only_by_measured_evidence(setup, story):
    """The instant of power-out moves later only if a value changed in this poll or one of the last two readable."""
    policy, feed = setup
    state, now = EMPTY, 1000.0
    before: float | None = None
    news: list[bool] = []
    for gap, reading in story:
        now += gap
        old = state
        state = absorb(policy, feed, state, replace(reading, at=now), now)
        if state.draw is None or old.draw is None:
            before, news = None, [True]
            continue
        if reading.comm is Comm.OK:
            news.append(state.changed_at > old.changed_at)
        after = deadline(setup, state, now)
        if before is not None and after is not None and after > now and after > before + 1e-6:
            assert any(news[-3:])
        before = after


@pytest.mark.slow
@given(setups, stories, st.data())
@settings(max_examples=150, deadline=None)
def test_what_is_missing_never_lengthens_the_bound(setup, story, data):
    """A reading that lacks values, or that is stale, leaves no more than silence or the whole reading would."""
    policy, feed = setup
    state, now = EMPTY, 1000.0
    for gap, reading in story:
        now += gap
        whole = absorb(policy, feed, state, replace(reading, at=now), now)
        if reading.comm is Comm.OK and state.draw is not None and whole.draw is not None:
            names = ["charge_pct", "runtime_s", "load_pct", "voltage", "input_voltage"]
            gone = data.draw(st.sets(st.sampled_from(names), min_size=1))
            less = [
                replace(reading, at=now, **dict.fromkeys(gone)),
                Reading(feed=NAME, at=now, comm=data.draw(st.sampled_from([Comm.STALE, Comm.DRIVER_GONE, Comm.WAIT]))),
            ]
            silence, full = deadline(setup, state, now), deadline(setup, whole, now)
            was_there = any(
                getattr(state.reading, name) is not None and getattr(reading, name) is not None
                for name in gone & set(names[:4])
            )
            for each in less:
                lacked = deadline(setup, absorb(policy, feed, state, each, now), now)
                if lacked is not None and silence is not None and (was_there or each.comm is not Comm.OK):
                    assert lacked <= max(silence, now, -math.inf if full is None else full) + 1e-6
        state = whole


@pytest.mark.slow
@given(setups, stories, st.integers(1, 40), st.data())
@settings(max_examples=150, deadline=None)
def test_a_stale_period_never_lengthens_the_bound(setup, story, length, data):
    """While nothing can be read the deadline stands, for as long as it takes, and the daemon is told it is blind."""
    policy, feed = setup
    state, now = EMPTY, 1000.0
    for gap, reading in story:
        now += gap
        state = absorb(policy, feed, state, replace(reading, at=now), now)
    if state.draw is None:
        return
    before, since = deadline(setup, state, now), now
    for _ in range(length):
        now += 2.0
        state = absorb(policy, feed, state, Reading(feed=NAME, at=now, comm=Comm.STALE), now)
    after = deadline(setup, state, now)
    if before is not None and after is not None:
        assert after <= max(before, now) + 1e-6
    assert answer(setup, state, now).blind_s >= now - since - 1e-6
    if now - since > policy.blind_save_s + 1e-6:
        assert answer(setup, state, now).save_now


@pytest.mark.slow
@given(setups, stories, st.data())
@settings(max_examples=60, deadline=None)
def test_the_state_survives_the_journal(setup, story, data):
    """A state that was written as JSON and read back is the same state: a daemon that was killed goes on."""
    policy, feed = setup
    state, now = EMPTY, 1000.0
    for gap, reading in story:
        now += gap
        state = absorb(policy, feed, state, replace(reading, at=now), now)
    assert state == decode(encode(state), type=Runway)


@pytest.mark.parametrize("seed", range(3))
def test_the_state_is_bounded(seed):
    """Thousands of readings leave no more state than a few do."""
    state, now, size = EMPTY, 1000.0, 0
    for part in range(60):
        for gap, reading in discharge(1000 * seed + part):
            now += gap
            state = absorb(Policy(), FEEDS[0], state, replace(reading, at=now), now)
            size = max(size, len(encode(state)))
    assert size < 5000


STORY = [
    ("OL", {"battery.charge": "100", "battery.runtime": "900", "ups.load": "60", "battery.voltage": "27.3"}),
    ("OB DISCHRG", {"battery.charge": "99", "battery.runtime": "890", "ups.load": "62", "battery.voltage": "25.0"}),
    ("OB DISCHRG LB", {"battery.charge": "60", "battery.runtime": "400", "ups.load": "61", "battery.voltage": "24.1"}),
    ("OB DISCHRG LB RB", {"battery.charge": "40", "battery.runtime": "200", "ups.load": "61"}),
]


@pytest.mark.slow
@given(st.data())
@settings(max_examples=50, deadline=None)
def test_the_order_of_tokens_changes_nothing(data):
    """`ups.status` is a set: any order, any case, any repetition gives the same bounds."""

    def play(shuffle: bool) -> list[Bound]:
        state, now, said = EMPTY, 1000.0, []
        for status, variables in STORY:
            tokens = status.split()
            if shuffle:
                tokens = [
                    word.lower() if data.draw(st.booleans()) else word for word in data.draw(st.permutations(tokens))
                ]
                tokens += tokens[:1]
            for _ in range(12):
                now += 2.0
                sample = Sample(NAME, now, Comm.OK, {"ups.status": " ".join(tokens), **variables})
                state = absorb(Policy(), FEEDS[0], state, parse(sample), now)
                said.append(answer((Policy(), FEEDS[0]), state, now))
        return said

    assert play(False) == play(True)


@pytest.mark.slow
@given(st.lists(numbers(0.0, 4000.0), min_size=4, max_size=30))
@settings(max_examples=60, deadline=None)
def test_sentinels_are_as_good_as_nothing(values):
    """A runtime that is a sentinel gives the very bounds that a missing one gives."""

    def play(sentinel: str | None) -> list[float | None]:
        state, now, said = EMPTY, 1000.0, []
        for i, _ in enumerate(values):
            now += 2.0
            variables = {"ups.status": "OB", "battery.charge": f"{max(0, 99 - i)}", "ups.load": "50"}
            if sentinel is not None:
                variables["battery.runtime"] = sentinel
            state = absorb(Policy(), FEEDS[0], state, parse(Sample(NAME, now, Comm.OK, variables)), now)
            said.append(answer((Policy(), FEEDS[0]), state, now).runway_s)
        return said

    missing = play(None)
    for sentinel in ("65535", "599940", "3932100", "-1", "36:00", "0", "133200", "nonsense"):
        assert missing == play(sentinel)


def test_out_of_order_readings_do_not_turn_the_clock_back():
    """A reading from before the last one counts as of the last one."""
    state = EMPTY
    for now in (1000.0, 1020.0, 1010.0, 1022.0):
        reading = Reading(feed=NAME, at=now, comm=Comm.OK, on_battery=True, charge_pct=90.0, load_pct=50.0)
        state = absorb(Policy(), FEEDS[0], state, reading, now)
    assert state.at == 1022.0
