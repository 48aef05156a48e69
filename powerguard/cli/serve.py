"""`powerguard run`: the daemon in the foreground."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from powerguard.config import FILE


def register(app: typer.Typer) -> None:
    """Adds the command to *app*."""
    app.command("run")(run)


def run(
    file: Annotated[Path, typer.Option("-c", "--config", help="the configuration file", readable=False)] = Path(FILE),
    really: Annotated[
        bool, typer.Option("--really", help="power the node off when it must be; without it, only say so")
    ] = False,
    json_logs: Annotated[bool, typer.Option("--json-logs", help="log lines in JSON, as under systemd")] = False,
) -> None:
    """Watch the UPS, save training when the mains fail, halt in time. Runs until it is told to stop.

    SIGHUP reloads the configuration; one with mistakes is refused. SIGTERM ends: ranks train on, unwatched.
    """
    from powerguard.node.service import serve

    raise typer.Exit(serve(file, really=really, json_logs=json_logs))
