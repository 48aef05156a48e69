"""`powerguard status`, `flush`, `park`, `resume`: a word with the daemon."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from powerguard import config
from powerguard.cli.out import console, safe, say, say_json, seconds, size, warn
from powerguard.errors import DaemonUnreachable, PowerguardError
from powerguard.node.ask import CONTROL_SOCKET, Answer, Ask
from powerguard.node.ask import ask as ask_daemon
from powerguard.node.status import FeedStatus, JobStatus, Status

RUN_DIR = "/run/powerguard"

ConfigFile = Annotated[
    Path | None,
    typer.Option("-c", "--config", help="a configuration file, for its run_dir", show_default=False, readable=False),
]
RunDir = Annotated[
    str,
    typer.Option("--run-dir", envvar="POWERGUARD_RUN_DIR", help="folder of the daemon's sockets", show_default=RUN_DIR),
]
Json = Annotated[bool, typer.Option("--json", help="one line of JSON")]


class Refused(PowerguardError):
    """The daemon refused an order; it said why."""


def register(app: typer.Typer) -> None:
    """Adds the commands to *app*."""
    for command in (status, flush, park, resume):
        app.command()(command)


def fetch(run_dir: str) -> Status:
    """The status of the daemon whose sockets are in *run_dir*. Raises DaemonUnreachable."""
    answer = _ask(run_dir, "status")
    try:
        return msgspec.convert(answer.data, Status, strict=False)
    except msgspec.ValidationError as err:
        raise DaemonUnreachable(f"the daemon's status can't be understood: {err}", todo="update both sides") from None


def status(file: ConfigFile = None, run_dir: RunDir = "", as_json: Json = False) -> None:
    """Show what the daemon knows: power, runway, need, jobs."""
    now = fetch(run_dir_of(file, run_dir))
    if as_json:
        say_json(now)
    else:
        _show(now)


def flush(file: ConfigFile = None, run_dir: RunDir = "") -> None:
    """Save now: every job writes a generation and trains on."""
    _order(run_dir_of(file, run_dir), "flush")


def park(file: ConfigFile = None, run_dir: RunDir = "") -> None:
    """Save and stop: every job writes a generation and waits, until `powerguard resume`."""
    _order(run_dir_of(file, run_dir), "park")


def resume(file: ConfigFile = None, run_dir: RunDir = "") -> None:
    """Train on after `powerguard park`."""
    run_dir = run_dir_of(file, run_dir)
    _order(run_dir, "resume")
    with contextlib.suppress(DaemonUnreachable):
        gate = fetch(run_dir).gate
        if gate:
            warn(f"another outage now would leave too little for a flush and a halt: {gate}")


def run_dir_of(file: Path | None, run_dir: str) -> str:
    """The folder of the daemon's sockets, as the options name it."""
    if run_dir:
        return run_dir
    return config.load(file, secrets=False).node.run_dir if file is not None else RUN_DIR


def _ask(run_dir: str, verb: str) -> Answer:
    answer = ask_daemon(Path(run_dir) / CONTROL_SOCKET, Ask(verb, by=os.environ.get("SUDO_USER", "")))
    if not answer.ok:
        raise Refused(answer.text or f"{verb} was refused")
    return answer


def _order(run_dir: str, verb: str) -> None:
    say(_ask(run_dir, verb).text)


# ---- the status for people -------------------------------------------------------------------------


def _show(now: Status) -> None:
    screen = console()
    since = f" for {seconds(now.phase_s)}"
    screen.print(f"[bold]{safe(now.node)}[/]  {now.phase.replace('_', ' ')}{since}: {safe(now.reason)}")
    need = f"need {seconds(now.need.total_s)} ({safe(now.need.by)})"
    screen.print(
        f"runway {seconds(now.runway_s)} ({seconds(now.idle_runway_s)} parked), {need}, spare {seconds(now.spare_s)}"
    )
    screen.print(f"halt by {now.halt}, up {seconds(now.up_s)}, journal {safe(now.journal)}")
    for text in (*now.troubles, *([f"journal: {now.journal_trouble}"] if now.journal_trouble else [])):
        screen.print(f"[yellow]trouble[/] {safe(text)}")
    screen.print(_feeds(now.feeds))
    if now.jobs:
        screen.print(_jobs(now.jobs))
    else:
        screen.print("no training job is registered")


def _feeds(feeds: tuple[FeedStatus, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("ups", "status", "charge", "load", "runtime", "voltage", "fresh", "login"):
        table.add_column(column)
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
            f"{seconds(feed.fresh_s)} ago" if feed.fresh_s is not None else "never",
            safe(login + (f": {feed.login_problem}" if feed.login_problem else "")),
        )
    return table


def _jobs(jobs: tuple[JobStatus, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("job", "ranks", "step", "state", "saved", "a step", "stage", "write", "size"):
        table.add_column(column)
    for job in jobs:
        alive = [rank for rank in job.ranks if rank.alive]
        steps = [rank.step for rank in alive if rank.step is not None]
        saved = f"step {job.saved_step}, {seconds(job.saved_s)} ago" if job.saved_step is not None else "never"
        table.add_row(
            safe(job.name),
            f"{len(alive)}/{job.world_size}",
            str(min(steps)) if steps else "-",
            safe(job.outcome + (f": {job.why}" if job.why else "")),
            saved,
            *(
                seconds(slowest) if (slowest := max((getattr(r, name) or 0.0 for r in alive), default=0.0)) else "-"
                for name in ("step_s", "stage_s", "write_s")
            ),
            size(sum(rank.state_bytes or 0 for rank in alive) or None) if alive else "-",
        )
    return table


def _figure(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:g}{unit}"
