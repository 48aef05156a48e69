"""Log lines: lower-case facts with key=value, one a fact. JSON under systemd, coloured on a terminal."""

from __future__ import annotations

import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TextIO

import structlog

REPEAT_S = 60.0
"""The same line is written once in this long, then with the number of those left out."""
REMEMBERED = 256

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def under_systemd(env: Mapping[str, str] = os.environ, stream: TextIO | None = None) -> bool:
    """Whether *stream* (stderr) is the journal's, or at least the process is a unit's."""
    stream = stream or sys.stderr
    device, _, inode = env.get("JOURNAL_STREAM", "").partition(":")
    if device.isdigit() and inode.isdigit():
        try:
            stat = os.fstat(stream.fileno())
        except (OSError, ValueError):
            return False
        return (stat.st_dev, stat.st_ino) == (int(device), int(inode))
    return bool(env.get("INVOCATION_ID")) and not stream.isatty()


def set_up(*, level: str = "info", json: bool = False, stream: TextIO | None = None) -> None:
    """Sends all lines of at least *level* to *stream* (stderr)."""
    stream = stream or sys.stderr
    renderer: Any
    if json:
        stamps: list[Any] = [
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.EventRenamer("message"),
        ]
        renderer = structlog.processors.JSONRenderer()
    else:
        stamps = [structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False)]
        renderer = structlog.dev.ConsoleRenderer(colors=stream.isatty(), pad_event_to=0)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            Repeats(),
            structlog.processors.format_exc_info,
            *stamps,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=_Unbreakable(stream)),  # type: ignore[arg-type]
        cache_logger_on_first_use=False,
    )


class Repeats:
    """A processor that drops a line said less than `REPEAT_S` ago, and later says how often it was dropped.

    Lines are the same if their event and level are; the values may differ.
    """

    def __init__(self, every_s: float = REPEAT_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._clock = every_s, clock
        self._last: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()

    def __call__(self, _logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if event.pop("always", False):
            return event
        key, now = (str(event.get("event")), method), self._clock()
        said, dropped = self._last.pop(key, (None, 0))
        if said is not None and now - said < self._every_s:
            self._last[key] = (said, dropped + 1)
            raise structlog.DropEvent
        self._last[key] = (now, 0)
        while len(self._last) > REMEMBERED:
            self._last.popitem(last=False)
        if dropped:
            event["repeated"] = dropped
        return event


class _Unbreakable:
    """A stream whose failures (a closed terminal, a full disk) are swallowed: a log line mustn't end a flush."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            return
