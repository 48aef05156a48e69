"""What modules and optimizers need beyond their own ``load_state_dict``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from powerguard.errors import StateError
from powerguard.generations.values import Node
from powerguard.train.tree import class_name


def check_keys(node: Node, template: Mapping[str, object], path: str) -> None:
    """Compares a Module's entries by name, before anything is touched; raises StateError."""
    pairs = next(iter(node.values())) if isinstance(node, dict) else []
    saved = {key for key, _ in pairs if isinstance(key, str)}
    gone, new = sorted(saved - set(template)), sorted(set(template) - saved)
    if not gone and not new:
        return
    parts = [f"the checkpoint has {_few(gone)}, the model doesn't"] if gone else []
    parts += [f"the model has {_few(new)}, the checkpoint doesn't"] if new else []
    raise StateError(f"{path}: {'; '.join(parts)}", todo="build the model as it was when it was saved")


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def load_object(target: Any, state: Any, path: str) -> None:
    """Gives *target* its state; raises StateError where it refuses."""
    try:
        target.load_state_dict(state)
    except Exception as error:
        raise StateError(f"{path} ({class_name(target)}) refuses its state: {error}") from error
    if isinstance(target, torch.optim.Optimizer):
        _keep_dtypes(target, state)


def _keep_dtypes(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Undoes the optimizer's habit of casting its state to the parameter's dtype, which would lose bits."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    ids = [i for group in state["param_groups"] for i in group["params"]]
    for index, parameter in zip(ids, parameters, strict=False):
        mine = optimizer.state.get(parameter, {})
        for key, saved in state["state"].get(index, {}).items():
            loaded = mine.get(key)
            if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor) and loaded.dtype != saved.dtype:
                mine[key] = saved.to(loaded.device)
