"""What the tests of the deputy share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flusher.rig import Node


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A bus that serves."""
    with contextlib.closing(Node(tmp_path)) as running:
        yield running
