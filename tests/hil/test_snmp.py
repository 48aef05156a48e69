"""The SNMP rig: RFC 1628 and PowerNet, through snmp-ups and upsd, to the daemon's halt."""

from __future__ import annotations

import os
import socket

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


def test_what_is_shown_twice_in_a_second_is_told_twice():
    """snmpsim compares the whole seconds of a file's time."""
    with snmp.Agent(snmp.rfc1628()) as agent, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(20)
        for rows in (snmp.powernet, snmp.rfc1628) * 3:
            agent.show(rows())
            asking.sendto(snmp.GET_SYS_OBJECT_ID, ("127.0.0.1", agent.port))
            said_apc = bytes.fromhex("2b06010401823e") in asking.recv(1500)
            assert said_apc == (rows is snmp.powernet)
