"""The phase machine: each transition, each threshold at its edge, each command."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from powerguard.core import outages
from powerguard.core.commands import CANCELLED, DRY_RUN, SHUTDOWN, command
from powerguard.core.decide import decide
from powerguard.core.feeds import Power
from powerguard.core.messages import Exit, Notice, Prepare, Quiesce, Welcome
from powerguard.core.need import Need, eased
from powerguard.core.phase import Do, Flush, FlushView, Next, PhaseView
from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.poll import FAST_S, look_s, poll_wait
from powerguard.core.serve import entered
from powerguard.core.state import State, event_id, initial
from powerguard.core.transition import transition
from powerguard.core.types import Announce, Comm, Command, Halt, LoadStep, Observation, Phase, Sample, Send
from powerguard.core.why import Case
from powerguard.sim.feed import SimFeed
from powerguard.sim.rank import RankSpec
from powerguard.sim.world import JobSpec, World

POLICY = Policy(feeds=(FeedPolicy("ups", age_y=2.0),))
NEED = Need(flush_s=20.0, step_s=2.0, stage_s=1.0, write_s=19.0, halt_s=45.0, save_s=22.0, total_s=67.0, by="gpt")
OFF = Power(True, since=100.0, runway_s=500.0, idle_runway_s=1500.0, by="charge", reason="ups is on battery")
ON = Power(False, online_since=50.0, runway_s=500.0, idle_runway_s=1500.0, by="prior", reason="mains")
IDLE = FlushView(state=Flush.IDLE, quiet=False, gone=False)
BUSY = FlushView(state=Flush.UNDERWAY, why="gpt: rank 1 not yet durable", underway=True, quiet=False, gone=False)
DONE = FlushView(state=Flush.PARKED, quiet=False, gone=False)
LOST = FlushView(state=Flush.LOST, why="gpt: rank 1 died", quiet=False, gone=False)
NOBODY = FlushView()


def at(phase: Phase, **fields: object) -> PhaseView:
    """A view in *phase*, in an outage that began at 100 unless it is ONLINE."""
    known: dict[str, object] = {"phase": phase, "phase_since": 100.0}
    if phase is not Phase.ONLINE:
        known["event_at"] = 100.0
    return PhaseView(**{**known, **fields})  # type: ignore[arg-type]


def step(
    view: PhaseView,
    power: Power = OFF,
    flush: FlushView = IDLE,
    *,
    now: float = 200.0,
    policy: Policy = POLICY,
    need: Need = NEED,
) -> Next:
    """One step of the machine."""
    return transition(policy, view, power, need, flush, now)


def ask(verb: str, view: PhaseView, power: Power = ON, flush: FlushView = IDLE, now: float = 200.0) -> Next:
    """An operator's command."""
    return command(Command(verb), Case(POLICY, view, power, NEED, flush, now))


# ---- online ----------------------------------------------------------------------------------------


def test_mains_stay_mains():
    """On line power nothing changes, and the view is the same object: no garbage a million times a day."""
    view = at(Phase.ONLINE)
    answer = step(view, ON)

    assert answer.view is view
    assert (answer.orders, answer.reason) == ((), "on line power")


def test_unknown_power_without_an_outage_only_waits():
    """Nobody knows: that isn't an outage, and the reason says what is missing."""
    answer = step(at(Phase.ONLINE), Power(None, reason="ups was never heard from"))

    assert Phase.ONLINE is answer.phase
    assert "never heard from" in answer.reason


def test_silence_on_line_power_is_worth_one_snapshot():
    """The link may have broken at the moment of a transfer: after `snapshot_after_s` of not knowing one snapshot is
    ordered, not a second one in the same silence, and in the next only once `snapshot_again_s` has passed."""
    silent, view, ordered = Power(None, reason="ups was on line when last heard"), at(Phase.ONLINE), []
    for now in range(200, 1200, 2):
        answer = step(view, ON if 500 <= now < 520 or now == 950 else silent, now=float(now))
        view = answer.view
        ordered += [now] * (Do.SNAPSHOT in answer.orders)

        assert Phase.ONLINE is answer.phase

    assert ordered == [210, 810]
    assert step(at(Phase.ONLINE, unknown_at=100.0), silent, NOBODY).orders == ()
    assert step(at(Phase.ONLINE, unknown_at=100.0), silent, policy=replace(POLICY, snapshot="never")).orders == ()


SILENT = Power(None, prior_s=110.0, reason="ups was on line when last heard")
WRITING = replace(IDLE, underway=True)
UNHEARD = at(Phase.ONLINE, unknown_at=100.0, snapshot_at=110.0)


@pytest.mark.parametrize(("now", "pending_s", "left_s", "phase"), [
    (144.9, 200.0, 110.0, Phase.ONLINE),  # not before it is as long as stops training on battery
    (145.0, 200.0, 110.0, Phase.FLUSHING),
    (145.0, 101.0, 110.0, Phase.FLUSHING),  # the margin is kept
    (145.0, 100.0, 110.0, Phase.ONLINE),  # the battery carries both
    (145.0, 200.0, None, Phase.ONLINE),  # nothing is known of the battery
])  # fmt: skip
def test_training_pauses_in_a_silence_only_where_the_battery_may_not_carry_the_snapshot(
    now: float, pending_s: float, left_s: float | None, phase: Phase
):
    """What counts is what was known with the last word, less the time since, against the rest of the writing."""
    need = replace(NEED, pending_s=pending_s)
    answer = step(UNHEARD, replace(SILENT, prior_s=left_s), WRITING, now=now, need=need)

    assert phase is answer.phase
    if phase is Phase.FLUSHING:
        assert f"the battery surely holds 110 s, and the snapshot takes {pending_s:.0f} s more" in answer.reason


@pytest.mark.parametrize(("view", "flush"), [
    (UNHEARD, IDLE),  # the snapshot is durable
    (UNHEARD, NOBODY),
    (replace(UNHEARD, snapshot_at=None), WRITING),  # what is being written is no snapshot of this silence
    (replace(UNHEARD, snapshot_at=90.0), WRITING),
    (replace(UNHEARD, pause_at=150.0), WRITING),  # it has paused already
])  # fmt: skip
def test_training_pauses_for_nothing_else(view: PhaseView, flush: FlushView):
    """Once in a silence, and for its own snapshot."""
    assert Phase.ONLINE is step(view, SILENT, flush, need=replace(NEED, pending_s=200.0)).phase


def test_a_pause_ends_with_the_snapshot_or_is_given_up():
    """Ranks train on when what they wrote is durable, whether the silence lasts or not, and after `flush_max_s`."""
    pause = at(Phase.FLUSHING, event_at=None, unknown_at=100.0, snapshot_at=110.0, pause_at=145.0, phase_since=145.0)

    for unfinished in (BUSY, replace(LOST, underway=True)):  # the order is over, the snapshot is still being written
        assert Phase.FLUSHING is step(pause, SILENT, unfinished, now=744.0).phase
    for done in (DONE, LOST, NOBODY):
        answer = step(pause, SILENT, done)
        assert Phase.ONLINE is answer.phase
        assert (answer.view.unknown_at, answer.view.snapshot_at, answer.view.pause_at) == (100.0, 110.0, 145.0)
        known = step(pause, ON, done)
        assert (known.phase, known.view.unknown_at, known.view.pause_at) == (Phase.ONLINE, None, None)
    given_up = step(pause, SILENT, BUSY, now=745.0)
    assert Phase.ONLINE is given_up.phase
    assert "given up" in given_up.reason


@pytest.mark.parametrize(("changes", "power"), [
    ({}, OFF),
    ({"held": True}, SILENT),
    ({"leave_at": 900.0}, SILENT),
    ({}, replace(SILENT, fsd="ups")),
])  # fmt: skip
def test_what_is_real_takes_a_pause_over(changes: dict[str, object], power: Power):
    """An outage, an operator, a shutdown or an FSD: what was stopped for the snapshot stays stopped."""
    pause = at(Phase.FLUSHING, event_at=None, unknown_at=100.0, snapshot_at=110.0, pause_at=145.0)
    answer = step(replace(pause, **changes), power, DONE)

    assert answer.view.pause_at is None
    assert Phase.PARKED is answer.phase


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([IDLE, WRITING, BUSY, DONE, LOST, NOBODY])), max_size=200))
def test_a_silence_on_line_never_parks_or_halts(story: list[tuple[bool, FlushView]]):
    """Whatever is heard of mains and ranks: training pauses at most once in a silence, and never beyond flush_max_s."""
    view, pauses, now, stopped_s = at(Phase.ONLINE), 0, 200.0, 0.0
    for heard, flush in story:
        now += 15.0
        answer = step(view, ON if heard else SILENT, flush, now=now, need=replace(NEED, pending_s=200.0))
        pauses += (view.phase, answer.phase) == (Phase.ONLINE, Phase.FLUSHING)
        stopped_s = stopped_s + 15.0 if answer.phase is Phase.FLUSHING else 0.0
        view = answer.view

        assert answer.phase in (Phase.ONLINE, Phase.FLUSHING)
        assert stopped_s <= POLICY.flush_max_s
        assert pauses <= 1
        if view.phase is Phase.ONLINE and view.unknown_at is None:
            pauses = 0


@pytest.mark.parametrize(("confirm_s", "now", "phase"), [
    (0.0, 100.0, Phase.ON_BATTERY),
    (3.0, 102.9, Phase.ONLINE),
    (3.0, 103.0, Phase.ON_BATTERY),
])  # fmt: skip
def test_an_outage_is_believed_after_confirm(confirm_s: float, now: float, phase: Phase):
    """confirm_s counts from the beginning of the outage, which the event keeps as its own."""
    answer = step(at(Phase.ONLINE), OFF, now=now, policy=replace(POLICY, confirm_s=confirm_s))

    assert phase is answer.phase
    if phase is Phase.ON_BATTERY:
        assert (answer.view.event_at, answer.view.phase_since, answer.view.why) == (100.0, now, answer.reason)


@pytest.mark.parametrize("word", ["save_now", "halt_now"])
def test_strong_signals_on_mains_do_nothing(word: str):
    """LB and the like on line power are no outage."""
    assert Phase.ONLINE is step(at(Phase.ONLINE), replace(ON, **{word: "low battery"})).phase
    assert Phase.PARKED is step(at(Phase.PARKED), replace(ON, online_since=199.0, **{word: "low battery"}), DONE).phase


# ---- riding through --------------------------------------------------------------------------------


@pytest.mark.parametrize(("runway", "phase"), [(77.1, Phase.ON_BATTERY), (77.0, Phase.FLUSHING), (0.0, Phase.FLUSHING)])
def test_stop_when_the_spare_is_the_margin(runway: float, phase: Phase):
    """Runway 77 s, need 67 s, margin 10 s: that is the moment, and the sentence has the numbers."""
    answer = step(at(Phase.ON_BATTERY, snapshot_at=110.0), replace(OFF, runway_s=runway))

    assert phase is answer.phase
    if phase is Phase.FLUSHING:
        assert answer.reason == f"stop: runway {runway:.0f} s (charge) <= need 67 s + margin 10 s"


@pytest.mark.parametrize(("power", "now", "policy", "word"), [
    (replace(OFF, save_now="low battery (LB)"), 101.0, POLICY, "low battery (LB)"),
    (replace(OFF, blind_s=45.0), 200.0, POLICY, "nothing fresh from the UPS for 45 s"),
    (replace(OFF, runway_s=None), 145.0, POLICY, "unknown after 45 s"),
    (OFF, 110.0, replace(POLICY, on_battery="park"), "configured to park"),
])  # fmt: skip
def test_other_reasons_to_stop(power: Power, now: float, policy: Policy, word: str):
    """A strong signal, blindness, a runway that stays unknown, the policy; each just before isn't enough."""
    view = at(Phase.ON_BATTERY, snapshot_at=101.0)

    assert word in step(view, power, now=now, policy=policy).reason
    assert Phase.FLUSHING is step(view, power, now=now, policy=policy).phase
    less = replace(power, save_now="", blind_s=None if power.blind_s is None else 44.9)
    before = now - (0.1 if power.blind_s is None and not power.save_now else 0.0)
    assert Phase.ON_BATTERY is step(view, less, now=before, policy=policy).phase


@pytest.mark.parametrize(
    ("flush_load", "used_s"), [(1.0, 145.0), (0.8, 1.15 * 0.8**1.1 * 145.0), (0.3, 77.0), (0.0, 77.0)]
)
def test_a_flush_at_less_load_takes_less_of_the_runway(flush_load: float, used_s: float):
    """100 s of flush and 45 s of halt at a part of the training load: the stop comes later by what they don't draw,
    never by more than half, and the sentence tells both numbers."""
    need = Need(flush_s=100.0, write_s=100.0, halt_s=45.0, save_s=100.0, total_s=145.0, eased=eased(flush_load))
    view = at(Phase.ON_BATTERY, snapshot_at=110.0)
    answer = step(view, replace(OFF, runway_s=used_s + 10.0), need=need)

    assert need.used_s == pytest.approx(used_s)
    assert Phase.FLUSHING is answer.phase
    assert Phase.ON_BATTERY is step(view, replace(OFF, runway_s=used_s + 10.1), need=need).phase
    assert ("145 s at a flush's" in answer.reason) == (flush_load < 1.0)


def test_no_job_to_flush_parks_at_once():
    """With nobody to flush, the stop leads straight to PARKED."""
    answer = step(at(Phase.ON_BATTERY), replace(OFF, runway_s=10.0), NOBODY)

    assert Phase.PARKED is answer.phase
    assert "no job to flush" in answer.reason


@pytest.mark.parametrize(("now", "orders"), [(109.9, ()), (110.0, (Do.SNAPSHOT,))])
def test_snapshot_after_the_debounce(now: float, orders: tuple[Do, ...]):
    """The first snapshot comes `snapshot_after_s` into the outage."""
    answer = step(at(Phase.ON_BATTERY), OFF, now=now)

    assert orders == answer.orders
    assert (answer.view.snapshot_at == now) == bool(orders)


@pytest.mark.parametrize(("age", "failed", "again"), [
    (599.9, False, False), (600.0, False, True), (59.9, True, False), (60.0, True, True),
])  # fmt: skip
def test_snapshot_again(age: float, failed: bool, again: bool):
    """Once more when enough work is at risk, or soon when the last one failed."""
    view = at(Phase.ON_BATTERY, snapshot_at=1000.0 - age)

    assert again == (Do.SNAPSHOT in step(view, OFF, replace(IDLE, failed=failed), now=1000.0).orders)


@pytest.mark.parametrize(("policy", "flush_s", "runway", "taken"), [
    (POLICY, 375.0, 5000.0, True),  # 45,000 = 300^2 / 2, and 375 s are planned for 300 s measured
    (POLICY, 375.1, 5000.0, False),
    (replace(POLICY, snapshot="always"), 380.0, 5000.0, True),
    (replace(POLICY, snapshot="never"), 20.0, 5000.0, False),
    (POLICY, 400.0, 455.0 + 3 * 400.0 - 0.1, True),  # doubtful: fewer than three saves to spare
    (POLICY, 400.0, 455.0 + 3 * 400.0, False),
    (POLICY, 20.0, 75.0 + 20.0, False),  # the stop is so near that the snapshot would be in its way
    (POLICY, 20.0, 75.0 + 20.1, True),
])  # fmt: skip
def test_when_a_snapshot_pays(policy: Policy, flush_s: float, runway: float, taken: bool):
    """It pays at a loss weight of C^2/2, or when the runway is doubtful; never right before the stop."""
    need = Need(flush_s=flush_s, write_s=flush_s, halt_s=45.0, save_s=flush_s, total_s=45.0 + flush_s)
    answer = step(at(Phase.ON_BATTERY), replace(OFF, runway_s=runway), now=150.0, policy=policy, need=need)

    assert taken == (Do.SNAPSHOT in answer.orders)


def test_a_snapshot_pays_less_where_outages_are_short():
    """What the site's own outages taught weighs the loss, and is told; the default prior isn't."""
    need = Need(flush_s=250.0, write_s=250.0, halt_s=45.0, save_s=250.0, total_s=295.0)
    short = outages.learn(outages.DEFAULT, [40.0] * 200)
    long = outages.learn(outages.DEFAULT, [9000.0] * 200)
    known = {
        name: step(at(Phase.ON_BATTERY), replace(OFF, runway_s=5000.0), now=150.0, need=need, policy=policy)
        for name, policy in {
            "usual": POLICY,
            "short": replace(POLICY, outages=short.counts),
            "long": replace(POLICY, outages=long.counts),
        }.items()
    }

    assert {"usual": True, "short": False, "long": True} == {name: bool(each.orders) for name, each in known.items()}
    assert "97 % of such outages are long here" in known["long"].reason
    assert "of such outages" not in known["usual"].reason


def test_the_runway_is_doubtful_when_it_stays_unknown():
    """A save that doesn't pay by itself is made once the estimator should have spoken."""
    need = Need(flush_s=400.0, write_s=400.0, halt_s=45.0, save_s=400.0, total_s=445.0)
    unknown = replace(OFF, runway_s=None)

    assert step(at(Phase.ON_BATTERY), unknown, now=119.9, need=need).orders == ()
    assert step(at(Phase.ON_BATTERY), unknown, now=120.0, need=need).orders == (Do.SNAPSHOT,)


@pytest.mark.parametrize(("now", "prior", "taken"), [
    (101.9, 100.0, False),  # two looks at least
    (102.0, 5 * 67.0 - 0.1, True),
    (102.0, 5 * 67.0, False),  # five needs: there is time for the debounce
    (102.0, None, False),
])  # fmt: skip
def test_a_small_prior_is_not_waited_out(now: float, prior: float | None, taken: bool):
    """With little known beforehand the snapshot comes at the second look, and says why."""
    answer = step(at(Phase.ON_BATTERY), replace(OFF, runway_s=None, prior_s=prior), now=now)

    assert taken == (Do.SNAPSHOT in answer.orders)
    assert taken == ("perhaps no more than" in answer.reason)


@pytest.mark.parametrize(("age", "taken"), [(1199.9, False), (1200.0, True)])
def test_snapshots_are_six_flushes_apart(age: float, taken: bool):
    """A slow flush isn't repeated so soon that writing takes the training's speed for good."""
    need = Need(flush_s=200.0, write_s=200.0, halt_s=45.0, save_s=200.0, total_s=245.0)
    view = at(Phase.ON_BATTERY, snapshot_at=2000.0 - age)

    assert taken == (Do.SNAPSHOT in step(view, replace(OFF, runway_s=5000.0), now=2000.0, need=need).orders)


def test_a_second_outage_is_not_waited_out():
    """Within 15 minutes of the last one the snapshot is due at once."""
    assert step(at(Phase.ON_BATTERY, ended_at=-799.0), OFF, now=100.0).orders == (Do.SNAPSHOT,)
    assert step(at(Phase.ON_BATTERY, ended_at=-801.0), OFF, now=100.0).orders == ()


@pytest.mark.parametrize("flush", [NOBODY, BUSY])
def test_no_snapshot_of_nobody_nor_in_another(flush: FlushView):
    """Nobody to snapshot, or an order underway: nothing is ordered."""
    assert step(at(Phase.ON_BATTERY), OFF, flush).orders == ()


@pytest.mark.parametrize(("since", "phase"), [(190.1, Phase.ON_BATTERY), (190.0, Phase.ONLINE)])
def test_mains_must_be_back_for_a_while(since: float, phase: Phase):
    """resume_after_s of mains end the event; the instant is kept for the next one."""
    answer = step(at(Phase.ON_BATTERY), replace(ON, online_since=since))

    assert phase is answer.phase
    if phase is Phase.ONLINE:
        assert (answer.view.ended_at, answer.view.event_at) == (200.0, None)


@pytest.mark.parametrize("phase", [Phase.ON_BATTERY, Phase.PARKED])
def test_silence_neither_ends_an_outage_nor_halts(phase: Phase):
    """Nobody says battery, nobody says mains: the node stays as it is, however long and with whatever numbers."""
    unknown = Power(None, online_since=0.0, runway_s=0.0, idle_runway_s=0.0, reason="ups was on line when last heard")
    answer = step(at(phase), unknown, DONE, now=99999.0)

    assert (phase, ()) == (answer.phase, answer.orders)
    assert "when last heard" in answer.reason


def test_an_operators_park_is_no_outage_when_the_link_goes():
    """Held ranks on line power, and the link is lost: nothing but waiting."""
    view = at(Phase.PARKED, held=True, event_at=None)
    answer = step(view, Power(None, reason="ups was on line when last heard"), DONE, now=99999.0)

    assert answer.view is view


# ---- flushing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flush", "word"), [
    (DONE, "every rank is durable"), (LOST, "not everything is durable: gpt: rank 1 died"), (NOBODY, "no rank is left"),
])  # fmt: skip
@pytest.mark.parametrize("power", [OFF, ON, replace(OFF, on_battery=None)])
def test_a_flush_that_is_over_parks(flush: FlushView, word: str, power: Power):
    """Whatever the power does, a flush that is done, or as done as it gets, ends in PARKED."""
    answer = step(at(Phase.FLUSHING), power, flush)

    assert Phase.PARKED is answer.phase
    assert word in answer.reason


def test_a_stop_is_not_withdrawn_when_mains_are_back():
    """The flush goes on with mains back, until `flush_max_s`; then it is given up with the reason."""
    view = at(Phase.FLUSHING)

    assert Phase.FLUSHING is step(view, ON, BUSY, now=699.9).phase
    given_up = step(view, ON, BUSY, now=700.0)
    assert Phase.ONLINE is given_up.phase
    assert "given up" in given_up.reason
    assert "rank 1 not yet durable" in given_up.reason
    assert Phase.FLUSHING is step(view, replace(ON, online_since=691.0), BUSY, now=700.0).phase


@pytest.mark.parametrize(("power", "took", "halts"), [
    (replace(OFF, idle_runway_s=55.0), 43.9, False),  # nearly spent, but the flush isn't late: twice its 22 s
    (replace(OFF, idle_runway_s=55.0), 44.0, True),
    (replace(OFF, idle_runway_s=55.1), 500.0, False),
    (replace(OFF, idle_runway_s=0.0), 43.9, False),  # giving up would lose it for sure, and a bound is cautious
    (replace(OFF, halt_now="battery at 1.80 V"), 43.9, False),
    (replace(OFF, halt_now="battery at 1.80 V"), 44.0, True),
    (replace(OFF, blind_s=20.0), 44.0, True),
    (replace(OFF, blind_s=19.9), 44.0, False),
    (replace(OFF, idle_runway_s=None, runway_s=None), 599.9, False),
    (replace(OFF, idle_runway_s=None, runway_s=None), 600.0, True),
    (replace(ON, idle_runway_s=0.0), 599.0, False),
    (replace(OFF, on_battery=None, idle_runway_s=10.0), 30.0, False),
])  # fmt: skip
def test_halting_in_the_middle_of_a_flush(power: Power, took: float, halts: bool):
    """Only when power is nearly gone and the flush is late; it says what isn't durable."""
    answer = step(at(Phase.FLUSHING), power, BUSY, now=100.0 + took)

    assert halts == (answer.phase is Phase.HALTING)
    if halts:
        assert "not durable: gpt: rank 1 not yet durable" in answer.reason


# ---- parked ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("power", "parked_s", "halts"), [
    (replace(OFF, idle_runway_s=55.0), 1.0, True),
    (replace(OFF, idle_runway_s=55.1), 1.0, False),
    (replace(OFF, halt_now="low battery (LB) while parked"), 1.0, True),
    (replace(OFF, blind_s=20.0), 1.0, True),
    (replace(OFF, blind_s=19.9), 1.0, False),
    (OFF, 899.9, False),
    (OFF, 900.0, True),
    (replace(OFF, on_battery=None), 900.0, False),
    (replace(ON, online_since=999.0, idle_runway_s=0.0, halt_now="x", blind_s=99.0), 900.0, False),
])  # fmt: skip
def test_when_a_parked_node_halts(power: Power, parked_s: float, halts: bool):
    """On the idle bound, a strong signal, blindness or the longest wait; never on line power."""
    assert halts == (step(at(Phase.PARKED), power, DONE, now=100.0 + parked_s).phase is Phase.HALTING)


def test_a_halt_says_what_was_lost():
    """The reason of the halt names what isn't durable."""
    assert "not durable: gpt: rank 1 died" in step(at(Phase.PARKED), replace(OFF, idle_runway_s=1.0), LOST).reason


@pytest.mark.parametrize(("since", "flush", "now", "phase"), [
    (190.1, DONE, 200.0, Phase.PARKED),
    (190.0, DONE, 200.0, Phase.ONLINE),
    (100.0, BUSY, 200.0, Phase.PARKED),
    (100.0, BUSY, 700.0, Phase.ONLINE),
])  # fmt: skip
def test_parked_ranks_resume(since: float, flush: FlushView, now: float, phase: Phase):
    """After resume_after_s of mains, once a late job's flush is done (or has taken too long)."""
    assert phase is step(at(Phase.PARKED), replace(ON, online_since=since), flush, now=now).phase


def test_parked_by_the_operator():
    """Held ranks stay parked on mains; an outage in the meantime runs from its own beginning and may halt the node."""
    view = at(Phase.PARKED, held=True, event_at=None)

    assert Phase.PARKED is step(view, ON, DONE, now=99999.0).phase
    out = step(view, replace(OFF, since=5000.0), DONE, now=5001.0)
    assert (out.phase, out.view.event_at) == (Phase.PARKED, 5000.0)
    assert Phase.HALTING is step(out.view, replace(OFF, since=5000.0), DONE, now=5900.0).phase
    over = step(out.view, replace(ON, online_since=5100.0), DONE, now=5200.0)
    assert (over.phase, over.view.event_at, over.view.ended_at) == (Phase.PARKED, None, 5200.0)


# ---- FSD -------------------------------------------------------------------------------------------


def test_fsd_from_anywhere():
    """A new FSD stops training in any phase, on mains too, and leads to the halt: at once when all is durable, after
    `fsd_s` at the latest."""
    commanded = replace(ON, fsd="ups")
    stopped = step(at(Phase.ONLINE), commanded, now=200.0)

    assert (stopped.phase, stopped.view.fsd_at) == (Phase.FLUSHING, 200.0)
    assert Phase.FLUSHING is step(at(Phase.ON_BATTERY), replace(OFF, fsd="ups"), now=200.0).phase
    assert Phase.FLUSHING is step(stopped.view, commanded, BUSY, now=214.9).phase
    assert Phase.HALTING is step(stopped.view, commanded, BUSY, now=215.0).phase
    parked = step(stopped.view, commanded, DONE, now=205.0)
    assert Phase.PARKED is parked.phase
    assert Phase.HALTING is step(parked.view, commanded, DONE, now=205.2).phase
    assert Phase.HALTING is step(parked.view, ON, DONE, now=205.2).phase  # it can't be taken back
    assert Phase.PARKED is step(at(Phase.ONLINE), commanded, NOBODY).phase


# ---- halting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [OFF, ON, replace(ON, online_since=0.0)])
def test_halting_is_committed(power: Power):
    """Ranks quiesce, leave, and the power goes off once, whether mains come back or not."""
    alive = replace(DONE, quiet=False, gone=False)
    view = at(Phase.HALTING)

    assert step(view, power, alive, now=109.9).orders == ()
    assert step(view, power, alive, now=109.9).view.exit_at is None
    late = step(view, power, alive, now=110.0)
    assert late.view.exit_at == 110.0
    quiet = step(view, power, replace(alive, quiet=True), now=101.0)
    assert quiet.view.exit_at == 101.0
    assert step(quiet.view, power, replace(alive, quiet=True), now=110.9).orders == ()
    assert step(quiet.view, power, replace(alive, quiet=True), now=111.0).orders == (Do.HALT,)
    off = step(quiet.view, power, NOBODY, now=102.0)
    assert (off.orders, off.view.halted_at) == ((Do.HALT,), 102.0)
    assert step(off.view, power, NOBODY, now=9999.0).orders == ()
    assert Phase.HALTING is step(off.view, power, NOBODY, now=9999.0).phase


def test_an_fsd_hurries_the_halt():
    """With a primary waiting, ranks have two seconds instead of ten."""
    alive = replace(DONE, quiet=False, gone=False)

    assert step(at(Phase.HALTING, fsd_at=90.0), OFF, alive, now=102.0).view.exit_at == 102.0


def test_a_dry_run_comes_back():
    """Only the shell's word that nothing was powered off leads out of HALTING, and only with mains."""
    view = at(Phase.HALTING, exit_at=101.0, halted_at=102.0)
    dry = ask(DRY_RUN, view).view

    assert dry.dry
    assert Phase.HALTING is step(view, ON, NOBODY).phase
    assert Phase.HALTING is step(dry, OFF, NOBODY).phase
    assert Phase.ONLINE is step(dry, ON, NOBODY).phase
    assert ask(DRY_RUN, at(Phase.HALTING)).refused


# ---- a shutdown of the system ----------------------------------------------------------------------


def leave(view: PhaseView, power: Power = ON, flush: FlushView = IDLE, within_s: float | None = 120.0) -> Next:
    """The service manager begins to shut down."""
    return command(Command(SHUTDOWN, "logind", within_s), Case(POLICY, view, power, NEED, flush, 200.0))


@pytest.mark.parametrize("phase", [Phase.ONLINE, Phase.ON_BATTERY])
def test_a_shutdown_stops_training_wherever_it_runs(phase: Phase):
    """Ranks flush before the system goes down, on mains and on battery; with nobody to flush it is done at once."""
    power = ON if phase is Phase.ONLINE else OFF

    assert (Phase.FLUSHING, 320.0) == (leave(at(phase), power).phase, leave(at(phase), power).view.leave_at)
    assert Phase.PARKED is leave(at(phase), power, NOBODY).phase
    assert "shutting down (logind)" in leave(at(phase), power).reason


def test_a_shutdown_doesnt_repeat_a_stop():
    """Stopped ranks stay stopped; only how long the system waits is new. Asked twice it counts from the first."""
    parked = leave(at(Phase.PARKED, held=True), ON, DONE)

    assert (Phase.PARKED, True, 320.0) == (parked.phase, parked.view.held, parked.view.leave_at)
    assert 150.0 == leave(at(Phase.FLUSHING, leave_at=150.0), ON, BUSY).view.leave_at
    assert leave(at(Phase.HALTING), OFF, DONE).refused


def test_nothing_resumes_while_the_system_shuts_down():
    """Mains for ever, a flush without end, the operator: all of them wait."""
    view = at(Phase.PARKED, leave_at=320.0)

    assert Phase.PARKED is step(view, ON, DONE, now=9e4).phase
    assert Phase.FLUSHING is step(replace(view, phase=Phase.FLUSHING), ON, BUSY, now=9e4).phase
    assert ask("resume", view, ON, DONE).refused


def test_a_cancelled_shutdown_gives_the_ranks_back():
    """Training goes on, unless somebody or something else keeps it parked."""

    def cancel(view: PhaseView, power: Power = ON, flush: FlushView = DONE) -> Next:
        return ask(CANCELLED, replace(view, leave_at=320.0), power, flush)

    alone = at(Phase.PARKED, event_at=None)
    assert Phase.ONLINE is cancel(alone).phase
    for other in (
        cancel(replace(alone, held=True)),
        cancel(at(Phase.PARKED), OFF),
        cancel(replace(alone, phase=Phase.FLUSHING), ON, BUSY),
    ):
        assert other.phase is not Phase.ONLINE
        assert (None, False) == (other.view.leave_at, other.refused)
    assert ask(CANCELLED, alone).refused


def test_the_outage_of_a_shutting_down_node_still_halts_it():
    """A shutdown that hangs on battery doesn't keep the power-off back."""
    view = at(Phase.PARKED, leave_at=320.0)

    assert Phase.HALTING is step(view, replace(OFF, idle_runway_s=50.0), DONE).phase


@pytest.mark.parametrize(("power", "deadline"), [(ON, 320.0), (OFF, 320.0), (replace(OFF, runway_s=60.0), 260.0)])
def test_ranks_are_given_what_the_system_waits(power: Power, deadline: float):
    """On mains logind's delay is the deadline, on battery the runway if it is nearer."""
    view = at(Phase.FLUSHING, leave_at=320.0)
    state = replace(initial("boot", 0.0), view=view, event="e", power=power, need=NEED)

    assert deadline == entered(POLICY, state, Next(view, (), "x"), 200.0).deadline_at


# ---- commands --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("verb", "view", "power", "flush", "phase", "word"), [
    ("flush", at(Phase.ONLINE), ON, IDLE, Phase.ONLINE, ""),
    ("flush", at(Phase.ON_BATTERY), OFF, IDLE, Phase.ON_BATTERY, ""),
    ("flush", at(Phase.ONLINE), ON, BUSY, Phase.ONLINE, "is being carried out"),
    ("flush", at(Phase.ONLINE), ON, NOBODY, Phase.ONLINE, "no job"),
    ("flush", at(Phase.FLUSHING), OFF, BUSY, Phase.FLUSHING, "saves everything already"),
    ("flush", at(Phase.PARKED), OFF, DONE, Phase.PARKED, "saves everything already"),
    ("flush", at(Phase.HALTING), OFF, DONE, Phase.HALTING, "is halting"),
    ("park", at(Phase.ONLINE), ON, IDLE, Phase.FLUSHING, ""),
    ("park", at(Phase.ON_BATTERY), OFF, IDLE, Phase.FLUSHING, ""),
    ("park", at(Phase.ONLINE), ON, NOBODY, Phase.PARKED, ""),
    ("park", at(Phase.FLUSHING), OFF, BUSY, Phase.FLUSHING, ""),
    ("park", at(Phase.PARKED), ON, DONE, Phase.PARKED, ""),
    ("park", at(Phase.PARKED, held=True), ON, DONE, Phase.PARKED, "already"),
    ("park", at(Phase.HALTING), OFF, DONE, Phase.HALTING, "is halting"),
    ("resume", at(Phase.PARKED, held=True), ON, DONE, Phase.ONLINE, ""),
    ("resume", at(Phase.PARKED), ON, DONE, Phase.ONLINE, ""),
    ("resume", at(Phase.PARKED, held=True), OFF, DONE, Phase.PARKED, ""),
    ("resume", at(Phase.PARKED), OFF, DONE, Phase.PARKED, "by itself"),
    ("resume", at(Phase.PARKED, fsd_at=1.0), ON, DONE, Phase.PARKED, "FSD"),
    ("resume", at(Phase.FLUSHING, held=True), ON, BUSY, Phase.FLUSHING, ""),
    ("resume", at(Phase.FLUSHING), ON, BUSY, Phase.FLUSHING, "never withdrawn"),
    ("resume", at(Phase.ONLINE), ON, IDLE, Phase.ONLINE, "nothing is parked"),
    ("resume", at(Phase.HALTING), ON, DONE, Phase.HALTING, "is halting"),
    ("reboot", at(Phase.ONLINE), ON, IDLE, Phase.ONLINE, "known are flush, park, resume"),
    (DRY_RUN, at(Phase.ONLINE), ON, IDLE, Phase.ONLINE, "no halt was ordered"),
])  # fmt: skip
def test_commands(  # noqa: PLR0917
    verb: str, view: PhaseView, power: Power, flush: FlushView, phase: Phase, word: str
):
    """Each command in each phase: done, or refused with a reason."""
    answer = ask(verb, view, power, flush)

    assert phase is answer.phase
    assert bool(word) == answer.refused
    assert word in answer.reason
    if answer.refused:
        assert (view, ()) == (answer.view, answer.orders)


# ---- always and never ------------------------------------------------------------------------------

instants = st.none() | st.floats(0.0, 1000.0)
amounts = st.none() | st.floats(0.0, 5000.0)
views = st.builds(
    PhaseView, phase=st.sampled_from(Phase), phase_since=st.floats(0.0, 1000.0), event_at=instants, ended_at=instants,
    snapshot_at=instants, fsd_at=instants, held=st.booleans(), leave_at=instants, exit_at=instants, halted_at=instants,
    dry=st.booleans(),
)  # fmt: skip
powers = st.builds(
    Power, on_battery=st.none() | st.booleans(), since=instants, online_since=instants, runway_s=amounts,
    idle_runway_s=amounts, save_now=st.sampled_from(["", "LB"]), halt_now=st.sampled_from(["", "LB"]),
    fsd=st.sampled_from(["", "ups"]), blind_s=amounts,
)  # fmt: skip
flushes = st.builds(
    FlushView, state=st.sampled_from(Flush), underway=st.booleans(), failed=st.booleans(), quiet=st.booleans(),
    gone=st.booleans(), strays=st.booleans(),
)  # fmt: skip


@given(views, powers, flushes, st.floats(0.0, 20.0))
def test_no_halt_on_mains(view: PhaseView, power: Power, flush: FlushView, more: float):
    """From whatever view: with mains or without a word, and no FSD, nothing enters HALTING, and no stop is begun."""
    power = replace(power, on_battery=None if power.on_battery is None else False, fsd="")
    view = replace(view, fsd_at=None)
    answer = step(view, power, flush, now=1000.0 + more)

    if view.phase is not Phase.HALTING:
        assert answer.phase is not Phase.HALTING
        assert Do.HALT not in answer.orders
    if view.phase in (Phase.ONLINE, Phase.ON_BATTERY):
        assert answer.phase in (Phase.ONLINE, Phase.ON_BATTERY)


@given(views, powers, flushes, st.floats(0.0, 20.0))
def test_back_online_needs_mains(view: PhaseView, power: Power, flush: FlushView, more: float):
    """Nothing but mains leads to ONLINE, and every answer has its reason."""
    answer = step(view, power, flush, now=1000.0 + more)

    assert answer.reason
    if answer.phase is Phase.ONLINE and view.phase is not Phase.ONLINE:
        assert power.on_battery is False
        assert power.online_since is not None
        assert 1000.0 + more - power.online_since >= POLICY.resume_after_s
    if answer.phase is view.phase:
        assert answer.view.phase_since == view.phase_since


@given(powers, flushes, st.floats(0.0, 400.0), st.floats(0.0, 400.0))
def test_less_runway_never_stops_later(power: Power, flush: FlushView, one: float, other: float):
    """If a runway makes ranks stop, so does every shorter one."""
    power = replace(power, on_battery=True, fsd="", save_now="", blind_s=None)
    view = at(Phase.ON_BATTERY, snapshot_at=150.0)
    less, more = sorted((one, other))

    stopped = step(view, replace(power, runway_s=more), flush).phase is not Phase.ON_BATTERY
    if stopped:
        assert step(view, replace(power, runway_s=less), flush).phase is not Phase.ON_BATTERY


# ---- the whole decision ----------------------------------------------------------------------------


def heard(state: State, status: str, now: float, *, verbs: tuple[str, ...] = ()) -> Observation:
    """One poll."""
    variables = {"ups.status": status, "battery.charge": "90", "battery.runtime": "900", "ups.load": "40"}
    sample = Sample("ups", now, Comm.OK, variables)
    return Observation(samples=(sample,), commands=tuple(Command(verb) for verb in verbs))


def test_events_have_names_of_their_own():
    """Each outage is a new event, named for files; between them there is none."""
    state, names = initial("4c6f-BOOT", 0.0), []
    for now, status in ((1.0, "OL"), (2.0, "OB"), (4.0, "OL"), (20.0, "OL"), (21.0, "OB")):
        state = decide(POLICY, state, heard(state, status, now), now).state
        names.append(state.event)

    assert names == ["", "4c6fboot-1", "4c6fboot-1", "", "4c6fboot-2"]
    assert event_id("///", 7) == "boot-7"


def test_people_are_told_once():
    """A phase is announced when it is entered, a trouble when it comes, and not at every poll."""
    state, told = initial("boot", 0.0), []
    for i in range(40):
        now = 1.0 + i
        status = "OL LB" if i < 10 else "OB"
        decision = decide(POLICY, state, heard(state, status, now), now)
        state = decision.state
        told += [action.text for action in decision.actions if isinstance(action, Announce)]

    assert sum("low battery (LB) on line" in text for text in told) == 1
    assert sum(text.startswith("on battery: ") for text in told) == 1
    assert len(told) <= 4


def test_commands_are_answered():
    """Every command gets one answer that says whether it was refused; two at once are both answered."""
    state = decide(POLICY, initial("boot", 0.0), heard(initial("boot", 0.0), "OL", 1.0), 1.0).state
    decision = decide(POLICY, state, heard(state, "OL", 2.0, verbs=("resume", "park", "dance")), 2.0)
    answers = {
        action.facts["command"]: action.facts["refused"]
        for action in decision.actions
        if isinstance(action, Announce) and "command" in action.facts
    }

    assert answers == {"resume": True, "park": False, "dance": True}
    assert Phase.PARKED is decision.state.phase  # nobody to flush


def test_ranks_are_given_the_runway_at_a_flushs_load():
    """A stop at 100 s of runway gives 200 s to ranks whose flush draws half: a fresh save isn't given up too soon."""
    given = []
    for share in (1.0, 0.5):
        need = replace(NEED, eased=share)
        state = replace(initial("boot", 0.0), power=replace(OFF, runway_s=100.0), need=need)
        stop = Next(at(Phase.FLUSHING), (), "stop: runway")
        given.append(entered(POLICY, state, stop, 100.0).deadline_at)

    assert given == [200.0, 300.0]


def ranks_of(world: World, kind: type[object]) -> set[tuple[str, int]]:
    """Who was sent a message of that kind."""
    return {
        (action.job, action.rank)
        for entry in world.entries
        for action in entry.decision.actions
        if isinstance(action, Send) and isinstance(action.message, kind)
    }


def test_a_night_of_two_jobs():
    """Both jobs are greeted, noticed, stopped, quiesced and sent away with the code to requeue on; one power-off."""
    feed = SimFeed("ups")
    jobs = (JobSpec("a", 2, RankSpec(write_s=2.0)), JobSpec("b", 1, RankSpec(write_s=3.0)))
    world = World(replace(POLICY, on_battery="park", park_max_s=30.0), jobs=jobs, feeds=(feed,), begin_at=0.0)
    world.at(10.0, lambda: feed.say({"ups.status": "OB DISCHRG"}))
    world.run(120.0)
    everybody = {("a", 0), ("a", 1), ("b", 0)}

    for kind in (Welcome, Notice, Prepare, Quiesce, Exit):
        assert everybody == ranks_of(world, kind), kind.__name__
    halts = [action for entry in world.entries for action in entry.decision.actions if isinstance(action, Halt)]
    assert [halt.reason for halt in halts] == ["halt: parked on battery for 30 s, at most 30 s"] or len(halts) == 1
    assert {75} == {rank.left_with for rank in world.ranks.values()}
    assert all(world.newest(name) is not None for name in ("a", "b"))


def test_poll_wait_is_slow_far_away_and_fast_near():
    """Bounded both ways: `look_s` and a bit at rest, FAST_S while something is underway or about to happen."""
    feed = SimFeed("ups")
    world = World(POLICY, jobs=(JobSpec("gpt", 2, RankSpec(write_s=3.0)),), feeds=(feed,), begin_at=0.0)
    waits: dict[Phase, list[float]] = {phase: [] for phase in Phase}
    world.at(30.0, lambda: feed.say({"ups.status": "OB DISCHRG"}))
    world.at(90.0, lambda: world.command("park"))
    world.at(130.0, lambda: feed.say({"ups.status": "OL"}))
    world.at(150.0, lambda: world.command("resume"))
    for second in range(1, 200):
        world.run(float(second))
        waits[world.phase].append(poll_wait(POLICY, world.state, world.now))

    assert max(waits[Phase.ONLINE]) == look_s(POLICY) + FAST_S
    assert max(waits[Phase.ON_BATTERY]) == POLICY.poll_battery_s
    assert set(waits[Phase.FLUSHING]) == {FAST_S}
    assert FAST_S in waits[Phase.ON_BATTERY]
    assert all(FAST_S <= wait <= look_s(POLICY) + FAST_S for each in waits.values() for wait in each)


def test_a_step_of_the_load_reaches_the_estimator():
    """GPUs at less power on battery: the feed's witnesses are told, on mains there is nothing to tell."""
    sample = Sample("ups", 100.0, Comm.OK, {"ups.status": "OB DISCHRG", "battery.charge": "90", "ups.load": "60"})
    for status, factor in (("OB DISCHRG", 0.8), ("OL", None)):
        said = replace(sample, variables={**sample.variables, "ups.status": status})
        before = decide(POLICY, initial("boot", 90.0), Observation((said,)), 100.0).state
        after = decide(POLICY, before, Observation(loads=(LoadStep(0.8),)), 101.0).state
        draw = after.feeds["ups"].runway.draw
        assert factor == (None if draw is None else draw.carry_factor)
