"""Standard output as the commands see it: a full disk behind it is known for what it is, whoever wrote there.

Needs nothing but Python: it is there before anything that can be missing is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast


class OutputLost(OSError):
    """Standard output can't be written: its disk is full, say. A reader that has gone is a BrokenPipeError as ever."""


class _Output:
    """Standard output, whose errors can be told from those of any other file: they are OutputLost."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As a stream does."""
        with _own_errors():
            return self._stream.write(text)

    def flush(self) -> None:
        """As a stream does."""
        with _own_errors():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _own_errors() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputLost(error.errno, error.strerror) from error


@contextmanager
def known() -> Iterator[None]:
    """Within it standard output raises OutputLost for its own errors, whoever writes there."""
    was = sys.stdout
    ours = sys.stdout = cast(TextIO, _Output(was))
    try:
        yield
    finally:
        if sys.stdout is ours:  # else somebody's: click's, once the reader has gone
            sys.stdout = was


def give_up() -> None:
    """What is left for standard output goes nowhere: it can't be written, and Python would try again at the exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
