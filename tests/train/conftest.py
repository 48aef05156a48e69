"""What the tests of the flush engine share. A seam, not a mock: `FaultyDisk` is the real disk that fails at times."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from powerguard.generations.disk import Buffer, Disk

torch = pytest.importorskip("torch")


class FaultyDisk(Disk):
    """Counts the calls by which a save changes the disk, and asks *fault(number, name)* before each.

    *fault* may raise, or return a number of bytes that a write is cut short to, or None.
    """

    def __init__(self, fault: Callable[[int, str], int | None] = lambda _number, _name: None) -> None:
        self.fault = fault
        self.number = 0
        self.names: list[str] = []
        self._lock = threading.Lock()

    def _next(self, name: str) -> int | None:
        with self._lock:
            number = self.number
            self.number += 1
            self.names.append(name)
        return self.fault(number, name)

    def open(self, path: str | Path, flags: int, mode: int = 0o644) -> int:
        self._next("open")
        return super().open(path, flags, mode)

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        short = self._next("pwrite")
        return super().pwrite(fd, data if short is None else memoryview(data)[:short], offset)

    def pwritev(self, fd: int, data: Sequence[Buffer], offset: int, flags: int) -> int:
        short = self._next("pwritev")
        return super().pwritev(fd, data if short is None else [memoryview(data[0])[:short]], offset, flags)

    def ftruncate(self, fd: int, length: int) -> None:
        self._next("ftruncate")
        super().ftruncate(fd, length)

    def fallocate(self, fd: int, mode: int, offset: int, length: int) -> None:
        self._next("fallocate")
        super().fallocate(fd, mode, offset, length)

    def sync_file_range(self, fd: int, offset: int, length: int) -> None:
        self._next("sync_file_range")
        super().sync_file_range(fd, offset, length)

    def fsync(self, fd: int) -> None:
        self._next("fsync")
        super().fsync(fd)

    def mkdir(self, path: Path) -> None:
        self._next("mkdir")
        super().mkdir(path)

    def rename(self, source: Path, target: Path) -> None:
        self._next("rename")
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._next("unlink")
        super().unlink(path)


@pytest.fixture
def faulty_disk() -> type[FaultyDisk]:
    """The class, for tests that plan faults."""
    return FaultyDisk


@pytest.fixture
def flusher(tmp_path) -> Iterator[Callable[..., Any]]:
    """Makes flushers into *tmp_path* that are closed at the end."""
    from powerguard.train.flush import Flusher

    made: list[Any] = []

    def maker(directory: Path = tmp_path, rank: int = 0, world_size: int = 1, **options: Any) -> Any:
        made.append(Flusher(directory, rank=rank, world_size=world_size, **options))
        return made[-1]

    yield maker
    for one in made:
        one.close()


@pytest.fixture
def save(tmp_path) -> Callable[..., Any]:
    """save(flusher, state, step): a sealed generation of one rank, as the scan sees it."""
    from powerguard.generations import generation_name, scan, seal

    def saver(flusher: Any, state: dict[str, object], step: int, tag: str = "t-1") -> Any:
        name = generation_name(step, tag)
        written = flusher.write(flusher.stage(state, step), name)
        seal(flusher.directory, name, step=step, world_size=1, shards=[written.record])
        return next(g for g in scan(flusher.directory) if g.name == name)

    return saver
