"""The story that a journal tells: one outage of it, with what was believed at each decision."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import msgspec

from powerguard.core.types import Halt, Phase
from powerguard.drill.curves import series, spans, steps
from powerguard.drill.late import late
from powerguard.drill.marks import events, marks, saves
from powerguard.drill.moments import Moment, moments, turns
from powerguard.drill.outages import Outage, pick
from powerguard.drill.story import Number, Story
from powerguard.journal import Recording, Rules, read

_LEAD = 0.15  # of the outage is shown before it, and a little after


def from_journal(path: str | Path, *, since: float = float("-inf")) -> Story:
    """The story of the last outage of the journal at *path* that ends after *since*. JournalError: there is none."""
    return story(pick([read(path)], since=since))


def story(outage: Outage) -> Story:
    """The story of *outage*."""
    return tell(outage.recording, moments(outage.recording), outage.first, outage.last)


def tell(recording: Recording, told: list[Moment], first: int, last: int) -> Story:
    """The story of the decisions from *first* to before *last*, with a little before and after."""
    state = told[first].state
    began = state.view.event_at if state is not None else None
    zero = told[first].tick.at if began is None else began
    over = told[last].tick.at if last < len(told) else told[last - 1].tick.at
    begins, title = _beginning(told[first])
    lead = max(3.0, _LEAD * (over - zero))
    shown = [m for m in told if zero - lead <= m.tick.at <= over + lead]
    end = max(shown[-1].tick.at, over) if last < len(told) else over
    return Story(
        title=f"{title} of {over - zero:.0f} s",
        zero_at=zero,
        start=max(zero - lead, shown[0].tick.at),
        end=end,
        verdict=_verdict(told[first:last], ended=last < len(told)),
        why=tuple(dict.fromkeys(m.tick.reason for m in turns(told[first:last]) if m.tick.reason))[-2:],
        node=recording.head.node if recording.head else "",
        date=_date(recording, zero),
        spans=spans(shown, end),
        marks=marks(shown, zero, begins),
        series=series(shown),
        steps=steps(shown),
        events=events(shown),
        numbers=_numbers(shown, zero, over, _halt_at(told[first:last])) + _damaged(recording),
        late=late(told[first:last]),
        zero=begins or "the mains failed",
        configuration=_configuration(recording),
    )


def _beginning(moment: Moment) -> tuple[str, str]:
    """What it began with where that is no outage, and what to call it."""
    view = moment.state.view if moment.state is not None else None
    if view is None or view.event_at is not None or moment.tick.phase is Phase.ON_BATTERY:
        return "", "Outage"
    return ("a drill began", "Drill") if view.drill_s is not None else ("a stop was ordered", "Stop")


def _date(recording: Recording, at: float) -> str:
    head = recording.head
    if head is None:
        return ""
    created = datetime.fromisoformat(head.created)
    return f"{created + timedelta(seconds=at - head.at):%Y-%m-%d %H:%M:%S %Z}".strip()


def _halt_at(told: list[Moment]) -> float | None:
    """When the power-off was ordered."""
    return next((m.tick.at for m in told for action in m.tick.actions if isinstance(action, Halt)), None)


def _numbers(shown: list[Moment], zero: float, over: float, halt_at: float | None) -> tuple[Number, ...]:
    numbers = [Number("outage", f"{over - zero:.1f} s", "from its beginning to the end of the event")]
    curves = series(shown)
    until = over if halt_at is None else halt_at
    on = [value for at, value in curves.charge_pct if zero <= at <= until]
    if on:
        numbers.append(Number("charge", f"{on[0]:.0f} to {min(on):.0f} %", "as reported, until it was over"))
    spare = [(value, at) for at, value in curves.spare_s if zero <= at <= until]
    if spare:
        low, at = min(spare)
        numbers.append(Number("least spare", f"{low:.1f} s", f"runway less need, {at - zero:.1f} s into the outage"))
    for save in saves(shown):
        name = "flush" if save.purpose == "stop" else save.purpose
        numbers.append(Number(name, f"{save.took_s:.2f} s", f"from the order to sealed, step {save.step}"))
    rates = [value for _, value in curves.write_mbps]
    if rates:
        numbers.append(Number("writing", f"{max(rates):.0f} MB/s", "all ranks together at most, sync included"))
    return tuple(numbers)


def _damaged(recording: Recording) -> tuple[Number, ...]:
    """A row for what couldn't be read, where there is any."""
    count = recording.damaged
    return (Number("damaged lines", str(count), "of the journal, left out"),) if count else ()


def _verdict(told: list[Moment], *, ended: bool) -> str:
    """What became of the node, in a few words."""
    phases = {m.tick.phase for m in told}
    halted = _halt_at(told) is not None
    lost = any(job.outcome == "lost" for m in told[-1:] if m.state is not None for job in m.state.jobs.values())
    if halted:
        return "halted, not everything durable" if lost else "halted with everything durable"
    if not ended:
        return "the journal ends in the outage"
    if Phase.PARKED in phases or Phase.FLUSHING in phases:
        return "stopped, and went on in place"
    return "trained through"


def _configuration(recording: Recording) -> str:
    """The policy in force at the end: what differs from the defaults."""
    rules = [record for record in recording.records if isinstance(record, Rules)]
    if not rules:
        return ""
    values = msgspec.to_builtins(rules[-1].policy)
    lines = [f"{key} = {msgspec.json.encode(value).decode()}" for key, value in values.items() if key != "feeds"]
    feeds = [f"# feed {feed['name']}" for feed in values.get("feeds", ())]
    return "\n".join([*feeds, "[policy]  # what differs from the defaults", *lines])
