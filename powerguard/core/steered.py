"""A follower takes the orders from its leader's COURSE, and keeps the parts of its own ranks. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from powerguard.core.between import Course, OrderState
from powerguard.core.farewell import called
from powerguard.core.job import Job, Order, Part
from powerguard.core.messages import Purpose
from powerguard.core.mirrored import mirrored


def steered(job: Job, course: Course, now: float) -> Job:
    """The job after a word of its leader."""
    job = replace(
        job,
        retry=course.retry,
        pace=course.pace,
        shards=course.shards,
        stopping=course.stopping,
        saved=job.saved if course.saved is None else replace(course.saved, at=now),
    )
    if course.roster:
        job = replace(job, roster=course.roster, roster_n=course.roster_n)
    if course.resumed > job.resumed:
        job = _released(job, course.resumed, course.resumed_why, now)
    if course.order is not None:
        job = _ordered(job, course.order, now)
    job = replace(job, earlier=_same(job.earlier, course.earlier, now))
    if course.quiesce is not None and course.quiesce.seq >= job.resumed and job.quiesce is None:
        job = replace(job, quiesce=called(job, course.quiesce.seq, course.quiesce.reason, now), resume=None)
    if course.leave is not None and job.quiesce is not None:
        seq, reason, code = course.leave.seq, course.leave.reason, course.leave.code
        job = replace(job, let_go=True, leave=job.leave or called(job, seq, reason, now, code))
    return job


def _released(job: Job, seq: int, reason: str, now: float) -> Job:
    """RESUME: orders up to *seq* are over here."""
    order = job.order
    if order is not None and order.seq <= seq:
        order = replace(order, over=True)
    quiesce = job.quiesce if job.quiesce is not None and job.quiesce.seq > seq else None
    leave = job.leave if quiesce is not None else None
    word = called(job, seq, reason, now)
    job = replace(job, order=order, quiesce=quiesce, leave=leave, let_go=job.let_go and quiesce is not None)
    return replace(job, resume=word, resumed=seq, resumed_why=reason)


def _ordered(job: Job, told: OrderState, now: float) -> Job:
    known = job.order
    if known is not None and told.seq < known.seq:
        return job
    if known is not None and told.seq == known.seq:
        return replace(job, order=mirrored(known, told, known.parts, now))
    earlier = job.earlier
    begun = known is not None and any(p.staged_at is not None or p.shard is not None for p in known.parts.values())
    if known is not None and known.purpose is Purpose.SNAPSHOT and known.underway and begun:
        earlier = known
    parts = {rank: Part() for rank in job.members}
    resume = None if not told.over else job.resume
    return replace(job, order=mirrored(None, told, parts, now), earlier=earlier, resume=resume)


def _same(known: Order | None, told: OrderState | None, now: float) -> Order | None:
    if known is None or told is None or told.seq != known.seq:
        return None if told is None or (known is not None and told.seq > known.seq) else known
    return mirrored(known, told, known.parts, now)
