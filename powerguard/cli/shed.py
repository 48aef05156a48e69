"""`powerguard shed`: the power limits of this node's GPUs, for powerguard-shed.service and for people."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from powerguard import config as configuration
from powerguard.cli.limits import within
from powerguard.cli.out import say
from powerguard.errors import PowerguardError, UsageError
from powerguard.node import clock, gpus, shed
from powerguard.node.gpus import Limits, Outcome

Note = Annotated[Path, typer.Option("--note", help="where the limits that were found are kept")]


def register(app: typer.Typer) -> None:
    """Adds the commands to *app*."""
    group = typer.Typer(no_args_is_help=True, help="Run the GPUs at less power, or put back what was found.")
    group.command()(lower)
    group.command()(restore)
    group.command()(show)
    app.add_typer(group, name="shed")


def lower(
    pct: Annotated[
        float, typer.Option(help="of each GPU's default limit; default: \\[shed] gpu_power_pct", show_default=False)
    ] = 0.0,
    file: Annotated[
        Path | None, typer.Option("-c", "--config", help="the configuration file", show_default=False)
    ] = None,
    note: Note = shed.NOTE,
) -> None:
    """Lower the power limit of every GPU. What was found is kept first, and survives a crash."""
    if not pct and file is not None:
        pct = configuration.load(file, secrets=False).shed.gpu_power_pct
    if not 0 < pct <= 100:
        raise UsageError("how low isn't said", todo="--pct 60, or -c FILE with [shed] gpu_power_pct")
    _tell(_limits(note).lower(pct))


def restore(note: Note = shed.NOTE) -> None:
    """Put back the limits that were found, but for those that somebody has changed since."""
    if not note.exists():
        return
    _tell(_limits(note).restore())


def show(pct: Annotated[float, typer.Option(help="what this would save")] = 60.0) -> None:
    """Show each GPU's draw and limit, and what lowering it would save."""
    within("--pct", pct, 0.0, 100.0, todo="give percent of each GPU's default limit")
    found = gpus.look(gpus.library())
    for gpu in found:
        figures = [f"draws {gpu.draw_w:.0f} W"] if gpu.draw_w is not None else []
        figures += [f"limit {gpu.limit_w:.0f} W"] if gpu.limit_w is not None else ["no limit"]
        say(f"GPU {gpu.index} {gpu.name}: {', '.join(figures)}; at {pct:g} % {gpu.saved_w(pct):.0f} W less")
    if not found:
        say("no GPU")


def _limits(note: Path) -> Limits:
    return shed.limits(clock.boot_id(), note)


def _tell(outcome: Outcome) -> None:
    for line in outcome.done:
        say(line)
    if outcome.failed:
        raise PowerguardError("; ".join(outcome.failed), todo="it is tried again when it is asked again")
