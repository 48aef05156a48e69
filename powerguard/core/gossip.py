"""What this node's daemon tells the daemons of its jobs' other nodes, and when. Pure; the words are in `between.py`.

A word follows from the state alone. Nothing of it is remembered in the state: `Said` is the shell's own, and losing
it costs one word more.
"""

from __future__ import annotations

from itertools import groupby

from msgspec import Struct, field
from msgspec.structs import replace

from powerguard.core.between import (
    GOSSIP_FAST_S,
    GOSSIP_S,
    Course,
    Farewell,
    FromPeer,
    OrderReport,
    OrderState,
    RankPart,
    RankState,
    Report,
    SendPeer,
)
from powerguard.core.demand import may_leave
from powerguard.core.job import NO_LEADER, Due, Job, Member, Node, Order, Stage, Want, astray, living
from powerguard.core.messages import Pace
from powerguard.core.policy import Policy
from powerguard.core.state import State
from powerguard.core.types import Phase

WORDS_MAX = 400
"""Characters of a text for people; the whole stays with who wrote it."""

KEEP_SNAPSHOT_S = 60.0
"""A wish for a snapshot is told for so long."""


STOPPING = frozenset({Phase.FLUSHING, Phase.PARKED, Phase.HALTING})
"""Phases in which a node's power keeps its jobs from training."""


class Last(Struct, frozen=True):
    """The last word to a node about a job."""

    at: float
    news: object  # what was in it, without what changes by itself


class Said(Struct, frozen=True):
    """What was told, to whom and about which job."""

    words: dict[tuple[str, str], Last] = field(default_factory=dict)


def words(policy: Policy, state: State, said: Said, now: float) -> tuple[Said, tuple[SendPeer, ...]]:
    """What is to be sent now: what is new at once, everything at least every `GOSSIP_S` (faster during an order)."""
    told: dict[tuple[str, str], Last] = {}
    sends: list[SendPeer] = []
    for name, job in state.jobs.items():
        if not job.spans:
            continue
        every_s = GOSSIP_FAST_S if _busy(job) else GOSSIP_S
        course = report = common = rostered = None
        for node, address in _to(job):
            last = said.words.get((node, name))
            if job.leads:
                course = course or _course(policy, state, job, now)
                rostered = rostered or replace(course, roster_n=job.roster_n, roster=job.roster)
                word: FromPeer = _sealing(rostered if _unrostered(job, node) else course, job, node)
            else:
                word = report = report or _report(state, job, now)
            if word is course or word is rostered or word is report:
                news = common = common or _news(word)  # the same for all, and there may be a thousand
            else:
                news = _news(word)
            if last is None or news != last.news or now - last.at >= every_s:
                last = Last(now, news)
                sends.append(SendPeer(node, address, word))
            told[node, name] = last
    return Said(told), tuple(sends)


def _busy(job: Job) -> bool:
    order = job.order
    return (
        (order is not None and (order.underway or (not order.over and not order.settled)))
        or job.quiesce is not None
        or job.claimed_at is not None
    )


def _to(job: Job) -> list[tuple[str, str]]:
    """Names and addresses of those to whom this node's word is due."""
    if job.rankless:
        return []
    if job.leads:
        to = [(name, node.address) for name, node in job.nodes.items()]
        if job.claimed_at is None and not job.nodes and job.term:
            to.append(("", job.master))
        return to
    named = {} if job.lead == NO_LEADER else {job.lead: _address(job, job.lead)}
    named |= {name: node.address for name, node in job.nodes.items() if node.behind}
    anonymous = [("", job.master)] if job.lead == NO_LEADER and job.master else []
    return [*named.items(), *anonymous]


def _address(job: Job, node: str) -> str:
    if node in job.nodes and job.nodes[node].address:
        return job.nodes[node].address
    return next((seat.address for seat in job.roster if seat.node == node), job.master)


def _claimer_address(state: State, job: Job) -> str:
    if job.claimer == state.node:
        return state.addresses[0] if state.addresses else ""
    return _address(job, job.claimer) if job.claimer else job.master


# ---- a node's report -------------------------------------------------------------------------------


def want(state: State, job: Job, now: float) -> Want:
    """What this node's power asks of the job."""
    phase = state.phase
    stop = phase in STOPPING and state.concerns(job.name)
    wanted_at = job.wanted_at
    recent = wanted_at is not None and now - wanted_at < KEEP_SNAPSHOT_S
    return Want(
        phase=phase.value,
        stop=stop,
        halt=phase is Phase.HALTING,
        snapshot_s=now - wanted_at if recent and wanted_at is not None else None,
        budget_s=None if state.deadline_at is None else max(0.0, state.deadline_at - now),
        runway_s=None if state.power is None else state.power.runway_s,
        event=state.event,
        reason=state.view.why[:400] if stop else "",
    )


def _report(state: State, job: Job, now: float) -> Report:
    return Report(
        node=state.node,
        boot=state.boot,
        n=_number(now),
        job=job.name,
        term=job.term,
        claimer=job.claimer,
        claimer_address=_claimer_address(state, job),
        world_size=job.world_size,
        address=state.addresses[0] if state.addresses else "",
        seq=max(state.seq, job.order.seq if job.order is not None else 0),
        directory=job.directory,
        unit=job.unit,
        ranks=tuple(_rank(job, member) for _, member in sorted(job.members.items())),
        want=want(state, job, now),
        order=_order_report(job.order, job, now),
        earlier=_order_report(job.earlier, job, now),
        saved=None if job.saved is None else replace(job.saved, at=0.0),
        roster_n=job.roster_n,
        astray=astray(job),
    )


def _number(now: float) -> int:
    """Microseconds of this boot, for comparison with another one of them only."""
    return int(now * 1e6)


def _rank(job: Job, member: Member) -> RankState:
    return RankState(
        rank=member.rank,
        pid=member.pid,
        step=member.step,
        local_rank=member.local_rank,
        pace=member.pace,
        busy=member.busy,
        gone=member.gone,
        staged=member.staged,
        staged_write_s=member.staged_write_s,
        deputy=member.deputy_at is not None,
        quiet=job.quiesce is not None and member.rank not in job.quiesce.waiting,
    )


def _order_report(order: Order | None, job: Job, now: float) -> OrderReport | None:
    if order is None:
        return None
    parts = tuple(
        RankPart(rank, replace(part, asked="", due=Due(), staged_at=None if part.staged_at is None else 0.0))
        for rank, part in sorted(order.parts.items())
        if rank in job.members
    )
    return OrderReport(_order(order, now), parts)


def _order(order: Order, now: float) -> OrderState:
    return OrderState(
        seq=order.seq,
        event=order.event,
        purpose=order.purpose,
        stage=order.stage,
        reason=order.reason[:WORDS_MAX],
        budget_s=order.budget_s,
        plan=order.plan,
        step=order.step,
        generation=order.generation,
        age_s=max(0.0, now - order.ordered_at),
        stage_s=max(0.0, now - order.stage_at),
        sealer=order.sealer,
        sealed_by=order.sealed_by,
        why=order.why[:WORDS_MAX],  # it may name thousands of ranks
        settled=order.settled,
        over=order.over,
        nth=order.nth,
        weights=_runs(order.weights),
    )


def _runs(weights: tuple[float, ...]) -> tuple[tuple[int, float], ...]:
    """*weights* shorter: nodes have their ranks in a row, and those of a node weigh the same."""
    return tuple((len(tuple(same)), weight) for weight, same in groupby(weights))


# ---- a leader's course -----------------------------------------------------------------------------


def _course(policy: Policy, state: State, job: Job, now: float) -> Course:
    quiesce, leave = job.quiesce, job.leave
    may = leave is not None and may_leave(policy, job, now)
    return Course(
        node=state.node,
        boot=state.boot,
        n=_number(now),
        job=job.name,
        term=job.term,
        claimer=job.claimer,
        claimer_address=_claimer_address(state, job),
        world_size=job.world_size,
        address=state.addresses[0] if state.addresses else "",
        seq=max(state.seq, job.resumed),
        order=None if job.order is None else _order(job.order, now),
        earlier=None if job.earlier is None else _order(job.earlier, now),
        resumed=job.resumed,
        resumed_why=job.resumed_why[:400],
        retry=job.again,
        quiesce=None if quiesce is None else Farewell(quiesce.seq, quiesce.reason),
        leave=Farewell(leave.seq, leave.reason, leave.code) if leave is not None and may else None,
        saved=None if job.saved is None else replace(job.saved, at=0.0),
        pace=_pace(job),
        stopping=tuple(name for name, node in job.nodes.items() if node.want.stop)
        + ((state.node,) if state.phase in STOPPING and state.concerns(job.name) else ()),
    )


def _pace(job: Job) -> Pace:
    paces = [job.members[rank].pace for rank in living(job)]
    if not paces:
        return Pace()
    return Pace(
        max(pace.step_s for pace in paces),
        max(pace.stage_s for pace in paces),
        max(pace.write_s for pace in paces),
        max(pace.fsync_s for pace in paces),
        max(pace.state_bytes for pace in paces),
    )


def _unrostered(job: Job, name: str) -> bool:
    """That node hasn't said yet that it has the newest roster."""
    return bool(job.roster) and job.nodes.get(name, Node(name)).roster_n != job.roster_n


def _sealing(course: Course, job: Job, name: str) -> Course:
    """The course, for the node whose rank is to seal with the shards."""
    order = job.order
    sealer = job.members.get(order.sealer) if order is not None and order.stage is Stage.SEALING else None
    if order is not None and sealer is not None and sealer.node == name:
        shards = tuple(part.shard for _, part in sorted(order.parts.items()) if part.shard is not None)
        course = replace(course, shards=shards)
    return course


# ---- what is news ----------------------------------------------------------------------------------


def _news(word: FromPeer) -> object:
    """The word without what changes by itself: time, steps, the pace of training.

    Nor is the roster news: it grows with each node that comes, and holds every rank. The next word carries it.
    """
    if isinstance(word, Course):
        word = replace(word, roster_n=0, roster=())
        return replace(word, n=0, pace=Pace(), order=_timeless(word.order), earlier=_timeless(word.earlier))
    wanted = replace(word.want, snapshot_s=0.0 if word.want.snapshot_s is not None else None)
    order, earlier = word.order, word.earlier
    return replace(
        word,
        n=0,
        want=replace(wanted, budget_s=None, runway_s=None, reason=""),
        ranks=tuple(replace(rank, step=-1, pace=Pace(), busy="", staged=(), staged_write_s=0.0) for rank in word.ranks),
        order=None if order is None else replace(order, order=_told(order.order)),
        earlier=None if earlier is None else replace(earlier, order=_told(earlier.order)),
    )


def _told(order: OrderState) -> OrderState:
    return replace(order, age_s=0.0, stage_s=0.0, budget_s=None)


def _timeless(order: OrderState | None) -> OrderState | None:
    return None if order is None else _told(order)


def next_at(state: State, said: Said) -> float | None:
    """The next instant at which `words` will have something to repeat."""
    at = [
        last.at + (GOSSIP_FAST_S if _busy(state.jobs[job]) else GOSSIP_S)
        for (_, job), last in said.words.items()
        if job in state.jobs
    ]
    return min(at) if at else None
