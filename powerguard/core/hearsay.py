"""What the words of other nodes change in what is known of a job. Pure.

Here is who is heard at all; a leader then takes what a node reports (`reported.py`), a follower the course of its
leader (`steered.py`). The rules are in `between.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from powerguard.core import seats
from powerguard.core.batch import Batch, with_node
from powerguard.core.between import SEQ_MAX, TERM_MAX, FromPeer, OrderReport, OrderState, PeerReport, Report
from powerguard.core.job import NO_LEADER, Job, Node
from powerguard.core.reported import reported
from powerguard.core.state import State
from powerguard.core.steered import steered

JOBS = 64
"""Jobs that other nodes may make a node know of."""


def absorb(state: State, words: Iterable[PeerReport], now: float) -> State:
    """The state after what other nodes said. A word that is old, misaddressed or contradicts its sender is nothing."""
    jobs, seq = state.jobs, state.seq
    batch = Batch()
    for heard in words:
        word = heard.message
        if word.node != heard.node or not _countable(word):
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


def _countable(word: FromPeer) -> bool:
    """Nothing in it would make this node count on from where no number is left."""
    orders = [order for order in (word.order, word.earlier) if order is not None]
    if isinstance(word, Report):
        numbers = [word.astray, *(each.order.seq for each in orders if isinstance(each, OrderReport))]
    else:
        calls = [call.seq for call in (word.quiesce, word.leave) if call is not None]
        numbers = [word.resumed, *calls, *(each.seq for each in orders if isinstance(each, OrderState))]
    return max(word.seq, *numbers) < SEQ_MAX and word.term < TERM_MAX


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
        return with_node(job, replace(node, behind=True))
    if word.term > job.term:
        job = _follow(state, job, word, now)
    job = with_node(job, replace(node, behind=False))
    if isinstance(word, Report):
        return reported(job, word, now, batch) if job.leads else job
    if job.leads or word.claimer not in (word.node, "") or word.claimer != job.claimer:
        return job
    return steered(replace(job, lead=word.node, lead_at=now, passed=()), word, now)


def _follow(state: State, job: Job, word: FromPeer, now: float) -> Job:
    """Somebody has claimed the lead."""
    if word.claimer == state.node:  # this node, before it lost its memory
        return replace(job, term=word.term, claimer=word.claimer, lead="")
    return seats.following(job, now, term=word.term, claimer=word.claimer, address=word.claimer_address)
