"""What the words of other nodes change in what is known of a job. Pure.

A leader takes the ranks of a node and their parts in its orders from the node's REPORT; a follower takes the orders
from its leader's COURSE and keeps the parts of its own ranks. The rules are in `between.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from powerguard.core import seats
from powerguard.core.between import WORLD, Course, FromPeer, OrderState, PeerReport, RankState, Report
from powerguard.core.farewell import called
from powerguard.core.job import NO_LEADER, Call, Due, Job, Member, Node, Order, Part, Stage
from powerguard.core.messages import Purpose
from powerguard.core.state import State

JOBS = 64
"""Jobs that other nodes may make a node know of."""


def absorb(state: State, words: Iterable[PeerReport], now: float) -> State:
    """The state after what other nodes said. A word that is old, misaddressed or contradicts its sender is nothing."""
    jobs, seq = state.jobs, state.seq
    batch = Batch()
    for heard in words:
        word = heard.message
        if word.node != heard.node:
            continue
        job = jobs.get(word.job) or _stranger(state, jobs, word)
        if job is None or word.world_size != job.world_size:
            continue
        if word.node == state.node:  # the master address is ours, by a name that we didn't know
            job = replace(job, lead="") if job.lead == NO_LEADER and job.term == 0 else job
        else:
            job = _heard(state, batch.own(job), word, now, batch)
            seq = max(seq, word.seq)
        jobs = {**jobs, job.name: job}
    return state if jobs is state.jobs else replace(state, jobs=jobs, seq=seq)


class Batch:
    """The jobs of one batch of words. A leader hears of thousands of ranks at once, so their dicts are copied once and
    then changed in place, and the ranks of a node are found without looking at all of them.
    """

    def __init__(self) -> None:
        self._owned: set[str] = set()
        self._indexed: tuple[dict[int, Member], dict[str, set[int]]] = ({}, {})

    def own(self, job: Job) -> Job:
        """The job, with dicts that nobody else has."""
        if job.name in self._owned:
            return job
        self._owned.add(job.name)
        return replace(
            job,
            members=dict(job.members),
            nodes=dict(job.nodes),
            order=_apart(job.order),
            earlier=_apart(job.earlier),
        )

    def ranks(self, job: Job, node: str) -> set[int]:
        """The ranks of *node*, to be kept up with `job.members`."""
        members, index = self._indexed
        if members is not job.members:
            index = {}
            for rank, member in job.members.items():
                index.setdefault(member.node, set()).add(rank)
            self._indexed = (job.members, index)
        return index.setdefault(node, set())


def _apart(order: Order | None) -> Order | None:
    return None if order is None else replace(order, parts=dict(order.parts))


def _stranger(state: State, jobs: dict[str, Job], word: FromPeer) -> Job | None:
    """A job none of whose ranks has said HELLO here, though another node takes this one for its leader."""
    if not isinstance(word, Report) or word.claimer not in ("", state.node) or len(jobs) >= JOBS:
        return None
    return Job(word.job, word.world_size, directory=word.directory, unit=word.unit, term=word.term)


def _heard(state: State, job: Job, word: FromPeer, now: float, batch: Batch) -> Job:
    node = job.nodes.get(word.node, Node(word.node))
    if node.boot == word.boot and word.n <= node.n:
        return job
    node = replace(node, address=word.address or node.address, boot=word.boot, n=word.n)
    if word.term < job.term:
        return _with(job, replace(node, behind=True))
    if word.term > job.term:
        job = _follow(state, job, word, now)
    job = _with(job, replace(node, behind=False))
    if isinstance(word, Report):
        return _reported(job, word, now, batch) if job.leads else job
    if job.leads or word.claimer not in (word.node, "") or word.claimer != job.claimer:
        return job
    return _steered(replace(job, lead=word.node, lead_at=now, passed=()), word, now)


def _follow(state: State, job: Job, word: FromPeer, now: float) -> Job:
    """Somebody has claimed the lead."""
    if word.claimer == state.node:  # this node, before it lost its memory
        return replace(job, term=word.term, claimer=word.claimer, lead="")
    return seats.following(job, now, term=word.term, claimer=word.claimer, address=word.claimer_address)


def _with(job: Job, node: Node) -> Job:
    job.nodes[node.name] = node  # ours: see Batch
    return job


# ---- a leader hears of a node's ranks --------------------------------------------------------------


def _reported(job: Job, report: Report, now: float, batch: Batch) -> Job:
    node = replace(job.nodes[report.node], heard_at=now, want=report.want, roster_n=report.roster_n)
    members, ranks = job.members, batch.ranks(job, report.node)
    old = {rank: members.pop(rank) for rank in ranks}
    ranks.clear()
    renewed: set[int] = set()
    for told in report.ranks:
        known = members.get(told.rank)
        if not 0 <= told.rank < job.world_size or (known is not None and known.alive and not known.node):
            continue  # a living rank of this node isn't somebody else's
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
        order=_parts(job.order, report, renewed, now),
        earlier=_parts(job.earlier, report, renewed, now),
        quiesce=_quieter(job, report),
    )
    return _with(job, replace(node, beyond=_beyond(job, report)))


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
        return replace(job, order=seats.everybody(job, _mirrored(None, told, parts, now)))
    if known.step < 0 <= told.step:
        return replace(job, order=seats.everybody(job, _mirrored(known, told, known.parts, now)))
    return job


def _beyond(job: Job, report: Report) -> int:
    """The newest order that the node's ranks obey or wait by and that this leader hasn't given; 0 = none."""
    obeyed = 0 if report.order is None or report.order.order.over else report.order.order.seq
    given = [job.resumed, *(order.seq for order in (job.order, job.earlier) if order is not None)]
    return max((seq for seq in (obeyed, report.astray) if seq > job.resumed and seq not in given), default=0)


def _parts(order: Order | None, report: Report, renewed: set[int], now: float) -> Order | None:
    """The order with the parts of the node's ranks as the node knows them."""
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
    own = {rank.rank for rank in report.ranks}
    told = next((each for each in (report.order, report.earlier) if each and each.order.seq == order.seq), None)
    for each in () if told is None else told.parts:
        if each.rank in parts and each.rank in own:
            parts[each.rank] = _merged(order, parts[each.rank], each.part, now)
    if told is not None and told.order.sealed_by >= 0 and told.order.sealed_by in parts and order.sealed_by < 0:
        order = replace(order, sealed_by=told.order.sealed_by)
    return order


def _merged(order: Order, known: Part, told: Part, now: float) -> Part:
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


# ---- a follower hears of the orders ----------------------------------------------------------------


def _steered(job: Job, course: Course, now: float) -> Job:
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
        return replace(job, order=_mirrored(known, told, known.parts, now))
    earlier = job.earlier
    begun = known is not None and any(p.staged_at is not None or p.shard is not None for p in known.parts.values())
    if known is not None and known.purpose is Purpose.SNAPSHOT and known.underway and begun:
        earlier = known
    parts = {rank: Part() for rank in job.members}
    resume = None if not told.over else job.resume
    return replace(job, order=_mirrored(None, told, parts, now), earlier=earlier, resume=resume)


def _same(known: Order | None, told: OrderState | None, now: float) -> Order | None:
    if known is None or told is None or told.seq != known.seq:
        return None if told is None or (known is not None and told.seq > known.seq) else known
    return _mirrored(known, told, known.parts, now)


def _mirrored(known: Order | None, told: OrderState, parts: dict[int, Part], now: float) -> Order:
    """The order as it is told, with *parts*; what this node knows to be decided isn't moved by anybody."""
    decided = known is not None and known.step >= 0
    moved = known is not None and decided and (told.step, told.generation) != (known.step, known.generation)
    if known is not None and moved:
        return known
    return Order(
        seq=told.seq,
        event=told.event,
        purpose=told.purpose,
        ordered_at=now - told.age_s if known is None else known.ordered_at,
        parts=parts,
        reason=told.reason,
        budget_s=told.budget_s,
        stage=told.stage,
        stage_at=now - told.stage_s if known is None or known.stage is not told.stage else known.stage_at,
        plan=told.plan,
        step=told.step,
        generation=told.generation,
        sealer=told.sealer,
        sealed_by=told.sealed_by if known is None else max(known.sealed_by, told.sealed_by),
        sealer_at=now if known is None or known.sealer != told.sealer else known.sealer_at,
        why=told.why,
        settled=told.settled,
        over=told.over or (known is not None and known.over),
        nth=told.nth,
        weights=_by_rank(told.weights),
    )


def _by_rank(runs: tuple[tuple[int, float], ...]) -> tuple[float, ...]:
    """The weights one by one; nobody's runs make more of them than a world has ranks."""
    weights: list[float] = []
    for ranks, weight in runs:
        weights += [weight] * min(ranks, WORLD - len(weights))
    return tuple(weights)
