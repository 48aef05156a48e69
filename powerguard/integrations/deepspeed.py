"""DeepSpeed: a helper for loops around an engine, all ZeRO stages.

::

    engine, _, loader, _ = deepspeed.initialize(...)
    guard = guarded(engine, "checkpoints", also={"data": loader})
    guard.resume()                                   # engine.global_steps says where the run is
    ...
        engine.step()
        guard.boundary()                             # acts where global_steps has moved

`engine.save_checkpoint` is full of barriers, so the emergency saves what each rank holds by itself: the module's state
(for ZeRO-3 its buffers only: the parameters are in the optimizer's partitions), this rank's partition of the optimizer
with its fp32 weights, loss scaler, schedule and counters. The same number of ranks must come back. Start ranks with
torchrun: the `deepspeed` launcher kills its ranks 30 s after a signal. NVMe offload isn't supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from powerguard.errors import StateError, UsageError
from powerguard.integrations.halted import Halted
from powerguard.train.attach import attach
from powerguard.train.guard import Guard

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")

_DERIVED = ("param_slice_mappings", "universal_checkpoint_info")
"""Of a ZeRO optimizer's state: what a new optimizer has by itself and can't be saved as plain values."""


class DeepSpeedGuard:
    """`powerguard.attach` for an engine; *guard* is the hook itself."""

    def __init__(self, engine: Any, guard: Guard) -> None:
        self.engine, self.guard = engine, guard
        self._step = int(engine.global_steps)

    def resume(self) -> int:
        """Loads the newest generation; the number of optimizer steps done."""
        self.guard.resume()
        self._step = int(self.engine.global_steps)
        return self._step

    def boundary(self) -> None:
        """After `engine.step()`: nothing unless it completed an optimizer step. Raises Halted where the node halts."""
        if self.engine.global_steps == self._step:
            return
        self._step = int(self.engine.global_steps)
        verdict = self.guard.boundary(self._step)
        if verdict:
            self.guard.close(verdict.reason)
            raise Halted(verdict, self._step)

    def close(self) -> None:
        """See `Guard.close`."""
        self.guard.close()


def guarded(
    engine: Any, directory: str | Path, *, also: Mapping[str, object] | None = None, **options: Any
) -> DeepSpeedGuard:
    """Guards *engine*, and the objects in *also*. *options* are those of `powerguard.attach`.

    Raises UsageError for a pipeline engine or an NVMe offload, whose state isn't in memory or not on one boundary.
    """
    if hasattr(engine, "train_batch") and type(engine).__name__ == "PipelineEngine":
        raise UsageError("DeepSpeed's PipelineEngine isn't supported", todo="use its own checkpoints")
    if getattr(engine.optimizer, "swap_optimizer", False):
        raise UsageError("the optimizer's state is on NVMe", todo="offload to the CPU, which is saved from memory")
    state: dict[str, object] = {"module": _Module(engine), "counters": _Counters(engine), **(also or {})}
    if engine.optimizer is not None:
        state["optimizer"] = _Optimizer(engine)
    if engine.lr_scheduler is not None:
        state["scheduler"] = engine.lr_scheduler
    return DeepSpeedGuard(engine, attach(state, directory, **options))


class _Module:
    """The module as this rank holds it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        module = self._engine.module
        if self._engine.zero_optimization_stage() < 3:
            return dict(module.state_dict())
        return {name: buffer for name, buffer in module.named_buffers()}  # noqa: C416  (of a subclass of dict)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._engine.module.load_state_dict(state, strict=self._engine.zero_optimization_stage() < 3)


class _Counters:
    """Where the engine is."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, int]:
        return {name: int(getattr(self._engine, name)) for name in COUNTERS}

    def load_state_dict(self, state: dict[str, int]) -> None:
        for name, value in state.items():
            setattr(self._engine, name, value)


class _Optimizer:
    """The optimizer's partition of this rank, without what a new one has by itself."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        optimizer, plain = self._engine.optimizer, {}
        for name, value in optimizer.state_dict().items():
            if name in _DERIVED or isinstance(value, Enum):
                continue
            plain[name] = (
                {"scaler": dict(vars(value))} if name == "loss_scaler" and hasattr(value, "__dict__") else value
            )
        return plain

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """By ranks, as it was saved: nothing is gathered but ZeRO-3's small parameters, which every rank holds."""
        import torch.distributed as dist

        optimizer = self._engine.optimizer
        whole = {**optimizer.state_dict(), **state}
        scaler = getattr(optimizer, "loss_scaler", None)
        if isinstance(state.get("loss_scaler"), dict):
            vars(scaler).update(state["loss_scaler"]["scaler"])
            whole["loss_scaler"] = scaler
        if not hasattr(optimizer, "partition_count"):
            optimizer.load_state_dict(whole)
            return
        if getattr(optimizer, "elastic_checkpoint", False):
            raise StateError("elastic ZeRO checkpoints need all ranks' parts", todo='set "elastic_checkpoint": false')
        optimizer.load_state_dict([whole] * dist.get_world_size(), load_from_fp32_weights=True)
        if self._engine.zero_optimization_stage() == 3:
            optimizer.checkpoint_event_epilogue()
