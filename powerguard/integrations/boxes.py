"""A generation's values without the objects that they were saved from, for frameworks that load from their own files.

::

    found = newest("checkpoints", objects=("model", "optimizer", "trainer"))
    found.values["optimizer"]          # what optimizer.state_dict() was
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from msgspec import Struct

from powerguard.train import rng
from powerguard.train.flush import Flusher, LoadReport
from powerguard.train.identity import find_identity
from powerguard.train.log import Log
from powerguard.train.periodic import Checkpointer
from powerguard.train.resume import load_newest


class Box:
    """Takes what an object's state_dict() was."""

    def __init__(self) -> None:
        self.value: Any = {}

    def state_dict(self) -> dict[str, Any]:
        """Nothing: loading doesn't compare with it."""
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Keeps it."""
        self.value = state


class Boxes(dict[str, Any]):
    """A dict of objects whose names nobody knows yet."""

    def get(self, key: str, default: Any = None) -> Any:
        """A box of that name."""
        return self.setdefault(key, Box())


class Found(Struct, frozen=True):
    """The newest generation's values, and the random states as `rng.capture` has them."""

    report: LoadReport
    values: dict[str, Any]
    random: dict[str, Any]

    @property
    def step(self) -> int:
        """The step after which it was saved."""
        return self.report.step


def newest(
    directory: str | Path, *, objects: tuple[str, ...], groups: tuple[str, ...] = (), allow_pickle: bool = False
) -> Found | None:
    """The newest generation in *directory* that all ranks can trust; None where there is none.

    *objects* are the names of single objects, *groups* those of dicts of objects. Ranks agree through
    torch.distributed; before it is initialised, each verifies all ranks' parts. Sets the global random numbers to what
    they were. Raises CheckpointError, and StateError where the generations are of another number of ranks.
    """
    import torch.distributed as dist

    state: dict[str, Any] = {name: Box() for name in objects} | {name: Boxes() for name in groups}
    group = (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else None
    me = find_identity(os.environ, job="resume", group=group)
    flusher = Flusher(directory, rank=me.rank, world_size=me.world_size, allow_pickle=allow_pickle, reserve=False)
    try:
        report = load_newest(
            flusher, state, lambda: Checkpointer(directory, rank=me.rank, world_size=me.world_size, flusher=flusher)
        )
    finally:
        flusher.close()
    if report is None:
        return None
    values: dict[str, Any] = {name: state[name].value for name in objects}
    values |= {name: {key: box.value for key, box in state[name].items()} for name in groups}
    Log().info(report.describe(), step=report.step)
    return Found(report, values, rng.capture())
