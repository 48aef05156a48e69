"""Which generation a run goes on from, the same for all its ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from powerguard.errors import CheckpointError
from powerguard.generations import resumes
from powerguard.generations.scan import Skipped, latest
from powerguard.train.flush import Flusher, LoadReport
from powerguard.train.load import refuse_others


def load_newest(flusher: Flusher, state: Mapping[str, object], checkpointer: Callable[[], Any]) -> LoadReport | None:
    """Loads the newest generation that can be trusted, None where there is none.

    With torch.distributed, or alone, *checkpointer* does it: ranks load a candidate and tell each other. Without, each
    rank verifies every rank's part of it, and so they come to the same one; how often one is resumed from is counted,
    but none is passed over for that, as ranks would see different counts.
    """
    import torch.distributed as dist

    if flusher.world_size == 1 or (dist.is_available() and dist.is_initialized()):
        report: LoadReport | None = checkpointer().load(state)
        return report
    damaged: dict[str, str] = {}
    while True:
        found = latest(flusher.directory, world_size=flusher.world_size, cap=None, exclude=damaged)
        skipped = tuple(str(Skipped(name, why)) for name, why in damaged.items()) + tuple(map(str, found.skipped))
        if found.generation is None:
            if not damaged:
                refuse_others(flusher.directory, flusher.world_size)
                return None
            raise CheckpointError(
                f"no generation in {flusher.directory} can be trusted: {'; '.join(skipped)}",
                todo="move the directory away to start from scratch",
            )
        try:
            report = flusher.load(found.generation, state)
        except CheckpointError as error:  # damaged between the look and the load
            damaged[found.generation.name] = error.message
            continue
        if flusher.rank == 0:
            resumes.count(flusher.directory, found.generation.name)
        return replace(report, skipped=skipped)


def beginning(directory: Path) -> str:
    """The word of a run that has nothing to go on from, with what is there all the same."""
    skipped = latest(directory, verify=False, cap=None).skipped
    return "; ".join(["nothing to resume from: starting at step 0", *map(str, skipped[:3])])
