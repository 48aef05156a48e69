"""The laws: each of them can be broken, and no log whatever leads to a decision that breaks one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from powerguard.core.feeds import Power
from powerguard.core.job import Job, Member, Order, Part, Stage
from powerguard.core.lawful import NEXT, check
from powerguard.core.messages import Decide, Exit, Plan, Prepare, Purpose, Quiesce, Resume
from powerguard.core.phase import PhaseView
from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.poll import FAST_S, look_s, poll_wait
from powerguard.core.state import Decision, State, initial
from powerguard.core.types import Actions, Announce, Halt, Phase, Send
from powerguard.errors import InvariantError
from powerguard.sim.noise import babble

POLICY = Policy(feeds=(FeedPolicy("ups", age_y=2.0),))
NOW = 500.0
OFF, ON = Power(True, since=100.0), Power(False, online_since=100.0)
MEMBERS = {rank: Member(rank, 2, 100 + rank) for rank in range(2)}
STOP = Order(7, "e-1", Purpose.STOP, 400.0, {0: Part(), 1: Part()}, stage=Stage.DECIDED, step=9, stage_at=400.0)
JOB = Job("gpt", 2, members=MEMBERS, order=STOP)


def state(phase: Phase, *, job: Job = JOB, power: Power = OFF, **fields: object) -> State:
    """A state in the middle of event e-1."""
    event = "" if phase is Phase.ONLINE else "e-1"
    view = PhaseView(phase=phase, phase_since=450.0, why="because", event_at=100.0)
    known = State("boot", view=view, event=event, event_n=1, seq=9, jobs={"gpt": job}, power=power)
    return replace(known, **fields)


def after(before: State, phase: Phase | None = None, **fields: object) -> State:
    """The state after *before*, in another phase entered now."""
    if phase is not None:
        view = replace(before.view, phase=phase, phase_since=NOW, why="because")
        event = "" if phase is Phase.ONLINE else before.event or "e-2"
        before = replace(before, view=view, event=event, event_n=before.event_n + (not before.event))
    return replace(before, **fields)


def viewed(before: State, **fields: object) -> State:
    """The same state with another view."""
    return replace(before, view=replace(before.view, **fields))


def job(before: State, order: Order | None, **fields: object) -> State:
    """The same state with another order of the job."""
    return replace(before, jobs={"gpt": replace(before.jobs["gpt"], order=order, **fields)})


F, P, H = state(Phase.FLUSHING), state(Phase.PARKED, job=replace(JOB, order=None)), state(Phase.HALTING)
PREPARE = Send("gpt", 0, Prepare(7, "e-1", Purpose.STOP, 15.0, "e-1-7"))
DECIDE = Send("gpt", 0, Decide(7, Purpose.STOP, Plan.FRESH, 9, "step-0000000009.e-1-7"))
LEAVING = viewed(H, exit_at=490.0)

BREACHES: list[tuple[str, State, State, tuple[Actions, ...]]] = [
    ("no way from on_battery to halting", state(Phase.ON_BATTERY), after(state(Phase.ON_BATTERY), Phase.HALTING), ()),
    ("no way from online to halting", state(Phase.ONLINE), after(state(Phase.ONLINE), Phase.HALTING), ()),
    ("no way from parked to flushing", P, after(P, Phase.FLUSHING), ()),
    ("flushing was entered twice", F, viewed(F, phase_since=NOW), ()),
    ("entered without an instant", F, viewed(after(F, Phase.HALTING), phase_since=3.0), ()),
    ("entered without an instant or a reason", F, viewed(after(F, Phase.HALTING), why=""), ()),
    ("online from parked without mains", P, after(P, Phase.ONLINE), ()),
    ("online from parked without mains", P, after(P, Phase.ONLINE, power=Power(None)), ()),
    ("on_battery while no feed", state(Phase.ONLINE), after(state(Phase.ONLINE), Phase.ON_BATTERY, power=ON), ()),
    ("a flush was given up after 50 s", F, after(F, Phase.ONLINE, power=ON), ()),
    ("a flush was given up after 50 s", F, after(F, Phase.ONLINE, power=Power(None)), ()),
    ("online from flushing without mains", F, after(F, Phase.ONLINE, power=Power(None)), ()),
    ("online from flushing without mains", viewed(F, pause_at=450.0), after(F, Phase.ONLINE), ()),
    ("online from parked without mains", viewed(P, pause_at=450.0), after(P, Phase.ONLINE, power=Power(None)), ()),
    ("flushing with event ''", F, replace(F, event=""), ()),
    ("online with event 'e-1'", state(Phase.ONLINE), replace(state(Phase.ONLINE), event="e-1"), ()),
    ("a state of another boot", F, replace(F, boot="other"), ()),
    ("halting was left", H, after(H, Phase.ONLINE, power=ON), ()),
    ("halting without battery", P, after(P, Phase.HALTING, power=ON), ()),
    ("halting without battery", P, after(P, Phase.HALTING, power=Power(None)), ()),
    ("before ranks were told to leave", H, viewed(H, halted_at=NOW), (Halt("x"),)),
    ("a power-off in parked", P, P, (Halt("x"),)),
    ("a second power-off", LEAVING, viewed(LEAVING, halted_at=NOW), (Halt("x"), Halt("x"))),
    ("a second power-off", viewed(LEAVING, halted_at=495.0), viewed(LEAVING, halted_at=495.0), (Halt("x"),)),
    ("a power-off that the state doesn't know of", LEAVING, LEAVING, (Halt("x"),)),
    ("or the reverse", LEAVING, viewed(LEAVING, halted_at=NOW), ()),
    ("seq 9 -> 8", F, replace(F, seq=8), ()),
    ("event 1 -> 0 fell", F, replace(F, event_n=0), ()),
    ("event e-1 turned into e-2", F, replace(F, event="e-2", event_n=2), ()),
    ("reuses a number", state(Phase.ONLINE), after(state(Phase.ONLINE), Phase.ON_BATTERY, event_n=1), ()),
    ("has order 12, beyond 9", F, job(F, replace(STOP, seq=12, stage=Stage.PREPARE)), ()),
    ("the deadline recedes by 1.000 s", replace(F, deadline_at=600.0), replace(F, deadline_at=601.0), ()),
    ("stop 7 was forgotten", F, job(F, None), ()),
    ("the stop step moved from 9 to 10", F, job(F, replace(STOP, step=10)), ()),
    ("stop 7 was withdrawn in flushing", F, job(F, replace(STOP, over=True)), ()),
    ("overtaken by a snapshot", F, job(F, replace(STOP, seq=8, purpose=Purpose.SNAPSHOT)), ()),
    (
        "a second stop, 9 after 7",
        job(F, replace(STOP, stage=Stage.SEALED)),
        job(F, replace(STOP, seq=9, stage=Stage.PREPARE)),
        (),
    ),
    ("more than 3 stops", F, replace(job(F, replace(STOP, seq=9)), stops={"gpt": 4}), ()),
    ("parked while gpt is underway", F, after(F, Phase.PARKED), ()),
    ("Resume to the unknown rank 5", F, F, (Send("gpt", 5, Resume(7, "x")),)),
    ("Resume to the unknown rank 0 of other", F, F, (Send("other", 0, Resume(7, "x")),)),
    ("a stop is sent in online", state(Phase.ONLINE), state(Phase.ONLINE), (PREPARE,)),
    ("a stop is sent in on_battery", state(Phase.ON_BATTERY), state(Phase.ON_BATTERY), (DECIDE,)),
    ("Quiesce is sent in flushing", F, F, (Send("gpt", 0, Quiesce(7, "x")),)),
    ("Exit is sent in parked", P, P, (Send("gpt", 0, Exit(7, 75, "x")),)),
    ("9 messages at once to rank 0", F, F, (PREPARE,) * 9),
    ("announcements at once", F, F, tuple(Announce("info", str(i)) for i in range(80))),
]


@pytest.mark.parametrize(("word", "before", "end", "actions"), BREACHES, ids=[breach[0] for breach in BREACHES])
def test_each_law_can_be_broken(word: str, before: State, end: State, actions: tuple[Actions, ...]):
    """A decision that breaks one law is refused in words that name it."""
    with pytest.raises(InvariantError) as caught:
        check(POLICY, before, Decision(end, actions, "x"), NOW)

    assert word in str(caught.value)


LATE = viewed(F, phase_since=-200.0)
LAWFUL: list[tuple[str, State, State, tuple[Actions, ...]]] = [
    ("nothing happens", F, F, ()),
    ("a lost stop is given again", job(F, replace(STOP, stage=Stage.LOST)), job(F, replace(STOP, seq=9)), ()),
    ("parked when lost", F, job(after(F, Phase.PARKED), replace(STOP, stage=Stage.LOST)), ()),
    (
        "given up in time",
        viewed(F, phase_since=-200.0),
        after(viewed(F, phase_since=-200.0), Phase.ONLINE, power=ON),
        (),
    ),
    ("a pause is over", viewed(F, pause_at=450.0), after(F, Phase.ONLINE, power=Power(None)), ()),
    ("a pause is over, with mains", viewed(F, pause_at=450.0), after(F, Phase.ONLINE, power=ON), ()),
    ("an FSD halts on mains", P, viewed(after(P, Phase.HALTING, power=ON), fsd_at=490.0), ()),
    ("the power-off", LEAVING, viewed(LEAVING, halted_at=NOW), (Halt("x"),)),
    ("a dry run", viewed(H, dry=True), after(viewed(H, dry=True), Phase.ONLINE, power=ON), ()),
    ("the deadline comes nearer", replace(F, deadline_at=600.0), replace(F, deadline_at=550.0), ()),
    ("mains lift the deadline", replace(F, deadline_at=600.0), replace(F, deadline_at=None, power=ON), ()),
    (
        "new processes forget the stop of the old ones",
        F,
        job(F, None, members={rank: replace(member, pid=900 + rank) for rank, member in MEMBERS.items()}),
        (),
    ),
]


@pytest.mark.parametrize(("before", "end", "actions"), [case[1:] for case in LAWFUL], ids=[case[0] for case in LAWFUL])
def test_what_is_lawful(before: State, end: State, actions: tuple[Actions, ...]):
    """The laws don't forbid what has to be."""
    check(POLICY, before, Decision(end, actions, "x"), NOW)


def test_every_breach_is_named():
    """Two breaches at once are both in the message."""
    with pytest.raises(InvariantError, match=r"seq 9 -> 3.*another boot|another boot.*seq 9 -> 3"):
        check(POLICY, F, Decision(replace(F, seq=3, boot="other"), (), "x"), NOW)


def test_the_graph():
    """HALTING follows only FLUSHING and PARKED, and every phase but HALTING is left for ONLINE by mains."""
    assert {Phase.FLUSHING, Phase.PARKED} == {phase for phase, ends in NEXT.items() if Phase.HALTING in ends}
    assert all(Phase.ONLINE in ends for phase, ends in NEXT.items() if phase is not Phase.ONLINE)
    assert set(Phase) == set(NEXT)


# ---- noise -----------------------------------------------------------------------------------------

TWO = (FeedPolicy("left"), FeedPolicy("right", age_y=1.0))
POLICIES: dict[str, Policy] = {
    "defaults": POLICY,
    "both feeds, park": Policy(feeds=TWO, min_supplies=2, on_battery="park", flush_max_s=30.0),
    "either feed, late": Policy(feeds=TWO, min_supplies=1, confirm_s=3.0, snapshot="always", snapshot_again_s=20.0),
    "no patience": Policy(
        feeds=POLICY.feeds, resume_after_s=0.0, margin_s=0.0, prepare_max_s=0.0, park_max_s=5.0, exit_wait_s=0.0
    ),
}


def lawful(policy: Policy) -> Callable[[bytes], None]:
    """The claim about one log: checked inside `babble`, and the next look is always within its bounds."""

    def claim(data: bytes) -> None:
        for _, decision, now in babble(policy, initial("4c6f1a2b", 100.0), data):
            assert FAST_S <= poll_wait(policy, decision.state, now) <= look_s(policy) + FAST_S
            assert decision.reason

    return claim


@pytest.mark.parametrize("name", POLICIES)
def test_noise_is_lawful(name: str):
    """A quick look with few random logs."""
    claim = lawful(POLICIES[name])
    settings(max_examples=60, derandomize=True, deadline=None)(given(st.binary(min_size=20, max_size=80))(claim))()


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", POLICIES)
def test_ten_thousand_logs_are_lawful(name: str):
    """2,500 random observation logs for each of four policies, of 20 to 50 observations: 10,000 in all."""
    claim = lawful(POLICIES[name])
    fuzz = given(st.binary(min_size=40, max_size=100))(claim)
    settings(
        max_examples=2500, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )(fuzz)()
