"""Other programs: run to their end within a bound, and never in our way."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

OURS = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC")
"""What the service manager tells this process, and no other."""


class ProgramFailed(Exception):
    """It wasn't there, took too long, or said no; the text is for people."""


def run(command: Sequence[str], bound_s: float, env: Mapping[str, str] | None = None) -> str:
    """What it wrote. Raises ProgramFailed."""
    shown = " ".join(command)
    env = {key: value for key, value in (os.environ if env is None else env).items() if key not in OURS}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=bound_s,
            check=False,
            env=env,
            start_new_session=True,  # a signal to our own group mustn't end it
        )
    except subprocess.TimeoutExpired:
        raise ProgramFailed(f"{shown} didn't return within {bound_s:g} s") from None
    except OSError as err:
        raise ProgramFailed(f"{shown}: {err.strerror}") from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        raise ProgramFailed(f"{shown} returned {done.returncode}{': ' + said[-1] if said else ''}")
    return done.stdout.decode(errors="replace")
