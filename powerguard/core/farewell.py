"""What ends an order: RESUME, or QUIESCE and EXIT in two phases. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from powerguard.core.demand import deliver
from powerguard.core.job import Call, Due, Job, here, living
from powerguard.core.policy import Policy
from powerguard.core.types import Actions

Outcome = tuple[Job, tuple[Actions, ...]]


def called(job: Job, seq: int, reason: str, now: float, code: int = 0) -> Call:
    """A word to every living rank of this node."""
    return Call(seq, reason, now, code, {rank: Due() for rank in here(job)})


def resume(policy: Policy, job: Job, reason: str, now: float) -> Outcome:
    """The newest order is over: ranks that it holds or has parked train on, those that it will reach don't stop."""
    if job.order is None or job.order.over or job.quiesce is not None:
        return job, ()
    return recall(policy, job, reason, now)


def recall(policy: Policy, job: Job, reason: str, now: float) -> Outcome:
    """The halt is off, or was a dry run: order, QUIESCE and EXIT are over, and who hasn't left yet trains on."""
    seqs = [known.seq for known in (job.order, job.quiesce, job.leave) if known is not None]
    seqs += [node.beyond for node in job.nodes.values() if node.beyond]  # other leaders' orders, obeyed somewhere
    if not seqs:
        return job, ()
    over = replace(job.order, over=True) if job.order is not None else None
    word = called(job, max(seqs), reason, now)
    released = replace(job, resumed=max(seqs), resumed_why=reason, retry=False, let_go=False)
    return deliver(policy, replace(released, order=over, quiesce=None, leave=None, resume=word), now)


def quiesce(policy: Policy, job: Job, seq: int, reason: str, now: float) -> Outcome:
    """The node will halt: ranks finish what moves data and wait for EXIT. There is no way back; a repeat is nothing."""
    if job.quiesce is not None:
        return job, ()
    return deliver(policy, replace(job, quiesce=_to_all(job, seq, reason, now), resume=None), now)


def _to_all(job: Job, seq: int, reason: str, now: float) -> Call:
    """A word to every living rank; those of other nodes hear it there, and their nodes report who has answered."""
    return Call(seq, reason, now, 0, {rank: Due() for rank in living(job)})


def leave(policy: Policy, job: Job, code: int, reason: str, now: float) -> Outcome:
    """Ranks are to exit with *code*: they are told when all of them are quiet, or after `exit_wait_s`."""
    if job.leave is not None:
        return job, ()
    if job.quiesce is None:
        seq = job.order.seq if job.order is not None else 0
        job = replace(job, quiesce=_to_all(job, seq, reason, now), resume=None)
    asked = job.quiesce
    seq = asked.seq if asked is not None else 0
    return deliver(policy, replace(job, leave=called(job, seq, reason, now, code)), now)
