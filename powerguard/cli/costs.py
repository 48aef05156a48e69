"""`powerguard costs DIR`: what interruptions and periodic saves cost a run, and what another interval would have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from msgspec import Struct
from rich.table import Table

from powerguard.cli.out import console, say, say_json, seconds
from powerguard.core.interval import PRIOR_S, learned_mtbf_s, optimum_s, unannounced_mtbf_s
from powerguard.errors import DirectoryError, UsageError
from powerguard.generations import lives
from powerguard.generations.lives import Life

UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


class Choice(Struct, frozen=True):
    """An interval, and what it costs over the time that was trained, in seconds of all ranks together."""

    every_s: float
    what: str
    saves_s: float
    lost_s: float

    @property
    def total_s(self) -> float:
        """Both."""
        return self.saves_s + self.lost_s


class Costs(Struct, frozen=True):
    """The sum over a run's lives; None = not known."""

    lives: int
    world_size: int
    trained_s: float
    steps: int
    interruptions: int
    announced: int
    lost_steps: int
    lost_s: float
    lost_gpu_hours: float
    down_s: float
    saves: int
    saves_s: float  # that training waited for them
    mtbf_s: float  # between unannounced failures, as reckoned
    choices: tuple[Choice, ...] = ()


def register(app: typer.Typer) -> None:
    """Adds the command to *app*."""
    app.command()(costs)


def costs(
    directory: Annotated[Path, typer.Argument(help="the directory given to attach(dir=...)", show_default=False)],
    every: Annotated[list[str] | None, typer.Option(help="another interval: 90s, 5min, 2h", show_default=False)] = None,
    mtbf: Annotated[str, typer.Option(help="mean time between failures, if known: 30d", show_default=False)] = "",
    as_json: Annotated[bool, typer.Option("--json", help="one line of JSON")] = False,
) -> None:
    """Show what interruptions and saves have cost, and what another interval would have cost."""
    if not os.path.isdir(directory):
        raise DirectoryError(f"{directory} isn't a directory", todo="name the directory given to attach(dir=...)")
    known = known_lives(directory)
    if not known:
        say(f"{directory}: no run has been recorded here")
        return
    summed = add_up(known, [_interval(text) for text in every or ()], _interval(mtbf) if mtbf else None)
    if as_json:
        say_json(summed)
    else:
        _show(known, summed)


def known_lives(directory: Path) -> tuple[Life, ...]:
    """Those that are over, and the one underway, or whose end nobody has seen yet."""
    last = lives.current(directory)
    past = lives.past(directory)
    buried = any(life.started_at == last.started_at for life in past) if last is not None else True
    return past if buried or last is None else (*past, last)


def add_up(known: tuple[Life, ...], others: list[float], mtbf_s: float | None = None) -> Costs:
    """The sum, with the interval that was, the best one, and *others*."""
    over = [life for life in known if life.settled and life.interrupted]
    announced = sum(life.announced for life in over)
    trained_s = sum(life.trained_s for life in known)
    saves, saves_s = sum(life.saves for life in known), sum(life.blocked_s for life in known)
    bad = len(over) - announced
    share = announced / len(over) if over else 0.0
    if mtbf_s is not None:
        between_s = unannounced_mtbf_s(mtbf_s, share)
    else:
        between_s = trained_s / bad if bad else learned_mtbf_s(trained_s, 0, PRIOR_S)
    blocked_s = saves_s / saves if saves else 0.0
    choices = []
    if saves:
        choices.append(Choice(trained_s / saves, "as it was", saves_s, sum(life.lost_s for life in over)))
        best = optimum_s(blocked_s, between_s)
        named = [(best, "the best"), (best / 2, "half of it"), (best * 2, "twice it")]
        for every_s, what in [*named, *((one, "asked for") for one in others)]:
            if every_s > 0:
                choices.append(Choice(every_s, what, blocked_s * trained_s / every_s, bad * every_s / 2))
    return Costs(
        lives=len(known),
        world_size=max(life.world_size for life in known),
        trained_s=trained_s,
        steps=sum(life.steps for life in known),
        interruptions=len(over),
        announced=announced,
        lost_steps=sum(life.lost_steps for life in over),
        lost_s=sum(life.lost_s for life in over),
        lost_gpu_hours=sum(life.gpu_hours for life in over),
        down_s=sum(life.down_s for life in over),
        saves=saves,
        saves_s=saves_s,
        mtbf_s=between_s,
        choices=tuple(choices),
    )


def _show(known: tuple[Life, ...], summed: Costs) -> None:
    ranks = f"{summed.world_size} rank{'s' * (summed.world_size != 1)}"
    say(f"trained      {seconds(summed.trained_s)}, {summed.steps} steps, {ranks}, {summed.lives} starts")
    unannounced = summed.interruptions - summed.announced
    say(f"interrupted  {summed.interruptions} times: {summed.announced} announced and saved, {unannounced} not")
    hours = f"{summed.lost_gpu_hours:.2f} GPU-hours"
    say(f"work lost    {summed.lost_steps} steps, {seconds(summed.lost_s)}, {hours}; down for {seconds(summed.down_s)}")
    each = f", {summed.saves_s / summed.saves:.3g} s each" if summed.saves else ""
    say(f"saves        {summed.saves}, which training waited {seconds(summed.saves_s)} for{each}")
    for life in known:
        if life.settled and life.interrupted:
            how = life.ended or "without a word"
            say(f"  at step {life.step}: {how}, {life.lost_steps} steps lost, {life.gpu_hours:.2f} GPU-hours")
    if not summed.choices:
        say("no periodic saves: attach(..., save_every=...) takes them, and this says what another interval would cost")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("a save every", "", "waiting for saves", "work lost", "together"):
        table.add_column(name, justify="left" if not name else "right")
    for one in summed.choices:
        table.add_row(seconds(one.every_s), one.what, seconds(one.saves_s), seconds(one.lost_s), seconds(one.total_s))
    console().print(table)
    say(f"others: as expected with {unannounced} unannounced failures, the best by one in {seconds(summed.mtbf_s)}")


def _interval(text: str) -> float:
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    try:
        value = float(number) * UNITS[text[len(number) :] or "s"]
    except (KeyError, ValueError):
        value = 0.0
    if value <= 0:
        raise UsageError(f"{text!r} is no time", todo="give 90s, 5min, 2h or 30d")
    return value
