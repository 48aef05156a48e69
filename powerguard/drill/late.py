"""What was late in an outage: what took longer than it was planned to, and what waited for whom."""

from __future__ import annotations

from itertools import pairwise

from powerguard.core.messages import Decide, Prepare, Promise, Purpose, Shard
from powerguard.core.types import Phase, Send
from powerguard.drill.curves import need_of, runway_of
from powerguard.drill.moments import Moment
from powerguard.drill.parts import Parts, stops

PLAN_FACTOR = 1.1
"""Later than the plan by more than this is late."""
ALONE_S = 0.5
"""A rank that everybody else has waited for so long, and longer than half of their own time, is named."""
PROMISE_S = 1.0
SILENT_S = 10.0
"""The daemon decides at least every few seconds on battery."""


def late(shown: list[Moment]) -> tuple[str, ...]:
    """In sentences; nothing was late: no sentence."""
    found: list[str] = []
    for part in stops(shown):
        found += _flush(shown, part)
    return (*found, *_promises(shown), *_silence(shown), *_overdrawn(shown))


def _flush(shown: list[Moment], part: Parts) -> list[str]:
    """A flush beside its plan, and the rank that it waited for."""
    found: list[str] = []
    planned = next((m.state.need.save_s for m in shown if m.tick.at >= part.ordered_at and m.state is not None), None)
    if part.total_s is None:
        found.append(f"{part.job}: the flush of step {part.step} was never sealed")
    elif planned is not None and part.total_s > PLAN_FACTOR * planned:
        found.append(f"{part.job}: the flush took {part.total_s:.1f} s, planned were {planned:.1f} s")
    ends = sorted(
        (report.at, report.rank)
        for moment in shown
        for report in moment.tick.seen.reports
        if report.job == part.job and isinstance(report.message, Shard) and report.message.generation == part.generation
    )
    if len(ends) > 1:
        alone = ends[-1][0] - ends[-2][0]
        if alone > max(ALONE_S, 0.5 * (ends[-2][0] - part.ordered_at)):
            found.append(f"{part.job}: rank {ends[-1][1]} was durable {alone:.1f} s after all others")
    return found


def _promises(shown: list[Moment]) -> list[str]:
    """Ranks that answered an order late, or not before it was decided."""
    found: list[str] = []
    asked: dict[tuple[str, int], float] = {}
    answered: set[tuple[str, int, int]] = set()
    for moment in shown:
        for report in moment.tick.seen.reports:
            promise = report.message
            if isinstance(promise, Promise) and (report.job, promise.seq) in asked:
                took = report.at - asked[report.job, promise.seq]
                key = (report.job, report.rank, promise.seq)
                if took > PROMISE_S and key not in answered:
                    found.append(f"{report.job}: rank {report.rank} promised {took:.1f} s after it was asked")
                answered.add(key)
        for action in moment.tick.actions:
            if not isinstance(action, Send):
                continue
            order = action.message
            if isinstance(order, Prepare) and order.purpose is Purpose.STOP:
                asked.setdefault((action.job, order.seq), moment.tick.at)
            elif isinstance(order, Decide) and (action.job, order.seq) in asked:
                key = (action.job, action.rank, order.seq)
                if key not in answered:
                    found.append(f"{action.job}: rank {action.rank} hadn't promised when step {order.step} was decided")
                answered.add(key)
    return found


def _silence(shown: list[Moment]) -> list[str]:
    """Times in which the daemon decided nothing."""
    away = [m for m in shown if m.tick.phase is not Phase.ONLINE]
    gaps = [(b.tick.at - a.tick.at, a.tick.at) for a, b in pairwise(away)]
    worst = max(gaps, default=(0.0, 0.0))
    return [f"the daemon decided nothing for {worst[0]:.1f} s"] if worst[0] > SILENT_S else []


def _overdrawn(shown: list[Moment]) -> list[str]:
    """The runway was below the need before the stop was ordered."""
    for moment in shown:
        if moment.state is None or moment.tick.phase is not Phase.ON_BATTERY:
            continue
        runway, need = runway_of(moment.state), need_of(moment.state)
        if runway is not None and need is not None and runway < need:
            return [f"the runway was {need - runway:.1f} s below the need when training still went on"]
    return []
