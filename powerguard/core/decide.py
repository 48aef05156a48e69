"""The phases of the node, and nothing else.

Rule 1: every transition between phases is in this file, in one function for each phase::

    online ──> on_battery ──> flushing ──> parked ──> halting
      │ ^          │  │         │  │ ^       │ ^         │
      │ └──────────┘  │         │  │ │       │ │         │   mains are back: online again
      │ ^             └─────────┼──┼─┼───────┼─┘         │   nothing to flush: parked at once
      ├─┼───────────────────────┼──┼─┘       │           │   an operator's order, a shutdown, an FSD (also to parked)
      │ └───────────────────────┘  │         │           │   a flush given up with mains back
      │ ^                          └─────────┼──────────>│   power nearly gone, and the flush past saving
      │ └────────────────────────────────────┘           │
      └<─────────────────────────────────────────────────┘   only if the halt was a dry run

Rule 2: a stop is never withdrawn. Mains coming back change only what follows the flush.
Rule 3: unknown isn't healthy, and no outage either. A feed last seen on battery counts as on battery, and its silence
    stops and halts; with no such feed silence ends no outage, begins none, and only alarms.
Rule 4: saving is early and reversible, halting is late and final: a halt needs battery or an FSD, and the flush done
    or past saving. HALTING is committed.
Rule 5: each answer carries its reason in one sentence with the numbers (`why.py`).

`transition` knows no ranks and no messages: it is also what the policy benchmark runs a million times. What a phase
asks of each job (STOP, RESUME, QUIESCE, EXIT) is `serve.py`'s. `decide` puts it all together: the daemon's one call.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from powerguard.core import agree, feeds
from powerguard.core.feeds import Power
from powerguard.core.need import Need, reckon
from powerguard.core.phase import Do, Flush, FlushView, Next, PhaseView
from powerguard.core.policy import Policy
from powerguard.core.serve import entered, flush_view, notices, serve
from powerguard.core.state import Decision, State
from powerguard.core.tell import Reply, announce
from powerguard.core.types import Actions, Command, Halt, Observation, Phase
from powerguard.core.why import (
    Case,
    spare_text,
    why_halt,
    why_halt_unflushed,
    why_snapshot,
    why_snapshot_unheard,
    why_stop,
)

HURRY_S = 2.0
"""After an FSD ranks have this long to quiesce, and then to leave (of the 15 s that a primary waits)."""

DRY_RUN = "halt-was-dry-run"
"""The shell's own command, after a halt that it only wrote down."""

SHUTDOWN, CANCELLED = "shutdown", "shutdown-cancelled"
"""The shell's own commands, when the service manager begins to shut down and when that is called off."""


def decide(policy: Policy, state: State, seen: Observation, now: float) -> Decision:
    """The next state, what to do, and why, after *seen*. Call it again after `poll.poll_wait` seconds at the latest."""
    before = state.phase
    jobs, told = agree.absorb(
        policy, state.jobs, seen.reports, seen.pages, now, node=state.node, phase=state.phase.value
    )
    actions: list[Actions] = list(told)
    budget_s = None if state.deadline_at is None else max(0.0, state.deadline_at - now)
    for name, job in jobs.items():
        jobs[name], told = agree.tick(policy, job, now, budget_s=budget_s)
        actions += told
    need = reckon(policy, jobs, now)
    known = feeds.absorb(policy, state.feeds, seen.samples, now)
    for step in seen.loads:
        known = feeds.step_load(policy, known, now, step.factor)
    power = feeds.view(policy, known, now, save_s=need.used_s + policy.margin_s, halt_s=need.halt_s)
    if state.phase is not Phase.ONLINE and power.on_battery is False:
        power = _as_seen(policy, known, power, now)
    state = replace(state, feeds=known, jobs=jobs, need=need, power=power)
    nxt, replies = _answer(Case(policy, state.view, power, need, flush_view(state), now), seen.commands)
    state = entered(policy, state, nxt, now)
    state, told = serve(policy, state, nxt, now)
    actions += told
    if state.phase is Phase.ON_BATTERY and before is Phase.ONLINE:
        actions += notices(state, nxt.reason)
    state, said = announce(before, state, nxt, replies, now)
    actions += said
    if Do.HALT in nxt.orders:
        actions.append(Halt(state.view.why))
    return Decision(state, tuple(actions), nxt.reason)


def _as_seen(policy: Policy, known: dict[str, feeds.Feed], power: Power, now: float) -> Power:
    """Mains are back for as long as readings say so: the silence since the last one doesn't count."""
    good = sorted(
        (feed.last_good_at for feed in known.values() if feed.on_battery is False and feed.last_good_at), reverse=True
    )
    if power.online_since is None or len(good) < policy.min_supplies:
        return power
    silent_s = max(0.0, now - good[policy.min_supplies - 1])
    return replace(power, online_since=min(now, power.online_since + silent_s))


def _answer(case: Case, commands: tuple[Command, ...]) -> tuple[Next, list[Reply]]:
    """The operator's commands, each answered, and then one step of the phases unless a command took one."""
    replies: list[Reply] = []
    taken: Next | None = None  # the command that changed something
    for asked in commands:
        nxt = command(asked, case)
        replies.append(Reply(asked.verb[:40], nxt.reason, nxt.refused))
        if nxt.orders or nxt.phase is not case.view.phase or nxt.view.dry is not case.view.dry:
            orders = nxt.orders if taken is None else taken.orders + nxt.orders
            taken = replace(nxt, orders=orders)
        case = replace(case, view=nxt.view)
    if taken is not None and Do.SNAPSHOT not in taken.orders:
        return replace(taken, view=case.view), replies
    nxt = transition(case.policy, case.view, case.power, case.need, case.flush, case.now)
    if taken is not None and nxt.phase is case.view.phase:
        return Next(nxt.view, taken.orders + nxt.orders, taken.reason), replies
    return nxt, replies


def transition(  # noqa: PLR0917
    policy: Policy, view: PhaseView, power: Power, need: Need, flush: FlushView, now: float
) -> Next:
    """At most one step between phases. Pure; the same view comes back if nothing changes."""
    if power.fsd and view.fsd_at is None and view.phase is not Phase.HALTING:
        view = replace(view, fsd_at=now)
    return _PHASES[view.phase](Case(policy, view, power, need, flush, now))


# ---- one function for each phase -------------------------------------------------------------------


def _online(case: Case) -> Next:
    power, now = case.power, case.now
    if case.view.fsd_at is not None:
        return _stop(case, replace(case.view, event_at=now), f"forced shutdown (FSD) by {power.fsd}")
    if power.on_battery is None:
        return _unknown(case)
    if not power.on_battery:
        view = case.view
        return _stay(view if view.unknown_at is None else replace(view, unknown_at=None), "on line power")
    since = now if power.since is None else min(now, power.since)
    if now - since < case.policy.confirm_s:
        return _stay(case.view, f"on battery for {now - since:.0f} s, believed after {case.policy.confirm_s:.0f} s")
    view = PhaseView(event_at=since, ended_at=case.view.ended_at)
    return _to(case, view, Phase.ON_BATTERY, f"on battery: {power.reason}")


def _unknown(case: Case) -> Next:
    """Last heard on line, and silent: no outage, but links break at the moment of a transfer (nut#2925). One snapshot
    for each silence is cheap, and all that an outage without a word would leave."""
    view = case.view
    if view.unknown_at is None:
        view = replace(view, unknown_at=case.now)
        case = replace(case, view=view)
    why = why_snapshot_unheard(case)
    if why:
        return Next(replace(view, snapshot_at=case.now), (Do.SNAPSHOT,), f"snapshot: {why}")
    return _stay(view, f"on line power as far as known: {case.power.reason}")


def _on_battery(case: Case) -> Next:
    view = case.view
    if view.fsd_at is not None:
        return _stop(case, view, f"forced shutdown (FSD) by {case.power.fsd}")
    if case.power.on_battery is False:
        if case.back_s < case.policy.resume_after_s:
            return _stay(view, _returning(case))
        return _online_again(case, f"mains are back for {case.back_s:.0f} s: {_outage(case)} is over")
    if case.power.on_battery is None:
        return _stay(view, f"an outage, as far as known: {case.power.reason}")
    why = why_stop(case)
    if why:
        return _stop(case, view, why)
    why = why_snapshot(case)
    if why:
        return Next(replace(view, snapshot_at=case.now), (Do.SNAPSHOT,), f"snapshot: {why}")
    return _stay(view, f"riding through: {spare_text(case)}")


def _flushing(case: Case) -> Next:
    view, flush, took = case.view, case.flush, case.phase_s
    if flush.final:
        return _to(case, view, Phase.PARKED, _parked_because(flush))
    if case.power.on_battery is False and view.fsd_at is None:
        given_up = took >= case.policy.flush_max_s and view.leave_at is None
        if given_up and case.back_s >= case.policy.resume_after_s:
            why = f"the flush isn't done after {took:.0f} s ({flush.why}) and mains are back: given up"
            return _online_again(case, why)
        return _stay(view, f"flushing for {took:.0f} s, on line power")
    why = why_halt_unflushed(case) if case.power.on_battery or view.fsd_at is not None else ""
    if why:
        return _to(case, view, Phase.HALTING, f"halt: {why}; not durable: {flush.why}")
    return _stay(view, f"flushing for {took:.0f} s of {case.need.save_s:.0f} s planned, {spare_text(case)}")


def _parked(case: Case) -> Next:
    view, flush, power = case.view, case.flush, case.power
    lost = f"; not durable: {flush.why}" if flush.state is Flush.LOST else ""
    if view.fsd_at is not None:
        if flush.final or case.now - view.fsd_at >= case.policy.fsd_s:
            return _to(case, view, Phase.HALTING, f"halt: forced shutdown (FSD) by {power.fsd or 'command'}{lost}")
        return _stay(view, "FSD: a late job still flushes")
    if power.on_battery is False:
        return _parked_on_mains(case)
    if power.on_battery is None:
        return _stay(view, f"parked, and nobody knows of the power: {power.reason}")
    if view.event_at is None:  # parked by the operator, and now an outage
        view = replace(view, event_at=case.now if power.since is None else min(case.now, power.since))
        case = replace(case, view=view)
    why = why_halt(case)
    if why:
        return _to(case, view, Phase.HALTING, f"halt: {why}{lost}")
    idle = "unknown" if power.idle_runway_s is None else f"{power.idle_runway_s:.0f} s"
    return _stay(view, f"parked on battery for {case.phase_s:.0f} s, idle runway {idle}")


def _parked_on_mains(case: Case) -> Next:
    view = case.view
    if view.held or view.leave_at is not None:
        if view.event_at is not None and case.back_s >= case.policy.resume_after_s:
            view = replace(view, event_at=None, ended_at=case.now)
        shutdown = view.leave_at is not None
        return _stay(view, f"parked: {_SHUTDOWN}" if shutdown else "parked by the operator until they say resume")
    if case.back_s < case.policy.resume_after_s:
        return _stay(view, f"parked, {_returning(case)}")
    if not case.flush.final and case.phase_s < case.policy.flush_max_s:
        return _stay(view, "parked, mains are back, a late job still flushes")
    return _online_again(case, f"mains are back for {case.back_s:.0f} s: training goes on, {_outage(case)} is over")


def _halting(case: Case) -> Next:
    view, flush, now = case.view, case.flush, case.now
    wait_s = case.policy.exit_wait_s if view.fsd_at is None else min(HURRY_S, case.policy.exit_wait_s)
    if view.exit_at is None:
        if not flush.quiet and case.phase_s < wait_s:
            return _stay(view, "halting: ranks quiesce")
        word = "every rank is quiet" if flush.quiet else f"not every rank is quiet after {wait_s:.0f} s"
        return _stay(replace(view, exit_at=now), f"halting: {word}, ranks leave")
    if view.halted_at is None:
        if not flush.gone and now - view.exit_at < wait_s:
            return _stay(view, "halting: ranks leave")
        word = "every rank has left" if flush.gone else f"not every rank has left after {wait_s:.0f} s"
        return Next(replace(view, halted_at=now), (Do.HALT,), f"halting: {word}, power off")
    if view.dry and case.power.on_battery is False and case.back_s >= case.policy.resume_after_s:
        return _online_again(case, "the halt was a dry run and mains are back")
    return _stay(view, f"halting: power off was ordered {now - view.halted_at:.0f} s ago")


_PHASES: dict[Phase, Callable[[Case], Next]] = {
    Phase.ONLINE: _online,
    Phase.ON_BATTERY: _on_battery,
    Phase.FLUSHING: _flushing,
    Phase.PARKED: _parked,
    Phase.HALTING: _halting,
}


# ---- commands --------------------------------------------------------------------------------------


def command(asked: Command, case: Case) -> Next:
    """What a command changes; refused with a reason where it can't be."""
    verb = asked.verb
    if case.view.phase is Phase.HALTING and verb in (*_COMMANDS, SHUTDOWN, CANCELLED) and verb != DRY_RUN:
        return _refuse(case, f"{verb}: the node is halting")
    if verb == SHUTDOWN:
        return _shutdown(case, asked)
    if verb == CANCELLED:
        return _cancelled(case)
    handler = _COMMANDS.get(verb)
    if handler is None:
        known = ", ".join(name for name in _COMMANDS if name != DRY_RUN)
        return _refuse(case, f"{verb[:40]!r} is not a command; known are {known}")
    return handler(case)


def _command_flush(case: Case) -> Next:
    if case.view.phase not in (Phase.ONLINE, Phase.ON_BATTERY):
        return _refuse(case, f"flush: the node is {case.view.phase.value}, a stop saves everything already")
    if case.flush.state is Flush.NONE:
        return _refuse(case, "flush: no job is registered")
    if case.flush.underway:
        return _refuse(case, "flush: an order is being carried out")
    return Next(replace(case.view, snapshot_at=case.now), (Do.SNAPSHOT,), "snapshot: the operator's order")


def _command_park(case: Case) -> Next:
    if case.view.held:
        return _refuse(case, "park: the operator has parked this node already")
    if case.view.phase in (Phase.FLUSHING, Phase.PARKED):
        return _stay(replace(case.view, held=True), "park: stays parked until the operator says resume")
    return _stop(case, replace(case.view, held=True), "the operator's order")


def _command_resume(case: Case) -> Next:
    view = case.view
    if view.phase not in (Phase.FLUSHING, Phase.PARKED):
        return _refuse(case, f"resume: the node is {view.phase.value}, nothing is parked")
    if view.fsd_at is not None:
        return _refuse(case, "resume: the node was told to halt (FSD)")
    if view.leave_at is not None:
        return _refuse(case, f"resume: {_SHUTDOWN}")
    if view.phase is Phase.PARKED and case.power.on_battery is False and case.flush.final:
        return _online_again(case, "resume: the operator's order")
    if view.held:
        return _stay(replace(view, held=False), "resume: training goes on once the flush is done and mains are there")
    if view.phase is Phase.FLUSHING:
        return _refuse(case, "resume: a stop is never withdrawn; training goes on after the flush if mains are there")
    return _refuse(case, "resume: no mains; training goes on by itself when they are back")


def _command_dry(case: Case) -> Next:
    if case.view.halted_at is None:
        return _refuse(case, f"{DRY_RUN}: no halt was ordered")
    return _stay(replace(case.view, dry=True), "the halt was a dry run: waiting for mains")


_COMMANDS: dict[str, Callable[[Case], Next]] = {
    "flush": _command_flush,
    "park": _command_park,
    "resume": _command_resume,
    DRY_RUN: _command_dry,
}


def _shutdown(case: Case, asked: Command) -> Next:
    """The system goes down, by somebody's hand: ranks stop and save, as long as it waits for them."""
    view = case.view
    if view.leave_at is not None:
        return _stay(view, _SHUTDOWN)
    view = replace(view, leave_at=case.now + (case.policy.flush_max_s if asked.within_s is None else asked.within_s))
    if view.phase in (Phase.FLUSHING, Phase.PARKED):
        return _stay(view, f"{_SHUTDOWN}, ranks are stopped already")
    return _stop(case, view, f"{_SHUTDOWN} ({asked.by})" if asked.by else _SHUTDOWN)


def _cancelled(case: Case) -> Next:
    """It doesn't go down after all: what parked for it alone trains on."""
    if case.view.leave_at is None:
        return _refuse(case, f"{CANCELLED}: none was under way")
    view = replace(case.view, leave_at=None)
    case = replace(case, view=view)
    mains = case.power.on_battery is False and view.event_at is None
    if view.phase is Phase.PARKED and mains and not view.held and case.flush.final:
        return _online_again(case, "the shutdown was cancelled: training goes on")
    return _stay(view, "the shutdown was cancelled")


_SHUTDOWN = "the system is shutting down"


# ---- steps and words -------------------------------------------------------------------------------


def _stay(view: PhaseView, reason: str) -> Next:
    return Next(view, (), reason)


def _to(case: Case, view: PhaseView, phase: Phase, reason: str) -> Next:
    return Next(replace(view, phase=phase, phase_since=case.now, why=reason), (), reason)


def _stop(case: Case, view: PhaseView, why: str) -> Next:
    """To FLUSHING, or to PARKED where there is nothing to flush."""
    if case.flush.state is Flush.NONE:
        return _to(case, view, Phase.PARKED, f"stop: {why}; no job to flush")
    return _to(case, view, Phase.FLUSHING, f"stop: {why}")


def _online_again(case: Case, reason: str) -> Next:
    ended_at = case.view.ended_at if case.view.event_at is None else case.now
    return _to(case, PhaseView(ended_at=ended_at), Phase.ONLINE, reason)


def _refuse(case: Case, reason: str) -> Next:
    return Next(case.view, (), reason, refused=True)


def _returning(case: Case) -> str:
    return f"mains are back for {case.back_s:.0f} s, believed after {case.policy.resume_after_s:.0f} s"


def _outage(case: Case) -> str:
    return "the event" if case.view.event_at is None else f"the outage of {case.on_battery_s:.0f} s"


def _parked_because(flush: FlushView) -> str:
    if flush.state is Flush.LOST:
        return f"parked, not everything is durable: {flush.why}"
    return "parked: every rank is durable" if flush.state is Flush.PARKED else "parked: no rank is left to flush"
