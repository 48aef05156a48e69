"""What the daemon tells of itself: one document, made from its state, for `powerguard status` and for metrics.

Ages and durations only: whoever reads it may be on another clock. None is unknown, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from powerguard.config import Config
from powerguard.core.job import Job, Member, living
from powerguard.core.need import Need
from powerguard.core.outlook import Outlook, outlook
from powerguard.core.policy import Policy
from powerguard.core.state import State
from powerguard.core.supply import Feed
from powerguard.core.types import Comm, Phase


class FeedStatus(Struct, frozen=True):
    """One UPS."""

    name: str
    comm: str
    detail: str
    tokens: tuple[str, ...]
    on_battery: bool | None
    charge_pct: float | None
    runtime_s: float | None  # as reported
    load_pct: float | None
    voltage: float | None
    fresh_s: float | None  # since the last good reading
    login_held: bool | None  # None: no user configured, so no LOGIN
    login_problem: str = ""


class RankStatus(Struct, frozen=True):
    """One training process."""

    rank: int
    alive: bool
    step: int | None
    busy: str
    heard_s: float  # since its last message
    step_s: float | None
    stage_s: float | None
    write_s: float | None  # with fsync
    state_bytes: int | None
    gone: str = ""


class JobStatus(Struct, frozen=True):
    """One training job."""

    name: str
    world_size: int
    directory: str
    outcome: str
    why: str
    ranks: tuple[RankStatus, ...]
    saved_step: int | None = None
    saved_generation: str = ""
    saved_s: float | None = None  # ago


class PeerStatus(Struct, frozen=True):
    """The daemon of another node that a job here has a part on."""

    node: str
    heard_s: float | None  # since its last word; None = never
    jobs: tuple[str, ...]
    leads: tuple[str, ...]  # those that it leads


class NeedStatus(Struct, frozen=True):
    """How long it takes to be durable and off, planned."""

    total_s: float
    save_s: float
    flush_s: float
    halt_s: float
    by: str
    measured: bool


class Status(Struct, frozen=True):
    """The whole document; *format* changes when a field changes its meaning."""

    node: str
    version: str
    pid: int
    boot: str
    up_s: float  # of the daemon
    phase: str
    phase_s: float
    reason: str
    event: str
    on_battery: bool | None
    runway_s: float | None
    idle_runway_s: float | None
    spare_s: float | None  # runway - need - margin
    need: NeedStatus
    feeds: tuple[FeedStatus, ...]
    jobs: tuple[JobStatus, ...]
    halt: str  # the method that is really used
    troubles: tuple[str, ...]
    journal: str
    journal_trouble: str
    held: bool = False  # parked by the operator
    shutdown_waits: bool | None = None  # a shutdown of the system would wait for training; None: isn't asked to
    shutdown_delay_s: float | None = None  # so long (InhibitDelayMaxSec)
    gpus_lowered: bool | None = None  # the GPUs run at less power; None: are left alone
    gate: str = ""  # why no new training should begin now; "" = it may
    outlook: Outlook = Outlook("")  # what happens next and when, if things stay as they are
    peers: tuple[PeerStatus, ...] = ()
    format: int = 1


class Shell(Struct, frozen=True):
    """What the state doesn't know: facts of this process."""

    version: str
    pid: int
    started_at: float
    halt: str
    journal: str
    journal_trouble: str
    reason: str
    logins: Mapping[str, bool | None]
    login_problems: Mapping[str, str]
    troubles: tuple[str, ...] = ()
    lock_held: bool | None = None
    shutdown_delay_s: float | None = None
    gpus_lowered: bool | None = None
    peers_heard_at: Mapping[str, float] = {}


def describe(config: Config, state: State, shell: Shell, now: float) -> Status:
    """The status at *now*."""
    power, need = state.power, state.need
    runway_s = power.runway_s if power else None
    return Status(
        node=state.node,
        version=shell.version,
        pid=shell.pid,
        boot=state.boot,
        up_s=now - shell.started_at,
        phase=state.phase.value,
        phase_s=max(0.0, now - state.phase_since),
        reason=shell.reason,
        event=state.event,
        on_battery=power.on_battery if power else None,
        runway_s=runway_s,
        idle_runway_s=power.idle_runway_s if power else None,
        spare_s=None if runway_s is None else runway_s - need.total_s - config.policy.margin_s,
        need=_need(need),
        feeds=tuple(_feed(state.feeds[u.name], shell, now) for u in config.ups if u.name in state.feeds),
        jobs=tuple(_job(job, now) for _, job in sorted(state.jobs.items())),
        halt=shell.halt,
        troubles=(*(power.troubles if power else ()), *shell.troubles),
        journal=shell.journal,
        journal_trouble=shell.journal_trouble,
        held=state.view.held,
        shutdown_waits=shell.lock_held,
        shutdown_delay_s=shell.shutdown_delay_s,
        gpus_lowered=shell.gpus_lowered,
        peers=_peers(state, shell.peers_heard_at, now),
        gate=gate(config.policy, state),
        outlook=outlook(config.policy, state, now),
    )


def gate(policy: Policy, state: State) -> str:
    """ "" once an outage from now on would leave enough for a flush and a halt, else why not yet.

    Without a job the flush is the configured default: who asks is about to start one.
    """
    power, need = state.power, state.need
    if power is None:
        return "no UPS has been read yet"
    if state.phase is not Phase.ONLINE:
        return f"the node is {state.phase.value.replace('_', ' ')}"
    if power.on_battery is not False:
        return f"not known to be on line power: {power.reason}" if power.on_battery is None else power.reason
    need_s = need.total_s if any(job.alive for job in state.jobs.values()) else policy.flush_default_s + need.halt_s
    if power.runway_s is None:
        return "the runway isn't known"
    if power.runway_s >= need_s + policy.margin_s:
        return ""
    return f"runway {power.runway_s:.0f} s < need {need_s:.0f} s + margin {policy.margin_s:.0f} s"


def _peers(state: State, heard_at: Mapping[str, float], now: float) -> tuple[PeerStatus, ...]:
    """The nodes that jobs of this one span, and any other that has spoken."""
    jobs: dict[str, list[str]] = {name: [] for name in heard_at}
    leads: dict[str, list[str]] = {}
    for name, job in sorted(state.jobs.items()):
        for node in {*job.nodes, *(seat.node for seat in job.roster)} - {state.node}:
            jobs.setdefault(node, []).append(name)
        if not job.leads:
            leads.setdefault(job.lead, []).append(name)
    return tuple(
        PeerStatus(
            node,
            max(0.0, now - heard_at[node]) if node in heard_at else None,
            tuple(names),
            tuple(leads.get(node, ())),
        )
        for node, names in sorted(jobs.items())
    )


def _need(need: Need) -> NeedStatus:
    return NeedStatus(need.total_s, need.save_s, need.flush_s, need.halt_s, need.by, need.measured)


def _feed(feed: Feed, shell: Shell, now: float) -> FeedStatus:
    reading = feed.reading if feed.comm is Comm.OK else None
    return FeedStatus(
        name=feed.name,
        comm=feed.comm.value,
        detail=feed.detail,
        tokens=tuple(sorted(reading.tokens)) if reading else (),
        on_battery=feed.on_battery if reading else None,
        charge_pct=reading.charge_pct if reading else None,
        runtime_s=reading.runtime_s if reading else None,
        load_pct=reading.load_pct if reading else None,
        voltage=reading.voltage if reading else None,
        fresh_s=None if feed.last_good_at is None else max(0.0, now - feed.last_good_at),
        login_held=shell.logins.get(feed.name),
        login_problem=shell.login_problems.get(feed.name, ""),
    )


def _job(job: Job, now: float) -> JobStatus:
    saved = job.saved
    return JobStatus(
        name=job.name,
        world_size=job.world_size,
        directory=job.directory,
        outcome=job.outcome if living(job) else "gone",
        why=job.why,
        ranks=tuple(_rank(job.members[rank], now) for rank in sorted(job.members)),
        saved_step=saved.step if saved else None,
        saved_generation=saved.generation if saved else "",
        saved_s=max(0.0, now - saved.at) if saved else None,
    )


def _rank(member: Member, now: float) -> RankStatus:
    pace = member.pace
    return RankStatus(
        rank=member.rank,
        alive=member.alive,
        step=member.step if member.step >= 0 else None,
        busy=member.busy,
        heard_s=max(0.0, now - member.heard_at),
        step_s=pace.step_s or None,
        stage_s=pace.stage_s or None,
        write_s=(pace.write_s + pace.fsync_s) or None,
        state_bytes=pace.state_bytes or None,
        gone=member.gone,
    )
