"""The order of the data under Lightning, which makes an epoch's iterator before it knows which epoch it is in.

For several ranks Lightning puts samplers of its own around the loaders'. Their order goes by epoch, and by the
generator of the sampler that is wrapped; a checkpoint has neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class Order:
    """What *trainer*'s samplers had drawn this epoch's order from."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        # the first epoch's was drawn as soon as there were loaders
        self.drawn_from = [
            torch.Generator().manual_seed(each.initial_seed()).get_state() for each in self._generators()
        ]

    def begin(self) -> None:
        """The next epoch begins; its order will be drawn now."""
        if self._trainer.current_epoch > 0:
            self.drawn_from = [each.get_state() for each in self._generators()]

    def rewind(self, drawn_from: list[torch.Tensor]) -> None:
        """The epoch's order will be drawn as it was from *drawn_from*."""
        self.drawn_from = drawn_from
        for generator, state in zip(self._generators(), drawn_from, strict=False):
            generator.set_state(state)

    def go_on(self, drawn_from: list[torch.Tensor], positions: list[dict[str, Any]]) -> None:
        """Makes the iterator again, in the epoch that the trainer is in, from the loaders' *positions*."""
        self.rewind(drawn_from)
        loop = self._trainer.fit_loop
        moved = [sampler for sampler in self._samplers() if callable(getattr(sampler, "set_epoch", None))]
        if not moved or loop._combined_loader is None or loop._data_fetcher is None:
            return
        for sampler in moved:
            sampler.set_epoch(loop.epoch_progress.current.processed)
        wrapped = [(each, each._sampler) for each in self._wrapped()]
        for each, sampler in wrapped:
            each._sampler = list(sampler)  # a loader that is given its position draws several times
        loop._combined_loader._load_state_dicts(positions)
        iter(loop._data_fetcher)
        for each, sampler in wrapped:
            each._sampler = sampler

    def unknown(self) -> str:
        """The class of a sampler that may draw from what isn't known, as the global random numbers; "" if none does."""
        samplers = [each._sampler for each in self._wrapped()]
        names = [type(each).__name__ for each in samplers if not hasattr(each, "set_epoch") and not _generator(each)]
        return next(iter(names), "")

    def _samplers(self) -> list[Any]:
        loaders = getattr(self._trainer.fit_loop._combined_loader, "flattened", [])
        found = [(getattr(each, "sampler", None), getattr(each, "batch_sampler", None)) for each in loaders]
        several = [one for sampler, batches in found for one in (sampler, getattr(batches, "sampler", None))]
        return list({id(each): each for each in several if each is not None}.values())

    def _wrapped(self) -> Iterator[Any]:
        """What holds the samplers that Lightning's are around."""
        for sampler in self._samplers():
            inside = getattr(sampler, "dataset", None)
            if hasattr(inside, "_sampler") and hasattr(inside, "_sampler_list"):
                yield inside

    def _generators(self) -> list[torch.Generator]:
        found = [_generator(each._sampler) for each in self._wrapped()]
        return [each for each in found if each is not None]


def _generator(sampler: Any) -> torch.Generator | None:
    found = getattr(sampler, "generator", None)
    return found if isinstance(found, torch.Generator) else None
