"""What a drill knows beyond the journal, put together: the facts for its verdict, and the story for its report."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from powerguard.drill import report
from powerguard.drill.compare import Comparison, Life, Trace
from powerguard.drill.marks import saves, stops
from powerguard.drill.moments import moments
from powerguard.drill.node import Node
from powerguard.drill.plan import MainsBack, Plan
from powerguard.drill.story import Mark, Number, Span, Steps, Story
from powerguard.drill.supply import Truth
from powerguard.drill.told import from_journal
from powerguard.drill.verdict import Facts, Verdict
from powerguard.drill.watch import Times
from powerguard.errors import JournalError
from powerguard.journal import read

_LEAD_S = 5.0
"""Shown before the failure of the mains."""
_TAIL_S = 1.5


class Told(Struct, frozen=True):
    """Everything that was kept of one drill."""

    plan: Plan
    node: Node
    times: Times
    truths: tuple[Truth, ...]
    trace: Trace

    @property
    def lives(self) -> list[Life]:
        """Of all ranks."""
        return [life for rank in self.trace.values() for life in rank]


def gather(told: Told, compared: Comparison, newest_step: int | None) -> Facts:
    """The facts that the verdict is made of."""
    journals = told.node.journals
    shown = moments(read(journals[0])) if journals else []
    done = [save for save in saves(shown) if save.ordered_at >= told.times.mains_cut_at]
    flushes = [save for save in done if save.purpose == "stop"]
    return Facts(
        mains_back=told.plan.mains_back,
        compared=compared,
        mains_cut_at=told.times.mains_cut_at,
        snapshots=tuple(save for save in done if save.purpose == "snapshot"),
        flush=flushes[-1] if flushes else None,
        stops=stops(shown),
        halted_at=told.times.halted_at,
        power_cut_at=told.times.power_cut_at,
        newest_step=newest_step,
        killed=told.plan.kill_rank if told.times.killed_at is not None else None,
        same_processes=all(len(told.trace.get(rank, ())) == 1 for rank in range(told.plan.ranks)),
        online_again=told.times.online_at is not None,
        spare_s=_spare(told),
    )


def _spare(told: Told) -> float | None:
    """What the battery had left, at the load of that instant, when the node was off or the mains were back."""
    end = told.times.halted_at or told.times.mains_back_at
    if end is None:
        return None
    before = [truth for truth in told.truths if truth.at <= end and not truth.mains]
    return before[-1].runway_s if before else None


def write(told: Told, facts: Facts, verdict: Verdict) -> Path:
    """The report, in the drill's folder; and the facts as JSON beside it."""
    folder = told.node.folder
    report.put(folder / "facts.json", msgspec.json.format(msgspec.json.encode(facts)), other="folder")
    return report.write(story(told, facts, verdict), folder / "report.html", other="folder")


def story(told: Told, facts: Facts, verdict: Verdict) -> Story:
    """The journal's story with the battery's truth, the power cut, and the second life."""
    zero = told.times.mains_cut_at
    end = max([life.end_at or max(life.times.values(), default=0.0) for life in told.lives], default=zero) + _TAIL_S
    try:
        base = from_journal(told.node.journals[0])
    except (IndexError, JournalError):
        base = Story(title="", zero_at=zero, start=zero - _LEAD_S, end=end)
    truths = [truth for truth in told.truths if truth.at <= (told.times.power_cut_at or end)]
    series = replace(
        base.series,
        load_pct=tuple((truth.at, truth.load_pct) for truth in truths),
        truth_s=tuple((t.at, t.runway_s) for t in truths if not t.mains and t.at <= (told.times.halted_at or end)),
    )
    return replace(
        base,
        title=f"Drill: {told.plan.name}",
        zero_at=zero,
        start=zero - _LEAD_S,
        end=end,
        verdict=verdict.word,
        why=verdict.why,
        spans=_spans(base.spans, told, end),
        marks=_marks(base.marks, told, facts),
        series=series,
        steps=_steps(told),
        numbers=_numbers(base.numbers, told, facts),
        configuration=_configuration(told),
    )


def _spans(known: tuple[Span, ...], told: Told, end: float) -> tuple[Span, ...]:
    """The daemon's phases up to the power cut; then no power, the start, and the second life."""
    times = told.times
    cut_at, boot_at = times.power_cut_at, times.boot_at
    spans = [span for span in known if cut_at is None or span.start < cut_at]
    spans = [replace(span, end=min(span.end, cut_at or end)) for span in spans]
    if spans:
        spans[0] = replace(spans[0], start=min(spans[0].start, times.mains_cut_at - _LEAD_S))
    if spans and cut_at is None:
        spans[-1] = replace(spans[-1], end=end)
    if spans and cut_at is not None:
        spans[-1] = replace(spans[-1], end=cut_at)
        spans.append(Span(cut_at, boot_at or end, "off"))
    if boot_at is not None:
        trains_at = min((min(life.times.values(), default=end) for life in _second(told)), default=end)
        spans += [Span(boot_at, trains_at, "starting"), Span(trains_at, end, "online")]
    return tuple(spans)


def _second(told: Told) -> list[Life]:
    return [lives[1] for lives in told.trace.values() if len(lives) > 1]


def _marks(known: tuple[Mark, ...], told: Told, facts: Facts) -> tuple[Mark, ...]:
    times, compared = told.times, facts.compared
    marks = [mark for mark in known if mark.kind not in ("mains_cut", "mains_back", "halt")]
    marks.append(Mark(times.mains_cut_at, "mains_cut", "mains fail"))
    optional = (
        (times.mains_back_at, "mains_back", "mains back"),
        (times.killed_at, "killed", f"rank {told.plan.kill_rank} killed"),
        (times.fault_at, "killed", "the fault begins"),
        (times.halted_at, "halt", "node off"),
        (times.power_cut_at, "power_cut", "battery flat, power cut"),
        (min((life.at for life in _second(told)), default=None), "resumed", f"resumed at step {compared.resumed_step}"),
        (
            max((life.end_at for life in told.lives if life.end_at), default=None),
            "finished" if compared.bit_exact else "power_cut",
            "done, bit-exact" if compared.bit_exact else "done, not the same",
        ),
    )
    marks += [Mark(at, kind, text) for at, kind, text in optional if at is not None]
    return tuple(sorted(marks, key=lambda mark: mark.at))


def _steps(told: Told) -> tuple[Steps, ...]:
    lines = []
    for rank, lives in sorted(told.trace.items()):
        for n, life in enumerate(lives):
            points = tuple((at, float(step)) for step, at in sorted(life.times.items()))
            lines.append(Steps(rank, n, points))
    return tuple(sorted(lines, key=lambda line: (line.life, line.rank)))


def _numbers(known: tuple[Number, ...], told: Told, facts: Facts) -> tuple[Number, ...]:
    compared, times = facts.compared, told.times
    numbers = [number for number in known if number.name != "outage"]
    if facts.flush is not None:
        numbers.append(Number("stop step", str(facts.flush.step), "the same for all ranks"))
    if facts.flush is not None and facts.power_cut_at is not None:
        early = facts.power_cut_at - facts.flush.sealed_at
        numbers.append(Number("sealed before the cut", f"{early:.1f} s"))
    if facts.spare_s is not None:
        end = "the node was off" if times.halted_at is not None else "the mains were back"
        numbers.append(Number("left in the battery", f"{facts.spare_s:.1f} s", f"true runway at that load when {end}"))
    if compared.resumed_step is not None:
        numbers.append(Number("resumed at step", str(compared.resumed_step)))
    numbers += [
        Number("lost steps", str(compared.lost_steps)),
        Number(
            "bit-exact",
            "yes" if compared.bit_exact else "no",
            compared.difference or f"{compared.losses_compared} losses, and all parameters after the last step",
        ),
        Number("run", f"{told.plan.total_steps} steps", f"{told.plan.ranks} ranks, gloo, DDP, seed {told.plan.seed}"),
    ]
    if facts.mains_back is MainsBack.NEVER:
        numbers.append(Number("power cut", "SIGKILL", "of every process of the node at once; disks keep their caches"))
    if times.halted_at is not None:
        numbers.append(
            Number("after the node was off", "hurried", "the rest of the battery was spent in a few seconds")
        )
    return tuple(numbers)


def _configuration(told: Told) -> str:
    plan = told.plan
    how = "a real upsd and dummy-ups" if plan.nut else "the simulated upsd"
    head = f"# a simulated UPS of {plan.runtime_s:g} s at {plan.loads.training:g} % load, through {how}\n\n"
    return head + told.node.daemon.configuration()
