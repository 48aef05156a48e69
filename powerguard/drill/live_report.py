"""What a live drill leaves: its result as JSON, and the report from the daemon's own journal."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import msgspec
from msgspec.structs import replace

from powerguard.drill import report
from powerguard.drill.live import Result
from powerguard.drill.story import Number
from powerguard.drill.told import from_journal
from powerguard.errors import JournalError, MissingDependency


def words(result: Result) -> list[str]:
    """The result for people: the verdict, each part of the need, and the spare."""
    lines = [f"live drill: {result.verdict}", *(f"  {why}" for why in result.why)]
    lines += [f"  {number.name:<22} {number.value:<12} {number.note}".rstrip() for number in numbers(result)]
    return lines


def numbers(result: Result) -> tuple[Number, ...]:
    """The rows of the table."""
    rows: list[Number] = []
    for part in result.parts:
        parts = (
            ("agree", part.agree_s, "from the order until the step was decided"),
            ("finish the step", part.step_s, "until the last rank was there"),
            ("stage", part.stage_s, "copy, the slowest rank"),
            ("write", part.write_s, f"{part.bytes / 1e6:.1f} MB of {part.ranks} ranks, the slowest one's time"),
            ("fsync", part.fsync_s, "the slowest rank"),
            ("seal", part.seal_s, "after the last shard was durable"),
            ("flush", part.total_s, f"{part.job}, step {part.step}: from the order to sealed"),
        )
        rows += [Number(name, f"{value:.2f} s", note) for name, value, note in parts if value is not None]
    if result.stopped_s is not None:
        rows.append(Number("pause of training", f"{result.stopped_s:.1f} s", "until every rank had gone on"))
    rows.append(Number("need", f"{result.need_s:.1f} s", f"as measured now; {result.need_before_s:.1f} s before"))
    runway = "unknown" if result.runway_s is None else f"{result.runway_s:.0f} s"
    rows.append(Number("runway today", runway, "if the mains failed now, at this load"))
    spare = "unknown" if result.spare_s is None else f"{result.spare_s:.0f} s"
    rows.append(Number("spare", spare, "runway less need and margin"))
    if result.load_pct is not None and result.parked_load_pct is not None:
        note = f"of the UPS, {result.load_pct:.0f} % in training; both as reported"
        rows.append(Number("load while parked", f"{result.parked_load_pct:.0f} %", note))
    return tuple(rows)


def write(result: Result, folder: Path) -> tuple[Path, str]:
    """The files in *folder*: (the report, or the JSON where there is none; why there is no report)."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "result.json"
    report.put(data, msgspec.json.format(msgspec.json.encode(result)), other="folder")
    if not result.journal:
        return data, "the daemon's journal can't be read"
    try:
        story = from_journal(result.journal, since=result.begun_at - 1.0)
        story = replace(
            story,
            title=f"Live drill, {datetime.now():%Y-%m-%d %H:%M}",  # noqa: DTZ005 - for people here
            verdict=result.verdict,
            why=result.why,
            numbers=numbers(result),
        )
        return report.write(story, folder / "report.html", other="folder"), ""
    except (JournalError, MissingDependency) as err:
        return data, str(err)
