"""`powerguard drill` and `powerguard report`: the command line of this folder."""

from __future__ import annotations

import json
import signal
import sys
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from powerguard.drill import report as page
from powerguard.drill.plan import PLANS, choose
from powerguard.drill.run import Outcome, run
from powerguard.drill.screen import Screen
from powerguard.drill.supply import boottime
from powerguard.drill.told import from_journal
from powerguard.errors import DrillFailed


def register(app: typer.Typer) -> None:
    """Adds both commands to *app*."""
    app.command("drill", help=_drill_help())(drill)
    app.command("report", help="Write the HTML report of an outage from the daemon's journal.")(report)


def _drill_help() -> str:
    drills = "\n\n".join(f"{plan.name}: {plan.says}" for plan in PLANS.values())
    return (
        "Prove on this machine that a power failure is survived: "
        "a simulated UPS, the real daemon, real training ranks.\n\n"
        f"{drills}\n\nNeeds no root and no UPS, and powers nothing off. About a minute."
    )


def drill(
    scenario: Annotated[str, typer.Argument(help=f"one of {', '.join(PLANS)}", show_default=False)] = "blackout",
    *,
    nut: Annotated[bool, typer.Option("--nut", help="through a real upsd and dummy-ups (package nut-server)")] = False,
    kill_rank: Annotated[int | None, typer.Option(help="kill this rank after the snapshot", show_default=False)] = None,
    ranks: Annotated[int, typer.Option(help="training processes")] = 2,
    steps: Annotated[int, typer.Option(help="of the whole run; 0 = as many as the drill needs")] = 0,
    seed: Annotated[int, typer.Option(help="of the model, its data and the UPS")] = 1,
    out: Annotated[Path | None, typer.Option(help="folder for everything that is kept", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="end with the result as one line of JSON")] = False,
) -> None:
    """Exit code 0 for the verdict "survived", 16 for any other."""
    plan = choose(scenario, ranks=ranks, steps=steps, seed=seed, nut=nut, kill_rank=kill_rank)
    folder = out or Path(f"drill-{plan.name}-{datetime.now():%Y%m%d-%H%M%S}")  # noqa: DTZ005 - a name for people
    was = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with Screen(boottime, sys.stderr) as screen:
            outcome = run(plan, folder, screen, boottime)
    finally:
        signal.signal(signal.SIGTERM, was)
    _tell(outcome, as_json=as_json)
    if not outcome.survived:
        raise DrillFailed(
            f"{plan.name}: {outcome.verdict.word}: {outcome.verdict.why[0]}", todo=f"see {outcome.report}"
        )


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


def report(
    journal: Annotated[Path, typer.Argument(help="a journal-*.jsonl of the daemon's state_dir", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="the HTML file; a PNG lies beside it", show_default=False)] = None,
    outage: Annotated[int, typer.Option(help="which outage of the journal, 1 = the first; 0 = the last")] = 0,
) -> None:
    """The report of one outage, as a drill's."""
    story = from_journal(journal, outage=outage - 1)
    path = page.write(story, out or Path(journal.stem).with_suffix(".html"))
    sys.stdout.write(f"{story.title}: {story.verdict}\nreport: {path}\n")


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """SIGTERM ends a drill as Ctrl-C does: everything that it started is cleaned up."""
    raise KeyboardInterrupt
