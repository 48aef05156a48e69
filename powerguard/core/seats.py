"""Who leads a job, and who does when that one falls silent. Pure; the rules are in `between.py`."""

from __future__ import annotations

from msgspec.structs import replace

from powerguard.core.between import CLAIM_S, LEAD_SILENT_S
from powerguard.core.job import NO_LEADER, Job, Member, Node, Order, Part, Seat, Stage, Want
from powerguard.core.messages import Hello
from powerguard.core.state import State
from powerguard.core.types import Announce, Phase

LOOPBACKS = frozenset({"", "localhost", "127.0.0.1", "::1", "[::1]"})

ROSTERS = 1 << 20
"""Rosters of one claim, so that the number of a roster says whose it is."""


def is_here(state: State, address: str) -> bool:
    """Whether *address*, a host or host:port, is this node's."""
    return bool({address, _host(address)} & {*LOOPBACKS, state.node, *state.addresses})


def _host(address: str) -> str:
    host, colon, port = address.rpartition(":")
    return host if colon and port.isdigit() and ":" not in host else address


def placed(state: State, job: Job, hello: Hello, now: float) -> Job:
    """The job after the HELLO of a rank of this node: the daemon on its master address leads, unless somebody has
    claimed the lead, or no other node has a part in it."""
    if job.term or job.claimer or job.nodes:
        return replace(job, master=hello.master or job.master)
    alone = hello.local_world_size == job.world_size or all(rank in job.members for rank in range(job.world_size))
    if alone or is_here(state, hello.master):
        return replace(job, master=hello.master, lead="")
    if hello.master == job.master:
        return job
    return replace(job, master=hello.master, lead=NO_LEADER, lead_at=now)


def found(state: State, addresses: tuple[str, ...]) -> State:
    """The state once *addresses* turned out to be this node's own: it leads the jobs whose master address is one."""
    new = tuple(address for address in addresses if address not in state.addresses)
    state = replace(state, addresses=state.addresses + new)
    jobs = {
        name: replace(job, lead="") if job.lead == NO_LEADER and not job.term and is_here(state, job.master) else job
        for name, job in state.jobs.items()
    }
    return replace(state, jobs=jobs)


def lowest(job: Job) -> int:
    """The lowest rank of this node: what its numbers are congruent to, modulo the world size."""
    return min((rank for rank, member in job.members.items() if not member.node), default=0) % max(job.world_size, 1)


def number(after: int, job: Job) -> int:
    """The next number of this node after *after*; no other node of the job gives it."""
    world = max(job.world_size, 1)
    return after + 1 + (lowest(job) - after - 1) % world


def following(job: Job, now: float, *, term: int, claimer: str, address: str = "") -> Job:
    """The job once *claimer* leads it: what this node knew as a leader goes, its own ranks' parts stay."""
    members = {rank: member for rank, member in job.members.items() if not member.node}
    nodes = job.nodes
    if claimer and claimer not in nodes:
        nodes = {**nodes, claimer: Node(claimer, address)}
    return replace(
        job,
        term=term,
        claimer=claimer,
        lead=claimer or NO_LEADER,
        lead_at=now,
        claimed_at=None,
        passed=(),
        nodes=nodes,
        members=members,
        order=_own(job.order, members),
        earlier=_own(job.earlier, members),
    )


def _own(order: Order | None, members: dict[int, Member]) -> Order | None:
    if order is None:
        return None
    return replace(order, parts={rank: part for rank, part in order.parts.items() if rank in members})


def leading(state: State, job: Job, now: float, *, term: int) -> Job:
    """The job once this node leads it: the order at hand is kept as it is until the others have said what they know."""
    nodes = dict(job.nodes)
    for seat in job.roster:
        if seat.node != state.node and seat.node not in nodes:
            nodes[seat.node] = Node(seat.node, seat.address)
    nodes = {
        name: replace(node, heard_at=None, want=Want(stop=name in job.stopping), beyond=0)
        for name, node in nodes.items()
    }
    return replace(
        job,
        term=term,
        claimer=state.node,
        lead="",
        lead_at=now,
        claimed_at=now,
        nodes=nodes,
        retry=False,
        order=everybody(job, job.order),
        earlier=everybody(job, job.earlier),
    )


def everybody(job: Job, order: Order | None) -> Order | None:
    """A leader's order has a part for every rank of the world; what was durable elsewhere is to be told anew."""
    if order is None:
        return None
    if order.stage is Stage.SEALING:
        order = replace(order, stage=Stage.DECIDED, sealer=-1, seal_tries=0)

    return replace(order, parts={rank: order.parts.get(rank, Part()) for rank in range(job.world_size)})


def care(state: State, job: Job, now: float) -> tuple[Job, tuple[Announce, ...]]:
    """The job after a look at the silence of its leader, or (a leader's) with its roster up to date."""
    if job.leads:
        return _led(state, job, now), ()
    if now - job.lead_at < LEAD_SILENT_S:
        return job, ()
    if not job.roster and state.phase in (Phase.ONLINE, Phase.ON_BATTERY):
        return job, ()  # never heard of one, and nothing is wanted of it
    passed = (*job.passed, job.lead)
    heirs = [seat.node for seat in job.roster if seat.node not in passed]
    heir = heirs[0] if heirs else state.node
    if heir != state.node:
        return replace(job, lead=heir, lead_at=now, passed=passed), ()
    silent = "nobody leads it" if job.lead == NO_LEADER else f"no word from {', '.join(passed)}"
    job = leading(state, job, now, term=number(job.term, job))
    facts: dict[str, str | int | float | bool | None] = {"job": job.name, "term": job.term}
    return job, (Announce("warning", f"this node leads the job now: {silent}", facts),)


def _led(state: State, job: Job, now: float) -> Job:
    if job.claimed_at is not None:
        waited = now - job.claimed_at
        unheard = [node for name, node in job.nodes.items() if node.heard_at is None and name not in job.passed]
        if not unheard or waited >= CLAIM_S:
            job = _claimed(replace(job, claimed_at=None, passed=()), now)
    if not job.nodes:
        return job
    ranks: dict[str, list[int]] = {}
    for rank, member in job.members.items():
        ranks.setdefault(member.node, []).append(rank)
    seats = {seat.node: seat for seat in job.roster if seat.node in job.nodes}
    for name, owned in ranks.items():
        node, address = (name, job.nodes[name].address) if name else (state.node, _own_address(state, job))
        seats[node] = Seat(node, address, tuple(sorted(owned)))
    roster = tuple(sorted(seats.values(), key=lambda seat: (seat.lowest, seat.node)))
    if roster == job.roster and job.roster_n // ROSTERS == job.term:
        return job
    count = job.roster_n % ROSTERS + 1 if job.roster_n // ROSTERS == job.term else 1
    return replace(job, roster=roster, roster_n=job.term * ROSTERS + count)


def _own_address(state: State, job: Job) -> str:
    return state.addresses[0] if state.addresses else (job.master if is_here(state, job.master) else state.node)


def _claimed(job: Job, now: float) -> Job:
    """The order at hand, once all has been said: a decided one goes on, one that nobody knows to be decided is lost."""
    order = job.order
    if order is None or order.over or order.stage is not Stage.PREPARE:
        return job
    why = "the node that gave the order is silent, and nobody knows what it decided"
    return replace(job, order=replace(order, stage=Stage.LOST, stage_at=now, why=why), retry=True)
