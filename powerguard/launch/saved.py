"""How an unmodified program shows that it has saved: by its exit, by a file, or by a line that it prints."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import threading
from collections.abc import Callable, Collection
from typing import IO, NamedTuple

from msgspec import Struct

from powerguard.errors import UsageError

LINE_MAX_BYTES = 64 * 1024


REST_S = 1.0
"""A file that hasn't changed for so long is at rest, if nobody has it open."""


class Facts(NamedTuple):
    """What tells a file from what it was."""

    mtime_ns: int
    size: int
    device: int
    inode: int


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
    """Files of a pattern: newly written since the watch began, at rest, and written to by nobody any more."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._before = self._look()
        self._last: dict[str, Facts] = {}
        self._since = 0.0  # it has been so

    def _look(self) -> dict[str, Facts]:
        found = {}
        for path in glob.glob(self._pattern, recursive=True):
            with contextlib.suppress(OSError):
                stat = os.stat(path)
                found[path] = Facts(stat.st_mtime_ns, stat.st_size, stat.st_dev, stat.st_ino)
        return found

    def new(self) -> dict[str, Facts]:
        """Those that weren't there when the watch began, or have been written to since."""
        return {path: facts for path, facts in self._look().items() if self._before.get(path) != facts}

    def at_rest(self, now: float, writing: Callable[[], Collection[tuple[int, int]]]) -> bool:
        """Whether something is new, has been the same for `REST_S`, and isn't among the files that *writing* names.

        Either alone is not enough: a program may be silent for longer between two writes (torch.save makes its file
        before it pickles a word), and who writes may be where *writing* doesn't see it.
        """
        new = self.new()
        if new != self._last:
            self._last, self._since = new, now
        if not new or now - self._since < REST_S:
            return False
        open_ones = writing()
        return not any((facts.device, facts.inode) in open_ones for facts in new.values())


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
