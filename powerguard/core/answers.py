"""What a rank's message or its shared page changes in what is known of its job. Pure.

Every deed that carries a sequence number is acknowledged, known or not, so that the rank stops repeating it.
Nothing here moves an order to another stage: that is `agree.tick`.
"""

from __future__ import annotations

from msgspec.structs import replace

from powerguard.core.job import Call, Due, Job, Member, Order, Part, Stage
from powerguard.core.messages import (
    Ack,
    Beat,
    Bye,
    Failed,
    FromRank,
    Held,
    Hello,
    Missed,
    Pace,
    Parked,
    Plan,
    Promise,
    Quiesced,
    SealWritten,
    Shard,
    Staged,
    Welcome,
)
from powerguard.core.types import Actions, PageReport, RankReport, Send


def registered(job: Job | None, report: RankReport, hello: Hello) -> Job:
    """The job with the rank that says HELLO in it; a process under a new pid replaces the old one."""
    member = Member(
        rank=hello.rank,
        world_size=hello.world_size,
        pid=hello.pid,
        local_rank=hello.local_rank,
        directory=hello.directory,
        page=hello.page,
        unit=hello.unit,
        version=hello.version,
        master=hello.master,
        registered_at=report.at,
        heard_at=report.at,
        step=hello.step,
        pace=hello.pace,
        seq=hello.seq,
    )
    if job is None:
        job = Job(report.job, hello.world_size)
    if job.saved is not None and not job.alive and hello.directory != job.directory:
        job = replace(job, saved=None)  # of another run under this name
    old = job.members.get(hello.rank)
    same = old is not None and old.pid == hello.pid and old.alive
    if same and old is not None:
        member = replace(
            member,
            registered_at=old.registered_at,
            busy=old.busy,
            pace=newer(old.pace, hello.pace),
            staged=old.staged,
            staged_write_s=old.staged_write_s,
            deputy_at=old.deputy_at,
        )
    members = {rank: other for rank, other in job.members.items() if rank < hello.world_size}
    members[hello.rank] = member
    job = replace(
        job, world_size=hello.world_size, directory=hello.directory or job.directory, unit=hello.unit, members=members
    )
    job = replace(
        job,
        order=_reintroduced(job, job.order, hello.rank, same=same),
        earlier=_reintroduced(job, job.earlier, hello.rank, same=same),
    )
    return replace(
        job,
        quiesce=_called_too(job.quiesce, hello.rank, same=same),
        leave=_called_too(job.leave, hello.rank, same=same),
    )


def _called_too(call: Call | None, rank: int, *, same: bool) -> Call | None:
    """A process that comes late must be called as well; one that has answered needn't be again."""
    if call is None or (same and rank not in call.waiting):
        return call
    return replace(call, waiting={**call.waiting, rank: Due()})


def newer(old: Pace, new: Pace) -> Pace:
    """The measured pace; one that says nothing doesn't erase one that does."""
    return new if new != Pace() else old


def _reintroduced(job: Job, order: Order | None, rank: int, *, same: bool) -> Order | None:
    """The order after a (re)registration: told again at once, and a new process can't deliver what an old one owed.

    An order that no living process was given is nobody's: None.
    """
    if order is None:
        return None
    part = order.parts.get(rank, Part())
    if same:
        part = replace(part, due=Due())
    elif order.stage is Stage.PREPARE:
        part = Part()
    else:
        trouble = part.trouble if part.trouble or part.shard is not None else f"rank {rank} was started anew"
        part = replace(part, anew=True, parked=False, decided=False, trouble=trouble, asked="", due=Due())
    order = replace(order, parts={**order.parts, rank: part})
    given = (r for r, p in order.parts.items() if p.asked and r in job.members and job.members[r].alive)
    return order if any(True for _ in given) else None


def heard(job: Job, report: RankReport, member: Member) -> tuple[Job, tuple[Actions, ...]]:
    """The job after a message of a registered rank, and what to answer at once."""
    message = report.message
    if isinstance(message, Held):  # the deputy's word is no sign of life of its rank
        member = replace(member, staged=message.steps, staged_write_s=message.write_s, deputy_at=report.at)
        return replace(job, members={**job.members, report.rank: member}), ()
    member = replace(member, heard_at=report.at)
    if isinstance(message, Beat):
        member = replace(
            member, step=max(member.step, message.step), pace=newer(member.pace, message.pace), busy=message.busy
        )
    elif isinstance(message, Promise):
        member = replace(member, step=max(member.step, message.edge - 1), pace=newer(member.pace, message.pace))
    elif isinstance(message, Bye):
        member = replace(member, gone=f"left ({message.why or 'no reason given'})")
    job = replace(job, members={**job.members, report.rank: member})
    if isinstance(message, Ack):
        return _acknowledged(job, report.rank, message), ()
    if isinstance(message, (Hello, Beat, Bye)):
        return job, ()
    if isinstance(message, Quiesced):
        job = _answered_call(job, report.rank, message.seq)
    else:
        job = replace(
            job,
            order=_done(job.order, report.rank, message, report.at),
            earlier=_done(job.earlier, report.rank, message, report.at),
        )
    return job, (Send(report.job, report.rank, Ack(message.seq, type(message).__name__)),)


def _answered_call(job: Job, rank: int, seq: int) -> Job:
    call = job.quiesce
    if call is None or call.seq != seq or rank not in call.waiting:
        return job
    return replace(job, quiesce=replace(call, waiting={r: d for r, d in call.waiting.items() if r != rank}))


def _acknowledged(job: Job, rank: int, ack: Ack) -> Job:
    """The job once *rank* has understood a message."""
    if ack.of == "Resume" and job.resume is not None and job.resume.seq == ack.seq:
        waiting = {r: d for r, d in job.resume.waiting.items() if r != rank}
        return replace(job, resume=replace(job.resume, waiting=waiting) if waiting else None)
    if ack.of == "Exit" and job.leave is not None and job.leave.seq == ack.seq:
        waiting = {r: d for r, d in job.leave.waiting.items() if r != rank}
        return replace(job, leave=replace(job.leave, waiting=waiting))
    if ack.of not in ("Decide", "Sealed"):
        return job
    return replace(job, order=_noted(job.order, rank, ack), earlier=_noted(job.earlier, rank, ack))


def _noted(order: Order | None, rank: int, ack: Ack) -> Order | None:
    if order is None or order.seq != ack.seq or rank not in order.parts:
        return order
    part = order.parts[rank]
    part = replace(part, decided=True) if ack.of == "Decide" else replace(part, sealed=True)
    return replace(order, parts={**order.parts, rank: part})


def _done(order: Order | None, rank: int, message: FromRank, at: float) -> Order | None:
    """The order after a deed of *rank*; deeds of other orders, or for another step, change nothing."""
    if order is None or not hasattr(message, "seq") or message.seq != order.seq or rank not in order.parts:
        return order
    part = order.parts[rank]
    if isinstance(message, Promise):
        if order.stage is Stage.PREPARE:
            part = replace(part, edge=max(part.edge, message.edge), by_page=False)
    elif isinstance(message, Parked):
        part = replace(part, parked=True, decided=True)
    elif isinstance(message, SealWritten):
        written = order.stage is Stage.SEALING and message.generation == order.generation
        return replace(order, sealed_by=rank) if written else order
    elif isinstance(message, (Staged, Shard, Missed, Failed)):
        if order.stage is Stage.PREPARE or (isinstance(message, (Staged, Shard)) and message.step != order.step):
            return order  # a lone save, or a rank that speaks of a decision that this daemon has lost
        part = _delivered(part, rank, message, at, staged=order.plan is Plan.STAGED)
        if isinstance(message, Failed) and order.stage is Stage.SEALING and rank == order.sealer:
            order = replace(order, sealer_at=0.0)  # it can't seal: ask another at once
        elif isinstance(message, Shard) and message.generation != order.generation:
            return order
    return replace(order, parts={**order.parts, rank: part})


def _delivered(
    part: Part, rank: int, message: Staged | Shard | Missed | Failed, at: float, *, staged: bool = False
) -> Part:
    """The part after a deed; with *staged* it may be the deputy's, and says nothing of the rank itself."""
    part = part if staged else replace(part, decided=True)
    if part.anew and not staged:
        return part  # the state of another process doesn't belong into this generation
    if isinstance(message, Staged):
        return part if part.staged_at is not None else replace(part, staged_at=at)
    if isinstance(message, Shard):
        if message.record.rank != rank:
            return replace(part, failed=True, trouble=f"rank {rank} handed in the shard of rank {message.record.rank}")
        return replace(part, shard=message.record, trouble="", missed=False)
    if part.shard is not None:
        return part  # what is durable can't be taken back
    if isinstance(message, Missed):
        return replace(part, missed=True, trouble=f"rank {rank} missed the stop step: {message.why}")
    return replace(part, failed=True, trouble=f"rank {rank} couldn't write: {message.why}")


def paged(job: Job, page: PageReport) -> Job:
    """The job after a look at a rank's shared page and process."""
    member = job.members.get(page.rank)
    if member is None or page.pid not in (0, member.pid):
        return job
    changed = replace(member, step=max(member.step, page.step))
    if not page.alive and member.alive:
        changed = replace(changed, gone="died")
    if changed == member:
        return job
    return replace(job, members={**job.members, page.rank: changed})


def greeting(job: Job | None, report: RankReport, *, node: str, phase: str, hello: bool) -> Send:
    """WELCOME; with *hello* it asks the rank to register."""
    seq = job.order.seq if job is not None and job.order is not None else 0
    return Send(report.job, report.rank, Welcome(node, phase, seq, hello=hello))
