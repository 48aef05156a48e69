"""Time of this boot: CLOCK_BOOTTIME, which goes on in suspend and which nobody can set."""

from __future__ import annotations

import time
from pathlib import Path

from powerguard.errors import PowerguardError

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def now() -> float:
    """Seconds since boot, suspended time included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """The kernel's name for this boot: instants of another one mean nothing here."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError as err:
        raise PowerguardError(f"{BOOT_ID} can't be read: {err.strerror}", todo="mount /proc, or run on Linux") from err
