"""Puts the commands together."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from powerguard import __version__
from powerguard.cli import (
    ask,
    battery,
    calibrate,
    check,
    checkpoints,
    costs,
    exec,
    keys,
    record,
    replay,
    serve,
    service,
    shed,
    slurm,
    wait,
)
from powerguard.cli.exit_codes import text as exit_codes
from powerguard.errors import UsageError

_CLICK_ERROR: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException" and issubclass(kind, Exception)
)
"""Typer brings its own copy of click in some versions; this is the base of usage errors in either."""

HELP = "Saves training runs when the mains fail: early and reversibly; halts late and for good."


@functools.cache
def build() -> typer.Typer:
    """The application with every command that can be had here."""
    app = typer.Typer(
        name="powerguard",
        help=HELP,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog="Exit codes: `powerguard exit-codes`",
    )
    app.callback()(_options)
    for group in (
        serve,
        check,
        calibrate,
        exec,
        costs,
        ask,
        wait,
        replay,
        record,
        checkpoints,
        service,
        slurm,
        shed,
        battery,
        keys,
    ):
        group.register(app)
    app.command("exit-codes", help="List what exit codes mean.")(_exit_codes)
    _register_drill(app)
    return app


def call(arguments: list[str]) -> int:
    """Runs one command; UsageError for a command line that makes no sense."""
    command = typer.main.get_command(build())
    try:
        result = command.main(arguments, prog_name="powerguard", standalone_mode=False)
    except _CLICK_ERROR as err:
        return _usage(err)
    except typer.Abort:
        raise KeyboardInterrupt from None
    return result if isinstance(result, int) else 0


def _usage(err: Exception) -> int:
    context = getattr(err, "ctx", None)
    if type(err).__name__ == "NoArgsIsHelpError":  # the help is printed already
        return UsageError.exit_code
    message = err.format_message() if hasattr(err, "format_message") else str(err)
    where = context.command_path if context is not None else "powerguard"
    raise UsageError(message.rstrip("."), todo=f"try: {where} --help") from None


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"powerguard {__version__}\n")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks. Comes first.")] = False,
) -> None:
    """Options of every command."""


def _exit_codes() -> None:
    sys.stdout.write(exit_codes() + "\n")


def _register_drill(app: typer.Typer) -> None:
    """`drill` needs the extra of that name to draw; without it everything else still works."""
    try:
        entry = importlib.import_module("powerguard.drill.cli_entry")
    except ImportError as err:
        missing = err.name or "a package"
        app.command("drill", help="Prove that a power failure is survived (needs powerguard\\[drill,train]).")(
            _without(missing)
        )
        return
    entry.register(app)


def _without(missing: str) -> Callable[..., None]:
    from powerguard.errors import MissingDependency

    def drill(
        arguments: Annotated[list[str] | None, typer.Argument(show_default=False)] = None,  # noqa: ARG001
    ) -> None:
        raise MissingDependency(f"{missing} isn't installed", todo="pip install 'powerguard[node,train,drill]'")

    return drill
