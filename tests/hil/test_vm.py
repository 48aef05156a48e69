"""The virtual machines: many minutes of an emulated processor, so only where POWERGUARD_TEST_RIGS asks."""

from __future__ import annotations

import os

import pytest

from hil.virtual.vm import usb
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
def test_a_usb_ups():
    """Through the real usbhid-ups: on battery and back, its values, and a low battery."""
    told: list[str] = []
    usb.rig(told.append)

    assert "low battery after" in told[0]


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_two_nights():
    """A whole outage to the halt and back, and a plug that goes in the middle of a flush."""
    told: list[str] = []
    both(told.append)

    assert any("resumed at step" in line and line.startswith("complete") for line in told)
    assert any("the half-written one was not taken" in line for line in told)
