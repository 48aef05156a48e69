"""powerguard: power-event-aware graceful shutdown for training nodes on a UPS.

::

    import powerguard

    guard = powerguard.attach({"model": model, "optimizer": optimizer}, "/checkpoints/run1")
    for step in range(guard.resume(), steps):
        train_one_step()
        if guard.boundary(step):
            break

Importing this needs neither torch nor NUT; `attach` needs torch. Type checkers read `__init__.pyi`.
"""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["Guard", "Verdict", "__version__", "attach", "latest"]

_HOMES = {
    "Guard": "powerguard.train.guard",
    "Verdict": "powerguard.train.guard",
    "attach": "powerguard.train.attach",
    "latest": "powerguard.generations",
}


def __getattr__(name: str) -> object:
    """The public names, each imported when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
