"""How many ranks of this node write to the same disk at once in an emergency."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from powerguard.generations.names import RESERVE, home

LOCKS = Path("/proc/locks")


def sharers(directory: Path, env: Mapping[str, str] = os.environ, *, locks: Path = LOCKS) -> int:
    """The larger of what the launcher says of this node, and of the ranks that keep space in *directory* now; >= 1.

    The second counts locks that the kernel lists, which are this node's processes' only.
    """
    told = 1
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        if env.get(name, "").isdigit():
            told = int(env[name])
            break
    return max(1, told, _holders(home(directory) / RESERVE, locks))


def _holders(reserve: Path, locks: Path) -> int:
    """Ranks whose lock in *reserve* is held."""
    try:
        held = {fields[5].split(":")[-1] for line in locks.read_text().splitlines() if len(fields := line.split()) > 5}
        return sum(str(entry.inode()) in held for entry in os.scandir(reserve) if entry.name.endswith(".0.lock"))
    except OSError:
        return 0
