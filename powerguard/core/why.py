"""Why to snapshot, to stop, to halt: the thresholds, each answered with a sentence or with "" for "no".

Questions only: nothing here changes anything. Numbers that operators may set are in `Policy`.
"""

from __future__ import annotations

from msgspec import Struct

from powerguard.core import outages
from powerguard.core.feeds import Power
from powerguard.core.need import Need
from powerguard.core.phase import Flush, FlushView, PhaseView
from powerguard.core.policy import Policy

REPEAT_S = 900.0
"""An outage so soon after the last one isn't waited out: outages come in series (NPL survey)."""

PRESSING_FROM_S, PRESSING_NEEDS = 2.0, 5.0
"""With a prior of fewer needs than this a snapshot is due after two looks. A battery that is weaker than anybody knows
dies in seconds, and each second that the snapshot begins sooner saves some (simulated)."""

RETRY_S = 60.0
"""A snapshot that failed is tried again after this long."""

AGAIN_SAVES = 6.0
"""Snapshots are so many flushes apart at least. One slows the training by a seventh while it is written, so they cost a
fortieth of it at most; what is at risk meanwhile is lost in one long outage of a hundred (simulated)."""

LATE = 2.0
"""A flush that takes so many times its plan is late. Writes vary: 1.5 times happens, and a save lost by impatience
is lost for sure (simulated outages: giving up at the plan loses 5-9 % of the runs, at twice the plan none)."""

SUSTAINED_S = 300.0
"""An outage that lasts so much longer is a sustained one (IEEE 1366): nothing a battery in a rack rides through."""

DOUBT_S = 20.0
"""From here on a runway that is still unknown is doubtful: the estimator may stay silent for 16 s."""

DOUBT_FACTOR = 3.0
"""A spare of fewer saves than this is doubtful."""


class Case(Struct, frozen=True):
    """All that one step of the phase machine may weigh."""

    policy: Policy
    view: PhaseView
    power: Power
    need: Need
    flush: FlushView
    now: float

    @property
    def on_battery_s(self) -> float:
        """Seconds since the outage began; 0 without one."""
        return 0.0 if self.view.event_at is None else self.now - self.view.event_at

    @property
    def phase_s(self) -> float:
        """Seconds in this phase."""
        return self.now - self.view.phase_since

    @property
    def back_s(self) -> float:
        """Seconds that mains have been back."""
        since = self.power.online_since
        return 0.0 if since is None or self.power.on_battery is not False else max(0.0, self.now - since)

    @property
    def spare_s(self) -> float | None:
        """Runway less need and margin; None = unknown."""
        runway = self.power.runway_s
        return None if runway is None else runway - self.need.used_s - self.policy.margin_s


def why_stop(case: Case) -> str:
    """Why training must stop now, on battery."""
    policy, power = case.policy, case.power
    if power.save_now:
        return power.save_now
    if power.blind_s is not None and power.blind_s >= policy.blind_save_s:
        return f"on battery and nothing fresh from the UPS for {power.blind_s:.0f} s"
    if power.runway_s is not None and power.runway_s - case.need.used_s <= policy.margin_s:
        return (
            f"runway {power.runway_s:.0f} s ({power.by}) <= "
            f"need {_need_text(case.need)} + margin {policy.margin_s:.0f} s"
        )
    if power.runway_s is None and case.on_battery_s >= policy.blind_save_s:
        return f"runway still unknown after {case.on_battery_s:.0f} s on battery"
    if case.flush.strays:
        return "on battery, and ranks are parked by an order of an earlier daemon"
    if policy.on_battery == "park" and case.on_battery_s >= policy.snapshot_after_s:
        return f"on battery for {case.on_battery_s:.0f} s and configured to park"
    return ""


def why_snapshot(case: Case) -> str:
    """Why all ranks should stage now and train on, on battery.

    It pays when a lost run costs at least C^2/2 seconds (C = a flush as measured, without the factor on it; 20,000
    simulated outages, asynchronous writes), where outages last as the default prior has it. Where they end sooner, by
    what the site's own taught, a lost run weighs less in proportion, and more where they last longer.
    """
    policy, view, need = case.policy, case.view, case.need
    if policy.snapshot == "never" or case.flush.state is Flush.NONE or case.flush.underway:
        return ""
    if view.snapshot_at is None:
        word = f"on battery for {case.on_battery_s:.0f} s"
        if case.on_battery_s < policy.snapshot_after_s:
            since_last = _since_last(view)
            if since_last is not None and since_last < REPEAT_S:
                word = f"another outage, {since_last:.0f} s after the last one"
            elif _pressing(case):
                word += f", and perhaps no more than {case.power.prior_s:.0f} s left"
            else:
                return ""
    else:
        age = case.now - view.snapshot_at
        if age < (RETRY_S if case.flush.failed else max(policy.snapshot_again_s, AGAIN_SAVES * need.flush_s)):
            return ""
        word = f"the last one failed {age:.0f} s ago" if case.flush.failed else f"{age:.0f} s of work at risk"
    spare = case.spare_s
    if spare is not None and spare <= need.write_s:
        return ""  # the stop is so near that a snapshot would only be in the way of its flush
    if policy.snapshot == "always":
        return word
    lasts, usual = _sustained(case, outages.of(policy.outages)), _sustained(case, outages.DEFAULT)
    if policy.loss_weight_s * lasts / usual >= (need.flush_s / policy.flush_factor) ** 2 / 2:
        here = f", {100.0 * lasts:.0f} % of such outages are long here" if policy.outages else ""
        return f"{word}{here}, a save of {need.flush_s:.0f} s pays"
    if spare is None and case.on_battery_s >= DOUBT_S * policy.time_scale:
        return f"{word}, the runway is unknown"
    if spare is not None and spare < DOUBT_FACTOR * need.save_s:
        return f"{word}, the runway is doubtful ({spare_text(case)})"
    return ""


def _pressing(case: Case) -> bool:
    """What is known beforehand is so little that the debounce isn't waited for, only the second look."""
    prior_s = case.power.prior_s
    early = case.on_battery_s >= PRESSING_FROM_S * case.policy.time_scale
    return early and prior_s is not None and prior_s < PRESSING_NEEDS * case.need.total_s


def _sustained(case: Case, known: outages.Outages) -> float:
    """The probability that this outage lasts `SUSTAINED_S` more."""
    return max(1e-6, 1.0 - outages.back_within(known, case.on_battery_s, SUSTAINED_S))


def _since_last(view: PhaseView) -> float | None:
    """Seconds between the end of the last outage and the beginning of this one."""
    if view.ended_at is None or view.event_at is None:
        return None
    return max(0.0, view.event_at - view.ended_at)


def why_snapshot_unheard(case: Case) -> str:
    """Why all ranks should stage now, on line as far as known, with nobody to say so: once for each silence."""
    policy, view = case.policy, case.view
    if policy.snapshot == "never" or case.flush.state is Flush.NONE or case.flush.underway or view.unknown_at is None:
        return ""
    silent_s = case.now - view.unknown_at
    if silent_s < policy.snapshot_after_s:
        return ""
    if view.snapshot_at is not None:
        age = case.now - view.snapshot_at
        if view.snapshot_at >= view.unknown_at or age < policy.snapshot_again_s:
            return ""
    return f"nobody knows for {silent_s:.0f} s whether mains are there: {case.power.reason}"


def why_pause(case: Case) -> str:
    """Why training must stop until the snapshot of this silence is durable: should the mains have failed with the last
    word, the battery surely doesn't carry training and the rest of its writing. Once for each silence, of as long as
    stops training on battery."""
    policy, view, left = case.policy, case.view, case.power.prior_s
    if view.unknown_at is None or view.snapshot_at is None or view.snapshot_at < view.unknown_at:
        return ""
    if view.pause_at is not None or case.flush.state is Flush.NONE or not case.flush.underway or left is None:
        return ""
    silent_s, rest_s = case.now - view.unknown_at, case.need.pending_s
    if silent_s < policy.blind_save_s or rest_s + policy.margin_s <= left:
        return ""
    return (
        f"nobody knows for {silent_s:.0f} s whether mains are there; the battery surely holds {left:.0f} s, and the "
        f"snapshot takes {rest_s:.0f} s more: training pauses for it"
    )


def why_halt(case: Case) -> str:
    """Why a parked node on battery must be powered off now."""
    policy, power, view = case.policy, case.power, case.view
    why = _nearly_spent(case)
    if why:
        return why
    if power.blind_s is not None and power.blind_s >= policy.blind_halt_s:
        return f"parked on battery and nothing fresh from the UPS for {power.blind_s:.0f} s"
    parked_s = case.now - max(view.phase_since, view.event_at or 0.0)
    if parked_s >= policy.park_max_s:
        return f"parked on battery for {parked_s:.0f} s, at most {policy.park_max_s:.0f} s"
    return ""


def why_halt_unflushed(case: Case) -> str:
    """Why to halt with a flush underway: power is nearly gone *and* the flush is late.

    One that isn't goes on, whatever the bound: giving it up loses the save for sure, and a bound is cautious.
    """
    power, need, took = case.power, case.need, case.phase_s
    late = took >= LATE * need.save_s
    if case.view.fsd_at is not None and case.now - case.view.fsd_at >= case.policy.fsd_s:
        return f"FSD {case.now - case.view.fsd_at:.0f} s ago, the primary waits no longer"
    why = _nearly_spent(case)
    if why and late:
        return f"{why}, and the flush is late ({took:.0f} s, planned {need.save_s:.0f} s)"
    if late and power.blind_s is not None and power.blind_s >= case.policy.blind_halt_s:
        return f"nothing fresh from the UPS for {power.blind_s:.0f} s, and the flush is late ({took:.0f} s)"
    if power.idle_runway_s is None and took >= case.policy.flush_max_s:
        return f"runway unknown, and the flush isn't done after {took:.0f} s"
    return ""


def _nearly_spent(case: Case) -> str:
    """Why power must be presumed nearly gone even with parked ranks."""
    power, halt_s, margin_s = case.power, case.need.halt_s, case.policy.margin_s
    if power.halt_now:
        return power.halt_now
    if power.idle_runway_s is not None and power.idle_runway_s <= halt_s + margin_s:
        return f"idle runway {power.idle_runway_s:.0f} s ({power.by}) <= halt {halt_s:.0f} s + margin {margin_s:.0f} s"
    return ""


def _need_text(need: Need) -> str:
    """The need in seconds of the training load, and as a clock would count it where that is more."""
    plain = f"{need.used_s:.0f} s"
    return plain if need.eased >= 1.0 else f"{plain} of this load ({need.total_s:.0f} s at a flush's)"


def spare_text(case: Case) -> str:
    """Runway against need, in numbers."""
    if case.power.runway_s is None:
        return f"runway unknown, need {_need_text(case.need)}"
    return f"runway {case.power.runway_s:.0f} s ({case.power.by}), need {_need_text(case.need)}"
