"""`powerguard exec -- COMMAND`: guards a program that knows nothing of powerguard."""

from __future__ import annotations

import os
import signal
from typing import Annotated

import typer

from powerguard.cli.limits import within
from powerguard.errors import UsageError

DEFAULT_WORDS = 'what shows that it has saved: "exit", "file:GLOB" (a new file, at rest) or "log:REGEX" (a line)'
TAKES_MAX_S = 86400.0


def register(app: typer.Typer) -> None:
    """Adds the command to *app*."""
    app.command(
        "exec",
        no_args_is_help=True,
        context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
    )(exec_)


def exec_(  # noqa: PLR0917  (of typer)
    command: Annotated[list[str], typer.Argument(help="after --: the program and its arguments", show_default=False)],
    signal_: Annotated[str, typer.Option("--signal", "-s", help="what it saves on: TERM, USR1, ...")] = "TERM",
    saved: Annotated[str, typer.Option(help=DEFAULT_WORDS)] = "exit",
    takes: Annotated[float, typer.Option(help="seconds from the signal to saved; 0: not known")] = 0.0,
    to: Annotated[
        str, typer.Option(help="who gets it: auto (the ranks of a launcher, else the command), command, ranks, tree")
    ] = "auto",
    snapshot_signal: Annotated[
        str, typer.Option(help="a signal on which it saves and goes on, if it has one", show_default=False)
    ] = "",
    restart: Annotated[bool, typer.Option("--restart", help="start it again when the mains are back")] = False,
    job: Annotated[str, typer.Option(help="the job's name; default: the scheduler's", show_default=False)] = "",
    rank: Annotated[int | None, typer.Option(help="this node's number in the job", show_default=False)] = None,
    nodes: Annotated[int | None, typer.Option(help="nodes of the job, each with one exec", show_default=False)] = None,
    socket: Annotated[str, typer.Option(help="the daemon's, default: as for the hook", show_default=False)] = "",
) -> int:
    """Run a program; on the daemon's order to stop, signal it and wait until it has saved.

    It is one rank for its whole process tree (one exec per node under torchrun). Its exit code is passed on, 75 where
    it ended for an outage. It is never killed, and gets no signal but that one.
    """
    from powerguard.launch.run import How, Launch
    from powerguard.launch.saved import parse
    from powerguard.launch.tree import To
    from powerguard.train.identity import DEFAULT_SOCKET, find_identity

    within("--takes", takes, 0.0, TAKES_MAX_S, todo="give seconds, 0 if nobody knows")
    if to not in {kind.value for kind in To}:
        raise UsageError(f"--to {to!r} is nobody", todo=f"give one of {', '.join(kind.value for kind in To)}")
    how = How(
        signal=_number(signal_),
        to=To(to),
        saved=parse(saved),
        takes_s=takes,
        snapshot=_number(snapshot_signal) if snapshot_signal else 0,
        restart=restart,
    )
    identity = find_identity(os.environ, job=job or None, rank=rank, local_rank=0, world_size=nodes)
    path = socket or os.environ.get("POWERGUARD_SOCKET") or DEFAULT_SOCKET
    return Launch(command, how, identity, path).run()


def _number(name: str) -> int:
    """A signal by name, with or without SIG, or by number."""
    try:
        if name.isdigit():
            return signal.Signals(int(name)).value
        return signal.Signals[name.upper() if name.upper().startswith("SIG") else f"SIG{name.upper()}"].value
    except (KeyError, ValueError):
        raise UsageError(f"{name!r} is no signal", todo="give TERM, USR1, USR2, INT, ...") from None
