"""The outlook: the phase machine run ahead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from powerguard.core.bound import PARKED_BLIND_S
from powerguard.core.decide import decide
from powerguard.core.feeds import Power
from powerguard.core.job import Job, Member
from powerguard.core.messages import Pace
from powerguard.core.need import Need, reckon
from powerguard.core.outlook import NOTHING, SHOWN_MAX, SNAPSHOT, WORDS, outlook
from powerguard.core.phase import PhaseView
from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.state import State, initial
from powerguard.core.types import Comm, Observation, Phase, Sample

POLICY = Policy()
ON_LINE = Power(on_battery=False, online_since=0.0, runway_s=600.0, idle_runway_s=1200.0, by="prior", reason="OL")
ON_BATTERY = replace(ON_LINE, on_battery=True, since=1000.0, online_since=None, reason="OB")
JOB = Job("run", 1, members={0: Member(0, 1, 1, step=5, pace=Pace(0.5, 0.2, 10.0, 1.0, 10**9))})
NOW = 1000.0


def state(power: Power | None, phase: Phase = Phase.ONLINE, *, job: Job | None = JOB, **view: object) -> State:
    jobs = {} if job is None else {job.name: job}
    need = reckon(POLICY, jobs, NOW) if jobs else Need(halt_s=45.0, total_s=45.0)
    seen = PhaseView(phase=phase, phase_since=NOW, **view)  # type: ignore[arg-type]
    return State("boot", view=seen, power=power, need=need, jobs=jobs)


def words(power: Power | None, phase: Phase = Phase.ONLINE, **more: object) -> list[str]:
    return [step.what for step in outlook(POLICY, state(power, phase, **more), NOW).steps]  # type: ignore[arg-type]


def test_on_line_it_tells_a_whole_outage():
    """Save early, stop late, park, halt: in that order, and power lasts longer than the halt takes."""
    found = outlook(POLICY, state(ON_LINE), NOW)
    saved, stopped, parked, halted = found.steps
    assert found.assuming == "if the mains failed now"
    assert [saved.what, stopped.what] == [SNAPSHOT, WORDS[Phase.FLUSHING]]
    assert [parked.what, halted.what] == [WORDS[Phase.PARKED], WORDS[Phase.HALTING]]
    assert abs(saved.in_s - POLICY.snapshot_after_s) <= 2.0
    need_s = reckon(POLICY, {"run": JOB}, NOW).used_s
    assert abs(stopped.in_s - (600.0 - need_s - POLICY.margin_s)) <= 3.0
    assert found.power_gone_s is not None
    assert halted.in_s + POLICY.halt_s <= found.power_gone_s


def test_parked_ranks_stretch_the_battery():
    """After the park seconds of training count double where the idle runway is double."""
    found = outlook(POLICY, state(ON_BATTERY, Phase.PARKED, event_at=900.0), NOW)
    (halted,) = found.steps
    assert found.assuming == "if the mains stay away"
    assert halted.what == WORDS[Phase.HALTING]
    assert halted.in_s <= POLICY.park_max_s + 2.0


def test_with_mains_back_it_tells_when_training_goes_on():
    """Parked, mains back for 3 of 10 s: training goes on in 7 s."""
    back = replace(ON_LINE, online_since=NOW - 3.0)
    found = outlook(POLICY, state(back, Phase.PARKED, event_at=900.0, job=None), NOW)
    (again,) = found.steps
    assert found.assuming == "if the mains stay"
    assert again.what == WORDS[Phase.ONLINE]
    assert abs(again.in_s - (POLICY.resume_after_s - 3.0)) <= 2.0


def test_without_a_job_nothing_is_saved():
    """No rank: no snapshot, no flush, only the halt."""
    assert words(ON_LINE, job=None) == [NOTHING, WORDS[Phase.HALTING]]


def test_an_unknown_runway_still_has_an_outlook():
    """A UPS that says nothing: saved, stopped for want of knowledge."""
    found = words(replace(ON_BATTERY, runway_s=None, idle_runway_s=None), Phase.ON_BATTERY, event_at=NOW)
    assert found[:2] == [SNAPSHOT, WORDS[Phase.FLUSHING]]


def test_parked_by_the_operator_nothing_is_in_sight():
    """Held on line power: no step comes by itself."""
    assert words(ON_LINE, Phase.PARKED, held=True) == []


def test_nothing_is_said_of_what_nobody_knows():
    """No reading yet, or a halt under way: a word, and no steps."""
    assert outlook(POLICY, state(None), NOW).steps == ()
    assert outlook(POLICY, state(ON_BATTERY, Phase.HALTING), NOW).steps == ()


maybe = st.none() | st.floats(0.0, 1e6)


strong = st.sampled_from(["", "low battery"])
powers = st.builds(
    Power,
    st.sampled_from([True, False, None]),
    since=st.just(NOW),
    online_since=st.just(NOW),
    runway_s=maybe,
    idle_runway_s=maybe,
    blind_s=maybe,
    save_now=strong,
    halt_now=strong,
)


@given(st.sampled_from(list(Phase)), powers, st.booleans())
def test_never_raises_and_goes_forward(phase, power, with_job):
    """Any state has an outlook: bounded, in order of time, and nothing follows a halt."""
    found = outlook(POLICY, state(power, phase, job=JOB if with_job else None, event_at=NOW - 5.0), NOW)
    times = [step.in_s for step in found.steps]
    assert times == sorted(times)
    assert len(times) <= SHOWN_MAX
    assert all(step.what != WORDS[Phase.HALTING] for step in found.steps[:-1])


@pytest.mark.parametrize(("voltage", "limit_s"), [("27.1", POLICY.park_max_s), (None, PARKED_BLIND_S)])
def test_it_knows_how_long_ranks_stay_parked(voltage, limit_s):
    """Without a voltage to watch that is a minute, and the page says so before it happens."""
    policy = Policy(feeds=(FeedPolicy("ups", age_y=2.0),), on_battery="park")
    seen, said = initial("b", 0.0), {"ups.status": "OL", "battery.charge": "100", "battery.runtime": "7200"}
    if voltage is not None:
        said |= {"battery.voltage": voltage, "battery.voltage.nominal": "24"}
    for at in (1.0, 2.0, 3.0):
        seen = decide(policy, seen, Observation(samples=(Sample("ups", at, Comm.OK, said),)), at).state
    halted = next(step for step in outlook(policy, seen, 3.0).steps if step.what == WORDS[Phase.HALTING])

    assert limit_s <= halted.in_s <= limit_s + 120.0
    assert f"at most {limit_s:.0f} s" in halted.why
