"""Hugging Face `Trainer`: a callback.

::

    guard = PowerguardCallback("checkpoints")
    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[guard])
    trainer.train(resume_from_checkpoint=guard.resume(trainer))

The boundary is `on_step_end`, where optimizer, schedule and `global_step` have moved: never inside an accumulation.
Coming back, the generation is turned into a checkpoint as the Trainer writes them, so that it restores by itself what
only it knows (the position in the epoch, the callbacks' states); that folder is deleted after the first step.

For one process and for DDP. A model that the Trainer shards itself (FSDP, DeepSpeed) is refused.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_utils import PreTrainedModel
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerState
from transformers.trainer_callback import TrainerControl as Control
from transformers.training_args import TrainingArguments as Args

from powerguard.errors import StateError, UsageError
from powerguard.integrations.boxes import Found, newest
from powerguard.integrations.halted import Halted
from powerguard.train import rng
from powerguard.train.attach import attach
from powerguard.train.export_hf import RECORDED
from powerguard.train.guard import Guard

if TYPE_CHECKING:
    from transformers.trainer import Trainer

RESUMING = ".resume-hf"
"""The folder, inside the checkpoint directory, of what the Trainer resumes from; one of each rank's own in it."""


class PowerguardCallback(TrainerCallback):  # type: ignore[misc]  # transformers is typed where it is installed
    """Guards a Trainer's run with checkpoints in *directory*; *options* are those of `powerguard.attach`."""

    def __init__(self, directory: str | Path, **options: Any) -> None:
        self.directory = Path(directory)
        self.options = options
        self.guard: Guard | None = None
        self._trainer: Trainer | None = None
        self._resuming: Path | None = None
        self._random: dict[str, Any] | None = None

    def resume(self, trainer: Trainer) -> str | None:
        """What to give to `train(resume_from_checkpoint=...)`; None where there is nothing to go on from.

        Raises CheckpointError where all generations are damaged.
        """
        self._trainer = trainer
        found = newest(
            self.directory,
            objects=("model", "optimizer", "scheduler", "trainer"),
            allow_pickle=self.options.get("allow_pickle", False),
        )
        if found is None:
            return None
        rank = trainer.args.process_index
        self._resuming = self.directory / RESUMING / f"rank-{rank:05d}" / f"checkpoint-{found.step}"
        write_checkpoint(found, self._resuming, rank=rank, world_size=trainer.args.world_size)
        return str(self._resuming)

    # ---- what the Trainer calls ----------------------------------------------------------------------

    def on_train_begin(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        """The optimizer and the schedule exist now, and are as they were."""
        if getattr(args, "enable_jit_checkpoint", False):
            raise UsageError(
                "enable_jit_checkpoint saves on a signal without agreement between ranks, and stops the run after it",
                todo="turn it off: powerguard saves at one step on all ranks",
            )
        model, optimizer, scheduler = kwargs["model"], kwargs["optimizer"], kwargs["lr_scheduler"]
        if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
            raise StateError(
                "this Trainer shards the model (FSDP or DeepSpeed), and gathering it needs all ranks",
                todo="use powerguard.integrations.accelerate or .deepspeed in a loop of your own",
            )
        others = self._trainer.callback_handler.callbacks if self._trainer is not None else []
        mine = _TrainerState(state, [*others, control], ModelConfig(model))
        told = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "trainer": mine}
        if self.guard is not None:  # `auto_find_batch_size` begins the loop anew where the device's memory is short
            self.guard.close("began anew")
        self.guard = attach(told, self.directory, **self.options)
        self.guard.goes_on(state.global_step)

    def on_step_end(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        """An optimizer step is complete."""
        assert self.guard is not None
        verdict = self.guard.boundary(state.global_step)
        if verdict:
            self.guard.close(verdict.reason)
            raise Halted(verdict, state.global_step)
        if not args.auto_find_batch_size:  # else the loop may yet begin anew, from there
            self._clear()
        # An evaluation draws a random number, and a run that is resumed after this step won't repeat it.
        self._random = rng.capture() if control.should_evaluate else None

    def on_epoch_end(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        """An evaluation that is due at an epoch's end is asked for here, after its last step."""
        self._random = rng.capture() if control.should_evaluate else None

    def on_evaluate(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        """Training draws the same random numbers with an evaluation as without."""
        if self._random is not None:
            rng.restore(self._random)
            self._random = None

    def on_train_end(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        """Training is over."""
        self._clear()
        if self.guard is not None:
            self.guard.close("finished")

    def _clear(self) -> None:
        if self._resuming is not None:
            shutil.rmtree(self._resuming.parent, ignore_errors=True)
            self._resuming = None


class ModelConfig:
    """What `powerguard checkpoints export --to hf` needs to know of a model of transformers beside its weights.

    The callback records it by itself. In another loop it is one more source of the state, ``"config":
    ModelConfig(model)``, or registered for checkpointing (Accelerate). Small, read once; nothing is recorded of a model
    that isn't a `PreTrainedModel`.
    """

    def __init__(self, model: Any) -> None:
        bare = model
        while not isinstance(bare, PreTrainedModel) and (inner := _inside(bare)) is not None:
            bare = inner
        self._told: dict[str, Any] = {}
        if isinstance(bare, PreTrainedModel) and not getattr(bare, "_hf_peft_config_loaded", False):
            self._told = _describe(bare)

    def state_dict(self) -> dict[str, Any]:
        """The record."""
        return self._told

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: the model is built as it is configured now."""


def _inside(model: Any) -> Any:
    """What DDP or torch.compile has wrapped; None for anything else."""
    if isinstance(model, DistributedDataParallel):
        return model.module
    return getattr(model, "_orig_mod", None)


def _describe(model: Any) -> dict[str, Any]:
    """As save_pretrained writes it."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.dtype = str(model.dtype).removeprefix("torch.")
    told = {
        "format": RECORDED,
        "config": config.to_json_string(),
        "tied": sorted(getattr(model, "all_tied_weights_keys", None) or ()),
        "unsaved": sorted(model._keys_to_ignore_on_save or ()),
    }
    if model.can_generate():
        told["generation_config"] = model.generation_config.to_json_string()
    return told


class _TrainerState:
    """The Trainer's own state, as in its trainer_state.json."""

    def __init__(self, state: TrainerState, parts: list[Any], config: ModelConfig) -> None:
        self._state, self._parts = state, [part for part in parts if isinstance(part, ExportableState)]
        self._config = config

    def state_dict(self) -> dict[str, Any]:
        state = copy.copy(self._state)
        told: dict[str, list[Any]] = {}
        for part in self._parts:
            told.setdefault(type(part).__name__, []).append(part.state())
        state.stateful_callbacks = {name: each[0] if len(each) == 1 else each for name, each in told.items()}
        return {"json": json.dumps(dataclasses.asdict(state), sort_keys=True), "config": self._config.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise StateError(
            "a Trainer's run isn't resumed in place", todo="train(resume_from_checkpoint=guard.resume(trainer))"
        )


def write_checkpoint(found: Found, folder: Path, *, rank: int = 0, world_size: int = 1) -> None:
    """*found* as the Trainer writes a checkpoint into *folder*; what was there is replaced."""
    import torch

    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.mkdir(parents=True)
    torch.save(found.values["model"], folder / "pytorch_model.bin")
    torch.save(found.values["optimizer"], folder / "optimizer.pt")
    torch.save(found.values["scheduler"], folder / "scheduler.pt")
    states: dict[str, Any] = {"python": found.random["python"], "cpu": found.random["torch"]}
    numpy = found.random.get("numpy")
    if numpy is not None:
        states["numpy"] = (
            numpy["bit_generator"], numpy["state"]["key"], numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"],
        )  # fmt: skip
    if "cuda" in found.random:
        cuda = found.random["cuda"]
        states["cuda"] = cuda if world_size > 1 else cuda[torch.cuda.current_device()]
    name = f"rng_state_{rank}.pth" if world_size > 1 else "rng_state.pth"
    torch.save(states, folder / name)
    (folder / "trainer_state.json").write_text(found.values["trainer"]["json"])
