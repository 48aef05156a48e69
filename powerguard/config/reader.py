"""Reading tables with care: each value is checked as it is taken, and every problem is collected, never raised."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from powerguard.config.rules import CHOICES, DAY_S, LIMITS

SECRET_MAX_BYTES = 4096

_HEADER = re.compile(r"\s*(\[\[?)\s*([\w.-]+)\s*\]")
_KEY = re.compile(r"\s*[\"']?([\w-]+)[\"']?\s*=")
EXPANDED = ("password_file", "tls_ca")
"""In these `${CREDENTIALS_DIRECTORY}` is systemd's."""
_VARIABLE = re.compile(r"\$\{([^}]*)\}")
_INDEX = re.compile(r"\[\d+\]")

T = TypeVar("T", bound=msgspec.Struct)


class Reader:
    """One pass over one file; *wrong* holds the keys that a problem was reported for."""

    def __init__(
        self, raw: dict[str, Any], source: str, text: str, env: Mapping[str, str], today: date, *, secrets: bool
    ) -> None:
        self.raw, self.source, self.env, self.today, self.secrets = raw, source, env, today, secrets
        self._problems: list[tuple[int, str]] = []
        self.wrong: set[str] = set()  # relations don't speak of these again
        self._lines = lines(text)

    @property
    def problems(self) -> tuple[str, ...]:
        """Lines for people, in the order of the file."""
        return tuple(problem for _, problem in sorted(self._problems, key=lambda p: p[0]))

    def bad(self, path: str, wrong: str, write: str = "") -> None:
        """Reports that the key *path* is *wrong*, and what to *write* instead."""
        self.wrong.add(path)
        line = self._lines.get(path) or self._lines.get(path.rpartition(".")[0], 0)
        where = f"{self.source}:{line}" if line else self.source
        self._problems.append((line, f"{where}: {path}: {wrong}{write and f'; write {write}'}"))

    def unknown(self, where: str, table: dict[str, Any], known: Sequence[str]) -> None:
        """Reports the keys of *table* that aren't in *known*, each with the nearest that is."""
        for key in table:
            if key in known:
                continue
            close = difflib.get_close_matches(key, known, 1, cutoff=0.5)
            path = f"{where}.{key}" if where else key
            if close:
                self.bad(path, f"unknown key, did you mean {close[0]}?")
            else:
                self.bad(path, "unknown key", "one of " + ", ".join(known))

    def struct(self, kind: type[T], where: str, without: tuple[str, ...] = ()) -> T:
        """A table that maps to *kind* field by field; a wrong value is reported and replaced by its default."""
        table = self.raw.get(where, {})
        if not isinstance(table, dict):
            self.bad(where, "must be a table", f"[{where}] with one bracket")
            table = {}
        fields = [f for f in msgspec.structs.fields(kind) if f.name not in without]
        self.unknown(where, table, [f.name for f in fields])
        return kind(**{f.name: self.value(table, where, f.name, f.type, f.default) for f in fields})

    def value(self, table: dict[str, Any], where: str, key: str, kind: Any, default: Any) -> Any:
        """The value of *key* if it is there, of its kind, in its limits and among its choices; else *default*."""
        if key not in table:
            return default
        value, path = table[key], f"{where}.{key}"
        wanted = _wanted(kind, value)
        if wanted:
            self.bad(path, f"must be {wanted[0]}", wanted[1])
            return default
        if kind is str and key not in EXPANDED and _VARIABLE.search(value):
            self.bad(path, "variables aren't expanded here", "the text itself")
            return default
        if kind in (int, float):
            return self._number(path, kind(value), default)
        rule = _INDEX.sub("", path)
        if rule in CHOICES and value not in CHOICES[rule]:
            close = difflib.get_close_matches(value, CHOICES[rule], 1)
            choices = " or ".join(f'"{c}"' for c in close or CHOICES[rule])
            self.bad(path, f"{value!r} isn't one of its values", choices)
            return default
        return tuple(value) if isinstance(value, list) else value

    def _number(self, path: str, value: float, default: Any) -> Any:
        usual = (0.0, DAY_S) if path.endswith("_s") else (-math.inf, math.inf)
        low, high = LIMITS.get(_INDEX.sub("", path), usual)
        if low <= value <= high:
            return value
        self.bad(path, f"{value:g} is outside its limits", f"{low:g} to {high:g}")
        return default

    def secret(self, path: str, name: str) -> str:
        """The one line that the file *name* holds; "" with a problem reported."""
        if not self.secrets:
            return "not read"
        expanded = self.expand(path, name)
        if path in self.wrong:
            return ""
        try:
            with Path(expanded).open("rb") as file:
                text = file.read(SECRET_MAX_BYTES + 1).decode()
        except (OSError, ValueError) as err:
            why = err.strerror if isinstance(err, OSError) else "isn't UTF-8 text"
            self.bad(path, f"{expanded}: {why}", "a file that holds the password alone, readable to this user")
            return ""
        secret = text.removesuffix("\n").removesuffix("\r")
        if not secret or len(text) > SECRET_MAX_BYTES or not secret.isprintable():
            self.bad(path, f"{expanded} doesn't hold one line of text", "a file that holds the password alone")
            return ""
        return secret

    def expand(self, path: str, text: str) -> str:
        """*text* with `${CREDENTIALS_DIRECTORY}` replaced; other variables are a problem."""
        if not self.secrets:
            return text
        for name in _VARIABLE.findall(text):
            if name != "CREDENTIALS_DIRECTORY":
                self.bad(path, f"${{{name}}} isn't expanded here", "${CREDENTIALS_DIRECTORY} or a full path")
            elif not self.env.get(name):
                self.bad(
                    path,
                    "${CREDENTIALS_DIRECTORY} is set by systemd alone, and isn't now",
                    "LoadCredential= in the unit, or a full path to try the file by hand",
                )
        return text.replace("${CREDENTIALS_DIRECTORY}", self.env.get("CREDENTIALS_DIRECTORY", ""))


def is_number(value: object) -> bool:
    """Whether *value* is an int or float that a float can hold, and not true, nan or inf."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _wanted(kind: Any, value: object) -> tuple[str, str] | None:
    """What a value must be and an example, or None if it is that."""
    if kind is str:
        good = isinstance(value, str) and (value.isprintable() or not value)
        return None if good else ("a text without line breaks", '"..." in quotes')
    if kind is bool:
        return None if isinstance(value, bool) else ("true or false", "true, without quotes")
    if kind is float:
        return None if is_number(value) else ("a finite number", "a number of seconds, as 10 or 2.5")
    if kind is int:
        good = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53
        return None if good else ("a whole number", "a number, as 1")
    good = isinstance(value, list) and all(isinstance(v, str) and v.isprintable() and v for v in value)
    return None if good else ("a list of texts", '["/path/of/program", "argument"]')


def lines(text: str) -> dict[str, int]:
    """Line number by key path, for files in the usual form; what it can't place is simply absent."""
    found: dict[str, int] = {}
    where, counts = "", dict[str, int]()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            where = header[2]
            if header[1] == "[[":
                counts[where] = counts.get(where, -1) + 1
                where = f"{where}[{counts[where]}]"
            found.setdefault(where, number)
        elif key := _KEY.match(line):
            found.setdefault(f"{where}.{key[1]}" if where else key[1], number)
    return found
