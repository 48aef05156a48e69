"""What an operator, the service manager or the shell says, and what it changes, or why it is refused.

Rule 1 of `transition.py`: a command changes phases by the same steps as an outage does, and never leaves HALTING.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from powerguard.core.phase import Do, Flush, Next
from powerguard.core.steps import SHUTTING_DOWN, online_again, refuse, stay, stop
from powerguard.core.types import Command, Phase
from powerguard.core.why import Case

DRY_RUN = "halt-was-dry-run"
"""The shell's own command, after a halt that it only wrote down."""

DRILL = "drill"
"""An operator's: rehearse an outage on line power."""

SHUTDOWN, CANCELLED = "shutdown", "shutdown-cancelled"
"""The shell's own commands, when the service manager begins to shut down and when that is called off."""


def command(asked: Command, case: Case) -> Next:
    """What a command changes; refused with a reason where it can't be."""
    verb = asked.verb
    if case.view.phase is Phase.HALTING and verb in (*_COMMANDS, SHUTDOWN, CANCELLED) and verb != DRY_RUN:
        return refuse(case, f"{verb}: the node is halting")
    if verb == SHUTDOWN:
        return _shutdown(case, asked)
    if verb == CANCELLED:
        return _cancelled(case)
    if verb == DRILL:
        return _drill(case, asked)
    handler = _COMMANDS.get(verb)
    if handler is None:
        known = ", ".join(name for name in (*_COMMANDS, DRILL) if name != DRY_RUN)
        return refuse(case, f"{verb[:40]!r} is not a command; known are {known}")
    return handler(case)


def _command_flush(case: Case) -> Next:
    if case.view.phase not in (Phase.ONLINE, Phase.ON_BATTERY):
        return refuse(case, f"flush: the node is {case.view.phase.value}, a stop saves everything already")
    if case.flush.state is Flush.NONE:
        return refuse(case, "flush: no job is registered")
    if case.flush.underway:
        return refuse(case, "flush: an order is being carried out")
    return Next(replace(case.view, snapshot_at=case.now), (Do.SNAPSHOT,), "snapshot: the operator's order")


def _command_park(case: Case) -> Next:
    if case.view.held:
        return refuse(case, "park: the operator has parked this node already")
    if case.view.phase in (Phase.FLUSHING, Phase.PARKED):
        return stay(replace(case.view, held=True), "park: stays parked until the operator says resume")
    return stop(case, replace(case.view, held=True), "the operator's order")


def _command_resume(case: Case) -> Next:
    view = case.view
    if view.phase not in (Phase.FLUSHING, Phase.PARKED):
        return refuse(case, f"resume: the node is {view.phase.value}, nothing is parked")
    if view.fsd_at is not None:
        return refuse(case, "resume: the node was told to halt (FSD)")
    if view.leave_at is not None:
        return refuse(case, f"resume: {SHUTTING_DOWN}")
    if view.phase is Phase.PARKED and case.power.on_battery is False and case.flush.final:
        return online_again(case, "resume: the operator's order")
    if view.held:
        return stay(replace(view, held=False), "resume: training goes on once the flush is done and mains are there")
    if view.phase is Phase.FLUSHING:
        return refuse(case, "resume: a stop is never withdrawn; training goes on after the flush if mains are there")
    return refuse(case, "resume: no mains; training goes on by itself when they are back")


def _command_dry(case: Case) -> Next:
    if case.view.halted_at is None:
        return refuse(case, f"{DRY_RUN}: no halt was ordered")
    return stay(replace(case.view, dry=True), "the halt was a dry run: waiting for mains")


_COMMANDS: dict[str, Callable[[Case], Next]] = {
    "flush": _command_flush,
    "park": _command_park,
    "resume": _command_resume,
    DRY_RUN: _command_dry,
}


def _drill(case: Case, asked: Command) -> Next:
    """A stop like an outage's, on line power, after which ranks train on in place; a real event takes it over."""
    if case.view.phase is not Phase.ONLINE:
        return refuse(case, f"drill: the node is {case.view.phase.value.replace('_', ' ')}")
    if case.power.on_battery is not False:
        return refuse(case, f"drill: not known to be on line power: {case.power.reason}")
    if case.flush.state is Flush.NONE:
        return refuse(case, "drill: no job is registered")
    if case.flush.underway:
        return refuse(case, "drill: an order is being carried out")
    view = replace(case.view, drill_s=max(0.0, asked.within_s or 0.0), only=asked.job)
    return stop(case, view, f"a drill ({asked.by})" if asked.by else "a drill")


def _shutdown(case: Case, asked: Command) -> Next:
    """The system goes down, by somebody's hand: ranks stop and save, as long as it waits for them."""
    view = case.view
    if view.leave_at is not None:
        return stay(view, SHUTTING_DOWN)
    view = replace(view, leave_at=case.now + (case.policy.flush_max_s if asked.within_s is None else asked.within_s))
    if view.phase in (Phase.FLUSHING, Phase.PARKED):
        return stay(view, f"{SHUTTING_DOWN}, ranks are stopped already")
    return stop(case, view, f"{SHUTTING_DOWN} ({asked.by})" if asked.by else SHUTTING_DOWN)


def _cancelled(case: Case) -> Next:
    """It doesn't go down after all: what parked for it alone trains on."""
    if case.view.leave_at is None:
        return refuse(case, f"{CANCELLED}: none was under way")
    view = replace(case.view, leave_at=None)
    case = replace(case, view=view)
    mains = case.power.on_battery is False and view.event_at is None
    if view.phase is Phase.PARKED and mains and not view.held and case.flush.final:
        return online_again(case, "the shutdown was cancelled: training goes on")
    return stay(view, "the shutdown was cancelled")
