"""The daemon's one call: what was seen goes in, the next state and what to do come out.

It only puts the others together: readings (`feeds.py`), ranks (`agree.py`), the need (`need.py`), the phases
(`transition.py`), what a phase asks of each job (`serve.py`), what people are told (`tell.py`).
"""

from __future__ import annotations

from msgspec.structs import replace

from powerguard.core import agree, feeds, hearsay, seats
from powerguard.core.between import SEQ_MAX
from powerguard.core.commands import DRY_RUN, command
from powerguard.core.feeds import Power
from powerguard.core.messages import Hello
from powerguard.core.need import reckon
from powerguard.core.phase import Do, Next
from powerguard.core.policy import Policy
from powerguard.core.serve import budget, entered, flush_view, notices, serve
from powerguard.core.state import Decision, State
from powerguard.core.tell import Reply, announce
from powerguard.core.transition import transition
from powerguard.core.types import Actions, Announce, Command, Halt, Observation, Phase
from powerguard.core.why import Case

__all__ = ["DRY_RUN", "decide"]


def decide(policy: Policy, state: State, seen: Observation, now: float) -> Decision:
    """The next state, what to do, and why, after *seen*. Call it again after `poll.poll_wait` seconds at the latest."""
    before, drilled = state.phase, state.view.drill_s is not None
    if seen.here:
        state = seats.found(state, seen.here)
    if seen.peers:
        state = hearsay.absorb(state, seen.peers, now)
    jobs, told = agree.absorb(
        policy, state.jobs, seen.reports, seen.pages, now, node=state.node, phase=state.phase.value
    )
    actions: list[Actions] = list(told)
    for report in seen.reports:
        if isinstance(report.message, Hello) and report.job in jobs:
            jobs[report.job] = seats.placed(state, jobs[report.job], report.message, now)
            if state.seq < report.message.seq < SEQ_MAX:
                state = replace(state, seq=report.message.seq)
    for name, job in jobs.items():
        job, cared = seats.care(state, job, now) if job.spans else (job, ())  # noqa: PLW2901
        jobs[name], told = agree.tick(policy, job, now, budget_s=budget(state, job, now))
        actions += (*cared, *told)
    need = reckon(policy, jobs, now)
    known = feeds.absorb(policy, state.feeds, seen.samples, now)
    for step in seen.loads:
        known = feeds.step_load(policy, known, now, step.factor)
    outage = state.view.event_at is not None
    power = feeds.view(policy, known, now, save_s=need.used_s + policy.margin_s, halt_s=need.halt_s, outage=outage)
    if state.phase is not Phase.ONLINE and power.on_battery is False:
        power = _as_seen(policy, known, power, now)
    state = replace(state, feeds=known, jobs=jobs, need=need, power=power)
    nxt, replies = _answer(Case(policy, state.view, power, need, flush_view(state), now), seen.commands)
    state = entered(policy, state, nxt, now)
    state, told = serve(policy, state, nxt, now)
    actions += told
    if drilled and state.view.drill_s is None and state.phase is not Phase.ONLINE:
        why = power.reason if power.on_battery else nxt.reason
        actions.append(Announce("warning", f"the drill gives way to something real: {why}"))
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
