"""Signals wait while an emergency save is being written.

A launcher that was told to end kills its ranks by process group: torchrun sends SIGTERM to all processes of each. Data
loaders' workers die of it, whereupon torch raises an exception in the training thread, out of a SIGCHLD handler and
into whatever it is doing. Nothing of that is to cut a save short that takes seconds; it happens right afterwards.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

DEFERRED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
"""SIGINT isn't: who presses Ctrl-C sees what goes on."""


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """Within it those signals are kept, and delivered at its end. Off the main thread it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []

    def keep(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if number not in caught:
            caught.append(number)

    before: dict[signal.Signals, Any] = {}
    try:
        for number in DEFERRED:
            handler = signal.getsignal(number)
            quiet = handler is signal.SIG_IGN or (number == signal.SIGCHLD and handler is signal.SIG_DFL)
            if handler is not None and not quiet:  # None: of a C library, which we couldn't give back
                before[number] = handler
                signal.signal(number, keep)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for kept in caught:
            os.kill(os.getpid(), kept)
