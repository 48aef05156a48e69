"""A leader takes the ranks of a node, and their parts in its orders, from the node's REPORT. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from powerguard.core import seats
from powerguard.core.batch import Batch, with_node
from powerguard.core.between import RankState, Report
from powerguard.core.job import Call, Due, Job, Member, Order, Part, Stage
from powerguard.core.mirrored import mirrored


def reported(job: Job, report: Report, now: float, batch: Batch) -> Job:
    """The job after a node's report."""
    node = replace(job.nodes[report.node], heard_at=now, want=report.want, roster_n=report.roster_n)
    members, ranks = job.members, batch.ranks(job, report.node)
    old = {rank: members.pop(rank) for rank in ranks}
    ranks.clear()
    renewed: set[int] = set()
    for told in report.ranks:
        known = members.get(told.rank)
        if not 0 <= told.rank < job.world_size or _elsewhere(known, told):
            continue
        member = _member(report, told, old.get(told.rank), now)
        was = old.get(told.rank)
        if was is not None and was.pid != member.pid:
            renewed.add(told.rank)
        if known is not None and known.node != report.node:
            batch.ranks(job, known.node).discard(told.rank)
        members[told.rank] = member
        ranks.add(told.rank)
    job = replace(job, directory=job.directory or report.directory)
    if report.saved is not None and (job.saved is None or job.saved.step < report.saved.step):
        job = replace(job, saved=replace(report.saved, at=now))
    if job.claimed_at is not None:
        job = _learned(job, report, now)
    job = replace(
        job,
        order=_parts(job.order, report, ranks, renewed, now),
        earlier=_parts(job.earlier, report, ranks, renewed, now),
        quiesce=_quieter(job, report),
    )
    return with_node(job, replace(node, beyond=_beyond(job, report)))


def _member(report: Report, told: RankState, old: Member | None, now: float) -> Member:
    same = old is not None and old.pid == told.pid
    return Member(
        rank=told.rank,
        world_size=report.world_size,
        pid=told.pid,
        local_rank=told.local_rank,
        node=report.node,
        directory=report.directory,
        unit=report.unit,
        registered_at=old.registered_at if same and old is not None else now,
        heard_at=now,
        step=told.step,
        pace=told.pace,
        busy=told.busy,
        staged=told.staged,
        staged_write_s=told.staged_write_s,
        deputy_at=now if told.deputy else None,
        gone=told.gone,
    )


def _learned(job: Job, report: Report, now: float) -> Job:
    """A new leader hears of an order that it doesn't know, or not as far as decided."""
    if report.order is None or report.order.order.over:
        return job
    told, known = report.order.order, job.order
    if told.seq <= job.resumed or (known is not None and told.seq < known.seq):
        return job
    if known is None or told.seq > known.seq:
        parts = {rank: Part() for rank in range(job.world_size)}
        return replace(job, order=seats.everybody(job, mirrored(None, told, parts, now)))
    if known.step < 0 <= told.step:
        return replace(job, order=seats.everybody(job, mirrored(known, told, known.parts, now)))
    return job


def _beyond(job: Job, report: Report) -> int:
    """The newest order that the node's ranks obey or wait by and that this leader hasn't given; 0 = none."""
    obeyed = 0 if report.order is None or report.order.order.over else report.order.order.seq
    given = [job.resumed, *(order.seq for order in (job.order, job.earlier) if order is not None)]
    return max((seq for seq in (obeyed, report.astray) if seq > job.resumed and seq not in given), default=0)


def _elsewhere(known: Member | None, told: RankState) -> bool:
    """A living rank of this node isn't somebody else's; nor does one that has ended replace one that lives elsewhere:
    ranks move when a launcher starts them anew, and the node that they were on remembers them."""
    return known is not None and known.alive and (not known.node or bool(told.gone))


def _parts(order: Order | None, report: Report, own: set[int], renewed: set[int], now: float) -> Order | None:
    """The order with the parts of *own*, the node's ranks, as the node knows them."""
    if order is None:
        return None
    parts = order.parts  # ours: see Batch
    for rank in renewed & parts.keys():
        part = parts[rank]
        if order.stage is Stage.PREPARE:
            parts[rank] = Part()
        else:
            trouble = part.trouble or ("" if part.shard is not None else f"rank {rank} was started anew")
            parts[rank] = replace(part, anew=True, parked=False, decided=False, trouble=trouble)
    told = next((each for each in (report.order, report.earlier) if each and each.order.seq == order.seq), None)
    for each in () if told is None else told.parts:
        if each.rank in parts and each.rank in own:
            parts[each.rank] = merged(order, parts[each.rank], each.part, now)
    if told is not None and told.order.sealed_by >= 0 and told.order.sealed_by in parts and order.sealed_by < 0:
        order = replace(order, sealed_by=told.order.sealed_by)
    return order


def merged(order: Order, known: Part, told: Part, now: float) -> Part:
    """What is known and what is told of one part: deeds only add up."""
    anew = known.anew or told.anew
    shard = known.shard if known.shard is not None or anew else told.shard
    edge = max(known.edge, told.edge) if order.stage is Stage.PREPARE else known.edge
    staged_at = known.staged_at if known.staged_at is not None or told.staged_at is None else now
    return replace(
        known,
        edge=edge,
        by_page=known.by_page and told.edge < 0,
        decided=told.decided,
        staged_at=staged_at,
        shard=shard,
        parked=told.parked,
        sealed=known.sealed or told.sealed,
        anew=anew,
        missed=told.missed and shard is None,
        failed=told.failed and shard is None,
        trouble="" if shard is not None else told.trouble or known.trouble,
    )


def _quieter(job: Job, report: Report) -> Call | None:
    call = job.quiesce
    if call is None:
        return None
    waiting = dict(call.waiting)
    for told in report.ranks:
        if told.quiet:
            waiting.pop(told.rank, None)
        elif told.rank not in waiting and not told.gone:
            waiting[told.rank] = Due()  # it came late, or is another process: it is called too
    return call if waiting == call.waiting else replace(call, waiting=waiting)
