"""The one door from the command line to what needs torch.

Nothing of the command line imports torch, directly or not: a node without it has every other command, and starts each
in a tenth of the time (1.4 s with torch imported, 0.1 s without). So the few commands that need it load their module by
name, when they run.
"""

from __future__ import annotations

import importlib
from typing import Any

from powerguard.errors import MissingDependency


def load(module: str) -> Any:
    """The module of that name; raises MissingDependency where it needs what isn't installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or "").split(".")[0]
        if missing in ("", "powerguard"):
            raise
        raise MissingDependency(
            f"{missing} isn't installed in this environment",
            todo="pip install 'powerguard[node,train]', or run this in the environment that trains",
        ) from None
