"""Memory that stays: a node that swaps itself to death must not take the daemon's next step with it."""

from __future__ import annotations

import ctypes
import os
import resource

_CURRENT, _FUTURE, _ON_FAULT = 1, 2, 4
"""mlockall(2). On fault: what is only reserved (thread stacks, arenas) costs nothing."""


def lock() -> str:
    """Keeps every page that is touched in memory; "" or why that can't be had.

    Only without a limit: mlockall counts address space, and under one threads could no longer be started.
    """
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY:
        return "RLIMIT_MEMLOCK isn't unlimited"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlockall(_CURRENT | _FUTURE | _ON_FAULT) != 0:
        return os.strerror(ctypes.get_errno())
    return ""
