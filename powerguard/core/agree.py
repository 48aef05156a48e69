"""The stop-step agreement of one job: promise, decide, seal. Pure.

Rule 1: every transition of an `Order` from one stage to the next is in this file.

::

    PREPARE ──all promised, or prepare_max_s──> DECIDED ──every shard durable──> SEALING ──SEAL WRITTEN──> SEALED
       │                                           │                                        or nobody answers
       └── a rank is missing or dead ──> LOST <────┴── a rank died, missed T or failed, or flush_max_s

The stop step is T = the highest promised edge. A rank that promised edge e waits at boundary e, so none of them is past
T; one that didn't answer is promised for from its shared page with one more step of slack, and answers MISSED if it
is past T all the same. T is never moved: what was missed takes a new order with a new number.

LOST means that no whole generation comes of the order. The others still park (STOP) or train on (SNAPSHOT), and
what was durable before stays (plan C). Should the missing shards come in after all, the order is sealed all the same.

Call `absorb` with what came in, then `tick` for each job in the same decision.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from powerguard.core import answers
from powerguard.core.between import NODE_GONE_S
from powerguard.core.demand import deliver, held_s, next_at
from powerguard.core.farewell import Outcome, called, leave, quiesce, recall, resume
from powerguard.core.job import Job, Member, Order, Part, Saved, Stage, here, living, unparked
from powerguard.core.messages import Hello, Plan, Purpose
from powerguard.core.policy import Policy
from powerguard.core.prospects import (
    absent_only,
    deputy,
    doubtful,
    going_on,
    kept_back,
    orphaned,
    out_of_step,
    spared,
    staged_step,
    stuck,
    too_short,
    troubles,
    unreachable,
    whole,
)
from powerguard.core.types import Actions, Announce, PageReport, RankReport

__all__ = [
    "Job",
    "Member",
    "Order",
    "absorb",
    "leave",
    "next_at",
    "order",
    "orphaned",
    "quiesce",
    "recall",
    "resume",
    "tick",
]

PAGE_SLACK = 2
"""Edge of a rank that can't answer = the step on its page + this: it may be past the next boundary already."""

PARK_WAIT_S = 5.0
"""After the seal, ranks have this long to say PARKED; then the order counts as done."""

SEAL_TRIES = 3
"""So many ranks are asked to seal; a generation without a seal is whole by its records all the same."""

FORGET_S = 60.0
"""A job none of whose processes lives is forgotten after so long."""

LEFT_S = 5.0
"""The same for one of several nodes that was told to leave: as long as others need to hear that it has left."""


def absorb(
    policy: Policy,  # noqa: ARG001  (of the same form as its sisters)
    jobs: dict[str, Job],
    reports: Iterable[RankReport],
    pages: Iterable[PageReport],
    now: float,
    *,
    node: str = "",
    phase: str = "",
) -> tuple[dict[str, Job], tuple[Actions, ...]]:
    """The jobs after what ranks said and their pages show; answers are greetings and acknowledgements.

    *node* and *phase* go into WELCOME. A rank that speaks without being registered is asked for HELLO; a HELLO that
    contradicts its sender is ignored.
    """
    jobs = dict(jobs)
    actions: list[Actions] = []
    for report in reports:
        job = jobs.get(report.job)
        message = report.message
        if isinstance(message, Hello):
            if (message.job, message.rank) != (report.job, report.rank) or not 0 <= message.rank < message.world_size:
                continue
            jobs[report.job] = job = answers.registered(job, report, message)
            actions.append(answers.greeting(job, report, node=node, phase=phase, hello=False))
        elif job is None or report.rank not in job.members:
            actions.append(answers.greeting(job, report, node=node, phase=phase, hello=True))
        else:
            jobs[report.job], answered = answers.heard(job, report, job.members[report.rank])
            actions.extend(answered)
    for page in pages:
        if page.job in jobs:
            jobs[page.job] = answers.paged(jobs[page.job], page)
    jobs = {name: job for name, job in jobs.items() if not _forgotten(job, now)}
    return jobs, tuple(actions)


def _forgotten(job: Job, now: float) -> bool:
    """Nobody of it lives, as far as is known: other nodes' ranks count while their nodes speak."""
    heard_at = max((member.heard_at for member in job.members.values()), default=0.0)
    if job.spans:
        spoken = {"", *(name for name, node in job.nodes.items() if now - (node.heard_at or 0.0) < NODE_GONE_S)}
        if any(member.alive and member.node in spoken for member in job.members.values()):
            return False
        if job.leave is not None:
            return now - heard_at > LEFT_S  # a requeued one of the same name begins anew
    if job.alive or (job.order is not None and job.order.underway):
        return False
    deputies = (member.deputy_at for member in job.members.values() if member.deputy_at is not None)
    return now - max(heard_at, *deputies, 0.0) > FORGET_S


def order(
    policy: Policy,
    job: Job,
    *,
    seq: int,
    event: str,
    purpose: Purpose,
    budget_s: float | None,
    reason: str,
    now: float,
    weights: tuple[float, ...] = (),
) -> Outcome:
    """Begin order *seq*; an older or equal one changes nothing, and a SNAPSHOT never overtakes a STOP that isn't over.

    A STOP overtakes a SNAPSHOT: what ranks have begun to write still counts when it is done.
    """
    old = job.order
    if old is not None and seq <= old.seq:
        return job, ()
    if old is not None and purpose is Purpose.SNAPSHOT and old.purpose is Purpose.STOP and not old.over:
        return job, ()
    if job.quiesce is not None:
        return job, ()
    earlier = job.earlier
    if old is not None and old.purpose is Purpose.SNAPSHOT and old.underway and _begun(old):
        earlier = old
    before = old if old is not None and old.purpose is purpose is Purpose.STOP and not old.over else None
    new = Order(
        seq=seq,
        event=event,
        purpose=purpose,
        ordered_at=now,
        stage_at=now,
        parts={rank: Part() for rank in range(job.world_size)},
        reason=reason,
        budget_s=budget_s,
        weights=weights,
        nth=1 if before is None else before.nth + 1,
        stuck=before is not None and before.stuck,
    )
    job = replace(job, order=new, earlier=earlier, resume=None, retry=False)
    return tick(policy, job, now, budget_s=budget_s)


def _begun(order: Order) -> bool:
    return any(part.staged_at is not None or part.shard is not None for part in order.parts.values())


def tick(policy: Policy, job: Job, now: float, *, budget_s: float | None) -> Outcome:
    """Move the job's orders on as far as what is known allows, and say what is due.

    *budget_s* is what a STOP may take from now until it is durable; None = not known, what ORDER said stays.
    A follower, and a leader that still listens what the others know, moves nothing: it only tells its own ranks.
    """
    if not job.leads or job.claimed_at is not None:
        order = None if job.order is None else _bereaved(job, job.order)
        earlier = None if job.earlier is None else _bereaved(job, job.earlier)
        return deliver(policy, replace(job, order=order, earlier=earlier), now)
    actions: list[Actions] = []
    if job.order is not None and not job.order.over:
        current = job.order
        if budget_s is not None and current.stage in (Stage.PREPARE, Stage.DECIDED):
            current = replace(current, budget_s=budget_s)
        job, told = _advance(policy, job, current, now)
        actions += told
    if job.earlier is not None:
        moved, told = _sealed_too(policy, job, job.earlier, now)
        job = moved
        actions += told
    job, sends = deliver(policy, job, now)
    return job, (*actions, *sends)


def _advance(policy: Policy, job: Job, order: Order, now: float) -> Outcome:
    """The newest order, moved on."""
    order = _bereaved(job, order)
    actions: list[Actions] = []
    if order.stage is Stage.PREPARE:
        job, order = _prepared(policy, job, order, now)
    if order.stage in (Stage.DECIDED, Stage.LOST) and whole(order):
        order = _to(replace(order, why=""), Stage.SEALING, now)
    if order.stage is Stage.DECIDED:
        order = _unlucky(policy, job, order, now)
    if order.stage is Stage.SEALING:
        order = _sealing(policy, job, order, now)
    was = job.order.stage if job.order is not None else None
    if order.stage is Stage.SEALED and was is not Stage.SEALED:
        job, actions = _record(job, order, now)
    elif order.stage is Stage.LOST and was is not Stage.LOST:
        actions = [_lost(job, order)]
        if order.purpose is Purpose.SNAPSHOT:
            job = replace(job, resume=called(job, order.seq, order.why, now), resumed=order.seq, resumed_why=order.why)
    if order.stage is Stage.SEALED and order.purpose is Purpose.STOP and not order.settled:
        job = replace(job, order=order)
        order = replace(order, settled=not unparked(job) or now - order.stage_at >= PARK_WAIT_S)
    return replace(job, order=order), tuple(actions)


def _bereaved(job: Job, order: Order) -> Order:
    """The order, with the ranks that died before they delivered marked."""
    parts = dict(order.parts)
    for rank, part in order.parts.items():
        member = job.members.get(rank)
        if order.plan is Plan.STAGED and member is not None and member.deputy_at is not None:
            continue  # its deputy has what is to be saved
        if member is not None and not member.alive and part.shard is None and not part.trouble:
            parts[rank] = replace(part, trouble=f"rank {rank} {member.gone}")
    return replace(order, parts=parts)


def _prepared(policy: Policy, job: Job, order: Order, now: float) -> tuple[Job, Order]:
    """The order once everybody has promised or been promised for; T is decided here and nowhere else."""
    late = now - order.ordered_at >= policy.prepare_max_s
    parts = dict(order.parts)
    for rank, part in order.parts.items():
        member = job.members.get(rank)
        if part.edge >= 0 or part.trouble:
            continue
        if not late:
            return job, order
        if member is None:
            parts[rank] = replace(part, trouble=f"rank {rank} of {job.world_size} never registered")
        else:
            parts[rank] = replace(part, edge=member.step + PAGE_SLACK, by_page=True)
    asked, order = order, replace(order, parts=parts)
    edges = [part.edge for rank, part in parts.items() if part.edge >= 0 and rank in job.members]
    if (not edges and not any(deputy(job, rank) for rank in parts)) or (
        troubles(order) and order.purpose is Purpose.SNAPSHOT and not orphaned(job)
    ):
        return job, _to(replace(order, why=troubles(order) or "no rank is left"), Stage.LOST, now)
    step = max(edges, default=-1)
    waited_s = now - order.ordered_at - policy.prepare_max_s
    if waited_s < held_s(policy, order) and doubtful(job, order, step) and out_of_step(job):
        return job, asked
    return job, _planned(job, order, step, now)


def _planned(job: Job, order: Order, step: int, now: float) -> Order:
    """The decision: plan A where it can be carried out in time, else B, else C.

    A rank that doesn't answer may hang, and hang its peers with it: what all have staged is certain, then.
    """
    why, short = troubles(order), too_short(job, order, step)
    staged = staged_step(job, order) if doubtful(job, order, step) or orphaned(job) else -1
    if staged >= 0:
        parts = {rank: replace(part, trouble="") for rank, part in order.parts.items()}
        return _decided(replace(order, parts=parts, plan=Plan.STAGED), staged, now)
    order = _decided(order, step, now)
    kept = kept_back(job, order) if short else ""
    if kept or (why and not absent_only(job, order)):
        return _to(replace(order, plan=Plan.DURABLE, why=why or f"{short}: {kept}"), Stage.LOST, now)
    return order


def _decided(order: Order, step: int, now: float) -> Order:
    return _to(replace(order, step=step, generation=f"step-{step:010d}.{order.tag}"), Stage.DECIDED, now)


def _unlucky(policy: Policy, job: Job, order: Order, now: float) -> Order:
    """A decided order that can't be completed any more, or not in time."""
    hang = stuck(job, order, now)
    if hang:
        parts = {r: replace(p, trouble=f"rank {r} hangs") if r in hang else p for r, p in order.parts.items()}
        late_s, names = now - order.stage_at, ", ".join(map(str, hang[:16]))
        why = f"rank {names} didn't come to step {order.step} in {late_s:.0f} s: what is staged is taken"
        return _to(replace(order, parts=parts, why=why, stuck=True), Stage.LOST, now)
    why = troubles(order)
    if why and absent_only(job, order) and going_on(job, order) and now - order.stage_at < policy.flush_max_s:
        return order  # those that are there save their part first
    why = why or unreachable(job, order, now)
    if not why and now - order.stage_at >= policy.flush_max_s:
        late = [str(rank) for rank, part in sorted(order.parts.items()) if part.shard is None]
        why = f"not durable within {policy.flush_max_s:.0f} s: rank {', '.join(late)}"
    return _to(replace(order, why=why, stuck=spared(job, order)), Stage.LOST, now) if why else order


def _sealing(policy: Policy, job: Job, order: Order, now: float) -> Order:
    """SEALED once somebody wrote it; else who is to: the lowest living rank, another if it dies or doesn't answer."""
    if order.sealed_by >= 0:
        return _to(order, Stage.SEALED, now)
    alive = [rank for rank in here(job) or living(job) if rank in order.parts]
    asked = order.sealer in alive and now - order.sealer_at < policy.seal_max_s
    if asked:
        return order
    if not alive or order.seal_tries >= SEAL_TRIES:
        why = "no rank wrote the seal; the generation is whole by its records"
        return _to(replace(order, why=why), Stage.SEALED, now)
    above = [rank for rank in alive if rank > order.sealer]
    sealer = above[0] if above else alive[0]
    return replace(order, sealer=sealer, sealer_at=now, seal_tries=order.seal_tries + 1)


def _sealed_too(policy: Policy, job: Job, order: Order, now: float) -> Outcome:
    """A snapshot that a STOP overtook: sealed if its last shards still come in, else let go in silence."""
    order = _bereaved(job, order)
    if order.stage is Stage.DECIDED and whole(order):
        order = _to(order, Stage.SEALING, now)
    if order.stage is Stage.DECIDED and (troubles(order) or now - order.stage_at >= policy.flush_max_s):
        return replace(job, earlier=None), ()
    if order.stage is Stage.SEALING:
        order = _sealing(policy, job, order, now)
    if order.stage is Stage.SEALED:
        done = all(order.parts[rank].sealed for rank in living(job) if rank in order.parts)
        if done or order.sealed_by < 0 or now - order.stage_at >= policy.seal_max_s:
            job, told = _record(job, order, now)
            return replace(job, earlier=None), tuple(told)
    return replace(job, earlier=order), ()


def _record(job: Job, order: Order, now: float) -> tuple[Job, list[Actions]]:
    """The job with the sealed generation noted, and a word about it."""
    if job.saved is None or job.saved.step <= order.step:
        job = replace(job, saved=Saved(order.seq, order.event, order.step, order.generation, now))
    facts: dict[str, str | int | float | bool | None] = {
        "job": job.name,
        "step": order.step,
        "generation": order.generation,
        "sealed_by": order.sealed_by if order.sealed_by >= 0 else None,
        "took_s": round(now - order.ordered_at, 3),
    }
    level, text = ("info", "generation is durable") if not order.why else ("warning", order.why)
    return job, [Announce(level, text, facts)]


def _lost(job: Job, order: Order) -> Announce:
    """A word about it; no error while a snapshot is still being written, or a staged copy can be had."""
    facts: dict[str, str | int | float | bool | None] = {
        "job": job.name,
        "seq": order.seq,
        "purpose": order.purpose.value,
        "newest": job.saved.generation if job.saved is not None else None,
    }
    level = "error" if job.earlier is None and not order.stuck else "warning"
    return Announce(level, f"no generation comes of this order: {order.why}", facts)


def _to(order: Order, stage: Stage, now: float) -> Order:
    return replace(order, stage=stage, stage_at=now)
