"""Reference policy: a plain robust estimator with an early save, written from its recipe, apart from the product.

It validates the population: if this loses more than a handful or keeps far less than half, the population is at fault;
if the shipped core does worse than this, the core is. Recipe and constants: lower bound = 0.80 x the smallest of
(firmware runtime over its own tick rate, charge slope, volts), an age prior where only one kind of evidence exists;
snapshot after 10 s, stop at the need, hold idle, halt late.
"""

from __future__ import annotations

import math
from collections import deque
from copy import copy
from itertools import pairwise

from policy.outcome import Outcome
from policy.world import CAP_AT_S, CAP_SHARE, POLL_S, Poll, Track, look, trained
from powerguard.core.types import Comm, Reading
from powerguard.sim.population import Outage

HALT_S = 45.0
LEVELS = (
    (1.70, 0),
    (1.79, 45),
    (1.854, 120),
    (1.891, 180),
    (1.918, 240),
    (1.941, 300),
    (1.96, 400),
    (1.975, 500),
    (2.0, 800),
)
AGES = ((0, 0.75), (2, 0.70), (3, 0.60), (4, 0.42), (5, 0.28), (6, 0.18), (7, 0.12))


def _between(points: tuple[tuple[float, float], ...], x: float) -> float:
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]


class F5:
    """Estimator of one outage; `see` takes readings, `bound` and `halt_now` answer."""

    def __init__(self, outage: Outage, prelude: list[Reading], learned: bool) -> None:
        spec = outage.spec
        self.recent = outage.recent
        self.lfp = spec.chemistry == "lfp"
        self.age = outage.age_y if outage.age_known else None
        self.learned = 0.85 * outage.learned_phi if learned else None
        last = prelude[-1]
        self.r0, self.p0 = last.runtime_s, max(1.0, last.load_pct or 1.0)
        self.soc0 = (1.0 if last.charge_pct is None else last.charge_pct / 100.0) - (0.3 if self.recent else 0.0)
        self.rated = outage.rated
        v0 = None if last.voltage is None else last.voltage / ((last.voltage_nominal or 12.0) / 2.0)
        self.volts_ok = not self.lfp and v0 is not None and 2.05 <= v0 <= 2.45
        self.p: float | None = None
        self.x = 0.0
        self.quantum = 60.0
        self.r12: float | None = None
        self.recentL: deque[float] = deque(maxlen=3)
        self.lb_polls = 0
        self.lb_since: float | None = None
        self.explained = False
        self.fresh_at = 0.0
        self.last: Reading | None = None
        self.last_t = 0.0
        self.changed_r = self.changed_c = self.changed_v = 0.0
        self.v = self.v8 = self.v40 = None
        self.old_kappa = 1.0
        self.old_slope = 0.0
        self.period = last.pollfreq_s or 30.0
        self.restart(0.0)

    def copy(self) -> F5:
        twin = copy(self)
        twin.recentL = self.recentL.copy()
        twin.ticks = self.ticks.copy()
        twin.drops = self.drops.copy()
        return twin

    def restart(self, t: float) -> None:
        """A load step: slopes start anew."""
        self.t0 = t
        self.ticks: list[tuple[float, float]] = []  # (t, runtime normalised) at changes
        self.drops: list[tuple[float, float]] = []  # (t, charge) at changes
        self.p_ref: float | None = None

    def load_step(self, t: float, factor: float) -> None:
        self.old_kappa = self.kappa(t)
        self.old_slope = self.slope(t) * factor**1.2
        if self.p is not None:
            self.p *= factor
        self.recentL.clear()
        self.restart(t)

    def see(self, reading: Reading, t: float) -> None:
        if reading.comm is not Comm.OK:
            self.lb_polls = 0
            self.last_t = t
            return
        dt = t - self.last_t
        self.last_t = t
        if self.last is None or (reading.charge_pct, reading.runtime_s, reading.voltage, reading.load_pct) != self.last:
            pass
        self.fresh_at = t
        load = max(1.0, reading.load_pct or 1.0)
        self.p = load if self.p is None else self.p + (load - self.p) * min(1.0, dt / 15.0)
        self.x += dt / self.rated_s(self.p)
        self.see_claims(reading, t)
        r, c = reading.runtime_s, reading.charge_pct
        old = self.last
        if r is not None and ((r <= 0 and (c or 0) > 10) or r >= 64800 or load < 10):
            r = None
        if r is not None:
            if r % 60 != 0:
                self.quantum = 6.0
            if self.p_ref is None:
                self.p_ref = self.p
            self.r12 = r if self.r12 is None else self.r12 + (r - self.r12) * min(1.0, dt / 12.0)
            if old is None or old.runtime_s != r:
                self.changed_r = t
                if t - self.t0 >= 10:
                    self.ticks.append((t, r * (self.p / self.p_ref) ** 1.2))
        if c is not None and (old is None or old.charge_pct != c):
            self.changed_c = t
            self.drops.append((t, c))
        if self.volts_ok and reading.voltage is not None:
            v = reading.voltage / ((reading.voltage_nominal or 12.0) / 2.0)
            if v != self.v:
                self.changed_v = t
            self.v = v
            self.v8 = v if self.v8 is None or t - self.t0 < 20 else self.v8 + (v - self.v8) * min(1.0, dt / 8.0)
            self.v40 = v if self.v40 is None or t - self.t0 < 20 else self.v40 + (v - self.v40) * min(1.0, dt / 40.0)
        self.last = reading

    def see_claims(self, reading: Reading, t: float) -> None:
        if not reading.low_battery:
            self.lb_polls, self.lb_since = 0, None
            return
        self.lb_polls += 1
        self.lb_since = t if self.lb_since is None else self.lb_since
        r, low, c, clow = reading.runtime_s, reading.runtime_low_s, reading.charge_pct, reading.charge_low_pct
        self.explained = (r is not None and low is not None and r <= 1.1 * low) or (
            c is not None and clow is not None and c <= clow + 1
        )

    def rated_s(self, p: float) -> float:
        if self.rated:
            (p2, t2), (p1, t1) = self.rated
            k = math.log(t2 / t1) / math.log(p1 / p2)
            return t1 * (p1 / p) ** k
        if self.r0 is not None and 0 < self.r0 < 64800 and self.p0 >= 5:
            return self.r0 * (self.p0 / p) ** 1.15
        return 150.0 * (p / 100.0) ** -1.15

    def kappa(self, t: float) -> float:
        ticks = self.ticks
        if len(ticks) < 2:
            return max(1.0, self.old_kappa)
        (t0, r0), (t1, r1) = ticks[0], ticks[-1]
        used = r0 - r1
        if t - self.t0 < 24 or used < max(0.12 * r0, 1.5 * self.quantum) or t1 <= t0:
            return max(1.0, self.old_kappa if t - self.t0 < 75 else 1.0)
        mean = used / (t1 - t0)
        recent = 0.0
        for tb, rb in reversed(ticks):
            if rb - r1 >= max(0.15 * r0, 1.5 * self.quantum):
                recent = (rb - r1) / max(1.0, t1 - tb)
                break
        return max(1.0, mean, recent)

    def slope(self, t: float) -> float:
        drops = [d for d in self.drops if d[0] - self.t0 >= 12]
        if len(drops) >= 2 and drops[0][1] - drops[-1][1] > 0:
            quantum = min((a[1] - b[1] for a, b in pairwise(drops) if a[1] > b[1]), default=1.0)
            (t0, c0), (t1, c1) = drops[0], drops[-1]
            if c0 - c1 >= 3 * quantum and t1 > t0:
                mean = (c0 - c1) / (t1 - t0)
                for tb, cb in reversed(drops):
                    if cb - c1 >= max(4 * quantum, 5.0):
                        return max(mean, (cb - c1) / (t1 - tb))
                return mean
        if len(self.drops) >= 2 and self.drops[0][1] - self.drops[-1][1] >= 12 and self.drops[-1][0] > self.drops[0][0]:
            return (self.drops[0][1] - self.drops[-1][1]) / (t - self.drops[0][0])
        return self.old_slope if t - self.t0 < 45 else 0.0

    def evidence(self, t: float) -> tuple[float | None, float | None]:
        """(firmware's, volts') seconds at the present load; None where there is nothing to say."""
        last = self.last
        firm: list[float] = []
        if last is None or self.p is None:
            return None, None
        r, c = last.runtime_s, last.charge_pct
        if r is not None and 0 < r < 64800 and (last.load_pct or 0) >= 10 and self.r12 is not None:
            r = min(r, self.r12 + self.quantum)
            e = (r - self.quantum / 2) / self.kappa(t)
            if self.recent:
                e *= 0.65
            firm.append(e - (t - self.changed_r))
        s = self.slope(t)
        if c is not None and s > 0:
            firm.append((c - 8.0 - (22.0 if self.recent else 0.0)) / s - (t - self.changed_c))
        volts: list[float] = []
        if self.v is not None and (t - self.t0 >= 40 or self.v < 1.80):
            volts.append(_between(LEVELS, self.v) - (t - self.changed_v if t - self.changed_v > 3 * self.period else 0))
            if t - self.t0 >= 40 and self.v < 1.94 and self.v8 is not None and self.v40 is not None:
                fall = (self.v40 - self.v8) / 32.0
                if fall > 1e-5:
                    volts.append(0.40 * (self.v - 1.74) / fall)
        return (max(0.0, min(firm)) if firm else None, max(0.0, min(volts)) if volts else None)

    def prior(self) -> float:
        phi = self.learned
        if phi is None:
            phi = 0.8 if self.lfp else 0.38 if self.age is None else _between(AGES, self.age)
        return max(0.0, (phi * self.soc0 - self.x) * self.rated_s(self.p or 100.0))

    def bound(self, t: float) -> float:
        firm, volts = self.evidence(t)
        prior = self.prior()
        spoken = [said for said in (firm, volts) if said is not None]
        if firm is not None and self.v is not None:  # both kinds are alive, even if the volts say nothing yet
            value = 0.80 * min(spoken)
        elif spoken:
            value = min(0.60 * spoken[0], prior)
        else:
            value = prior
        if self.learned is not None:
            value = min(value, prior)
        self.recentL.append(value)
        return sorted(self.recentL)[len(self.recentL) // 2]

    def strong(self, t: float, planned_s: float) -> str:
        """A reason to stop whatever the bound."""
        last = self.last
        if last is None:
            return ""
        if t >= 4 and last.runtime_s is not None and 0 < last.runtime_s <= planned_s:
            return "runtime"
        if self.lb_polls >= 2 and not self.explained:
            return "LB"
        if self.v is not None and t - self.fresh_at < 4:
            if t >= 6 and self.v < 1.80:
                return "volts"
            if 6 <= t <= 60 and self.v < 1.86:
                return "first volts"
        if t - self.fresh_at > 45:
            return "blind"
        return ""

    def halt_now(self, t: float, stretched_s: float, since_step_s: float, held_s: float) -> str:
        firm, volts = self.evidence(t)
        known = [e for e in (firm, volts) if e is not None]
        if since_step_s < 24:
            if stretched_s - since_step_s <= HALT_S + 10:
                return "stretched"
        elif known and 0.5 * min(known) <= HALT_S + 10:
            return "bound"
        if self.v is not None and self.v < 1.93 and since_step_s > 6:
            return "volts"
        if self.lb_since is not None and t - self.lb_since >= 4:
            return "LB"
        if t - self.fresh_at > 20:
            return "blind"
        if held_s > (900 if self.volts_ok else 60):
            return "long"
        return ""


def play_f5(track: Track, needs: tuple[float, ...], *, learned: bool) -> dict[float, Outcome]:
    """The reference policy, for all needs at once: they share the estimator while training."""
    outage, load = track.outage, track.outage.load
    mind = F5(outage, track.prelude, learned)
    rho = min(1.0, max(0.5, 1.15 * (load.flush_pct / load.train_pct) ** 1.1))
    outcomes: dict[float, Outcome] = {}
    early_at: float | None = None
    stepped = False
    for poll in track.polls:
        t = poll.t
        if track.capped and not stepped and t > CAP_AT_S + 2:
            stepped = True
            mind.load_step(t, load.capped(CAP_SHARE) / load.train_pct)
        mind.see(poll.reading, t)
        if early_at is None and t >= 10.0:
            early_at = t
        value = mind.bound(t)
        for need in needs:
            if need in outcomes:
                continue
            planned = rho * 1.25 * need + HALT_S + 10.0
            why = mind.strong(t, planned)
            if not why and t >= 16.0 and value <= planned:
                why = "bound"
            if why:
                outcomes[need] = _hold_f5(
                    track, poll, mind.copy(), need=need, early_at=early_at, why=why, bound_s=value
                )
        if len(outcomes) == len(needs):
            break
    for need in needs:
        if need not in outcomes:
            outcomes[need] = _unstopped(track, need * outage.flush_x, early_at)
    return outcomes


def _unstopped(track: Track, flush_s: float, early_at: float | None) -> Outcome:
    ridden = track.out_at is None
    until = track.mains_at if ridden else (track.out_at or 0.0)
    early = early_at is not None and (ridden or early_at + flush_s <= until)
    kept = until if ridden or early_at is None else early_at
    return Outcome(
        trained_s=trained(track, kept, early_at, flush_s),
        final=ridden,
        early=early,
        out=not ridden,
        saves=int(early_at is not None),
        why="never stopped",
    )


def _hold_f5(
    track: Track, poll: Poll, mind: F5, *, need: float, early_at: float | None, why: str, bound_s: float
) -> Outcome:
    outage, load = track.outage, track.outage.load
    ups, t = poll.ups.copy(), poll.t
    flush_s = need * outage.flush_x
    outcome = Outcome(trained_s=trained(track, t, early_at, flush_s), saves=1 + (early_at is not None), why=why)
    if early_at is not None and early_at + flush_s <= t:
        outcome.early = True
    mind.load_step(t, load.flush_pct / load.train_pct)
    done_at = t + flush_s
    stage, halt_at, step_at = "save", math.inf, t
    idle_stretch = max(0.0, bound_s - 0.75 * need) * min(4.0, (load.train_pct / load.idle_pct))
    while True:
        pct = {"save": load.flush_pct, "hold": load.idle_pct, "halt": load.halt_pct}[stage]
        ups.step(POLL_S, mains=False, load_pct=pct)
        t += POLL_S
        if not outcome.early and early_at is not None and ups.alive and early_at + flush_s <= t and t <= done_at + 1e9:
            outcome.early = stage != "save" or early_at + flush_s <= t
        if not ups.alive:
            outcome.out = True
            if not outcome.final and early_at is not None:
                outcome.trained_s = trained(track, early_at, None, flush_s)
            return outcome
        if stage == "halt":
            if t >= halt_at:
                outcome.halted = True
                return outcome
            continue
        if t >= track.mains_at:
            outcome.final = True
            return outcome
        mind.see(look(ups, outage, t), t)
        if stage == "save" and t >= done_at:
            outcome.final = True
            stage, step_at = "hold", t
            mind.load_step(t, load.idle_pct / load.flush_pct)
        if stage == "hold":
            why = mind.halt_now(t, idle_stretch, t - step_at, t - step_at)
            if why:
                outcome.why += f"; {why}"
                stage, halt_at = "halt", t + outage.halt_s
