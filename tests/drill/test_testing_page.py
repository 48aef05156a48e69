"""docs/testing.md promises what the fixtures have."""

from __future__ import annotations

import re
from pathlib import Path

from powerguard.drill.power import SimulatedUps
from powerguard.drill.trial import Blackout, RunningDaemon, Survival
from powerguard.integrations import pytest_plugin

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
FIXTURES = {"blackout": Survival, "powerguard_daemon": RunningDaemon, "ups": SimulatedUps}


def test_every_name_on_the_page_exists():
    """Each name in a fixture's table is an attribute of what the fixture gives (or of what `run` returns)."""
    text = PAGE.read_text(encoding="utf-8")
    for fixture, kind in FIXTURES.items():
        assert hasattr(pytest_plugin, fixture)
        section = text.partition(f"## `{fixture}`")[2].partition("\n## ")[0]
        rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
        names = {name for row in rows for name in re.findall(r"`([a-z_]+)(?:\(|`)", row)}
        assert names
        known = {*dir(kind), *getattr(kind, "__struct_fields__", ()), "supply", "upsd", "address", "process"}
        assert names <= known, (fixture, names - known)
    assert "after_steps" in Blackout.run.__annotations__
    assert "within_s" in Blackout.run.__annotations__
