"""`powerguard status`, `flush`, `park`, `resume`: a word with the daemon."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from powerguard import config
from powerguard.cli import show, watch
from powerguard.cli.out import say, say_json, warn
from powerguard.errors import DaemonUnreachable, PowerguardError
from powerguard.node.ask import CONTROL_SOCKET, Answer, Ask
from powerguard.node.ask import ask as ask_daemon
from powerguard.node.status import Status

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


def status(
    file: ConfigFile = None,
    run_dir: RunDir = "",
    as_json: Json = False,
    live: Annotated[
        bool,
        typer.Option("--watch", "-w", help="go on showing it, once a second, until Ctrl-C; with --json a line each"),
    ] = False,
) -> None:
    """Show what the daemon knows: power, runway, need, jobs, and what happens next."""
    where = run_dir_of(file, run_dir)
    if live:
        watch.run(lambda: fetch(where), as_json=as_json)
    elif as_json:
        say_json(fetch(where))
    else:
        show.once(fetch(where))


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
