"""Exit codes, from the tree of errors and its drawing: one source for the help, the README and its test."""

from __future__ import annotations

import re
from collections.abc import Iterator

from powerguard import errors
from powerguard.errors import PowerguardError

_DRAWN = re.compile(r"(\w+)[ ]{2,}\d+[ ]{2,}(\S.*)")
"""A line of the tree in the docstring of `errors.py`: the class, its code, its meaning."""


def walk(root: type[PowerguardError] = PowerguardError) -> Iterator[type[PowerguardError]]:
    """*root* and every class below it, in the order of their definition."""
    yield root
    for child in root.__subclasses__():
        if child.__module__ == PowerguardError.__module__:
            yield from walk(child)


def table() -> list[tuple[int, str, str]]:
    """(code, name, meaning) by code: each class that has a code of its own, success, and a rank's code."""
    drawn = dict(_DRAWN.findall(errors.__doc__ or ""))
    rows = [(0, "", "success")]
    rows += [(kind.exit_code, kind.__name__, drawn[kind.__name__]) for kind in walk() if "exit_code" in kind.__dict__]
    rows.append((errors.EXIT_REQUEUE, "", "a rank left because its node halts: requeue the job"))
    rows.append((130, "", "interrupted"))
    return sorted(rows)


def markdown() -> str:
    """The table for the README."""
    lines = ["| code | error | meaning |", "|---|---|---|"]
    lines += [f"| {code} | {f'`{name}`' if name else ''} | {meaning} |" for code, name, meaning in table()]
    return "\n".join(lines) + "\n"


def text() -> str:
    """The table for a terminal."""
    return "\n".join(f"{code:>4}  {meaning}" for code, _, meaning in table())
