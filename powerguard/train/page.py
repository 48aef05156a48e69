"""The rank's side of its shared page: a small file, mapped, whose step the hot path stores.

It lies in /dev/shm, which every process of the node sees and no disk is behind. The daemon reads it when the rank can't
answer.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import tempfile
from pathlib import Path

from powerguard.core import page

SHM = Path("/dev/shm")
PREFIX = "powerguard-page"


class SharedPage:
    """A page of this process. *cells* are its 8-byte cells; `cells[page.CELL] = step` is the hot path's one store."""

    def __init__(self, name: str) -> None:
        """*name* is for people who look into the folder. Where there is none, memory of our own does: *path* is ""."""
        self.path = ""
        self._map: mmap.mmap | None = None
        _sweep()
        try:
            self.path, fd = _create(re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:64])
            try:
                os.pwrite(fd, page.blank(os.getpid()), 0)
                self._map = mmap.mmap(fd, page.BYTES)
            finally:
                os.close(fd)
        except OSError:
            self.path = ""
            self._map = mmap.mmap(-1, page.BYTES)
            self._map[:] = page.blank(os.getpid())
        self.cells: memoryview = memoryview(self._map).cast("q")

    def close(self) -> None:
        """Removes the file. A repeat is nothing."""
        if self._map is None:
            return
        self.cells.release()
        self._map.close()
        self._map = None
        if self.path:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


def _create(name: str) -> tuple[str, int]:
    folder = SHM if SHM.is_dir() and os.access(SHM, os.W_OK) else Path(tempfile.gettempdir())
    path = folder / f"{PREFIX}.{os.getpid()}.{name}"
    with contextlib.suppress(FileNotFoundError):
        path.unlink()  # of an earlier process under our number
    return str(path), os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)


def _sweep() -> None:
    """Removes our user's pages whose process is gone: killed ones leave theirs behind."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(SHM):
            if not entry.name.startswith(f"{PREFIX}."):
                continue
            number = entry.name.split(".")[1]
            with contextlib.suppress(OSError, ValueError):
                if entry.stat(follow_symlinks=False).st_uid == os.geteuid() and not _lives(int(number)):
                    os.unlink(entry.path)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
