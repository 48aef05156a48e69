"""What modules and optimizers need beyond their own ``load_state_dict``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from powerguard.errors import StateError
from powerguard.generations.values import Node
from powerguard.train.dtypes import dtype_of
from powerguard.train.sharded import is_dtensor, like
from powerguard.train.tree import class_name

EXTRA_STATE = "_extra_state"  # torch.nn.Module's name for what get_extra_state() returns
DDP = "torch.nn.parallel.distributed.DistributedDataParallel"


def clean_name(wrapper: str, name: str) -> str:
    """A parameter's name without what DDP and torch.compile put before it; *wrapper* is the module's class."""
    if wrapper == DDP:
        name = name.removeprefix("module.")
    return name.replace("_orig_mod.", "")


def wrapped_names(node: Node, template: Mapping[str, object], module: object) -> Node:
    """*node*, a Module's state under clean names, under the names that *module* has in *template*."""
    wrapped = {clean_name(class_name(module), name): name for name in template}
    return {kind: [[wrapped.get(key, key), item] for key, item in pairs] for kind, pairs in node.items()}


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


def resizable(module: torch.nn.Module, template: Mapping[str, object]) -> list[str]:
    """The names in *template* whose tensors may have another shape in a checkpoint: *module* brings them to it itself.

    That is extra state, whatever it is, and what belongs to a part with a loading of its own, as observers and fake
    quantisers have it: their scales are of size 1 until they have seen a batch.
    """
    parts = dict(module.named_modules(remove_duplicate=False))
    own = {name for name, part in parts.items() if not _loading(part).startswith("torch.nn.modules.")}
    return [
        name
        for name, (owner, _, last) in ((name, name.rpartition(".")) for name in template)
        if last == EXTRA_STATE or owner in own
    ]


def _loading(module: torch.nn.Module) -> str:
    """Where *module*'s way to load itself comes from; torch's own layers, those with another than Module's too, never
    change shapes."""
    return str(type(module)._load_from_state_dict.__module__)


def sharded_template(optimizer: torch.optim.Optimizer, node: Node, template: dict[str, Any]) -> dict[str, Any]:
    """*template*, the state of an optimizer that has none yet, with places for moments of sharded parameters.

    Only for state that was saved whole: each moment is then laid out as its parameter. Anything else stays as it is.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(is_dtensor(p) for p in parameters):
        return template
    saved = dict(_pairs(dict(_pairs(node)).get("state")))
    places: dict[int, dict[str, Any]] = {}
    for index, parameter in enumerate(parameters):
        for key, item in _pairs(saved.get(index)):
            payload = item.get("tensor") if isinstance(item, dict) else None
            if is_dtensor(parameter) and payload and payload["shape"] == list(parameter.shape):
                places.setdefault(index, {})[key] = like(parameter, dtype_of(payload["dtype"]))
    return {**template, "state": places}


def _pairs(node: Node) -> list[tuple[Any, Node]]:
    """The items of a dict's node."""
    if not isinstance(node, dict) or "dict" not in node:
        return []
    return [(key, item) for key, item in node["dict"] if isinstance(key, (str, int))]


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
