"""The shipped core in the benchmark's world: `supply.hear`, `feeds.view` and `transition.transition`, untouched.

Only what surrounds them is simulated: ranks that need so long to save, a snapshot written in the background.
Several needs share the estimator while the node trains, because nothing of it depends on the need.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from msgspec.structs import replace

from policy.outcome import Outcome
from policy.world import CAP_AT_S, CAP_SHARE, FAR_S, FEED, POLL_S, Poll, Track, look, poll_s, trained
from powerguard.core.bound import VOLT_EARLY_S
from powerguard.core.feeds import Feed, Power, step_load, view
from powerguard.core.need import Need, eased
from powerguard.core.phase import Do, Flush, FlushView, PhaseView
from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.serve import PARKS
from powerguard.core.supply import hear
from powerguard.core.transition import transition
from powerguard.core.types import Phase, Reading

PARKED_FINE_S = 60.0  # a node that was parked for longer is looked at seldom (`FAR_POLL_S`)
EARLIER_S = 900.0  # a recent outage ended so long before this one

T0 = 100_000.0
"""Boot-time seconds of the transfer; the core sees instants, the benchmark counts from the transfer."""


@dataclass(slots=True)
class Job:
    """The ranks of the node, as far as the phases see them."""

    flush_s: float  # actual
    measured_s: float
    need: Need  # what `need.reckon` makes of one job of one rank that has measured itself
    snapshot_done: float = math.inf  # instant at which the snapshot that is being written is durable
    durable_from: float | None = None  # when the newest durable snapshot of this outage was staged
    snapshots: int = 0

    @property
    def staged_at(self) -> float:
        """When the last snapshot was staged."""
        return self.snapshot_done - self.flush_s

    def writing(self, now: float) -> bool:
        """A snapshot is being written."""
        return self.snapshots > 0 and now < self.snapshot_done < math.inf


def job_of(policy: Policy, track: Track, need_s: float) -> Job:
    """A job whose flush was measured to take *need_s*. A snapshot underway never counts more than the flush."""
    planned_s = policy.flush_factor * need_s
    need = Need(
        flush_s=planned_s,
        write_s=planned_s,
        halt_s=policy.halt_s,
        save_s=planned_s,
        total_s=planned_s + policy.halt_s,
        eased=eased(policy.flush_load),
    )
    return Job(need_s * track.outage.flush_x, need_s, need)


def policy_of(track: Track, *, learned: bool) -> Policy:
    """Defaults, what the operator may know of this UPS, and what a drill measured: the load while ranks flush."""
    outage = track.outage
    feed = FeedPolicy(
        name=FEED,
        age_y=outage.age_y if outage.age_known else None,
        rated=outage.rated,
        learned_phi=outage.learned_phi if learned else None,
    )
    load = outage.load
    training = load.capped(CAP_SHARE) if track.capped else load.train_pct
    return Policy(feeds=(feed,), flush_load=min(1.0, load.flush_pct / training))


def begin(policy: Policy, track: Track) -> dict[str, Feed]:
    """The feed as the daemon knows it when the mains fail: seen on line, perhaps through an earlier outage."""
    outage, feed = track.outage, Feed(FEED, T0 - 10_000.0, comm_since=T0 - 10_000.0)
    story: list[Reading] = list(track.prelude)
    if outage.recent:
        first = track.prelude[0]
        was_s = min(3600.0, max(10.0, (1.0 - outage.spec.soc) * track.polls[0].ups.truth_s())) if track.polls else 10.0
        times = (-EARLIER_S - was_s, -EARLIER_S - was_s + 2.0, -EARLIER_S - 1.0)
        full = replace(first, charge_pct=None if first.charge_pct is None else 100.0)
        earlier = [replace(full, at=times[0] - 10.0)]
        earlier += [replace(full, at=at, on_battery=True, tokens=frozenset({"OB"})) for at in times]
        story = [*earlier, replace(first, at=-EARLIER_S), *story]
    for reading in story:
        feed = hear(policy, feed, reading, "", T0 + reading.at)
    return {FEED: feed}


def play_ours(track: Track, needs: tuple[float, ...], *, learned: bool) -> dict[float, Outcome]:
    """The shipped policy, for all needs at once."""
    policy = policy_of(track, learned=learned)
    known = begin(policy, track)
    views = {need: PhaseView() for need in needs}
    jobs = {need: job_of(policy, track, need) for need in needs}
    longest_s = max(job.need.used_s for job in jobs.values()) + policy.margin_s
    outcomes: dict[float, Outcome] = {}
    capped = False
    for poll in track.polls:
        now = T0 + poll.t
        if track.capped and not capped and poll.t > CAP_AT_S:
            capped = True
            known = step_load(policy, known, now, track.outage.load.capped(CAP_SHARE) / track.outage.load.train_pct)
        known = {FEED: hear(policy, known[FEED], poll.reading, "", now)}
        shared = _shared(policy, known, longest_s, now)
        for need in needs:
            if need in outcomes:
                continue
            job = jobs[need]
            _settle(job, now)
            nxt, power = _step(policy, views[need], known, job, flush=Flush.IDLE, now=now, power=shared)
            views[need] = nxt
            if nxt.phase in (Phase.FLUSHING, Phase.PARKED):
                outcomes[need] = _parked(policy, track, poll, known, phase=nxt, job=job, power=power)
        if len(outcomes) == len(needs):
            return outcomes
    for need in needs:
        if need not in outcomes:
            outcomes[need] = _unstopped(track, jobs[need])
    return outcomes


def _settle(job: Job, now: float) -> None:
    if now >= job.snapshot_done:
        job.durable_from = job.staged_at


def _shared(policy: Policy, known: dict[str, Feed], longest_s: float, now: float) -> Power | None:
    """The view of the node if it is the same for all needs: it depends on them only where the reported runtime is
    within one of them, in the first minute, where the battery has said nothing yet, and in tests of it (there are
    none here)."""
    reading, draw = known[FEED].reading, known[FEED].runway.draw
    if draw is None or not draw.arrived or now - draw.since <= VOLT_EARLY_S:
        return None
    if reading is not None and reading.runtime_s is not None and reading.runtime_s <= longest_s:
        return None
    return view(policy, known, now, save_s=0.0, halt_s=policy.halt_s)


def _step(
    policy: Policy,
    phase: PhaseView,
    known: dict[str, Feed],
    job: Job,
    *,
    flush: Flush,
    now: float,
    power: Power | None = None,
) -> tuple[PhaseView, Power]:
    """One decision; two at the first poll of an outage, as the daemon's loop would make them within 0.2 s."""
    need = job.need
    if job.writing(now):
        need = replace(need, pending_s=max(0.0, job.measured_s - (now - job.staged_at)))
    if power is None:
        power = view(policy, known, now, save_s=need.used_s + policy.margin_s, halt_s=need.halt_s)
    seen = FlushView(state=flush, underway=job.writing(now) or flush is Flush.UNDERWAY, quiet=False, gone=False)
    nxt = transition(policy, phase, power, need, seen, now)
    if nxt.phase is Phase.ON_BATTERY and phase.phase is Phase.ONLINE:
        nxt = transition(policy, nxt.view, power, need, seen, now)
    if Do.SNAPSHOT in nxt.orders:
        job.snapshots += 1
        job.snapshot_done = now + job.flush_s
    return nxt.view, power


def _unstopped(track: Track, job: Job) -> Outcome:
    ridden = track.out_at is None
    until = track.mains_at if ridden else (track.out_at or 0.0)
    _settle(job, T0 + until)
    kept = until if ridden or job.durable_from is None else job.durable_from - T0
    return Outcome(
        trained_s=_trained(track, kept, job),
        final=ridden,
        early=job.durable_from is not None,
        out=not ridden,
        saves=job.snapshots,
        why="never stopped",
    )


def _trained(track: Track, until: float, job: Job) -> float:
    early_at = job.staged_at - T0 if job.snapshots else None
    return trained(track, until, early_at, job.flush_s, job.snapshots)


def _parked(
    policy: Policy, track: Track, poll: Poll, known: dict[str, Feed], *, phase: PhaseView, job: Job, power: Power
) -> Outcome:
    """From the stop on: flush, hold, halt, or mains back."""
    outage, load = track.outage, track.outage.load
    ups, t = poll.ups.copy(), poll.t
    now = T0 + t
    outcome = Outcome(trained_s=_trained(track, t, job), saves=job.snapshots + 1, why=phase.why)
    writing = job.writing(now)
    kept_from = job.staged_at if writing else job.durable_from
    fresh_s = job.measured_s + (job.snapshot_done - now if writing else 0.0)
    runway_s = power.runway_s if phase.pause_at is None else power.prior_s
    left_s = math.inf if runway_s is None else runway_s / eased(policy.flush_load)
    if (writing or job.durable_from is not None) and left_s < fresh_s:
        flushed_at = job.snapshot_done if writing else now  # a fresh one wouldn't fit: the snapshot is kept
        outcome.trained_s = _trained(track, (kept_from or T0) - T0, job)
    else:
        flushed_at = (job.snapshot_done if writing else now) + job.flush_s
    halt_at = math.inf
    if now >= flushed_at:
        outcome.final = True
    parked_t = 0.0
    while True:
        halting = phase.phase is Phase.HALTING
        step_s = POLL_S if halting or not outcome.final else poll_s(FAR_S - PARKED_FINE_S + parked_t)
        parked_t += step_s
        pct = load.halt_pct if halting else load.flush_pct if now < flushed_at else load.idle_pct
        ups.step(step_s, mains=False, load_pct=pct)
        t, now = t + step_s, now + step_s
        if not ups.alive or (halting and now >= halt_at):
            outcome.halted, outcome.out = ups.alive, not (ups.alive and outcome.final)
            outcome.early = job.durable_from is not None
            if not outcome.final and job.durable_from is not None:
                outcome.trained_s = _trained(track, job.durable_from - T0, job)
            return outcome
        _settle(job, now)
        outcome.final = outcome.final or now >= flushed_at
        if halting:
            continue
        if t >= track.mains_at:
            outcome.final = True
            return outcome
        reading = look(ups, outage, t)
        known = {FEED: hear(policy, known[FEED], reading, "", now)}
        phase, _ = _step(policy, phase, known, job, flush=Flush.PARKED if outcome.final else Flush.UNDERWAY, now=now)
        if phase.phase is Phase.ONLINE:
            outcome.early, outcome.final = True, False
            return _after_pause(policy, track, Poll(t, reading, ups), known, phase=phase, job=job, outcome=outcome)
        if phase.phase is Phase.PARKED:  # said at each look, as `serve.entered` does
            known = step_load(policy, known, now, PARKS)
        if phase.phase is Phase.HALTING:
            outcome.why += f"; {phase.why}"
            halt_at = now + outage.halt_s


def _after_pause(
    policy: Policy, track: Track, poll: Poll, known: dict[str, Feed], *, phase: PhaseView, job: Job, outcome: Outcome
) -> Outcome:
    """Training goes on after a silence's pause, at a steady load. What it still gains isn't counted."""
    outage, ups, t = track.outage, poll.ups, poll.t
    while True:
        ups.step(POLL_S, mains=False, load_pct=outage.load.train_pct)
        t += POLL_S
        if not ups.alive or t >= track.mains_at:
            outcome.out = not ups.alive
            return outcome
        reading = look(ups, outage, t)
        known = {FEED: hear(policy, known[FEED], reading, "", T0 + t)}
        phase, power = _step(policy, phase, known, job, flush=Flush.IDLE, now=T0 + t)
        if phase.phase in (Phase.FLUSHING, Phase.PARKED):
            kept_s = outcome.trained_s
            outcome = _parked(policy, track, Poll(t, reading, ups), known, phase=phase, job=job, power=power)
            outcome.early, outcome.trained_s = True, kept_s
            return outcome
