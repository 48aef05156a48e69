"""What a type checker knows of the public names: checked by mypy --strict, never run."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import torch

import powerguard
from powerguard import checkpoint
from powerguard.generations.scan import Latest
from powerguard.train.load import LoadReport
from powerguard.train.periodic import Saving


def hook(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int | None:
    """A training loop."""
    guard = powerguard.attach({"model": model, "optimizer": optimizer}, "/checkpoints", job="run", save_every="auto")
    assert_type(guard, powerguard.Guard)
    for step in range(assert_type(guard.resume(), int), 10):
        with guard.mutating():
            optimizer.step()
        verdict = guard.boundary(step)
        assert_type(verdict, powerguard.Verdict)
        if verdict:
            break
    return guard.exit_code


def library(state: dict[str, object], where: Path) -> None:
    """Checkpoints without a daemon."""
    assert_type(checkpoint.save(state, where, 7), Path)
    assert_type(checkpoint.async_save(state, where, 8), Saving)
    assert_type(checkpoint.load(state, where), LoadReport | None)
    assert_type(powerguard.latest(where), Latest)
    assert_type(powerguard.__version__, str)
