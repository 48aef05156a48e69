"""Lightning: a callback.

::

    guard = PowerguardCallback("checkpoints")
    trainer = Trainer(callbacks=[guard], plugins=[SLURMEnvironment(auto_requeue=False)])   # under Slurm
    trainer.fit(model, loader, ckpt_path=guard.resume())

The boundary is `on_train_batch_end` where `global_step` has moved: Lightning calls it for every micro-batch. Coming
back, the generation is turned into a checkpoint as Lightning writes them, so that it restores its loops and callbacks
by itself; that file is deleted when training begins. Random numbers, which Lightning doesn't keep, are set here.
An epoch's last step is a boundary when the next epoch begins, and training's last step when it ends: only there do
Lightning's counters say that the epoch is over.

For strategies where each rank holds the whole model (one device, DDP). Others are refused: they gather by collectives.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powerguard.errors import StateError, UsageError
from powerguard.integrations.boxes import Found, newest
from powerguard.integrations.halted import Halted
from powerguard.integrations.lightning_order import Order
from powerguard.train import rng
from powerguard.train.attach import attach
from powerguard.train.guard import Guard
from powerguard.train.identity import find_identity
from powerguard.train.log import Log

try:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.plugins.environments import SLURMEnvironment
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
except ImportError:  # the same, under its older name
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.plugins.environments import SLURMEnvironment
    from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

RESUMING = ".resume-lightning"
"""The folder, inside the checkpoint directory, of what Lightning resumes from; one file of each rank in it."""

_OURS = ("state_dict", "optimizer_states")
"""Of Lightning's checkpoint: what stands in a generation as a model and optimizers."""

_ORDER = "powerguard.order"
"""What stands beside Lightning's: see `Order`."""

_LIVE, _AVERAGE = "current_model_state", "powerguard.average"
"""`WeightAveraging` calls the trained weights the one, and its average "state_dict", which we keep as the other."""


class PowerguardCallback(Callback):  # type: ignore[misc]  # lightning is typed where it is installed
    """Guards a run with checkpoints in *directory*; *options* are those of `powerguard.attach`."""

    def __init__(self, directory: str | Path, **options: Any) -> None:
        self.directory = Path(directory)
        self.options = options
        self.guard: Guard | None = None
        self._found: Found | None = None
        self._resuming: Path | None = None
        self._step = -1
        self._random: dict[str, Any] | None = None
        self._order: Order | None = None

    def resume(self) -> str | None:
        """What to give to `fit(ckpt_path=...)`; None where there is nothing to go on from.

        Ranks that Lightning's own launcher starts call it in their script, like everything else. Raises CheckpointError
        where all generations are damaged.
        """
        import os

        import torch

        me = find_identity(os.environ, job="resume")
        self._found = newest(
            self.directory,
            objects=("model", "lightning"),
            groups=("optimizers",),
            allow_pickle=self.options.get("allow_pickle", False),
        )
        if self._found is None:
            return None
        self._resuming = self.directory / RESUMING / f"rank-{me.rank:05d}" / f"step-{self._found.step}.ckpt"
        shutil.rmtree(self._resuming.parent, ignore_errors=True)
        self._resuming.parent.mkdir(parents=True)
        torch.save(checkpoint(self._found), self._resuming)
        return str(self._resuming)

    # ---- what Lightning calls ------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Everything is loaded, and the first iterator over the data is made."""
        _refuse(trainer, self)
        for name, loader in _loaders(trainer):
            if not callable(getattr(loader, "state_dict", None)):
                text = "Lightning begins its epoch anew after a restart; use torchdata's StatefulDataLoader"
                Log().warning(f"{name} can't tell its position: {text}", position="not exact")
        self._order = Order(trainer)
        if name := self._order.unknown():
            text = "a restart draws the order anew, which is exact only if it is the same again: give it a generator"
            Log().warning(f"{name}: {text}", position="not exact")
        told = {
            "model": pl_module,
            "optimizers": {str(i): optimizer for i, optimizer in enumerate(trainer.optimizers)},
            "lightning": _Rest(trainer, self._order),
        }
        self.guard = attach(told, self.directory, **self.options)
        self.guard.goes_on(trainer.global_step)
        self._step = trainer.global_step
        self._clear()
        if self._found is not None and not _at_an_epochs_start(trainer):
            rest = self._found.values["lightning"]
            positions = rest["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])
            self._order.go_on(rest.get(_ORDER, []), positions)
            rng.restore(self._found.random)
            self._found = None

    def on_train_epoch_start(self, trainer: Trainer, *args: Any) -> None:
        """The next epoch begins, with the shuffle still to be drawn: the boundary of the last one's last step."""
        assert self._order is not None
        self._order.begin()
        if self._found is not None:
            self._order.rewind(self._found.values["lightning"].get(_ORDER, []))
            # Lightning would go on with the iterator that it made before the random numbers were restored.
            trainer.fit_loop.restarting = trainer.fit_loop._resuming_from_checkpoint = False
            rng.restore(self._found.random)
            self._found = None
        self._boundary(trainer)

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """A micro-batch is done; perhaps an optimizer step too."""
        if not trainer.is_last_batch:  # from within an epoch's last batch, Lightning would come back an epoch too far
            self._boundary(trainer)

    def _boundary(self, trainer: Trainer) -> None:
        if trainer.global_step == self._step or self.guard is None:
            return
        self._step = trainer.global_step
        verdict = self.guard.boundary(self._step)
        if verdict:
            self.guard.close(verdict.reason)
            raise Halted(verdict, self._step)

    def on_validation_start(self, trainer: Trainer, *args: Any) -> None:
        """A validation draws a random number, and a run that is resumed before it may not repeat it."""
        self._random = rng.capture() if not trainer.sanity_checking else None

    def on_validation_end(self, *args: Any) -> None:
        """Training draws the same random numbers with a validation as without."""
        if self._random is not None:
            rng.restore(self._random)
            self._random = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The run ends badly, or halts."""
        if self.guard is not None and not isinstance(exception, Halted):
            self.guard.close(f"failed: {type(exception).__name__}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training is over; the last epoch's last step is a boundary like any other."""
        self._boundary(trainer)
        if self.guard is not None:
            self.guard.close("finished")

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Also of a run that had been complete, and had nothing to train."""
        self._clear()

    def _clear(self) -> None:
        if self._resuming is not None:
            shutil.rmtree(self._resuming.parent, ignore_errors=True)
            self._resuming = None


class _Rest:
    """What is in Lightning's checkpoint beside the model and the optimizers."""

    def __init__(self, trainer: Trainer, order: Order) -> None:
        self._trainer, self._order = trainer, order

    def state_dict(self) -> dict[str, Any]:
        dumped = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        rest = {key: value for key, value in dumped.items() if key not in _OURS}
        if rest.pop(_LIVE, None) is not None:  # it stands in the generation as the model
            rest[_AVERAGE] = dumped["state_dict"]
        return {**rest, _ORDER: list(self._order.drawn_from)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise StateError("a Lightning run isn't resumed in place", todo="fit(ckpt_path=guard.resume())")


def checkpoint(found: Found) -> dict[str, Any]:
    """*found* as Lightning writes a checkpoint."""
    optimizers = found.values["optimizers"]
    told = {
        **{key: value for key, value in found.values["lightning"].items() if key not in (_ORDER, _AVERAGE)},
        "state_dict": found.values["model"],
        "optimizer_states": [optimizers[key] for key in sorted(optimizers, key=int)],
    }
    average = found.values["lightning"].get(_AVERAGE)
    return told if average is None else {**told, "state_dict": average, _LIVE: told["state_dict"]}


def _at_an_epochs_start(trainer: Trainer) -> bool:
    """Whether what was loaded had been saved just before an epoch's first batch."""
    return bool(trainer.fit_loop.restarted_on_epoch_start)


def _refuse(trainer: Trainer, me: Callback) -> None:
    if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
        raise StateError(
            f"{type(trainer.strategy).__name__} gathers the model by collectives, which an emergency has no time for",
            todo="use DDP, or FSDP2 in a loop of your own with powerguard.attach",
        )
    later = trainer.callbacks[trainer.callbacks.index(me) + 1 :]
    if any(kind.__name__ == "WeightAveraging" for one in later for kind in type(one).__mro__):
        raise UsageError(
            "a callback that averages weights comes after the boundary, and would be saved a step behind them",
            todo="callbacks=[..., PowerguardCallback(...)]: put PowerguardCallback last",
        )
    for plugin in (trainer._accelerator_connector.cluster_environment,):
        if isinstance(plugin, SLURMEnvironment) and plugin.auto_requeue:
            raise UsageError(
                "Lightning's Slurm handler saves and requeues inside a signal handler, and bypasses SIGTERM",
                todo="Trainer(plugins=[SLURMEnvironment(auto_requeue=False)])",
            )


def _loaders(trainer: Trainer) -> list[tuple[str, Any]]:
    loaders = getattr(trainer.fit_loop._combined_loader, "flattened", [])
    return [(f"train_dataloader {i}" if len(loaders) > 1 else "train_dataloader", one) for i, one in enumerate(loaders)]
