"""The need: how long the node's jobs take to be durable, and the node to be off.

Seconds from "stop now": finish the step (and the next one, for a rank that is a step behind), stage, write and
fsync, then halt. The slowest rank of each job counts, never the mean; several jobs share the disks, so their writes
add up. A snapshot that is still being written is saved work too: the longer of the two counts, not both, because a stop
that finds too little for both keeps the snapshot (`agree`).
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from powerguard.core.job import Job, Member, living, writing_s
from powerguard.core.messages import Purpose
from powerguard.core.policy import Policy

EASED_EXPONENT, EASED_TRUST, EASED_LEAST = 1.1, 1.15, 0.5
"""A flush at a share *x* of the training load takes 1.15 x^1.1 of what training would, never less than half: runtime
goes with load^-1.0 ... -1.3 in published tables, and the share is a measurement."""

EASED_HALT_LEAST = 0.6
"""Halting runs at less load than a flush, and is not measured."""

STEPS = 2.0
"""Steps until the stop step is over: the one underway, and one more for a rank that is behind."""


class Need(Struct, frozen=True):
    """Planned seconds, each with `flush_factor` where it was measured."""

    flush_s: float = 0.0  # stage, write and fsync
    step_s: float = 0.0  # until the stop step is over
    stage_s: float = 0.0
    write_s: float = 0.0  # write and fsync
    pending_s: float = 0.0  # until a snapshot that is being written is out of the way
    halt_s: float = 0.0
    save_s: float = 0.0  # everything until all is durable
    total_s: float = 0.0  # everything until the node is off
    by: str = "no job"  # whose measure it is
    eased: float = 1.0  # what a second of the flush takes out of a battery, in seconds of training
    measured: bool = True  # False: some rank has measured no write, the default stands in where it is longer

    @property
    def used_s(self) -> float:
        """`total_s` in seconds at the training load, which is what a runway is counted in."""
        return self.eased * self.save_s + max(self.eased, EASED_HALT_LEAST) * self.halt_s


def eased(flush_load: float) -> float:
    """What a second at *flush_load* of the training load takes, in seconds of training."""
    return min(1.0, max(EASED_LEAST, EASED_TRUST * float(flush_load**EASED_EXPONENT)))


def reckon(policy: Policy, jobs: dict[str, Job], now: float) -> Need:
    """The need of all jobs with a living rank; without one it is the halt alone."""
    step_s = stage_s = write_s = pending_s = slowest_s = 0.0
    by, measured = "no job", True
    for name, job in jobs.items():
        ranks = living(job)
        if not ranks:
            continue
        members = [job.members[rank] for rank in ranks]
        if not job.leads:
            members.append(_elsewhere(job, members[0]))
        slowest = max(members, key=_own_s)
        job_stage_s = policy.flush_factor * max(member.pace.stage_s for member in members)
        job_write_s = policy.flush_factor * max(member.pace.write_s + member.pace.fsync_s for member in members)
        label = f"{name} rank {slowest.rank}" if slowest.rank >= 0 else f"{name}, another node's rank"
        blank = [member.rank for member in members if member.pace.write_s <= 0.0 and member.rank >= 0]
        if blank:
            measured = False
            if job_write_s < policy.flush_default_s:
                job_write_s = policy.flush_default_s
                label = f"{name} rank {blank[0]}, nothing measured: the default"
        step_s = max(step_s, STEPS * max(member.pace.step_s for member in members))
        stage_s = max(stage_s, job_stage_s)
        write_s += job_write_s
        pending_s = max(pending_s, _pending_s(job, now))
        if job_stage_s + job_write_s > slowest_s:
            slowest_s, by = job_stage_s + job_write_s, label
    flush_s = stage_s + write_s
    save_s = step_s + max(pending_s, flush_s)
    return Need(
        flush_s=flush_s,
        step_s=step_s,
        stage_s=stage_s,
        write_s=write_s,
        pending_s=pending_s,
        halt_s=policy.halt_s,
        save_s=save_s,
        total_s=save_s + policy.halt_s,
        by=by,
        eased=eased(policy.flush_load),
        measured=measured,
    )


def _elsewhere(job: Job, member: Member) -> Member:
    """The slowest of the ranks on other nodes, in the shape of a rank."""
    return replace(member, rank=-1, pace=job.pace if job.pace.write_s > 0.0 else member.pace)


def _own_s(member: Member) -> float:
    return member.pace.stage_s + member.pace.write_s + member.pace.fsync_s


def _pending_s(job: Job, now: float) -> float:
    """Seconds until the writers are free for a stop; what a stop itself still writes isn't waited for."""
    if job.order is not None and job.order.purpose is Purpose.STOP:
        job = replace(job, order=None)
    return writing_s(job, now)
