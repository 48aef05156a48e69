"""`powerguard wait-ready`: the gate before training begins, for `ExecStartPre=` and the prologs of schedulers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from powerguard import config
from powerguard.cli.ask import RUN_DIR, fetch
from powerguard.cli.limits import within
from powerguard.cli.out import say, warn, without_digits
from powerguard.errors import DaemonUnreachable, NotReady, PowerguardError

POLL_S = 2.0


def register(app: typer.Typer) -> None:
    """Adds the command to *app*."""
    app.command("wait-ready")(wait_ready)


def wait_ready(
    file: Annotated[
        Path | None, typer.Option("-c", "--config", help="a configuration file, for its run_dir", show_default=False)
    ] = None,
    run_dir: Annotated[
        str,
        typer.Option(
            "--run-dir", envvar="POWERGUARD_RUN_DIR", help="folder of the daemon's sockets", show_default=RUN_DIR
        ),
    ] = "",
    timeout: Annotated[
        float | None, typer.Option(help="give up after so many seconds; default: wait for ever", show_default=False)
    ] = None,
) -> None:
    """Wait until an outage would leave enough battery for one flush and a halt.

    After an outage batteries are low, and the next one often comes soon: training that starts at once may not be saved
    by then. Returns at once if all is well. Exit code 17 when the time is over, 10 if no daemon answered.
    """
    if timeout is not None:
        within("--timeout", timeout, 0.0, todo="give seconds, 0 to look once")
    where = run_dir or (config.load(file, secrets=False).node.run_dir if file is not None else RUN_DIR)
    ends = None if timeout is None else time.monotonic() + timeout
    said = ""
    while True:
        failure = _gate(where)
        if failure is None:
            say("ready")
            return
        left_s = POLL_S if ends is None else ends - time.monotonic()
        if left_s <= 0:
            raise failure
        kind = without_digits(failure.message)
        if kind != said:
            said = kind
            warn(f"waiting: {failure.message}")
        time.sleep(min(POLL_S, left_s))


def _gate(run_dir: str) -> PowerguardError | None:
    """None once the gate is open."""
    try:
        gate = fetch(run_dir).gate
    except DaemonUnreachable as err:
        return err
    return NotReady(gate, todo="wait for the batteries, or start anyway at your own risk") if gate else None
