"""What memory the machine has left."""

from __future__ import annotations


def available_bytes() -> int | None:
    """What the kernel could give without swapping (MemAvailable); None where it doesn't say."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None
