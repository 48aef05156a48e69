"""How an unmodified program shows that it has saved: by its exit, by a file, or by a line that it prints."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import threading
from collections.abc import Callable
from typing import IO

from msgspec import Struct

from powerguard.errors import UsageError

LINE_MAX_BYTES = 64 * 1024


class Sign(Struct, frozen=True):
    """*kind* is "exit", "file" (*what* is a glob pattern) or "log" (*what* is a regular expression)."""

    kind: str = "exit"
    what: str = ""


def parse(text: str) -> Sign:
    """ "exit", "file:GLOB" or "log:REGEX"; raises UsageError."""
    kind, colon, what = text.partition(":")
    if kind == "exit" and not colon:
        return Sign()
    if kind in ("file", "log") and what:
        if kind == "log":
            try:
                re.compile(what.encode())
            except re.error as error:
                raise UsageError(
                    f"--saved log:{what} is no regular expression: {error}", todo="see re in Python"
                ) from None
        return Sign(kind, what)
    raise UsageError(f"--saved {text!r} is no sign of a save", todo="give exit, file:GLOB or log:REGEX")


class Files:
    """Files of a pattern: newly written since the watch began, and at rest over two looks."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._before = self._look()
        self._last: dict[str, tuple[int, int]] = {}

    def _look(self) -> dict[str, tuple[int, int]]:
        found = {}
        for path in glob.glob(self._pattern, recursive=True):
            with contextlib.suppress(OSError):
                stat = os.stat(path)
                found[path] = (stat.st_mtime_ns, stat.st_size)
        return found

    def done(self) -> bool:
        """Whether something is new, and was the same at the last look."""
        now = self._look()
        new = {path: facts for path, facts in now.items() if self._before.get(path) != facts}
        at_rest = bool(new) and new == self._last
        self._last = new
        return at_rest


class Pump(threading.Thread):
    """Passes a program's output on, and notes lines that match."""

    def __init__(self, source: IO[bytes], sink: int, pattern: str, seen: Callable[[], None]) -> None:
        super().__init__(name="powerguard-output", daemon=True)
        self._source, self._sink, self._seen = source, sink, seen
        self._pattern = re.compile(pattern.encode())

    def run(self) -> None:
        """Until the program closes its end."""
        rest = b""
        while data := os.read(self._source.fileno(), 65536):
            with contextlib.suppress(OSError):  # nobody reads our output any more; the program doesn't suffer for it
                view = memoryview(data)
                while view:
                    view = view[os.write(self._sink, view) :]
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[-LINE_MAX_BYTES:]
            if any(self._pattern.search(line) for line in lines):
                self._seen()
