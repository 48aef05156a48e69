"""What each rank is to be told now, and when to say it again. Pure.

A demand follows from the state alone: after a lost message, a reconnect or a restart of the daemon the same demand is
made again, and ranks answer repeats from memory. So nothing has to be remembered about what was "in flight".
"""

from __future__ import annotations

from msgspec.structs import replace

from powerguard.core.job import Call, Due, Job, Member, Order, Part, Stage, quiet
from powerguard.core.messages import Decide, Exit, Plan, Prepare, Purpose, Quiesce, Resume, Seal, Sealed, ToRank
from powerguard.core.policy import Policy
from powerguard.core.types import Actions, Send

RESEND_FIRST_S = 0.25
RESEND_MAX_S = 2.0
RESEND_TRIES = 30
"""After so many tries (about a minute) it is said only every RESEND_SLOW_S: a stopped process may wake up."""
RESEND_SLOW_S = 30.0

HELD_S = 5.0
"""Deputies tell of a new copy within half a second, on a node whose processors are all busy within three (seen): what
they hold in common is waited for until so long after `prepare_max_s`."""
HELD_SHARE, HELD_BUDGET = 0.75, 0.25
"""And for no more than this share of what ranks that promised wait, and of what there is until all must be durable."""


def backed_off(due: Due, now: float) -> Due:
    """When to say it once more, after saying it now."""
    if due.tries >= RESEND_TRIES:
        return Due(due.tries, now + RESEND_SLOW_S)
    return Due(due.tries + 1, now + min(RESEND_FIRST_S * 1.5**due.tries, RESEND_MAX_S))


def deliver(policy: Policy, job: Job, now: float) -> tuple[Job, tuple[Actions, ...]]:
    """The job, noting what is said now, and the messages to send: each demand at once, then with a bounded back-off."""
    if job.leave is not None or job.quiesce is not None:
        job, sends = _farewell(policy, job, now)
    elif job.resume is not None:
        call, sends = _called(job, job.resume, now)
        job = replace(job, resume=call if call.waiting else None)
    else:
        sends = ()
    if job.leave is not None:
        return job, sends
    order, asked = _demanded(policy, job, job.order, now)
    earlier, asked_too = _demanded(policy, job, job.earlier, now)
    return replace(job, order=order, earlier=earlier), (*sends, *asked, *asked_too)


def _farewell(policy: Policy, job: Job, now: float) -> tuple[Job, tuple[Send, ...]]:
    """QUIESCE until all are quiet; EXIT only then, or when `exit_wait_s` is over."""
    if job.leave is not None and may_leave(policy, job, now):
        call, sends = _called(job, job.leave, now)
        return replace(job, leave=call), sends
    if job.quiesce is None:
        return job, ()
    call, sends = _called(job, job.quiesce, now)
    return replace(job, quiesce=call), sends


def may_leave(policy: Policy, job: Job, now: float) -> bool:
    """No rank may exit while a peer still moves data; the wait for that is bounded."""
    asked_at = job.quiesce.asked_at if job.quiesce is not None else now
    return quiet(job) or now - asked_at >= policy.exit_wait_s


def _called(job: Job, call: Call, now: float) -> tuple[Call, tuple[Send, ...]]:
    """Say *call* to whom it is due; ranks that are gone needn't hear it."""
    waiting: dict[int, Due] = {}
    sends: list[Send] = []
    for rank, due in call.waiting.items():
        member = job.members.get(rank)
        if member is None or not member.alive:
            continue
        if member.node:  # its own daemon asks it
            waiting[rank] = due
            continue
        if now >= due.at:
            sends.append(Send(job.name, rank, _call_message(job, call)))
            due = backed_off(due, now)  # noqa: PLW2901
        waiting[rank] = due
    return replace(call, waiting=waiting), tuple(sends)


def _call_message(job: Job, call: Call) -> ToRank:
    if call is job.leave:
        return Exit(call.seq, call.code, call.reason)
    return Quiesce(call.seq, call.reason) if call is job.quiesce else Resume(call.seq, call.reason)


def _demanded(policy: Policy, job: Job, order: Order | None, now: float) -> tuple[Order | None, tuple[Send, ...]]:
    if order is None or order.over:
        return order, ()
    parts = dict(order.parts)
    sends: list[Send] = []
    for rank, part in order.parts.items():
        member = job.members.get(rank)
        if member is None or member.node:
            continue
        message = _demand(policy, job, order, rank) if member.alive else _demand_of_deputy(order, part, member)
        if message is None:
            continue
        asked = type(message).__name__
        due = part.due if asked == part.asked else Due()
        if now < due.at:
            continue
        sends.append(Send(job.name, rank, message))
        parts[rank] = replace(part, asked=asked, due=backed_off(due, now))
    return (replace(order, parts=parts) if sends else order), tuple(sends)


def _demand(policy: Policy, job: Job, order: Order, rank: int) -> ToRank | None:
    """The one thing to tell this living rank now, or None."""
    part = order.parts[rank]
    if order.stage is Stage.PREPARE:
        if part.edge >= 0 and not part.by_page:
            return None
        return Prepare(order.seq, order.event, order.purpose, policy.hold_max_s, order.tag, order.reason)
    if order.stage is Stage.SEALING and rank == order.sealer:
        shards = tuple(p.shard for _, p in sorted(order.parts.items()) if p.shard is not None)
        if not job.leads:
            shards = job.shards
            if not shards:
                return None
        return Seal(order.seq, order.step, order.generation, job.world_size, shards)
    if order.stage is Stage.SEALED and order.sealed_by >= 0 and not part.sealed:
        return Sealed(order.seq, order.step, order.generation)
    if order is job.order and order.step >= 0 and not _obeyed(order, part):
        return _decision(order, part)
    return None


def _decision(order: Order, part: Part) -> Decide:
    plan = Plan.DURABLE if part.anew and order.plan is Plan.FRESH else order.plan
    return Decide(order.seq, order.purpose, plan, order.step, order.generation, order.budget_s, order.weights)


def _demand_of_deputy(order: Order, part: Part, member: Member) -> ToRank | None:
    """What a dead rank has staged is still made durable, by its deputy."""
    if order.plan is not Plan.STAGED or order.step < 0 or order.over or member.deputy_at is None:
        return None
    return None if part.shard is not None or part.failed else _decision(order, part)


def _obeyed(order: Order, part: Part) -> bool:
    """The rank has done what the decision asks of it, or has said that it won't: there is no more to ask for."""
    if not part.decided:
        return order.stage is Stage.LOST and order.purpose is Purpose.SNAPSHOT
    delivered = part.shard is not None or bool(part.trouble) or part.anew or order.plan is Plan.DURABLE
    return delivered and (order.purpose is Purpose.SNAPSHOT or part.parked)


def held_s(policy: Policy, order: Order) -> float:
    """How long after `prepare_max_s` copies are waited for that weren't told of in step."""
    wait_s = min(HELD_S, HELD_SHARE * max(0.0, policy.hold_max_s - policy.prepare_max_s))
    return wait_s if order.budget_s is None else min(wait_s, HELD_BUDGET * order.budget_s)


def next_at(policy: Policy, job: Job, now: float) -> float | None:
    """The next instant at which `tick` would have something to do by itself; None = only when somebody speaks."""
    at: list[float] = []
    for order in (job.order, job.earlier):
        if order is None or order.over:
            continue
        if order.stage is Stage.PREPARE:
            late_at = order.ordered_at + policy.prepare_max_s
            at += [late_at, late_at + held_s(policy, order)]
        elif order.stage is Stage.SEALING:
            at.append(order.sealer_at + policy.seal_max_s)
        at += [part.due.at for part in order.parts.values() if part.asked]
    for call in (job.resume, job.quiesce, job.leave):
        if call is not None:
            at += [due.at for due in call.waiting.values()]
    if job.leave is not None and not may_leave(policy, job, now) and job.quiesce is not None:
        at.append(job.quiesce.asked_at + policy.exit_wait_s)
    later = [instant for instant in at if instant > now]
    return min(later) if later else None
