"""Megatron-LM and loops like it: a signal handler that isn't one.

Once an iteration, after optimizer and schedule have moved, Megatron asks ``get_signal_handler().signals_received()``;
the original gathers a flag from all ranks by a collective, each time. This one makes it the hook's boundary instead::

    state = {f"model-{i}": chunk for i, chunk in enumerate(model)}
    state |= {"optimizer": OptimizerShards(optimizer), "schedule": opt_param_scheduler}
    guard = powerguard.attach(state, "checkpoints")
    args.iteration = guard.resume()
    install(SignalHandler(guard, lambda: args.curr_iteration + 1))      # --exit-signal-handler

All ranks stop after the same iteration, each writes what it holds, and where the node halts `Halted` ends the process
with code 75: Megatron's own save, which needs all ranks, isn't called. To have that one instead, run the unmodified
program under ``powerguard exec --signal TERM``.

Not for ``--overlap-param-gather``: there the parameters of a step are gathered during the next one, so at the boundary
those in the model aren't yet what the optimizer has made of them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from powerguard.integrations.halted import Halted
from powerguard.train.guard import Guard


class SignalHandler:
    """Has the interface of Megatron's `DistributedSignalHandler`; *iterations* tells how many are done."""

    def __init__(self, guard: Guard, iterations: Callable[[], int]) -> None:
        self.guard, self._iterations = guard, iterations

    def signals_received(self) -> list[bool]:
        """The boundary. [False]: go on. Raises Halted where the node halts; may wait inside, as any boundary."""
        step = self._iterations()
        verdict = self.guard.boundary(step)
        if verdict:
            self.guard.close(verdict.reason)
            raise Halted(verdict, step)
        return [False]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> bool:
        """There is no handler to give back."""
        return False


def install(handler: SignalHandler) -> None:
    """Makes *handler* the one that Megatron's training loop asks."""
    from megatron.training import get_args, global_vars

    global_vars._GLOBAL_SIGNAL_HANDLER = handler
    get_args().exit_signal_handler = True


class OptimizerShards:
    """What this rank holds of a Megatron optimizer: its inner optimizers' states and the fp32 weights that they update.

    The `state_dict` of Megatron's DistributedOptimizer leaves the shards out, and what brings them in is a collective.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def _parts(self) -> list[Any]:
        """Mixtures of experts and several model chunks have several."""
        return list(getattr(self._optimizer, "chained_optimizers", [self._optimizer]))

    def state_dict(self) -> dict[str, Any]:
        parts = []
        for part in self._parts():
            scaler = getattr(part, "grad_scaler", None)
            parts.append(
                {
                    "inner": part.optimizer.state_dict(),
                    "weights": [weight.detach() for weight in _weights(part)],
                    "scaler": scaler.state_dict() if scaler is not None else None,
                }
            )
        return {"parts": parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        import torch

        for part, saved in zip(self._parts(), state["parts"], strict=True):
            part.optimizer.load_state_dict(saved["inner"])
            with torch.no_grad():
                for weight, value in zip(_weights(part), saved["weights"], strict=True):
                    weight.copy_(value)
            if saved["scaler"] is not None:
                part.grad_scaler.load_state_dict(saved["scaler"])


def _weights(part: Any) -> list[Any]:
    return [weight for group in part.optimizer.param_groups for weight in group["params"]]
