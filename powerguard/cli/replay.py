"""`powerguard replay`: decide a journal anew. What would this version, or another policy, have done that night?

A CSV file of a discharge, of anybody's UPS, is told what the estimator makes of it (`trace.py`). Both can be drawn.
"""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from powerguard import config, journal
from powerguard.cli import trace
from powerguard.cli.chart import Point, svg
from powerguard.cli.limits import within
from powerguard.cli.out import say, say_json, seconds
from powerguard.core.decide import decide
from powerguard.core.policy import Policy
from powerguard.core.state import Decision, State
from powerguard.core.types import Actions, Announce, Halt
from powerguard.errors import DirectoryError, JournalError, UsageError
from powerguard.journal import Base, Done, Fault, Head, Learnt, Rules, Tick

TOLD = 40
"""A trace is told in about so many lines, and where something changes."""

_LATER = ("Ack", "Welcome", "Notice")
"""Small talk that isn't worth a line."""


class Line(msgspec.Struct, omit_defaults=True):
    """One record of the answer."""

    at: float
    wall: str
    phase: str
    reason: str
    actions: tuple[str, ...] = ()
    was_phase: str = ""  # where the journal says otherwise
    was_actions: tuple[str, ...] | None = None


class Replay:
    """Walks a journal; *own* replaces its policy, and then its states are not taken over."""

    def __init__(self, own: Policy | None) -> None:
        self.decided = self.differ = self.skipped = 0
        self._own, self._policy = own, own or Policy()
        self._state: State | None = None
        self._last_n = -1

    @property
    def margin_s(self) -> float:
        """On top of the need, by the policy in force."""
        return self._policy.margin_s

    def take(self, record: journal.Record) -> tuple[Tick, Decision] | None:
        """The new decision beside the old one; None for records that decide nothing, or lack a state to begin with."""
        if record.n != self._last_n + 1:  # quiet minutes that were never written: the daemon was killed
            self._state = self._state if self._own is not None else None
        self._last_n = record.n
        if isinstance(record, Rules):
            self._policy = _tried(self._own, record.policy)
        elif isinstance(record, Base):
            self._take_over(record.state)
        elif isinstance(record, Fault):
            self._state = None
        elif isinstance(record, Tick):
            return self._decide(record)
        return None

    def _decide(self, tick: Tick) -> tuple[Tick, Decision] | None:
        if self._state is None:
            self.skipped += 1
            self._take_over(tick.state)
            return None
        decision = decide(self._policy, self._state, tick.seen, tick.at)
        self.decided += 1
        same = decision.state.phase is tick.phase and decision.actions == tick.actions
        self.differ += not same
        self._state = decision.state if same or self._own is not None or tick.state is None else tick.state
        return tick, decision

    def _take_over(self, state: State | None) -> None:
        if self._own is None or self._state is None:
            self._state = state


def _tried(own: Policy | None, recorded: Policy) -> Policy:
    """*own*, for the feeds that the journal has: those that it doesn't name stay as they were."""
    if own is None:
        return recorded
    named = {feed.name: feed for feed in own.feeds}
    feeds = tuple(named.get(feed.name, feed) for feed in recorded.feeds)
    needed = min(own.min_supplies, max(1, len(feeds)))
    return msgspec.structs.replace(own, feeds=feeds, min_supplies=needed, outages=recorded.outages)


def register(app: typer.Typer) -> None:
    """Adds the command to *app*."""
    app.command()(replay)


def replay(  # noqa: PLR0917
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="a journal-*.jsonl of state_dir, or a .csv of a discharge",
            show_default=False,
            readable=False,
        ),
    ],
    policy: Annotated[
        Path | None,
        typer.Option(help="a powerguard.toml whose policy is tried instead", show_default=False, readable=False),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="a line for every decision, not only where something changes")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="a line of JSON for each line, then a summary")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="draw the runway over time into this .svg", show_default=False, readable=False)
    ] = None,
    flush: Annotated[float, typer.Option(help="a .csv: seconds that a flush takes")] = 60.0,
    dark: Annotated[bool, typer.Option("--dark", help="a .csv: the power went out at its end")] = False,
    fixed: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="VAR=VALUE", help="a .csv: a NUT variable that it lacks", show_default=False),
    ] = None,
) -> None:
    """Decide a journal anew: the timeline of reasons, and where it differs from what was done.

    Lines that differ begin with a ! and show what was done then.

    A .csv of a discharge has a row for each poll: t_s (or time), and NUT variables (battery.charge) or names as public
    traces have them (charge_pct, timeleft_min, batt_V, volts_mV, load_pct, status); # begins a comment.
    """
    if plot is not None and plot.suffix != ".svg":
        raise UsageError(f"--plot {plot}: only .svg is drawn", todo="name a file that ends in .svg")
    own = config.load(policy, secrets=False).policy if policy is not None else None
    if path.suffix == ".csv":
        points = _trace(
            path, own or Policy(), flush_s=flush, dark=dark, fixed=fixed or [], every=every, as_json=as_json
        )
        title = "What the runway said of this discharge"
    else:
        points = _journal(path, own, policy, every=every, as_json=as_json)
        title = "The runway as it was decided on"
    if plot is not None and points:
        try:
            plot.write_text(svg(title, path.name, points), encoding="utf-8")
        except OSError as error:
            raise DirectoryError(f"{plot} can't be written: {error.strerror}", todo="name another file") from None


def _journal(path: Path, own: Policy | None, policy: Path | None, *, every: bool, as_json: bool) -> list[Point]:
    """Tells a journal; its decisions on battery, and those around them, as points."""
    recording = journal.read(path)
    if recording.head is None:
        raise JournalError(f"{path} has no head", todo="its beginning is lost; name another file")
    walk = Replay(own)
    shown_reason = shown_phase = ""
    points: list[Point] = []
    if not as_json:
        _introduce(recording.head, policy)
    for record in recording.records:
        if isinstance(record, Fault | Done | Learnt) and not as_json:
            say(f"  {_wall(recording.head, record.at)}  {_note(record)}")
        pair = walk.take(record)
        if pair is None:
            continue
        line = _line(recording.head, *pair)
        points.append(_point(recording.head, *pair, shown_phase, walk.margin_s))
        kind = _kind(line.reason)
        telling = line.phase != shown_phase or kind != shown_reason or line.actions or line.was_actions is not None
        if every or telling:
            say_json(line) if as_json else _say(line)
        shown_reason, shown_phase = kind, line.phase
    _sum_up(
        {"decisions": walk.decided, "differ": walk.differ, "skipped": walk.skipped, "damaged_lines": recording.damaged},
        as_json=as_json,
    )
    return points


def _sum_up(summary: dict[str, int], *, as_json: bool) -> None:
    if as_json:
        say_json(summary)
        return
    words = (f"{count} {what.replace('_', ' ')}" for what, count in summary.items() if count or what == "differ")
    say(", ".join(words))


def _point(head: Head, tick: Tick, decision: Decision, before: str, margin_s: float) -> Point:
    state = decision.state
    power, phase = state.power, state.phase.value
    need_s = None if phase == "online" else state.need.used_s + margin_s
    event = phase.replace("_", " ") if before not in ("", phase) else ""
    return Point(tick.at - head.at, None if power is None else power.runway_s, phase, need_s, event=event)


def _trace(
    path: Path, policy: Policy, *, flush_s: float, dark: bool, fixed: list[str], every: bool, as_json: bool
) -> list[Point]:
    """Tells a trace, and its rows as points."""
    within("--flush", flush_s, 0.0, trace.DAY_S, todo="give the seconds that a flush takes")
    said = trace.play(trace.read(path, trace.lacking(fixed)), policy, flush_s=flush_s, dark=dark)
    need_s = trace.need_of(policy, flush_s).used_s + policy.margin_s
    told = ("", "", -math.inf)
    for each in said:
        often = each.at - told[2] >= max(10.0, said[-1].at / TOLD)
        if every or each.event or (each.phase, each.by) != told[:2] or often or each is said[-1]:
            say_json(each) if as_json else _say_trace(each)
            told = (each.phase, each.by, each.at)
    under, given, share = trace.kept(said)
    summary = {"rows": len(said), "bounds": sum(each.runway_s is not None for each in said)}
    if as_json:
        say_json(summary | ({"not_above_the_truth": under, "median_share": share} if given else {}))
    else:
        words = f"{summary['rows']} rows, {summary['bounds']} bounds"
        if given and share is not None:
            words += f", {100.0 * under / given:.1f} % not above what was left, in the median {share:.2f} of it"
        say(words)
    return [
        Point(each.at, each.runway_s, each.phase, None if each.phase == "online" else need_s, each.truth_s, each.event)
        for each in said
    ]


def _say_trace(each: trace.Said) -> None:
    left = "unknown" if each.runway_s is None else f"{each.runway_s:.0f} s"
    truth = "" if each.truth_s is None else f" of {each.truth_s:.0f} s"
    say(f"{each.at:>8.0f} s  {each.status:<12} {left + truth:>20}  {each.by:<10}  {each.reason}")


def _introduce(head: Head, policy: Path | None) -> None:
    say(f"node {head.node}, boot {head.boot[:8]}, written by powerguard {head.version} from {head.created}")
    if policy is not None:
        say(f"decided by the policy of {policy}; what ranks and UPS answered is as it was")


def _line(head: Head, tick: Tick, decision: Decision) -> Line:
    now, was = _words(decision.actions), _words(tick.actions)
    line = Line(tick.at, _wall(head, tick.at), decision.state.phase.value, decision.reason, now)
    if tick.phase is not decision.state.phase:
        line.was_phase = tick.phase.value
    if decision.actions != tick.actions or line.was_phase:
        line.was_actions = was
    return line


def _say(line: Line) -> None:
    differs = line.was_actions is not None
    say(f"{'!' if differs else ' '} {line.wall}  {line.phase:<10}  {line.reason}")
    for action in line.actions:
        say(f"{'':<27}  {action}")
    if differs:
        was = ", ".join(line.was_actions or ()) or "nothing"
        say(f"{'':<27}  then: {line.was_phase or line.phase}, {was}")


def _words(actions: tuple[Actions, ...]) -> tuple[str, ...]:
    """Orders, the same one to many ranks once."""
    found: dict[str, list[int]] = {}
    for action in actions:
        if isinstance(action, Halt):
            found[f"HALT ({action.reason})"] = []
        elif isinstance(action, Announce):
            found[f"{action.level}: {action.text}"] = []
        elif type(action.message).__name__ not in _LATER:
            found.setdefault(f"{type(action.message).__name__} to {action.job}", []).append(action.rank)
    return tuple(f"{text} rank {', '.join(map(str, ranks))}" if ranks else text for text, ranks in found.items())


def _note(record: Fault | Done | Learnt) -> str:
    if isinstance(record, Learnt):
        seen = record.lesson.discharge
        promised = "" if seen.bound_s is None else f", promised {seconds(seen.bound_s)} at least"
        return f"{record.feed}: {seconds(seen.lasted_s)} on battery{promised}; {record.lesson.why}"
    return f"FAULT: {record.text}" if isinstance(record, Fault) else f"halt: {record.what}"


def _wall(head: Head, at: float) -> str:
    created = datetime.fromisoformat(head.created)
    return (created + timedelta(seconds=at - head.at)).strftime("%d %H:%M:%S.%f")[:-5]


def _kind(reason: str) -> str:
    """A reason without its numbers: a countdown is told once."""
    return "".join(char for char in reason if not char.isdigit() and char != ".")
