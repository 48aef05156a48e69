"""What a drill shows while it runs: a line for each event, and on a terminal a line below that moves."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import IO

from msgspec import Struct
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

_TONES = {"good": "green", "bad": "red", "save": "blue", "plain": "default"}
_PHASES = {
    "online": "black on green",
    "on_battery": "black on yellow",
    "flushing": "black on bright_blue",
    "parked": "black on bright_magenta",
    "halting": "black on bright_red",
    "no power": "white on bright_black",
}


class Glance(Struct, frozen=True):
    """The node at one instant; None = unknown."""

    phase: str = "starting"
    charge_pct: float | None = None
    runway_s: float | None = None
    need_s: float | None = None
    steps: tuple[int, ...] = ()


class Screen:
    """Lines to *stream*; with rich's live line where that is a terminal. Use as a context."""

    def __init__(self, clock: Callable[[], float], stream: IO[str] | None = None, *, quiet: bool = False) -> None:
        self._clock, self._began, self._quiet = clock, clock(), quiet
        self._console = Console(file=stream or sys.stderr, highlight=False, soft_wrap=True)
        self._live = Live(console=self._console, refresh_per_second=8, transient=True)
        self._glance = Glance()

    def __enter__(self) -> Screen:
        if self._console.is_terminal and not self._quiet:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str, tone: str = "plain") -> None:
        """One event, with where the node is."""
        if self._quiet:
            return
        line = Text(f"{self._clock() - self._began:6.1f} s  ", "dim")
        line.append(f"{words(self._glance):<58}  ", "dim")
        line.append(text, _TONES[tone])
        self._console.print(line)

    def show(self, glance: Glance) -> None:
        """The node as it is now."""
        self._glance = glance
        if self._live.is_started:
            self._live.update(self._row(glance))

    def _row(self, glance: Glance) -> Table:
        row = Table.grid(padding=(0, 2))
        charge = glance.charge_pct or 0.0
        bar = Text("█" * round(charge / 5), "green" if charge > 40 else "yellow" if charge > 15 else "red")
        bar.append("░" * (20 - round(charge / 5)), "dim")
        row.add_row(
            Text(f" {glance.phase.replace('_', ' ')} ", _PHASES.get(glance.phase, "reverse")), bar, words(glance)
        )
        return row


def words(glance: Glance) -> str:
    """The glance in one line; what is unknown is left out."""
    parts = [f"{glance.phase:<10}"]
    if glance.charge_pct is not None:
        parts.append(f"charge {glance.charge_pct:3.0f} %")
    if glance.runway_s is not None:
        parts.append(f"runway {glance.runway_s:4.1f} s")
    if glance.need_s is not None:
        parts.append(f"need {glance.need_s:.1f} s")
    if glance.steps:
        low, high = min(glance.steps), max(glance.steps)
        parts.append(f"step {low}" if low == high else f"steps {low} to {high}")
    return "  ".join(parts)
