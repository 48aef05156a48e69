"""What a phase asks of each job, and what the jobs together mean for the phase. Pure.

Orders follow from the phase, not from the moment it was entered: a job that registers in mid-outage, or after a
restart of the daemon, gets what everybody else has got, and nobody gets it twice.

    online, on_battery    train: a job still held by an old STOP is released
    flushing, parked      every living job gets one STOP; one that was lost by bad luck gets another, a few times
    halting               QUIESCE, then EXIT
"""

from __future__ import annotations

from msgspec.structs import replace

from powerguard.core import agree, feeds, seats
from powerguard.core.between import NODE_GONE_S, NODE_LOST_S, SNAPSHOT_MERGE_S
from powerguard.core.combine import STRETCH_TRUST
from powerguard.core.job import Call, Due, Job, Node, astray, here, not_durable, quiet
from powerguard.core.messages import Notice, Purpose
from powerguard.core.phase import Do, Flush, FlushView, Next
from powerguard.core.policy import Policy
from powerguard.core.state import State, event_id
from powerguard.core.types import Actions, Phase, Send
from powerguard.errors import EXIT_REQUEUE

MAX_STOPS = 3
"""STOP orders to one job in one event, where the first ones were lost though every rank lives (a missed step)."""


def entered(policy: Policy, state: State, nxt: Next, now: float) -> State:
    """*state* with the new view, the event's name, and the deadline of a stop."""
    event, event_n, stops = state.event, state.event_n, state.stops
    if nxt.phase is Phase.ONLINE:
        event, stops = "", {}
        event_n += Do.SNAPSHOT in nxt.orders
    elif not event:
        event_n += 1
        event = event_id(state.boot, event_n)
    known = state.feeds
    if nxt.phase is Phase.PARKED and state.power is not None and state.power.on_battery is not False:
        # Said at each look: an outage may begin, or begin anew, while ranks are parked already.
        parks = PARKS if any(job.alive for job in state.jobs.values()) else NOBODY
        known = feeds.step_load(policy, known, now, parks)
    if nxt.phase is Phase.ONLINE and state.phase is not Phase.ONLINE:
        known = feeds.unpark(policy, known, now, STRETCH_TRUST / PARKS)
    state = replace(state, view=nxt.view, event=event, event_n=event_n, stops=stops, feeds=known)
    return replace(state, deadline_at=_deadline_at(policy, state, now))


PARKS = 0.5
"""Expected load of parked ranks, of the load while they flushed: a GPU node writes a checkpoint at 32-55 % of its
training load, and idles at 22-32 % of it (published H100 node figures)."""

NOBODY = 0.69
"""The same where no rank was there to park: it counts as a park, and next to nothing is expected of it."""


def _deadline_at(policy: Policy, state: State, now: float) -> float | None:
    """The instant that ranks under a STOP are given: the runway at a flush's load, or in a silence what was known
    before it. It only comes nearer, unless mains were seen meanwhile."""
    view, power = state.view, state.power
    if view.phase is not Phase.FLUSHING or power is None:
        return None
    spent = power.on_battery is not False or view.fsd_at is not None
    if not spent and view.leave_at is None:
        return None
    given = [] if state.deadline_at is None else [state.deadline_at]
    runway_s = power.prior_s if view.pause_at is not None else power.runway_s
    if runway_s is not None and spent:
        given.append(now + runway_s / state.need.eased)
    if view.fsd_at is not None:
        given.append(view.fsd_at + policy.fsd_s)
    if view.leave_at is not None:
        given.append(view.leave_at)
    return min(given) if given else None


def flush_view(state: State) -> FlushView:
    """All jobs together, by the least advanced one."""
    found: list[Flush] = []
    whys: list[str] = []
    for name, job in sorted(state.jobs.items()):
        if not state.concerns(name):
            continue
        where = _where(state, name, job)
        if where is Flush.NONE:
            continue
        found.append(where)
        if where is not Flush.PARKED:
            whys.append(f"{name}: {_missing(job)}")
    jobs = state.jobs.values()
    return FlushView(
        state=next((where for where in _LEAST_FIRST if where in found), Flush.NONE),
        why="; ".join(whys),
        underway=any((job.order is not None and job.order.underway) or job.earlier is not None for job in jobs),
        failed=any(job.alive and _snapshot_failed(job) for job in jobs),
        strays=any(_strays(job) for job in jobs),
        quiet=all(quiet(job) for job in jobs),
        gone=not any(job.alive for job in jobs),
    )


_LEAST_FIRST = (Flush.IDLE, Flush.UNDERWAY, Flush.LOST, Flush.PARKED)


def _where(state: State, name: str, job: Job) -> Flush:
    """How far one job is on its way to being parked."""
    if job.rankless:
        return Flush.NONE
    if not stopped(job):
        return Flush.IDLE if job.alive or agree.orphaned(job) else Flush.NONE
    outcome = job.outcome
    if _overtaken(job):
        return Flush.UNDERWAY  # it is to be stopped anew
    if not job.leads and not job.alive and not job.members:
        return Flush.NONE
    if not job.alive and all(member.gone.startswith("left") for member in job.members.values()):
        return Flush.NONE  # training was over
    if outcome == "lost":
        return Flush.UNDERWAY if _again(state, name, job) else Flush.LOST
    if outcome == "parked":
        return Flush.PARKED if job.alive else Flush.NONE
    return Flush.UNDERWAY


def stopped(job: Job) -> bool:
    """The newest order is a STOP that no RESUME has ended."""
    return job.order is not None and job.order.purpose is Purpose.STOP and not job.order.over


def _again(state: State, name: str, job: Job) -> bool:
    """A lost STOP is worth another one."""
    if job.retry or not job.leads:
        return job.again
    if job.again and stop_elsewhere(job) and job.order is not None and job.order.nth < MAX_STOPS:
        return True
    return state.phase is Phase.FLUSHING and job.again and state.stops.get(name, 0) < MAX_STOPS


def _strays(job: Job) -> tuple[int, ...]:
    """Ranks of this node that wait parked by an order that this daemon, which leads the job, doesn't know."""
    if not job.leads or (job.order is not None and (stopped(job) or not astray(job))):
        return ()
    return tuple(rank for rank in here(job) if job.members[rank].busy == "parked")


def _snapshot_failed(job: Job) -> bool:
    return job.order is not None and job.order.purpose is Purpose.SNAPSHOT and job.outcome == "lost"


def _missing(job: Job) -> str:
    if not stopped(job):
        return "not yet stopped"
    ranks = ", ".join(str(rank) for rank in not_durable(job)[:16])
    return job.why or (f"rank {ranks} not yet durable" if ranks else "not every rank waits")


def serve(policy: Policy, state: State, nxt: Next, now: float) -> tuple[State, tuple[Actions, ...]]:
    """*state*, whose view is *nxt*'s already, with every job served by its phase, and what to send."""
    actions: list[Actions] = []
    jobs = dict(state.jobs)
    seq, stops = state.seq, dict(state.stops)
    event = state.event or event_id(state.boot, state.event_n)
    for name in sorted(jobs):
        job = jobs[name]
        if Do.SNAPSHOT in nxt.orders and job.alive:
            job = replace(job, wanted_at=now)
        purpose = _purpose(state, nxt, name, job, now)
        if purpose is not None:
            seq = seats.number(seq, job) if job.spans else seq + 1
            if purpose is Purpose.STOP:
                stops[name] = stops.get(name, 0) + 1
            job, told = agree.order(
                policy,
                job,
                seq=seq,
                event=state.event or _event_elsewhere(job) or event,
                purpose=purpose,
                budget_s=budget(state, job, now) if purpose is Purpose.STOP else None,
                reason=_reason(state, nxt, job, purpose),
                now=now,
                weights=_weights(state, job),
            )
            actions += told
        elif state.phase is Phase.HALTING:
            job, told = _farewell(policy, state, job, seq, now)
            actions += told
        elif job.leads and _cannot_go_on(job, now):
            job, told = _dismiss(policy, job, seq, now)
            actions += told
        elif state.phase in (Phase.ONLINE, Phase.ON_BATTERY) and _to_be_recalled(job, now):
            job, told = agree.recall(policy, job, state.view.why, now)
            actions += told
        elif state.phase is Phase.ONLINE and _strays(job) and job.resume is None and _on_line(state):
            waiting = {rank: Due() for rank in _strays(job)}
            job = replace(job, resume=Call(seq, "on line power, and no order is known", now, 0, waiting))
        jobs[name] = job
    return replace(state, jobs=jobs, seq=seq, stops=stops), tuple(actions)


def _on_line(state: State) -> bool:
    return state.power is not None and state.power.on_battery is False


def _purpose(state: State, nxt: Next, name: str, job: Job, now: float) -> Purpose | None:
    """The new order that this job is to get now, if any; only its leader gives one."""
    if not job.leads or job.claimed_at is not None or job.quiesce is not None:
        return None
    if not job.alive and not agree.orphaned(job):
        return None
    if job.spans and (job.rankless or not job.members):
        return None
    own = state.phase in (Phase.FLUSHING, Phase.PARKED) and state.concerns(name)
    if own or (stop_elsewhere(job) and state.phase is not Phase.HALTING and not _cannot_go_on(job, now)):
        if not stopped(job) or (job.outcome == "lost" and _again(state, name, job)) or _overtaken(job):
            return Purpose.STOP
    elif Do.SNAPSHOT in nxt.orders or _snapshot_elsewhere(job, now):
        return Purpose.SNAPSHOT
    return None


# ---- what other nodes want -------------------------------------------------------------------------


def stop_elsewhere(job: Job) -> bool:
    """The power of another node keeps this job from training."""
    return any(node.want.stop for node in job.nodes.values()) if job.leads else False


def _snapshot_elsewhere(job: Job, now: float) -> bool:
    """Another node wants a snapshot, and none is under way or so recent that it serves that node too."""
    if job.order is not None and job.order.underway:
        return False
    since = now - job.order.ordered_at if job.order is not None else None
    return any(
        node.want.snapshot_s is not None and (since is None or since - node.want.snapshot_s > SNAPSHOT_MERGE_S)
        for node in job.nodes.values()
    )


def _overtaken(job: Job) -> bool:
    """Some ranks obey or wait by a newer order, of another leader: only a still newer one reaches them."""
    if job.order is None or not job.leads:
        return False
    return max(astray(job), *(node.beyond for node in job.nodes.values()), 0) > job.order.seq


def _cannot_go_on(job: Job, now: float) -> bool:
    """A node of the job halts, or had to stop and has been silent for so long that it has."""
    return any(
        node.want.halt or (node.want.stop and now - (node.heard_at or job.lead_at) >= NODE_GONE_S)
        for node in job.nodes.values()
    )


def _to_be_recalled(job: Job, now: float) -> bool:
    """An order keeps its ranks from training, and no node wants that any longer."""
    if not job.leads or job.claimed_at is not None or stop_elsewhere(job):
        return False
    unknown = any(node.heard_at is None for node in job.nodes.values())
    if unknown and now - job.lead_at < NODE_LOST_S:
        return False  # a new leader doesn't know yet what they want
    return stopped(job) or job.quiesce is not None or any(node.beyond > job.resumed for node in job.nodes.values())


def _dismiss(policy: Policy, job: Job, seq: int, now: float) -> tuple[Job, tuple[Actions, ...]]:
    """The job ends here too, though this node stays: nobody leaves before all are quiet."""
    names = sorted(name for name, node in job.nodes.items() if node.want.stop)
    why = f"{', '.join(names)} halts: the job can't go on"
    job, actions = agree.quiesce(policy, job, seq, why, now)
    job, told = agree.leave(policy, job, EXIT_REQUEUE, why, now)
    return job, (*actions, *told)


def budget(state: State, job: Job, now: float) -> float | None:
    """What a stop may take until it is durable: the least over the nodes; None = nobody knows a bound."""
    given = [] if state.deadline_at is None else [state.deadline_at - now]
    given += [
        node.want.budget_s - (now - (node.heard_at or now))
        for node in job.nodes.values()
        if node.want.budget_s is not None
    ]
    return max(0.0, min(given)) if given else None


ALIKE = 0.8
"""Runways that differ by less than this factor are the same, for all that is known of them."""


def _weights(state: State, job: Job) -> tuple[float, ...]:
    """How much of what ranks hold alike each should write: those whose nodes live longest do. () = all the same."""
    if not job.nodes:
        return ()
    lasts = {name: _lasts_s(node.want.phase, node.want.runway_s) for name, node in job.nodes.items()}
    lasts[""] = _lasts_s(state.phase.value, None if state.power is None else state.power.runway_s)
    longest = max(lasts[member.node] for member in job.members.values() if member.node in lasts)
    if min(lasts.values()) >= ALIKE * longest:
        return ()
    long = {name for name, each in lasts.items() if each >= ALIKE * longest}
    return tuple(
        1.0 if rank in job.members and job.members[rank].node in long else 0.0 for rank in range(job.world_size)
    )


FOREVER_S = 1e6


def _lasts_s(phase: str, runway_s: float | None) -> float:
    """How long a node has power, as far as its word goes: for good on line, not long where nobody knows."""
    return FOREVER_S if phase == Phase.ONLINE.value else runway_s or 0.0


def _event_elsewhere(job: Job) -> str:
    return next((node.want.event for _, node in sorted(job.nodes.items()) if node.want.event), "")


def _reason(state: State, nxt: Next, job: Job, purpose: Purpose) -> str:
    """Whose power asks for it, in words."""
    if purpose is Purpose.SNAPSHOT:
        return nxt.reason if Do.SNAPSHOT in nxt.orders else "another node's power asks for a snapshot"
    if state.phase in (Phase.FLUSHING, Phase.PARKED):
        return state.view.why
    name, node = next((each for each in sorted(job.nodes.items()) if each[1].want.stop), ("", Node("")))
    return f"{name}: {node.want.reason}" if name else state.view.why


def _farewell(policy: Policy, state: State, job: Job, seq: int, now: float) -> tuple[Job, tuple[Actions, ...]]:
    """HALTING: quiesce, and leave once `exit_at` is set; both are nothing when repeated."""
    job, actions = agree.quiesce(policy, job, seq, state.view.why, now)
    if state.view.exit_at is not None:
        job, told = agree.leave(policy, job, EXIT_REQUEUE, state.view.why, now)
        actions = (*actions, *told)
    return job, actions


def notices(state: State, reason: str) -> tuple[Send, ...]:
    """NOTICE to every living rank: what is coming."""
    remaining_s = None if state.power is None else state.power.runway_s
    return tuple(
        Send(name, rank, Notice(state.seq, remaining_s, reason))
        for name, job in sorted(state.jobs.items())
        for rank in here(job)
    )
