"""What the last daemon of this boot left, made ready for the next one."""

from __future__ import annotations

from msgspec.structs import replace

from powerguard.core.job import Job, Stage
from powerguard.core.state import State, initial
from powerguard.journal import Folded

RECONNECT_S = 1.0
"""Ranks have found the new socket by then."""


def remembered(folded: Folded, boot: str, node: str, now: float) -> State:
    """The state to begin with: the last daemon's, or a new one that gives higher order numbers."""
    state = folded.state or initial(boot, now)
    return replace(state, node=node, seq=max(state.seq, folded.seq_floor))


def awake(state: State, now: float) -> State:
    """*state* once the bus is open again.

    Ranks that were asked to PREPARE get their time anew: nobody heard their answers while the daemon was away, and
    a promise made for them from what was last known of them would be for a step that they have long passed.
    """
    return replace(state, jobs={name: _asked_anew(job, now) for name, job in state.jobs.items()})


def _asked_anew(job: Job, now: float) -> Job:
    if job.order is None or job.order.stage is not Stage.PREPARE:
        return job
    at = now + RECONNECT_S
    return replace(job, order=replace(job.order, ordered_at=at, stage_at=at))
