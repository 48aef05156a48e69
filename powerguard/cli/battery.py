"""`powerguard battery`: what outages taught of each battery, and the word that one was replaced."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from powerguard import config as configuration
from powerguard.cli.ask import ConfigFile, Json, Refused, RunDir, run_dir_of
from powerguard.cli.out import console, safe, say, say_json
from powerguard.config import Config
from powerguard.errors import DaemonUnreachable, DirectoryError, UsageError
from powerguard.node import clock
from powerguard.node.ask import CONTROL_SOCKET, Answer, Ask, ask, served
from powerguard.node.batteries import Batteries, about, outage_words, put_in, replaced_words, which
from powerguard.node.learned import LEARNED_FILE, Learned, looked_at


def register(app: typer.Typer) -> None:
    """Adds the commands to *app*."""
    group = typer.Typer(no_args_is_help=True, help="What outages taught of each battery; say that one was replaced.")
    group.command("list")(listing)
    group.command()(replaced)
    app.add_typer(group, name="battery")


def listing(file: ConfigFile = None, run_dir: RunDir = "", as_json: Json = False) -> None:
    """Show what is known of each battery and of this node's outages."""
    answer = _asked(Ask("batteries"), file, run_dir)
    found = msgspec.convert(answer.data, Batteries, strict=False) if answer else _without_daemon(_config(file))
    if as_json:
        say_json(found)
    else:
        _show(found)


def replaced(
    ups: Annotated[str, typer.Argument(metavar="UPS", help="its name, as rack or rack@host", show_default=False)],
    on: Annotated[str, typer.Option("--on", help="the day, as 2026-05-17; default: today", show_default=False)] = "",
    file: ConfigFile = None,
    run_dir: RunDir = "",
) -> None:
    """Say that the battery of a UPS was replaced: what was learned of the old one is forgotten.

    A running daemon does it itself; without one, -c FILE says where the record is.
    """
    day = put_in(on)
    answer = _asked(Ask("battery-replaced", os.environ.get("SUDO_USER", ""), ups, day.isoformat()), file, run_dir)
    if answer is not None:
        say(answer.text)
        return
    config = _config(file)
    feed = which([one.name for one in config.ups], ups)
    learned = _own(config)
    learned.replaced(feed, day)
    learned.close(30.0)
    if learned.trouble:
        raise DirectoryError(f"can't be written: {learned.trouble}", todo="use sudo, or check state_dir")
    say(replaced_words(feed, day))


def _asked(question: Ask, file: Path | None, run_dir: str) -> Answer | None:
    """The daemon's answer; None where none runs and the file can be used instead."""
    path = Path(run_dir_of(file, run_dir)) / CONTROL_SOCKET
    try:
        answer = ask(path, question)
    except DaemonUnreachable:
        if file is None or served(path):
            raise
        return None
    if not answer.ok:
        raise Refused(answer.text or "refused")
    return answer


def _config(file: Path | None) -> Config:
    if file is None:
        raise UsageError("no daemon answers, and no configuration is named", todo="-c FILE")
    return configuration.load(file, secrets=False)


def _without_daemon(config: Config) -> Batteries:
    learned, why = looked_at(Path(config.node.state_dir) / LEARNED_FILE)
    if why:
        raise DirectoryError(f"can't be read: {why}", todo="use sudo, or let the daemon mend it: it begins anew")
    learned.applied(config)
    return about(learned)


def _own(config: Config) -> Learned:
    learned = Learned(Path(config.node.state_dir) / LEARNED_FILE, boot=clock.boot_id())
    learned.applied(config)
    return learned


def _show(found: Batteries) -> None:
    screen, table = console(), Table(box=None, pad_edge=False)
    for column in ("ups", "battery of", "capacity", "proven", "discharges", "last"):
        table.add_column(column)
    for battery in found.batteries:
        word = " (configured)" if battery.operator else ""
        table.add_row(
            safe(battery.feed),
            battery.installed or "unknown",
            _share(battery.capacity) + (word if battery.capacity is not None else ""),
            _share(battery.proven),
            str(battery.discharges),
            safe(battery.last or "-"),
        )
    screen.print(table)
    screen.print(safe(outage_words(found.outages, found.back)))


def _share(value: float | None) -> str:
    return "not measured" if value is None else f"{100 * value:.0f} % of rated"
