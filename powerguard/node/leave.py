"""When a SIGTERM is obeyed, and what ranks are told when the daemon can't be trusted any more. Questions only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from powerguard.core.messages import Prepare, Purpose
from powerguard.core.policy import Policy
from powerguard.core.state import State
from powerguard.core.types import Phase, Send

HOLD_MAX_S = 45.0
"""LOGIN is kept against a SIGTERM at most this long after the power-off was ordered."""
SHUTDOWN_COMM = "systemd-shutdow"
"""/proc/1/comm once every service is stopped (15 bytes, prctl(2)): nothing is left to be waited for."""


def may_leave(
    policy: Policy, state: State, *, real: bool, pid1: Callable[[], str], manager_gone: bool, now: float
) -> bool:
    """Whether a SIGTERM is obeyed now; *real*: power-offs aren't dry runs.

    Once the node is halting, LOGIN is all that keeps a NUT primary from cutting the power while other services
    still close their files. It is kept until that is done, or for as long as a halt may take by the configuration.
    It is done once systemd-shutdown has taken over as process 1: *pid1* says so (to whom ProtectProc= doesn't hide it),
    and the service manager listens no more.
    """
    if not going_down(state, real=real) or state.halted_at is None or manager_gone:
        return True
    with contextlib.suppress(OSError):
        if pid1() == SHUTDOWN_COMM:
            return True
    return now - state.halted_at >= min(HOLD_MAX_S, policy.halt_s)


def going_down(state: State, *, real: bool) -> bool:
    """Whether the node was really told to power off."""
    return real and state.halted_at is not None and not state.view.dry


def last_resort(policy: Policy, state: State, now: float) -> tuple[int, tuple[Send, ...]]:
    """A number above every order's, and what asks every rank to hold and, hearing nothing more, to save by itself.

    On line power nobody is asked: a fault of ours is no reason to disturb training.
    """
    given = [job.order.seq for job in state.jobs.values() if job.order is not None]
    seq = 1 + max(state.seq, int(now), *given, 0)  # whatever the state says
    if state.phase is Phase.ONLINE and state.power is not None and state.power.on_battery is False:
        return seq, ()
    event = state.event or "fault"
    order = Prepare(seq, event, Purpose.STOP, policy.hold_max_s, f"{event}-{seq}", "powerguard is at fault")
    return seq, tuple(Send(name, rank, order) for name, job in state.jobs.items() for rank in job.members)
