"""Log lines of a training process: through structlog as the script has set it up, else to stderr, never to stdout."""

from __future__ import annotations

import sys
from typing import Any

import structlog


def logger(**facts: Any) -> Any:
    """A structlog logger that carries *facts*. Scripts print their results to stdout: nothing of ours goes there."""
    if structlog.is_configured():
        return structlog.get_logger("powerguard", **facts)
    return structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        **facts,
    )
