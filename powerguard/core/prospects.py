"""What may still come of an order, and what there is to fall back on: questions only, `agree.py` acts on them. Pure."""

from __future__ import annotations

from powerguard.core.between import NODE_LOST_S
from powerguard.core.job import Job, Order, fresh_s, living
from powerguard.core.messages import Plan, Purpose


def whole(order: Order) -> bool:
    """Every shard of the decided step is durable."""
    return order.step >= 0 and all(part.shard is not None for part in order.parts.values())


def troubles(order: Order) -> str:
    """Why not every shard will come; "" = all may."""
    return "; ".join(part.trouble for _, part in sorted(order.parts.items()) if part.trouble)


def going_on(job: Job, order: Order) -> bool:
    """Some living rank still saves its part."""
    return any(rank in order.parts and order.parts[rank].shard is None for rank in living(job))


def unreachable(job: Job, order: Order, now: float) -> str:
    """Who isn't waited for any longer."""
    silent = {name: now - (node.heard_at or job.lead_at) for name, node in job.nodes.items()}
    lost = {
        job.members[rank].node
        for rank, part in order.parts.items()
        if part.shard is None and rank in job.members and silent.get(job.members[rank].node, 0.0) >= NODE_LOST_S
    }
    return "; ".join(f"no word from {name} for {silent[name]:.0f} s" for name in sorted(lost))


def absent_only(job: Job, order: Order) -> bool:
    """What is missing is on other nodes, of which nothing is known: they may save their part by the same order."""
    return job.spans and all(rank not in job.members for rank, part in order.parts.items() if part.trouble)


def too_short(job: Job, order: Order, step: int) -> str:
    """Why a fresh save doesn't fit, as measured."""
    if order.purpose is not Purpose.STOP or order.budget_s is None:
        return ""
    need = fresh_s(job, order, step)
    if need is None or need <= order.budget_s:
        return ""
    return f"a fresh save needs {need:.1f} s and {order.budget_s:.1f} s are left"


def kept_back(job: Job, order: Order) -> str:
    """What there is to fall back on in this event, so that a fresh save that doesn't fit isn't even tried."""
    fallback = job.earlier is not None or (job.saved is not None and job.saved.event == order.event)
    return "the snapshot of this outage is kept" if fallback else ""


def deputy(job: Job, rank: int) -> bool:
    """A process that keeps what the rank has staged lives."""
    member = job.members.get(rank)
    return member is not None and member.deputy_at is not None


def staged_step(job: Job, order: Order) -> int:
    """The newest step that all ranks hold staged, if it is worth it and can be made durable in time; else -1."""
    late = order.budget_s is not None and staged_write_s(job) > order.budget_s
    return -1 if late else held_step(job)


def staged_write_s(job: Job) -> float:
    """What the slowest deputy needs to make its copy durable, as it says."""
    return max((member.staged_write_s for member in job.members.values()), default=0.0)


def held_step(job: Job) -> int:
    """The newest step that all ranks hold staged, if it is newer than what is saved; else -1."""
    held = copies(job)
    step = max(set.intersection(*held), default=-1) if held else -1
    return -1 if job.saved is not None and job.saved.step >= step else step


def orphaned(job: Job) -> bool:
    """None of its processes lives, not all have left by themselves, and their deputies hold what is worth saving.

    A snapshot or a stop, whichever is due first, makes that durable.
    """
    if job.alive or not job.members or all(member.gone.startswith("left") for member in job.members.values()):
        return False
    return held_step(job) >= 0


def doubtful(job: Job, order: Order, step: int) -> bool:
    """A stop that may not end in a fresh save: a rank is dead, hangs or doesn't answer, or there isn't the time."""
    silent = order.stuck or any(part.by_page for part in order.parts.values())
    return order.purpose is Purpose.STOP and bool(silent or troubles(order) or too_short(job, order, step))


STUCK_TIMES, STUCK_S = 3.0, 10.0
"""A rank whose stop step takes so many times as long as it should, and so much longer, hangs: a straggler takes twice
as long, and an evaluation or a compilation of seconds is waited for."""

LATE_S, LAST_TIMES, LAST_S = 2.0, 1.25, 5.0
"""One that is late by so much isn't waited for beyond the last moment for a copy: a write with a quarter on it, and
what the words need."""


def stuck(job: Job, order: Order, now: float) -> tuple[int, ...]:
    """Ranks that promised and don't come to the stop step of a fresh save, overdue as it is for the slowest of them:
    a training thread hangs, in a collective most likely, while its listener answers. Only where `spared` is true.

    Who has come and writes is waited for: that it is written is all that is heard of a stop's save.
    """
    waited_s = now - order.stage_at
    if waited_s <= LATE_S:
        return ()  # asked at every decision: all ranks are looked at only where it can matter
    away = [job.members[rank] for rank in sorted(order.parts) if rank in job.members and _is_away(job, order, rank)]
    if not away or not spared(job, order):
        return ()
    due_s = max((order.step - member.step) * member.pace.step_s for member in away)
    least_s = LAST_TIMES * staged_write_s(job) + LAST_S
    last = order.budget_s is not None and order.budget_s < least_s and waited_s > due_s + LATE_S
    overdue = waited_s > STUCK_TIMES * due_s + STUCK_S
    return tuple(member.rank for member in away) if last or overdue else ()


def _is_away(job: Job, order: Order, rank: int) -> bool:
    return job.members[rank].step < order.step and order.parts[rank].shard is None


def spared(job: Job, order: Order) -> bool:
    """Should this fresh save of a stop come to nothing, a staged copy can be had instead."""
    fresh = order.purpose is Purpose.STOP and order.plan is Plan.FRESH
    return fresh and staged_step(job, order) >= 0 and not any(part.failed for part in order.parts.values())


def copies(job: Job) -> list[set[int]]:
    """The steps that each rank holds staged, as its deputy told."""
    return [set(job.members[rank].staged) if deputy(job, rank) else set() for rank in range(job.world_size)]


def out_of_step(job: Job) -> bool:
    """All ranks hold copies, and by what was told none of the same step: somebody's word is on its way."""
    held = copies(job)
    return bool(held) and all(held) and not set.intersection(*held)
