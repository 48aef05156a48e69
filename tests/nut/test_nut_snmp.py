"""An SNMP UPS: a simulated agent, NUT's snmp-ups, and our reader behind it."""

from __future__ import annotations

import pytest

from hil.virtual import snmp
from powerguard.core.types import Comm
from powerguard.node.ups_line import UpsAddress
from powerguard.sim.nut import RealNut

pytestmark = pytest.mark.skipif(bool(snmp.missing()), reason=snmp.missing())


def test_an_snmp_ups_from_mains_to_silence(listen):
    """On line, on battery, low battery in the order `LB OB`, and stale once the agent is gone."""
    with snmp.Agent(snmp.rfc1628()) as agent, RealNut({"rack": snmp.driver(agent, "ietf")}) as nut:
        listener = listen(address=UpsAddress.parse(nut.address("rack")), user="secondary", password="secondarypw")
        sample = listener.comm(Comm.OK)
        assert sample.variables["ups.status"] == "OL"
        assert float(sample.variables["battery.runtime"]) == 42 * 60
        assert sample.variables["driver.parameter.pollfreq"] == "1"
        agent.show(snmp.rfc1628(on_battery=True, low=True, minutes=3, charge=18))
        sample = listener.until(lambda sample: "LB" in sample.variables.get("ups.status", ""))[-1]
        assert sample.variables["ups.status"] == "LB OB"
        listener.until(lambda sample: float(sample.variables.get("battery.charge", 0)) == 18)
        agent.stop()
        listener.comm(Comm.STALE)
        assert listener.reader.login_held
        assert listener.reader.close()
