"""The processes of a command, as /proc tells, and which of them a signal is for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path

PROC = Path("/proc")
RANK_MARK = b"LOCAL_RANK="
"""What launchers (torchrun, accelerate, deepspeed) put into the environment of each rank they start."""


class To(str, Enum):
    """For whom the signal is."""

    AUTO = "auto"  # the ranks, if the command is a launcher that started any; else the command
    COMMAND = "command"
    RANKS = "ranks"
    TREE = "tree"  # every process, data loaders' workers included


def targets(command: int, to: To, *, proc: Path = PROC) -> list[int]:
    """The processes to signal, for the command with pid *command*; those that have ended meanwhile are left out."""
    family = descendants(command, proc=proc)
    if to is To.COMMAND:
        return [command]
    if to is To.TREE:
        return [command, *family]
    ranks = _ranks(command, family, proc)
    return ranks or ([command] if to is To.AUTO else [])


def descendants(root: int, *, proc: Path = PROC) -> list[int]:
    """All processes below *root*, parents first."""
    children: dict[int, list[int]] = {}
    for pid in _pids(proc):
        parent = _parent(pid, proc)
        if parent is not None:
            children.setdefault(parent, []).append(pid)
    found: list[int] = []
    level = children.get(root, [])
    while level:
        found += level
        level = [child for pid in level for child in children.get(pid, [])]
    return found


def _ranks(command: int, family: Iterable[int], proc: Path) -> list[int]:
    """The main process of each rank: it has the mark, its parent hasn't. So no worker of a data loader is one.

    Torchrun's own limit of 30 s between SIGTERM and SIGKILL begins only when torchrun itself is signalled.
    """
    marked = {pid for pid in family if _marked(pid, proc)}
    if _marked(command, proc):  # it is a rank itself
        return []
    return [pid for pid in family if pid in marked and _parent(pid, proc) not in marked]


def _marked(pid: int, proc: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(line.startswith(RANK_MARK) for line in (proc / str(pid) / "environ").read_bytes().split(b"\0"))
    return False


def _pids(proc: Path) -> list[int]:
    return sorted(int(name) for name in os.listdir(proc) if name.isdigit())


def _parent(pid: int, proc: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        stat = (proc / str(pid) / "stat").read_bytes()
        return int(stat[stat.rindex(b")") + 2 :].split()[1])  # a name may hold anything, brackets too
    return None


def tell(pids: Iterable[int], number: int, *, kill: Callable[[int, int], None] = os.kill) -> tuple[int, list[int]]:
    """Sends signal *number* to each: how many got it, and those that this user may not signal."""
    told, refused = 0, []
    for pid in pids:
        try:
            kill(pid, number)
            told += 1
        except ProcessLookupError:
            continue
        except PermissionError:
            refused.append(pid)
    return told, refused


def open_for_writing(pids: Iterable[int], *, proc: Path = PROC) -> set[tuple[int, int]]:
    """(device, inode) of each file that one of *pids* has open to write to, as far as this user may see that."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in os.listdir(proc / str(pid) / "fd"):
                with contextlib.suppress(OSError, ValueError):
                    if _writes((proc / str(pid) / "fdinfo" / fd).read_text()):
                        stat = os.stat(proc / str(pid) / "fd" / fd)
                        found.add((stat.st_dev, stat.st_ino))
    return found


def _writes(fdinfo: str) -> bool:
    """Whether the flags in *fdinfo* are those of a file opened for writing."""
    flags = next(line.split()[1] for line in fdinfo.splitlines() if line.startswith("flags:"))
    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY
