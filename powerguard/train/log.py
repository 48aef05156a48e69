"""Log lines of a training process: through structlog as the script has set it up, else to stderr, never to stdout."""

from __future__ import annotations

import sys
from typing import Any, TextIO, cast

import structlog

from powerguard.errors import PowerguardError

WHY_CHARS = 500


class Log:
    """Facts with key=value. A log that can't be written (a closed stream, a full pipe) never hurts the training."""

    def __init__(self, **facts: object) -> None:
        """*facts* stand in every line. Scripts print their results to stdout: nothing of ours goes there."""
        if structlog.is_configured():
            self._logger: Any = structlog.get_logger("powerguard", **facts)
        else:
            self._logger = structlog.wrap_logger(
                structlog.PrintLogger(cast(TextIO, _Stderr())),
                wrapper_class=structlog.make_filtering_bound_logger("info"),
                processors=[
                    structlog.processors.add_log_level,
                    structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
                    structlog.dev.ConsoleRenderer(colors=_is_terminal()),
                ],
            ).bind(**facts)

    def debug(self, text: str, **facts: object) -> None:
        """For those who look for a fault."""
        self._log("debug", text, facts)

    def info(self, text: str, **facts: object) -> None:
        """What happens."""
        self._log("info", text, facts)

    def warning(self, text: str, **facts: object) -> None:
        """What somebody should look at."""
        self._log("warning", text, facts)

    def error(self, text: str, **facts: object) -> None:
        """What went wrong."""
        self._log("error", text, facts)

    def _log(self, level: str, text: str, facts: dict[str, object]) -> None:
        try:
            getattr(self._logger, level)(text, **facts)
        except Exception:
            return


class _Stderr:
    """stderr as it is now: notebooks and test runners exchange it."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False


def explain(error: BaseException) -> str:
    """An exception in one line that fits into a message."""
    text = str(error) if isinstance(error, PowerguardError) else f"{type(error).__name__}: {error}"
    return " ".join(text.encode("utf-8", "replace").decode().split())[:WHY_CHARS]
