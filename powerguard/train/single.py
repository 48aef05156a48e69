"""One guard a process: who it is, and what the interpreter tells it (a fork, the end)."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
import sys
import traceback
from typing import Protocol

from powerguard.errors import UsageError


class Guarding(Protocol):
    """What is needed of a guard."""

    closed: bool

    def in_child(self) -> None:
        """This is a forked child."""

    def at_exit(self) -> None:
        """The interpreter ends."""


_current: Guarding | None = None


def check_free() -> None:
    """Raises UsageError if this process has a guard already."""
    if _current is not None and not _current.closed:
        raise UsageError("this process has a guard already", todo="use that one, or close() it first")


def claim(guard: Guarding) -> None:
    """*guard* is this process's, and is kept alive until it is released."""
    global _current
    _current = guard
    if multiprocessing.parent_process() is not None:
        # a process of multiprocessing (torch.multiprocessing.spawn) ends without atexit, through its own finalizers
        multiprocessing.util.Finalize(None, _at_exit, exitpriority=-100)


def release(guard: Guarding) -> None:
    """*guard* isn't any more."""
    global _current
    if _current is guard:
        _current = None


def _in_child() -> None:
    if _current is not None:
        _current.in_child()


def _at_exit() -> None:
    if _current is not None:
        if sys.exc_info()[0] not in (None, SystemExit) and multiprocessing.parent_process() is not None:
            traceback.print_exc()  # it may be the last chance
        _current.at_exit()


os.register_at_fork(after_in_child=_in_child)
atexit.register(_at_exit)
