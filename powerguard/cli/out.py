"""How results are shown: plain words that survive a pipe, colours only on a terminal."""

from __future__ import annotations

import sys

import msgspec
from rich.console import Console
from rich.markup import escape

PIPE_COLUMNS = 240
"""So that each row of a table is one line to grep and awk."""


def console() -> Console:
    """Standard output. Where it isn't a terminal, lines are never cut."""
    return Console(
        file=sys.stdout, highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else PIPE_COLUMNS
    )


def say(text: str) -> None:
    """One line, as it is."""
    sys.stdout.write(text + "\n")


def warn(text: str) -> None:
    """One line to people, on standard error."""
    sys.stderr.write(f"powerguard: {text}\n")


def say_json(value: object) -> None:
    """One line of JSON."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def seconds(value: float | None) -> str:
    """A duration for people: "unknown", "8 s", "12 min", "3.5 h"."""
    if value is None:
        return "unknown"
    if abs(value) < 180:
        return f"{value:.0f} s" if abs(value) >= 10 or value == 0 else f"{value:.1f} s"
    if abs(value) < 3 * 3600:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h"


def size(value: float | None) -> str:
    """Bytes for people."""
    if value is None:
        return "unknown"
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def safe(text: object) -> str:
    """*text* with nothing in it that rich would take for markup."""
    return escape(str(text))


def without_digits(text: str) -> str:
    """*text* less its numbers: two that differ in nothing else say the same, and are told once."""
    return text.translate(_NO_DIGITS)


_NO_DIGITS = str.maketrans("", "", "0123456789.")
