"""The virtual machine's two nights: ten minutes of an emulated processor, so only where POWERGUARD_TEST_RIGS asks."""

from __future__ import annotations

import os

import pytest

from hil.virtual.vm.image import missing
from hil.virtual.vm.outage import both

pytestmark = [
    pytest.mark.nut,
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(5400),
    pytest.mark.skipif(
        not os.environ.get("POWERGUARD_TEST_RIGS"), reason="make hil-virtual runs it, or POWERGUARD_TEST_RIGS=1"
    ),
]


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_two_nights():
    """A whole outage to the halt and back, and a plug that goes in the middle of a flush."""
    told: list[str] = []
    both(told.append)

    assert any("resumed at step" in line and line.startswith("complete") for line in told)
    assert any("the half-written one was not taken" in line for line in told)
