"""What the tests of the flush engine share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hil.virtual.disks import FaultyDisk

torch = pytest.importorskip("torch")


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
