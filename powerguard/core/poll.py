"""When to look again: slow far from every deadline, fast near one. Pure."""

from __future__ import annotations

from powerguard.core import agree
from powerguard.core.between import GOSSIP_S
from powerguard.core.policy import Policy
from powerguard.core.state import State
from powerguard.core.types import Phase

FAST_S = 0.2
"""Between ticks when something is about to happen; the size of the delay that a reader of the journal sees."""

LOOK_S = 10.0
"""Between decisions on line power while the feeds say nothing new. A UPS may be read more often; news never waits."""

SHARE = 0.1
"""Of the headroom that may pass before the next look."""


def look_s(policy: Policy) -> float:
    """Seconds between decisions on readings that say nothing new; less than a feed may be silent."""
    return max(policy.poll_online_s, min(LOOK_S, policy.blind_save_s / 4))


def poll_wait(policy: Policy, state: State, now: float) -> float:
    """Seconds, FAST_S up to a bit over `look_s`, after which the next decision is due even if nothing comes in."""
    view, power = state.view, state.power
    if power is None or view.phase in (Phase.FLUSHING, Phase.HALTING) or now - view.phase_since < FAST_S:
        return FAST_S
    waits = [look_s(policy) + FAST_S]  # feeds that answer have woken us before
    for job in state.jobs.values():
        at = agree.next_at(policy, job, now)
        if at is not None:
            waits.append(at - now)
        if job.spans:
            waits.append(GOSSIP_S)
    if view.phase is Phase.ONLINE:
        if power.on_battery is not False:
            since = now if power.since is None else power.since
            waits += [policy.poll_battery_s, since + policy.confirm_s - now]
        return max(FAST_S, min(waits))
    waits.append(policy.poll_battery_s)
    if power.on_battery is False and power.online_since is not None:
        waits.append(power.online_since + policy.resume_after_s - now)
    if view.phase is Phase.ON_BATTERY:
        if power.runway_s is not None:
            waits.append(SHARE * (power.runway_s - state.need.total_s - policy.margin_s))
        if view.event_at is not None and view.snapshot_at is None:
            due_s = view.event_at + policy.snapshot_after_s - now
            waits += [due_s] if due_s > 0.0 else []
    elif power.idle_runway_s is not None:
        waits.append(SHARE * (power.idle_runway_s - state.need.halt_s - policy.margin_s))
    return max(FAST_S, min(waits))
