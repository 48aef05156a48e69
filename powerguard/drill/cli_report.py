"""`powerguard report` and `powerguard scenario`: one outage of the daemon's journals, as a page or as a story."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import typer

from powerguard.drill import report as page
from powerguard.drill import retell, told
from powerguard.drill.outages import Outage, damage, pick
from powerguard.errors import UsageError
from powerguard.journal import several

Journals = Annotated[
    list[Path],
    typer.Argument(
        metavar="JOURNAL",
        help="journal-*.jsonl of the daemon's state_dir, one or more, or that folder",
        show_default=False,
    ),
]
Number = Annotated[int, typer.Option(help="which outage of them all, 1 = the first; 0 = the last", min=0)]


def report(
    journals: Journals,
    out: Annotated[Path | None, typer.Option(help="the HTML file; a PNG lies beside it", show_default=False)] = None,
    outage: Number = 0,
) -> None:
    """The report of one outage, as a drill's."""
    chosen = _chosen(journals, outage)
    story = told.story(chosen)
    path = page.write(story, out or Path(Path(chosen.recording.path).stem).with_suffix(".html"))
    sys.stdout.write(f"{story.title}: {story.verdict}\nreport: {path}\n")


def scenario(
    journals: Journals,
    out: Annotated[Path | None, typer.Option(help="its file; without it, to here", show_default=False)] = None,
    outage: Number = 0,
    every: Annotated[float, typer.Option(help="a UPS's numbers at most once in so many seconds")] = 2.0,
) -> None:
    """What the UPSes said, who commanded what, and what must hold; the answers are this version's."""
    if not 0.0 <= every < math.inf:
        raise UsageError(f"--every {every:g} isn't a number of seconds", todo="give 0 or more")
    text = retell.scenario(_chosen(journals, outage), every_s=every)
    if out is None:
        sys.stdout.write(text)
        return
    page.put(out, text.encode())
    sys.stdout.write(f"scenario: {out}\n")


def _chosen(journals: list[Path], outage: int) -> Outage:
    """The outage that was asked for; which of several it is, and what can't be read, is said on standard error."""
    recordings = several(journals)
    chosen = pick(recordings, outage - 1)
    if len(recordings) > 1 or chosen.count > 1:
        sys.stderr.write(f"powerguard: outage {chosen.number} of {chosen.count}: {chosen.recording.path}\n")
    if lost := damage(recordings):
        sys.stderr.write(f"powerguard: {lost}\n")
    return chosen
