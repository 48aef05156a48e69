"""The random states of the process: a resumed run must draw what the uninterrupted one would have drawn."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

KEY = "__rng__"
"""The name under which they stand among the sources of a state."""


def capture() -> dict[str, object]:
    """The states of Python's, numpy's (if imported) and torch's global generators, CUDA's of all devices.

    CUDA's generators live on the host: reading them makes no context on other ranks' devices.
    """
    states: dict[str, object] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        import numpy as np

        states["numpy"] = np.random.get_state(legacy=False)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = [generator.get_state() for generator in torch.cuda.default_generators]
    return states


def restore(states: dict[str, Any]) -> tuple[str, ...]:
    """Sets them; returns what had to be left out, in words. To be called last, as loading may draw numbers."""
    left: list[str] = []
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy as np

        np.random.set_state(states["numpy"])
    if "cuda" in states:
        if torch.cuda.is_available():
            torch.cuda.init()  # type: ignore[no-untyped-call]
            generators = torch.cuda.default_generators
            for generator, state in zip(generators, states["cuda"], strict=False):
                generator.set_state(state)
            if len(generators) != len(states["cuda"]):
                left.append(f"random states of {len(states['cuda'])} CUDA devices, this process sees {len(generators)}")
        else:
            left.append("random states of CUDA devices, this process has none")
    return tuple(left)
