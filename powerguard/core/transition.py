"""The phases of the node, and nothing else.

Rule 1: every transition between phases is in this file, in one function for each phase (commands: `commands.py`)::

    online ──> on_battery ──> flushing ──> parked ──> halting
      │ ^          │  │         │  │ ^       │ ^         │
      │ └──────────┘  │         │  │ │       │ │         │   mains are back: online again
      │ ^             └─────────┼──┼─┼───────┼─┘         │   nothing to flush: parked at once
      ├─┼───────────────────────┼──┼─┘       │           │   an order, a shutdown, an FSD (also to parked), a silence
      │ └───────────────────────┘  │         │           │   a flush given up with mains back, a silence's snapshot done
      │ ^                          └─────────┼──────────>│   power nearly gone, and the flush past saving
      │ └────────────────────────────────────┘           │
      └<─────────────────────────────────────────────────┘   only if the halt was a dry run

Rule 2: a stop is never withdrawn. Mains coming back change only what follows the flush.
Rule 3: unknown isn't healthy, and no outage either. A feed last seen on battery counts as on battery, and its silence
    stops and halts; with no such feed silence ends no outage and begins none: it alarms, and saves once. Where the
    battery may not carry training and that save, training pauses for it, and goes on.
Rule 4: saving is early and reversible, halting is late and final: a halt needs battery or an FSD, and the flush done
    or past saving. HALTING is committed.
Rule 5: each answer carries its reason in one sentence with the numbers (`why.py`).

`transition` knows no ranks and no messages: it is also what the policy benchmark runs a million times. What a phase
asks of each job (STOP, RESUME, QUIESCE, EXIT) is `serve.py`'s. `decide.py` puts it all together.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from powerguard.core.feeds import Power
from powerguard.core.need import Need
from powerguard.core.phase import Do, Flush, FlushView, Next, PhaseView
from powerguard.core.policy import Policy
from powerguard.core.steps import SHUTTING_DOWN, online_again, outage, parked_because, returning, stay, stop, to
from powerguard.core.types import Phase
from powerguard.core.why import (
    Case,
    spare_text,
    why_halt,
    why_halt_unflushed,
    why_pause,
    why_snapshot,
    why_snapshot_unheard,
    why_stop,
)

HURRY_S = 2.0
"""After an FSD ranks have this long to quiesce, and then to leave (of the 15 s that a primary waits)."""


def transition(  # noqa: PLR0917
    policy: Policy, view: PhaseView, power: Power, need: Need, flush: FlushView, now: float
) -> Next:
    """At most one step between phases. Pure; the same view comes back if nothing changes."""
    if power.fsd and view.fsd_at is None and view.phase is not Phase.HALTING:
        view = replace(view, fsd_at=now)
    real = power.on_battery or view.held or view.fsd_at is not None or view.leave_at is not None
    if real and view.drill_s is not None:
        view = replace(view, drill_s=None, only="")  # what the drill has stopped stays stopped for it
    if view.pause_at is not None and (real or view.drill_s is not None):
        view = replace(view, pause_at=None)  # the same
    return _PHASES[view.phase](Case(policy, view, power, need, flush, now))


# ---- one function for each phase -------------------------------------------------------------------


def _online(case: Case) -> Next:
    power, now = case.power, case.now
    if case.view.fsd_at is not None:
        return stop(case, replace(case.view, event_at=now), f"forced shutdown (FSD) by {power.fsd}")
    if power.on_battery is None:
        return _unknown(case)
    if not power.on_battery:
        view = case.view
        return stay(view if view.unknown_at is None else replace(view, unknown_at=None, pause_at=None), "on line power")
    since = now if power.since is None else min(now, power.since)
    if now - since < case.policy.confirm_s:
        return stay(case.view, f"on battery for {now - since:.0f} s, believed after {case.policy.confirm_s:.0f} s")
    view = PhaseView(event_at=since, ended_at=case.view.ended_at)
    return to(case, view, Phase.ON_BATTERY, f"on battery: {power.reason}")


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
    why = why_pause(case)
    if why:
        return stop(case, replace(view, pause_at=case.now), why)
    return stay(view, f"on line power as far as known: {case.power.reason}")


def _on_battery(case: Case) -> Next:
    view = case.view
    if view.fsd_at is not None:
        return stop(case, view, f"forced shutdown (FSD) by {case.power.fsd}")
    if case.power.on_battery is False:
        if case.back_s < case.policy.resume_after_s:
            return stay(view, returning(case))
        return online_again(case, f"mains are back for {case.back_s:.0f} s: {outage(case)} is over")
    if case.power.on_battery is None:
        return stay(view, f"an outage, as far as known: {case.power.reason}")
    why = why_stop(case)
    if why:
        return stop(case, view, why)
    why = why_snapshot(case)
    if why:
        return Next(replace(view, snapshot_at=case.now), (Do.SNAPSHOT,), f"snapshot: {why}")
    return stay(view, f"riding through: {spare_text(case)}")


def _flushing(case: Case) -> Next:
    view, flush, took = case.view, case.flush, case.phase_s
    if view.pause_at is not None:
        return _pausing(case)
    if flush.final:
        return to(case, view, Phase.PARKED, parked_because(flush))
    if case.power.on_battery is False and view.fsd_at is None:
        given_up = took >= case.policy.flush_max_s and view.leave_at is None
        if given_up and case.back_s >= case.policy.resume_after_s:
            why = f"the flush isn't done after {took:.0f} s ({flush.why}) and mains are back: given up"
            return online_again(case, why)
        return stay(view, f"flushing for {took:.0f} s, on line power")
    why = why_halt_unflushed(case) if case.power.on_battery or view.fsd_at is not None else ""
    if why:
        return to(case, view, Phase.HALTING, f"halt: {why}; not durable: {flush.why}")
    return stay(view, f"flushing for {took:.0f} s of {case.need.save_s:.0f} s planned, {spare_text(case)}")


def _pausing(case: Case) -> Next:
    """Stopped in a silence, and still no outage: ranks train on once what they wrote is durable."""
    flush, took = case.flush, case.phase_s
    done = flush.final and not flush.underway
    if not done and took < case.policy.flush_max_s:
        return stay(case.view, f"training pauses for the snapshot, for {took:.0f} s: {case.power.reason}")
    view = PhaseView(ended_at=case.view.ended_at, snapshot_at=case.view.snapshot_at)
    if case.power.on_battery is None:
        view = replace(view, unknown_at=case.view.unknown_at, pause_at=case.view.pause_at)
    word = "" if done else f"the flush isn't done ({flush.why}), given up; "
    return to(case, view, Phase.ONLINE, f"{word}training goes on after a pause of {took:.0f} s")


def _parked(case: Case) -> Next:
    view, flush, power = case.view, case.flush, case.power
    lost = f"; not durable: {flush.why}" if flush.state is Flush.LOST else ""
    if view.fsd_at is not None:
        if flush.final or case.now - view.fsd_at >= case.policy.fsd_s:
            return to(case, view, Phase.HALTING, f"halt: forced shutdown (FSD) by {power.fsd or 'command'}{lost}")
        return stay(view, "FSD: a late job still flushes")
    if power.on_battery is False:
        return _parked_on_mains(case)
    if power.on_battery is None:
        return stay(view, f"parked, and nobody knows of the power: {power.reason}")
    if view.event_at is None:  # parked by the operator, and now an outage
        view = replace(view, event_at=case.now if power.since is None else min(case.now, power.since))
        case = replace(case, view=view)
    why = why_halt(case)
    if why:
        return to(case, view, Phase.HALTING, f"halt: {why}{lost}")
    idle = "unknown" if power.idle_runway_s is None else f"{power.idle_runway_s:.0f} s"
    return stay(view, f"parked on battery for {case.phase_s:.0f} s, idle runway {idle}")


def _parked_on_mains(case: Case) -> Next:
    view = case.view
    if view.held or view.leave_at is not None:
        if view.event_at is not None and case.back_s >= case.policy.resume_after_s:
            view = replace(view, event_at=None, ended_at=case.now)
        shutdown = view.leave_at is not None
        return stay(view, f"parked: {SHUTTING_DOWN}" if shutdown else "parked by the operator until they say resume")
    if case.back_s < case.policy.resume_after_s:
        return stay(view, f"parked, {returning(case)}")
    if view.drill_s is not None:
        if case.phase_s < view.drill_s:
            return stay(view, f"parked for {case.phase_s:.0f} s of a drill")
        return online_again(case, "the drill is over: training goes on")
    if not case.flush.final and case.phase_s < case.policy.flush_max_s:
        return stay(view, "parked, mains are back, a late job still flushes")
    return online_again(case, f"mains are back for {case.back_s:.0f} s: training goes on, {outage(case)} is over")


def _halting(case: Case) -> Next:
    view, flush, now = case.view, case.flush, case.now
    wait_s = case.policy.exit_wait_s if view.fsd_at is None else min(HURRY_S, case.policy.exit_wait_s)
    if view.exit_at is None:
        if not flush.quiet and case.phase_s < wait_s:
            return stay(view, "halting: ranks quiesce")
        word = "every rank is quiet" if flush.quiet else f"not every rank is quiet after {wait_s:.0f} s"
        return stay(replace(view, exit_at=now), f"halting: {word}, ranks leave")
    if view.halted_at is None:
        if not flush.gone and now - view.exit_at < wait_s:
            return stay(view, "halting: ranks leave")
        word = "every rank has left" if flush.gone else f"not every rank has left after {wait_s:.0f} s"
        return Next(replace(view, halted_at=now), (Do.HALT,), f"halting: {word}, power off")
    if view.dry and case.power.on_battery is False and case.back_s >= case.policy.resume_after_s:
        return online_again(case, "the halt was a dry run and mains are back")
    return stay(view, f"halting: power off was ordered {now - view.halted_at:.0f} s ago")


_PHASES: dict[Phase, Callable[[Case], Next]] = {
    Phase.ONLINE: _online,
    Phase.ON_BATTERY: _on_battery,
    Phase.FLUSHING: _flushing,
    Phase.PARKED: _parked,
    Phase.HALTING: _halting,
}
