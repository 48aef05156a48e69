"""A scenario exported for dummy-ups is told by a real driver and a real upsd in the same words and order."""

from __future__ import annotations

from powerguard.node.ups_line import UpsAddress
from powerguard.sim.nut import RealNut
from powerguard.sim.scenario import read
from powerguard.sim.seq import to_seq

STORY = """# A short outage with a low battery.

feed ups

t=2 ups status="OB DISCHRG"
t=2..6 ups charge=100..80 every=2
t=4
----

t=7 ups status="OB LB DISCHRG" runtime=60
t=9 ups status="OL CHRG"
t=12
----
"""


def test_the_story_is_told_by_a_real_driver(listen):
    """Status, charge and runtime come through dummy-ups, upsd and our reader, in the story's order."""
    with RealNut({"told": to_seq(read(STORY, "short"), "ups")}, maxage_s=3) as real:
        listener = listen(address=UpsAddress.parse(real.address("told")))
        samples = listener.until(lambda sample: sample.variables.get("ups.status") == "OL CHRG", within_s=30.0)
        assert listener.reader.close()

    told = []
    for sample in samples:
        words = tuple(sample.variables.get(name) for name in ("ups.status", "battery.charge", "battery.runtime"))
        if words != (None, None, None) and (not told or told[-1] != words):
            told.append(words)
    statuses = [status for i, (status, _, _) in enumerate(told) if i == 0 or told[i - 1][0] != status]
    # The driver began before anybody listened: the first words may be over.
    assert ["OB DISCHRG", "OB LB DISCHRG", "OL CHRG"] == statuses[-3:]
    assert ("OB DISCHRG", "80", "1200") in told
    assert ("OB LB DISCHRG", "80", "60") in told
