"""The status for people: once as lines that a pipe keeps whole, and as a page of 80 columns for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from powerguard.cli.out import console, safe, seconds, size
from powerguard.core.outlook import Outlook
from powerguard.node.status import FeedStatus, JobStatus, Status

BAR = 28
"""Columns of the longest bar."""

COLOURS = {"online": "green", "on_battery": "yellow", "flushing": "magenta", "parked": "cyan", "halting": "red"}


def once(now: Status) -> None:
    """Prints it."""
    screen = console()
    since = f" for {seconds(now.phase_s)}"
    screen.print(f"[bold]{safe(now.node)}[/]  {now.phase.replace('_', ' ')}{since}: {safe(now.reason)}")
    need = f"need {seconds(now.need.total_s)} ({safe(now.need.by)})"
    screen.print(
        f"runway {seconds(now.runway_s)} ({seconds(now.idle_runway_s)} parked), {need}, spare {seconds(now.spare_s)}"
    )
    screen.print(f"halt by {now.halt}, up {seconds(now.up_s)}, journal {safe(now.journal)}")
    for text in _troubles(now):
        screen.print(f"[yellow]trouble[/] {safe(text)}")
    screen.print(_feeds(now.feeds))
    for peer in now.peers:
        heard = "never heard" if peer.heard_s is None else f"heard {seconds(peer.heard_s)} ago"
        leads = f", leads {safe(', '.join(peer.leads))}" if peer.leads else ""
        screen.print(f"node {safe(peer.node)}: {heard}{leads}")
    if now.jobs:
        screen.print(_jobs(now.jobs))
    else:
        screen.print("no training job is registered")
    for line in _next(now.outlook):
        screen.print(safe(line))


def page(now: Status, clock: str = "") -> RenderableType:
    """The whole as one page; *clock* goes into its corner."""
    colour = COLOURS.get(now.phase, "white")
    title = Table.grid(expand=True)
    title.add_column(no_wrap=True, overflow="ellipsis")
    title.add_column(justify="right", no_wrap=True)
    phase = now.phase.replace("_", " ")
    title.add_row(
        Text.assemble((now.node, "bold"), "  ", (phase, f"bold {colour}"), f" for {seconds(now.phase_s)}"), clock
    )
    parts: list[RenderableType] = [title, Text(now.reason), Text(), _bars(now)]
    parts += [Text(text, style="yellow") for text in _troubles(now)]
    parts += [Text(), _feeds_small(now.feeds), Text()]
    parts.append(_jobs_small(now.jobs) if now.jobs else Text("no training job is registered", style="dim"))
    parts += [Text(), _next_table(now.outlook)]
    return Group(*parts)


def _troubles(now: Status) -> tuple[str, ...]:
    return (*now.troubles, *([f"journal: {now.journal_trouble}"] if now.journal_trouble else []))


# ---- lines -----------------------------------------------------------------------------------------


def _feeds(feeds: tuple[FeedStatus, ...]) -> Table:
    table = _table("ups", "status", "charge", "load", "runtime", "voltage", "fresh", "login")
    for feed in feeds:
        said = " ".join(feed.tokens) if feed.comm == "ok" else feed.comm
        login = {True: "held", False: "not held", None: "no user"}[feed.login_held]
        table.add_row(
            safe(feed.name),
            safe(said + (f": {feed.detail}" if feed.detail and feed.comm != "ok" else "")),
            _figure(feed.charge_pct, " %"),
            _figure(feed.load_pct, " %"),
            seconds(feed.runtime_s) if feed.runtime_s is not None else "-",
            _figure(feed.voltage, " V"),
            _fresh(feed),
            safe(login + (f": {feed.login_problem}" if feed.login_problem else "")),
        )
    return table


def _jobs(jobs: tuple[JobStatus, ...]) -> Table:
    table = _table("job", "ranks", "step", "state", "saved", "a step", "stage", "write", "size")
    for job in jobs:
        alive = [rank for rank in job.ranks if rank.alive]
        table.add_row(
            safe(job.name),
            f"{len(alive)}/{job.world_size}",
            _step(job),
            safe(job.outcome + (f": {job.why}" if job.why else "")),
            _saved(job),
            *(
                seconds(slowest) if (slowest := max((getattr(r, name) or 0.0 for r in alive), default=0.0)) else "-"
                for name in ("step_s", "stage_s", "write_s")
            ),
            size(sum(rank.state_bytes or 0 for rank in alive) or None) if alive else "-",
        )
    return table


def _next(ahead: Outlook) -> Iterator[str]:
    if not ahead.assuming:
        return
    if not ahead.steps:
        yield f"next, {ahead.assuming}: nothing is in sight"
        return
    yield f"next, {ahead.assuming}:"
    for step in ahead.steps:
        yield f"  in {seconds(step.in_s):<8} {step.what} ({step.why})"
    if ahead.power_gone_s is not None:
        yield f"  in {seconds(ahead.power_gone_s):<8} power is presumed gone"


# ---- the page --------------------------------------------------------------------------------------


def _bars(now: Status) -> Table:
    """Runway and need to one scale, so that the spare can be seen."""
    longest = max((value for value in (now.runway_s, now.need.total_s) if value is not None), default=0.0)
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(width=BAR, no_wrap=True)
    table.add_column(overflow="fold")
    spare = now.spare_s
    colour = "red" if spare is not None and spare <= 0 else "green"
    parked = "" if now.idle_runway_s is None else f", {seconds(now.idle_runway_s)} with ranks parked"
    table.add_row("runway", _bar(now.runway_s, longest, colour), f"{seconds(now.runway_s)}{parked}")
    table.add_row("need", _bar(now.need.total_s, longest, "blue"), f"{seconds(now.need.total_s)} ({now.need.by})")
    table.add_row("spare", "", Text(seconds(spare), style=colour if spare is not None else "yellow"))
    return table


def _bar(value: float | None, longest: float, colour: str) -> Text:
    if value is None or longest <= 0.0:
        return Text("unknown" if value is None else "", style="yellow")
    return Text("█" * max(1, round(BAR * min(1.0, max(0.0, value) / longest))), style=colour)


def _feeds_small(feeds: tuple[FeedStatus, ...]) -> Table:
    table = _table("ups", "status", "charge", "load", "runtime", "fresh")
    table.columns[0].overflow = table.columns[1].overflow = "fold"
    for feed in feeds:
        said = " ".join(feed.tokens) if feed.comm == "ok" else f"{feed.comm}: {feed.detail}".rstrip(": ")
        style = "" if feed.on_battery is False else "yellow"
        table.add_row(
            Text(feed.name),
            Text(said, style=style),
            _figure(feed.charge_pct, " %"),
            _figure(feed.load_pct, " %"),
            seconds(feed.runtime_s) if feed.runtime_s is not None else "-",
            _fresh(feed),
        )
    return table


def _jobs_small(jobs: tuple[JobStatus, ...]) -> Table:
    table = _table("job", "ranks", "step", "state", "saved")
    table.columns[0].overflow = table.columns[3].overflow = "fold"
    for job in jobs:
        alive = sum(rank.alive for rank in job.ranks)
        state = job.outcome + (f": {job.why}" if job.why else "")
        few = "" if alive == job.world_size else "yellow"
        table.add_row(
            Text(job.name), Text(f"{alive}/{job.world_size}", style=few), _step(job), Text(state), _saved(job)
        )
    return table


def _next_table(ahead: Outlook) -> RenderableType:
    if not ahead.steps:
        return Text(f"next, {ahead.assuming}: nothing is in sight" if ahead.assuming else "", style="dim")
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for step in ahead.steps:
        table.add_row(f"in {seconds(step.in_s)}", Text.assemble((step.what, "bold"), "\n", (step.why, "dim")))
    if ahead.power_gone_s is not None:
        table.add_row(f"in {seconds(ahead.power_gone_s)}", Text("power is presumed gone", style="red"))
    return Group(Text(f"next, {ahead.assuming}"), table)


# ---- words for both --------------------------------------------------------------------------------


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table


def _fresh(feed: FeedStatus) -> str:
    return f"{seconds(feed.fresh_s)} ago" if feed.fresh_s is not None else "never"


def _step(job: JobStatus) -> str:
    return str(min((rank.step for rank in job.ranks if rank.alive and rank.step is not None), default="-"))


def _saved(job: JobStatus) -> str:
    return f"step {job.saved_step}, {seconds(job.saved_s)} ago" if job.saved_step is not None else "never"


def _figure(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:g}{unit}"
