"""The way out when the node halts: the process is gone after *grace_s*, whatever its teardown does.

Destructors of process groups have been seen to block an exit for 119 s (ai2cm/ace#1407), and the node's power won't
wait. So the interpreter's finalisation is left out: standard streams are flushed, then `os._exit`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading

FLUSH_S = 1.0


class Leaver:
    """Ends the process with a code: *grace_s* after `start`, or at once with `now`."""

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self._started = threading.Lock()

    def start(self, code: int) -> None:
        """From now on the process has *grace_s* to leave by itself. A repeat is nothing."""
        if self._started.acquire(blocking=False):
            timer = threading.Timer(self.grace_s, self.now, (code,))
            timer.name, timer.daemon = "powerguard-leaver", True
            timer.start()

    def now(self, code: int) -> None:
        """Leaves. Doesn't return."""
        flusher = threading.Thread(target=_flush, daemon=True)  # a full pipe may block it, or a lock that nobody frees
        with contextlib.suppress(RuntimeError):  # no new thread while the interpreter shuts down
            flusher.start()
            flusher.join(FLUSH_S)
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
