"""Numbers of the command line: one that isn't what an option asks for is a mistake, said with what it asks for."""

from __future__ import annotations

import math

from powerguard.errors import UsageError


def within(option: str, value: float, low: float, high: float = math.inf, *, todo: str) -> None:
    """Raises UsageError unless *value* is a number from *low* to *high*. NaN, which floats take, is within nothing."""
    if low <= value <= high:
        return
    limits = f"of at least {low:.12g}" if high == math.inf else f"from {low:.12g} to {high:.12g}"
    raise UsageError(f"{option} {value:.12g} isn't a number {limits}", todo=todo)
