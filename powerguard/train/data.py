"""The data's position: what of it a checkpoint brings back exactly, and words for what it doesn't.

A loader that tells its state (torchdata's StatefulDataLoader, or anything with state_dict and load_state_dict) is saved
and restored as any other object. What is particular about torch's: making an iterator draws a seed from the global
random numbers, and a resumed run makes one more than a run that wasn't interrupted. So `isolate` gives a loader numbers
of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from powerguard.errors import StateError
from powerguard.train.tree import is_stateful

STATEFUL = "torchdata.stateful_dataloader.StatefulDataLoader"


def examine(state: Mapping[str, object]) -> list[str]:
    """Warnings about loaders in *state* whose position comes back only nearly.

    Raises StateError for one whose position can't be saved at all.
    """
    return [f"{name}: {text}" for name, value in state.items() for text in _look(name, value)]


def _look(name: str, value: object) -> list[str]:
    from torch.utils.data import DataLoader, IterableDataset

    if not isinstance(value, DataLoader):
        return []
    if not is_stateful(value):
        raise StateError(
            f"{name} is a torch DataLoader, which can't tell its position: after a restart its epoch would begin anew",
            todo=f"use {STATEFUL} in its place (same arguments), or leave the loader out and skip batches yourself",
        )
    warnings = []
    dataset: Any = value.dataset
    if isinstance(dataset, IterableDataset) and not is_stateful(dataset):
        warnings.append(
            "its dataset is iterable and has no state_dict: a restart reads it again up to the position, which is "
            "slow, and exact only if the dataset yields the same each time"
        )
    sampler = getattr(value, "sampler", None)
    shuffled = sampler is not None and not isinstance(dataset, IterableDataset)
    if shuffled and not _exact_sampler(sampler) and not is_stateful(value.batch_sampler):
        warnings.append(
            f"its sampler, {type(sampler).__name__}, has no state_dict: a restart draws the order anew and skips to "
            "the position, which is exact only if the sampler gives the same order again (by its seed and epoch)"
        )
    if value.num_workers > 0:
        warnings.append("random numbers that the dataset draws inside its workers aren't restored")
    return warnings


def _exact_sampler(sampler: object) -> bool:
    """Whether the order after a restart is the one before it."""
    from torch.utils.data import DistributedSampler, SequentialSampler

    ours = type(sampler).__module__.startswith("torchdata.")  # its RandomSampler keeps its state in its iterator
    told = callable(getattr(sampler, "state_dict", None))
    return ours or told or isinstance(sampler, (SequentialSampler, DistributedSampler))


def isolate(state: Mapping[str, object]) -> None:
    """Lets the loaders in *state* draw their seeds from a generator of their own, where they have none."""
    import torch
    from torch.utils.data import DataLoader

    for value in state.values():
        if isinstance(value, DataLoader) and value.generator is None:
            value.generator = torch.Generator().manual_seed(torch.initial_seed() % 2**63)
