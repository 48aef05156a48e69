"""`powerguard drill`, and beside it the commands that tell an outage: the command line of this folder."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Annotated, TextIO

import msgspec
import typer

from powerguard import config
from powerguard.drill import live as live_drill
from powerguard.drill import live_report, stories, suite
from powerguard.drill.cli_report import report, scenario
from powerguard.drill.plan import PLANS, Plan, choose
from powerguard.drill.run import Outcome, run
from powerguard.drill.screen import Screen
from powerguard.drill.supply import boottime
from powerguard.errors import DirectoryError, DrillFailed, UsageError


def register(app: typer.Typer) -> None:
    """Adds all three commands to *app*."""
    app.command("drill", help=_drill_help())(drill)
    app.command("scenario", help="Turn an outage in the daemon's journal into a scenario, for `powerguard drill`.")(
        scenario
    )
    app.command("report", help="Write the HTML report of an outage from the daemon's journal.")(report)


def _drill_help() -> str:
    return (
        "Prove on this machine that a power failure is survived.\n\n"
        "A drill on real processes has a simulated UPS, the real daemon and real training ranks, and takes about a "
        f"minute: {', '.join(PLANS)}. A story is played in a simulated world and takes a second. `--list` shows both, "
        "`all` runs everything, a file's name plays a story of your own.\n\n"
        "Needs no root and no UPS, and powers nothing off."
    )


def drill(
    scenario: Annotated[
        str, typer.Argument(help="a name of --list, `all`, or a scenario's file", show_default=False)
    ] = "blackout",
    *,
    show_list: Annotated[bool, typer.Option("--list", help="what there is, and what each shows")] = False,
    nut: Annotated[bool, typer.Option("--nut", help="through a real upsd and dummy-ups (package nut-server)")] = False,
    kill_rank: Annotated[int | None, typer.Option(help="kill this rank after the snapshot", show_default=False)] = None,
    ranks: Annotated[int, typer.Option(help="training processes")] = 2,
    steps: Annotated[int, typer.Option(help="of the whole run; 0 = as many as the drill needs")] = 0,
    seed: Annotated[int, typer.Option(help="of the model, its data and the UPS")] = 1,
    out: Annotated[Path | None, typer.Option(help="folder for everything that is kept", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="results as lines of JSON")] = False,
    live: Annotated[bool, typer.Option("--live", help="on this running node: its own daemon, its own jobs")] = False,
    job: Annotated[str, typer.Option(help="with --live: this job alone", show_default=False)] = "",
    full: Annotated[bool, typer.Option("--full", help="with --live: a snapshot first, and parked for 30 s")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="with --live: don't ask")] = False,
    file: Annotated[
        Path | None,
        typer.Option("-c", "--config", help="with --live: a configuration, for its run_dir", show_default=False),
    ] = None,
    run_dir: Annotated[
        str,
        typer.Option("--run-dir", envvar="POWERGUARD_RUN_DIR", help="with --live: folder of the daemon's sockets"),
    ] = "",
) -> None:
    """Exit code 0 if everything that must hold does, 16 if not."""
    if live:
        _live(_run_dir(file, run_dir), out, job=job, full=full, yes=yes, as_json=as_json)
    elif show_list:
        _list(as_json=as_json)
    elif scenario == "all":
        with _folder(out, "all") as folder:
            _all(folder, as_json=as_json)
    elif scenario in PLANS:
        plan = choose(scenario, ranks=ranks, steps=steps, seed=seed, nut=nut, kill_rank=kill_rank)
        with _folder(out, plan.name) as folder:
            _one(plan, folder, as_json=as_json)
    else:
        _story(scenario, as_json=as_json)


@contextmanager
def _folder(out: Path | None, name: str) -> Iterator[Path]:
    """*out*, or a new folder here that no other drill has; a new one goes again if nothing was written into it.

    DirectoryError before anything has begun, where files can't be made in it.
    """
    if out is not None:
        yield _usable(out)
        return
    folder = _new_folder(f"drill-{name}-{datetime.now():%Y%m%d-%H%M%S}")  # noqa: DTZ005 - a name for people
    try:
        yield folder
    finally:
        with suppress(OSError):
            folder.rmdir()


def _usable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        why = "Not a directory" if isinstance(error, FileExistsError) else error.strerror or error
        raise DirectoryError(f"{folder} can't be written: {why}", todo="name another folder with --out") from None


def _new_folder(name: str) -> Path:
    """Two drills begun in the same second would spoil each other in one folder: the second gets `NAME-2`."""
    for turn in count(1):
        folder = Path(name if turn == 1 else f"{name}-{turn}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            todo = "name a folder with --out"
            raise DirectoryError(f"can't make {folder} here: {error.strerror}", todo=todo) from None
        return folder
    raise AssertionError("count ends never")


def _one(plan: Plan, folder: Path, *, as_json: bool) -> None:
    """A drill on real processes."""
    with _interruptible(), Screen(boottime, sys.stderr) as screen:
        outcome = run(plan, folder, screen, boottime)
    _tell(outcome, as_json=as_json)
    if not outcome.as_it_must or (plan.kill_rank is not None and not outcome.survived):
        raise DrillFailed(
            f"{plan.name}: {outcome.verdict.word}: {outcome.verdict.why[0]}", todo=f"see {outcome.report}"
        )


def _story(name: str, *, as_json: bool) -> None:
    """A story, told act by act; with --json only its verdict."""
    path = stories.find(name)
    told = stories.tell(path)
    if as_json:
        say(json.dumps({"scenario": told.scenario, "world": told.world, "verdict": told.verdict, "why": told.why}))
    else:
        say(stories.retold(path).rstrip())
        say(f"\n{told.scenario}: {told.verdict} ({told.took_s:.1f} s)")
        for why in told.why:
            say(f"  {why}")
    if told.verdict != stories.HELD:
        raise DrillFailed(f"{told.scenario}: {told.why[0]}", todo=f"see {path}")


def _all(folder: Path, *, as_json: bool) -> None:
    def show(line: suite.Line) -> None:
        say(suite.as_json(line) if as_json else suite.in_words(line))
        sys.stdout.flush()

    with _interruptible(), Screen(boottime, sys.stderr, quiet=True) as screen:
        summary = suite.everything(folder, screen, show)
    if as_json:
        say(suite.as_json(summary))
    else:
        say(f"{summary.ok} of {summary.scenarios} scenarios are as they must be, in {summary.took_s:.0f} s")
    if summary.broken:
        raise DrillFailed(f"not as it must be: {', '.join(summary.broken)}", todo=f"see {folder}")


def _run_dir(file: Path | None, run_dir: str) -> str:
    if run_dir:
        return run_dir
    return config.load(file, secrets=False).node.run_dir if file is not None else "/run/powerguard"


def _live(run_dir: str, out: Path | None, *, job: str, full: bool, yes: bool, as_json: bool) -> None:
    """A drill of the running node, after a yes."""
    node = live_drill.Node(run_dir, by=os.environ.get("SUDO_USER", ""))
    status = node.status()
    jobs = live_drill.may(status, job)
    tell = partial(_line, sys.stderr)
    tell(live_drill.warning(status, jobs, full=full))
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("a live drill asks before it begins, and nobody is there", todo="say --yes")
        if not typer.confirm("Begin?", err=True):
            raise live_drill.Refused("the drill wasn't begun: nobody said yes")
    with _folder(out, "live") as folder:
        result = live_drill.run(node, job=job, full=full, say=tell, clock=boottime)
        path, why = live_report.write(result, folder)
    if as_json:
        data = msgspec.to_builtins(result)
        say(json.dumps({"scenario": "live", **data, "ok": result.ok, "report": str(path)}))
    else:
        for line in live_report.words(result):
            say(line)
        say(f"report: {path}{f' ({why})' if why else ''}")
    if not result.ok:
        raise DrillFailed(f"live drill: {result.verdict}: {result.why[0]}", todo=f"see {path}")


def _list(*, as_json: bool) -> None:
    rows = [(plan.name, "processes", plan.says) for plan in PLANS.values()]
    rows += [(name, "pure", stories.read(path).title) for name, path in stories.paths().items()]
    for name, world, says in rows:
        text = json.dumps({"scenario": name, "world": world, "says": says})
        say(text if as_json else f"{name:<32}  {world:<9}  {says}")


def say(text: str) -> None:
    """One line."""
    _line(sys.stdout, text)


def _line(stream: TextIO, text: str) -> None:
    stream.write(text + "\n")
    stream.flush()


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends a drill as Ctrl-C does."""
    was = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, was)


def _tell(outcome: Outcome, *, as_json: bool) -> None:
    result = outcome.result()
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        sys.stdout.write(
            f"{result['scenario']}: {result['verdict']}. stopped at step {result['stop_step']}, "
            f"resumed at {result['resumed_step']}, lost steps: {result['lost_steps']}, "
            f"bit-exact: {'yes' if result['bit_exact'] else 'no'}, flush {result['flush_s']} s\n"
            f"report: {result['report']}\n"
        )
    sys.stdout.flush()


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """SIGTERM ends a drill as Ctrl-C does: everything that it started is cleaned up."""
    raise KeyboardInterrupt
