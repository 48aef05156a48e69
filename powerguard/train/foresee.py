"""How much larger a state will be once training runs: optimizers make their state in their first step.

Used only to size the arena and the reserved space beforehand. A guess that is too small costs time at the first save
after it, not correctness.
"""

from __future__ import annotations

import torch

from powerguard.train.sharded import is_dtensor, local_of

_STEP_BYTES = 256
"""For each parameter's step counter and its share of the header."""


def foreseen_bytes(value: object) -> int:
    """Bytes that the optimizers in *value* are going to add."""
    if isinstance(value, torch.optim.Optimizer):
        return 0 if value.state else sum(_group_bytes(value, group) for group in value.param_groups)
    if isinstance(value, dict):
        return sum(foreseen_bytes(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(foreseen_bytes(item) for item in value)
    return 0


def _group_bytes(optimizer: torch.optim.Optimizer, group: dict[str, object]) -> int:
    copies = 2  # first and second moment
    if type(optimizer).__name__ in ("SGD", "RMSprop", "ASGD", "Rprop", "Adagrad", "Adafactor"):
        copies = 1
    copies += int(bool(group.get("amsgrad"))) + int(bool(group.get("centered")))
    parameters = group["params"]
    assert isinstance(parameters, list)
    total = 0
    for parameter in parameters:
        if parameter.requires_grad:
            local = local_of(parameter) if is_dtensor(parameter) else parameter
            total += copies * local.numel() * local.element_size() + _STEP_BYTES * (copies + 1)
    return total
