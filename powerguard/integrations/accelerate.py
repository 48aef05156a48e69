"""Accelerate: a helper for loops that use an `Accelerator`.

::

    guard = guarded(accelerator, "checkpoints", loader=loader)       # after accelerator.prepare(...)
    done = guard.resume()                                            # optimizer steps
    for epoch in range(done // steps_per_epoch, epochs):
        for batch in loader:                                         # goes on in the middle of the first epoch
            with accelerator.accumulate(model):
                ...
                optimizer.step(); scheduler.step(); optimizer.zero_grad()
            guard.boundary()                                         # counts, and knows accumulation by itself

Where the node halts, `boundary` raises `Halted`, which ends the process with code 75. Saved is
all that was prepared (models, optimizers, schedules, the gradient scaler) and registered for checkpointing. Models may
be sharded by FSDP2; the older FSDP and DeepSpeed are refused, since they gather by collectives (for DeepSpeed there is
`powerguard.integrations.deepspeed`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from powerguard.errors import StateError
from powerguard.integrations.halted import Halted
from powerguard.train import rng
from powerguard.train.attach import attach
from powerguard.train.guard import Guard
from powerguard.train.log import Log

if TYPE_CHECKING:
    from accelerate import Accelerator

REFUSED = ("DEEPSPEED", "MEGATRON_LM", "XLA")


class AcceleratedGuard:
    """`powerguard.attach` for an Accelerator; *guard* is the hook itself."""

    def __init__(self, accelerator: Accelerator, guard: Guard, place: dict[str, int]) -> None:
        self.accelerator, self.guard, self._place = accelerator, guard, place

    def resume(self) -> int:
        """Loads the newest generation; the number of optimizer steps done."""
        self.guard.resume()
        return self._place["step"]

    def boundary(self) -> None:
        """After a batch: nothing unless it completed an optimizer step. Raises Halted where the node halts.

        A step that a gradient scaler skipped counts: all ranks skip it together.
        """
        if not self.accelerator.sync_gradients:
            return
        self._place["step"] += 1
        verdict = self.guard.boundary(self._place["step"])
        if verdict:
            self.guard.close(verdict.reason)
            raise Halted(verdict, self._place["step"])

    def close(self) -> None:
        """See `Guard.close`."""
        self.guard.close()


def guarded(
    accelerator: Accelerator, directory: str | Path, *, loader: object = None, **options: Any
) -> AcceleratedGuard:
    """Guards what *accelerator* has prepared; *loader* is what tells the data's position.

    Give the loader that prepare() returned: with `DataLoaderConfiguration(use_stateful_dataloader=True)` it tells its
    position. *options* are those of `powerguard.attach`. Raises StateError for what can't be saved without collectives.
    """
    kind = accelerator.distributed_type.name
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if kind in REFUSED or (kind == "FSDP" and getattr(plugin, "fsdp_version", 1) != 2):
        raise StateError(
            f"Accelerate's {kind} gathers the model by collectives, which an emergency has no time for",
            todo="use FSDP2 (fsdp_version: 2), DDP, or powerguard.integrations.deepspeed",
        )
    place = {"step": 0}
    state: dict[str, object] = {"place": place}
    named = {
        "model": accelerator._models,
        "optimizer": accelerator._optimizers,
        "scheduler": accelerator._schedulers,
        "registered": accelerator._custom_objects,
    }
    for name, objects in named.items():
        state |= {name if i == 0 else f"{name}-{i}": one for i, one in enumerate(objects)}
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    if loader is not None:
        state["loader"] = _telling(loader)
    return AcceleratedGuard(accelerator, attach(state, directory, **options), place)


class _Position:
    """Where a prepared loader is: in the epoch, and in which; and the random numbers that it had a batch ahead.

    Accelerate fetches the next batch before it gives one away, so what a dataset draws for it is drawn before a save,
    and would be drawn after it by a run that comes back. That fetch is repeated with the numbers that it had.
    """

    def __init__(self, loader: Any) -> None:
        import torch

        self._loader, base = loader, loader.base_dataloader
        self._ahead: dict[str, object] | None = None
        self._again: dict[str, object] | None = None  # the first fetch of a run that came back is to begin with these
        self._after: dict[str, object] | None = None  # and what follows it with these
        self._begin, self._update, self._end = loader.begin, loader._update_state_dict, loader.end
        loader.begin, loader._update_state_dict, loader.end = self._begins, self._fetches_ahead, self._ends
        if base.generator is None:  # see powerguard.train.data: its seeds are not to come from the global numbers
            base.generator = torch.Generator().manual_seed(torch.initial_seed() % 2**63)

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self._loader.state_dict(), "iteration": self._loader.iteration, "ahead": self._ahead}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After an epoch's last batch the next one begins: Accelerate itself would begin the same epoch again."""
        finished = bool(state["loader"].get("_iterator_finished"))
        self._loader.iteration = state["iteration"] + finished
        self._loader.load_state_dict({} if finished else state["loader"])
        self._again = None if finished else state.get("ahead")

    def _begins(self) -> None:
        """An iteration begins, with nothing fetched yet."""
        if self._again is not None:
            self._after = rng.capture()
            rng.restore(self._again)
            self._again = None
        self._begin()

    def _fetches_ahead(self) -> None:
        """A batch was fetched, the next one is to be."""
        self._update()
        self._go_on()
        self._ahead = rng.capture()

    def _ends(self) -> None:
        """The iteration is over, perhaps before anything was fetched ahead."""
        self._go_on()
        self._end()

    def _go_on(self) -> None:
        if self._after is not None:
            rng.restore(self._after)
            self._after = None


def _telling(loader: Any) -> object:
    """What of *loader* tells its position; raises StateError where nothing does."""
    if getattr(loader, "use_stateful_dataloader", False):
        from torch.utils.data import RandomSampler

        if type(getattr(loader.batch_sampler, "sampler", None)) is RandomSampler:
            todo = "use DataLoaderConfiguration(use_seedable_sampler=True)"
            Log().warning(f"the order is drawn anew by a restart: {todo}", position="not exact")
        return _Position(loader)
    if not hasattr(loader, "base_dataloader"):
        return loader
    raise StateError(
        "this loader can't tell its position: after a restart its epoch would begin anew",
        todo="Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))",
    )
