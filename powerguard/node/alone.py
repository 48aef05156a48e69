"""One daemon a state directory: two would write into one journal, and each undo what the other has learned."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from powerguard.errors import DirectoryError

LOCK = "daemon.lock"


def hold(directory: str | Path) -> int | None:
    """The lock's descriptor, which holds until it is closed or the process ends; None where none can be made.

    A daemon whose disk is full or gone runs without. Raises DirectoryError where another daemon has it.
    """
    try:
        Path(directory).mkdir(mode=0o755, parents=True, exist_ok=True)
        held = os.open(Path(directory) / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(held)
        if error.errno == errno.EAGAIN:
            raise DirectoryError(
                f"another daemon keeps its journal in {directory}",
                todo="stop it first, or give this one its own state_dir and run_dir",
            ) from None
        return None  # a file system without locks
    return held
