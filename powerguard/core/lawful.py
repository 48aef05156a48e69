"""The laws of a decision, checked in production after each one. A breach is powerguard's own fault.

Each law is one function that yields what is wrong; *before* is the state that the decision was made from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from powerguard.core.job import Job, Member, Stage
from powerguard.core.messages import Ack, Decide, Exit, Prepare, Purpose, Quiesce, Welcome
from powerguard.core.policy import Policy
from powerguard.core.serve import MAX_STOPS
from powerguard.core.state import Decision, State
from powerguard.core.types import Announce, Halt, Phase, Send
from powerguard.errors import InvariantError

NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.ONLINE: frozenset({Phase.ON_BATTERY, Phase.FLUSHING, Phase.PARKED}),
    Phase.ON_BATTERY: frozenset({Phase.ONLINE, Phase.FLUSHING, Phase.PARKED}),
    Phase.FLUSHING: frozenset({Phase.ONLINE, Phase.PARKED, Phase.HALTING}),
    Phase.PARKED: frozenset({Phase.ONLINE, Phase.HALTING}),
    Phase.HALTING: frozenset({Phase.ONLINE}),
}
"""The phases that may follow each phase; the diagram in the documentation is drawn from it."""

SENDS_PER_RANK = 8
ANNOUNCES = 64
ANNOUNCES_PER_JOB = 4
_EPSILON_S = 1e-6
_NOBODY = Member(-1, 0, 0)


def check(policy: Policy, before: State, decision: Decision, now: float) -> None:
    """Raise InvariantError, naming every breach, unless *decision* is lawful."""
    after = decision.state
    broken = [
        *_phases(policy, before, after, now),
        *_halts(before, decision),
        *_growth(before, after),
        *_deadline(before, after),
        *_stops(before, after),
        *_sends(before, decision),
        *_bounded(decision),
    ]
    if broken:
        raise InvariantError("; ".join(broken), todo="please report this with the journal")


def _phases(policy: Policy, before: State, after: State, now: float) -> Iterator[str]:
    """Only along the graph, with an instant and a name for every event, and online only with mains.

    Training that paused in a silence, for its snapshot alone, goes on in the same silence."""
    was, now_in = before.phase, after.phase
    if was is now_in:
        if after.view.phase_since != before.view.phase_since:
            yield f"{now_in.value} was entered twice"
    else:
        if now_in not in NEXT[was]:
            yield f"there is no way from {was.value} to {now_in.value}"
        if after.view.phase_since != now or not after.view.why:
            yield f"{now_in.value} was entered without an instant or a reason"
    power, paused = after.power, was is Phase.FLUSHING and before.view.pause_at is not None
    mains = power is not None and (power.on_battery is False or (paused and power.on_battery is None))
    if now_in is Phase.ONLINE and was is not Phase.ONLINE and not mains:
        yield f"online from {was.value} without mains"
    if now_in is Phase.ON_BATTERY and was is not now_in and (after.power is None or not after.power.on_battery):
        yield "on_battery while no feed says so"
    gave_up = was is Phase.FLUSHING and now_in is Phase.ONLINE and not paused
    if gave_up and now - before.phase_since < policy.flush_max_s:
        yield f"a flush was given up after {now - before.phase_since:.0f} s"
    if bool(after.event) == (now_in is Phase.ONLINE):
        yield f"{now_in.value} with event {after.event!r}"
    if after.boot != before.boot:
        yield "a state of another boot"


def _halts(before: State, decision: Decision) -> Iterator[str]:
    """HALTING is committed, needs battery or an FSD, and powers off once, after the ranks were told to leave."""
    after = decision.state
    was, view = before.view, decision.state.view
    halts = sum(isinstance(action, Halt) for action in decision.actions)
    if was.phase is Phase.HALTING and view.phase is not Phase.HALTING and not was.dry:
        yield "halting was left"
    if view.phase is Phase.HALTING and was.phase is not Phase.HALTING:
        on_battery = after.power is not None and after.power.on_battery is True
        if not on_battery and view.fsd_at is None:
            yield "halting without battery or an FSD"
    if halts and (view.phase is not Phase.HALTING or view.exit_at is None):
        yield f"a power-off in {view.phase.value} before ranks were told to leave"
    if halts > 1 or (halts and was.halted_at is not None):
        yield "a second power-off"
    if bool(halts) != (view.halted_at is not None and was.halted_at is None):
        yield "a power-off that the state doesn't know of, or the reverse"


def _growth(before: State, after: State) -> Iterator[str]:
    """Sequence numbers and event numbers only grow, and an event keeps its name."""
    if after.seq < before.seq or after.event_n < before.event_n:
        yield f"seq {before.seq} -> {after.seq} or event {before.event_n} -> {after.event_n} fell"
    if before.event and after.event and after.event != before.event:
        yield f"event {before.event} turned into {after.event}"
    if after.event and not before.event and after.event_n == before.event_n:
        yield f"event {after.event} reuses a number"
    for name, job in after.jobs.items():
        if job.order is not None and job.order.seq > after.seq:
            yield f"{name} has order {job.order.seq}, beyond {after.seq}"


def _deadline(before: State, after: State) -> Iterator[str]:
    """The instant that ranks were given never recedes, unless mains lifted it."""
    if before.deadline_at is None or after.deadline_at is None:
        return
    if after.deadline_at > before.deadline_at + _EPSILON_S:
        yield f"the deadline recedes by {after.deadline_at - before.deadline_at:.3f} s"


def _stops(before: State, after: State) -> Iterator[str]:
    """A STOP is carried to its end: not withdrawn, not moved, not given twice."""
    for name, job in after.jobs.items():
        old = before.jobs.get(name)
        if old is None:
            continue
        yield from _stop_kept(name, old, job, after)
    if after.phase is Phase.PARKED and before.phase is Phase.FLUSHING:
        for name, job in after.jobs.items():
            if not after.concerns(name):
                continue
            if job.alive and (job.order is None or job.order.purpose is not Purpose.STOP or job.outcome == "underway"):
                yield f"parked while {name} is {job.outcome}"


def _stop_kept(name: str, old_job: Job, job: Job, after: State) -> Iterator[str]:
    old, new = old_job.order, job.order
    if old is None or old.over or old.purpose is not Purpose.STOP:
        return
    if old_job.spans or job.spans:  # other nodes have a say: what is decided stays where it is, all the same
        if new is not None and new.seq == old.seq and old.step >= 0 and new.step != old.step:
            yield f"{name}: the stop step moved from {old.step} to {new.step}"
        return
    if new is None:
        if _same_processes(old_job, job):
            yield f"{name}: stop {old.seq} was forgotten"
        return
    if new.seq == old.seq:
        if old.step >= 0 and new.step != old.step:
            yield f"{name}: the stop step moved from {old.step} to {new.step}"
        if new.over and after.phase not in (Phase.ONLINE, Phase.ON_BATTERY):
            yield f"{name}: stop {old.seq} was withdrawn in {after.phase.value}"
        return
    if new.purpose is not Purpose.STOP:
        yield f"{name}: stop {old.seq} was overtaken by a snapshot"
    if new.event == old.event and _same_processes(old_job, job):
        if old.stage in (Stage.SEALING, Stage.SEALED):
            yield f"{name}: a second stop, {new.seq} after {old.seq}, for event {new.event}"
        elif after.stops.get(name, 0) > MAX_STOPS:
            yield f"{name}: more than {MAX_STOPS} stops in event {new.event}"


def _same_processes(old: Job, new: Job) -> bool:
    """Some process that was given the old stop lives on."""
    parts = {} if old.order is None else old.order.parts
    return any(
        member.alive and rank in new.members and new.members[rank].pid == member.pid and new.members[rank].alive
        for rank, member in old.members.items()
        if rank in parts and not parts[rank].anew
    )


def _sends(before: State, decision: Decision) -> Iterator[str]:
    """Messages go to known ranks, and stop or send them away only in the phases for it."""
    phase = decision.state.phase
    for action in decision.actions:
        if not isinstance(action, Send) or isinstance(action.message, (Welcome, Ack)):
            continue
        job = decision.state.jobs.get(action.job) or before.jobs.get(action.job)
        if job is None or action.rank not in job.members:
            yield f"{type(action.message).__name__} to the unknown rank {action.rank} of {action.job}"
        message = action.message
        if job is not None and job.members.get(action.rank, _NOBODY).node:
            yield f"{type(message).__name__} to rank {action.rank} of {action.job}, which is another node's"
        if job is not None and job.spans:
            continue  # another node's power may ask for it
        stop = isinstance(message, (Prepare, Decide)) and message.purpose is Purpose.STOP
        if stop and {phase, before.phase} <= {Phase.ONLINE, Phase.ON_BATTERY}:
            yield f"a stop is sent in {phase.value}"
        if isinstance(message, (Quiesce, Exit)) and Phase.HALTING not in (phase, before.phase):
            yield f"{type(message).__name__} is sent in {phase.value}"


def _bounded(decision: Decision) -> Iterator[str]:
    """No decision floods ranks or people."""
    sends = Counter(
        (action.job, action.rank)
        for action in decision.actions
        if isinstance(action, Send) and not isinstance(action.message, (Welcome, Ack))
    )
    for (job, rank), count in sends.items():
        if count > SENDS_PER_RANK:
            yield f"{count} messages at once to rank {rank} of {job}"
    announces = sum(isinstance(action, Announce) for action in decision.actions)
    if announces > ANNOUNCES + ANNOUNCES_PER_JOB * len(decision.state.jobs):
        yield f"{announces} announcements at once"
