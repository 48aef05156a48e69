"""The curves of an outage, from the decisions of its journal."""

from __future__ import annotations

from collections.abc import Callable

from powerguard.core.messages import Beat, Parked, Shard
from powerguard.core.state import State
from powerguard.core.status import parse
from powerguard.core.types import Phase
from powerguard.drill.moments import Moment, turns
from powerguard.drill.story import Points, Series, Span, Steps


def spans(shown: list[Moment], end: float) -> tuple[Span, ...]:
    """The phases, one after the other, up to *end*."""
    starts = turns(shown)
    ends = [m.tick.at for m in starts[1:]] + [end]
    return tuple(Span(m.tick.at, until, m.tick.phase.value) for m, until in zip(starts, ends, strict=True))


def series(shown: list[Moment]) -> Series:
    """With several feeds: the emptiest battery, the highest load."""
    charge: list[tuple[float, float]] = []
    load: list[tuple[float, float]] = []
    charges: dict[str, float] = {}
    loads: dict[str, float] = {}
    for moment in shown:
        for sample in moment.tick.seen.samples:
            reading = parse(sample)
            if reading.charge_pct is not None:
                charges[reading.feed] = reading.charge_pct
                charge.append((reading.at, min(charges.values())))
            if reading.load_pct is not None:
                loads[reading.feed] = reading.load_pct
                load.append((reading.at, max(loads.values())))
    reported = _reported(shown)
    runway = _beliefs(shown, runway_of)
    need = _beliefs(shown, need_of)
    floor = dict(need)
    return Series(
        charge_pct=tuple(charge),
        load_pct=tuple(load),
        runway_s=runway,
        need_s=need,
        spare_s=tuple((at, value - floor[at]) for at, value in runway if at in floor),
        idle_s=_beliefs(shown, _idle_of),
        reported_s=reported,
        write_mbps=bandwidth(shown),
    )


def _reported(shown: list[Moment]) -> Points:
    """The least runtime that a UPS on battery reports, as it came."""
    found: list[tuple[float, float]] = []
    runtimes: dict[str, float] = {}
    for moment in shown:
        for sample in moment.tick.seen.samples:
            reading = parse(sample)
            if reading.on_battery and reading.runtime_s is not None:
                runtimes[reading.feed] = reading.runtime_s
                found.append((reading.at, min(runtimes.values())))
            elif reading.on_battery is False:
                runtimes.pop(reading.feed, None)
    return tuple(found)


def bandwidth(shown: list[Moment]) -> Points:
    """Megabytes a second that all ranks together wrote and synced: each shard's bytes, evenly over its time."""
    edges: list[tuple[float, float]] = []
    for moment in shown:
        for report in moment.tick.seen.reports:
            shard = report.message
            took = shard.write_s + shard.fsync_s if isinstance(shard, Shard) else 0.0
            if isinstance(shard, Shard) and took > 0.0:
                rate = shard.record.bytes / took / 1e6
                edges += [(report.at - took, rate), (report.at, -rate)]
    points: list[tuple[float, float]] = []
    rate = 0.0
    for at, change in sorted(edges):
        rate = max(0.0, rate + change)
        points.append((at, 0.0 if rate < 1e-9 else rate))
    return tuple(points)


def _beliefs(shown: list[Moment], of: Callable[[State], float | None]) -> Points:
    known = ((m.tick.at, of(m.state)) for m in shown if m.state is not None)
    return tuple((at, value) for at, value in known if value is not None)


def _idle(state: State) -> bool:
    return state.phase in (Phase.PARKED, Phase.HALTING)


def runway_of(state: State) -> float | None:
    """On battery, and in a drill, until the power-off is ordered: the bound that the phase is decided by."""
    power = state.power
    if power is None or state.halted_at is not None:
        return None
    if not power.on_battery and state.view.drill_s is None:
        return None
    return power.idle_runway_s if _idle(state) and power.idle_runway_s is not None else power.runway_s


def _idle_of(state: State) -> float | None:
    power = state.power
    return None if power is None or not power.on_battery or state.halted_at is not None else power.idle_runway_s


def need_of(state: State) -> float | None:
    """What that runway must cover: of parked ranks only the halt is left."""
    if state.halted_at is not None:
        return None
    return state.need.halt_s if _idle(state) else state.need.total_s


def steps(shown: list[Moment]) -> tuple[Steps, ...]:
    """From the ranks' pages and beats; of one job, the first that is seen."""
    points: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for moment in shown:
        seen = moment.tick.seen
        found = [(page.job, page.rank, page.at, page.step) for page in seen.pages]
        found += [(r.job, r.rank, r.at, r.message.step) for r in seen.reports if isinstance(r.message, Beat | Parked)]
        for job, rank, at, step in found:
            if step >= 0:
                points.setdefault((job, rank), []).append((at, float(step)))
    first = next(iter(points), ("", 0))[0]
    return tuple(Steps(rank, 0, tuple(sorted(line))) for (job, rank), line in sorted(points.items()) if job == first)
