"""The steps that phases and commands take, and the words for them. Only `transition.py` and `commands.py` take any."""

from __future__ import annotations

from msgspec.structs import replace

from powerguard.core.phase import Flush, FlushView, Next, PhaseView
from powerguard.core.types import Phase
from powerguard.core.why import Case

SHUTTING_DOWN = "the system is shutting down"


def stay(view: PhaseView, reason: str) -> Next:
    """No step."""
    return Next(view, (), reason)


def to(case: Case, view: PhaseView, phase: Phase, reason: str) -> Next:
    """The one way into another phase."""
    return Next(replace(view, phase=phase, phase_since=case.now, why=reason), (), reason)


def stop(case: Case, view: PhaseView, why: str) -> Next:
    """To FLUSHING, or to PARKED where there is nothing to flush."""
    if case.flush.state is Flush.NONE:
        return to(case, view, Phase.PARKED, f"stop: {why}; no job to flush")
    return to(case, view, Phase.FLUSHING, f"stop: {why}")


def online_again(case: Case, reason: str) -> Next:
    """The event is over, and forgotten but for its end."""
    ended_at = case.view.ended_at if case.view.event_at is None else case.now
    return to(case, PhaseView(ended_at=ended_at), Phase.ONLINE, reason)


def refuse(case: Case, reason: str) -> Next:
    """A command that can't be carried out."""
    return Next(case.view, (), reason, refused=True)


def returning(case: Case) -> str:
    """How sure it is that mains are back."""
    return f"mains are back for {case.back_s:.0f} s, believed after {case.policy.resume_after_s:.0f} s"


def outage(case: Case) -> str:
    """The event that is over, in words."""
    return "the event" if case.view.event_at is None else f"the outage of {case.on_battery_s:.0f} s"


def parked_because(flush: FlushView) -> str:
    """Why the flush is over."""
    if flush.state is Flush.LOST:
        return f"parked, not everything is durable: {flush.why}"
    return "parked: every rank is durable" if flush.state is Flush.PARKED else "parked: no rank is left to flush"
