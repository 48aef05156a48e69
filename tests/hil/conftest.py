"""Tests of the bench. Those marked `hil` cut real power, and run only where a rig is named."""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what needs hardware, unless POWERGUARD_HIL_RIG says which."""
    if os.environ.get("POWERGUARD_HIL_RIG"):
        return
    real = [item for item in items if item.get_closest_marker("hil")]
    items[:] = [item for item in items if item not in real]
    config.hook.pytest_deselected(items=real)
