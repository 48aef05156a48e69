"""The SNMP rig: RFC 1628 and PowerNet, through snmp-ups and upsd, to the daemon's halt."""

from __future__ import annotations

import os

import pytest

from hil.virtual import snmp

pytestmark = [
    pytest.mark.nut,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(snmp.missing()), reason=snmp.missing()),
]


@pytest.mark.parametrize("mib", snmp.MIBS if os.environ.get("POWERGUARD_TEST_RIGS") else ["apcc"])
def test_an_outage_as_an_snmp_ups_tells_it(mib):
    """A short one, an agent that falls silent on mains and halts nobody, and one to the halt."""
    told: list[str] = []
    snmp.rig(mib, told.append)

    assert "low battery: halted after" in told[0]
