"""The gate before training: open once the batteries carry a flush and a halt."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from powerguard.core.feeds import Power
from powerguard.core.job import Job, Member
from powerguard.core.need import Need
from powerguard.core.phase import PhaseView
from powerguard.core.policy import Policy
from powerguard.core.state import State, initial
from powerguard.core.types import Phase
from powerguard.node.status import gate

POLICY = Policy(flush_default_s=60.0, margin_s=10.0, halt_s=45.0)
JOB = Job("gpt", 1, members={0: Member(0, 1, 7)})


def state(runway_s: float | None, **fields) -> State:
    power = Power(False, online_since=0.0, runway_s=runway_s, reason="mains")
    return replace(initial("boot", 0.0), power=power, need=Need(total_s=45.0, halt_s=45.0), **fields)


@pytest.mark.parametrize(("runway_s", "waits"), [(115.0, False), (114.9, True), (None, True)])
def test_without_a_job_the_default_flush_must_fit(runway_s, waits):
    """60 s for a flush that nobody has measured, 45 s to halt, 10 s of margin."""
    assert waits == bool(gate(POLICY, state(runway_s)))


def test_with_a_job_its_own_need_counts():
    """What its ranks have measured, not the default."""
    measured = Need(total_s=53.0, halt_s=45.0)

    assert "" == gate(POLICY, replace(state(63.0, jobs={"gpt": JOB}), need=measured))
    assert "runway 62 s < need 53 s + margin 10 s" == gate(
        POLICY, replace(state(62.4, jobs={"gpt": JOB}), need=measured)
    )


@pytest.mark.parametrize(("changed", "word"), [
    ({"power": None}, "no UPS has been read"),
    ({"power": Power(True, runway_s=9000.0, reason="ups is on battery")}, "ups is on battery"),
    ({"power": Power(None, reason="ups was never heard from")}, "never heard from"),
    ({"view": PhaseView(phase=Phase.PARKED)}, "the node is parked"),
    ({"view": PhaseView(phase=Phase.ON_BATTERY)}, "the node is on battery"),
])  # fmt: skip
def test_unknown_or_worse_is_not_ready(changed, word):
    """Long runways don't open the gate on battery, parked, or where nobody knows."""
    assert word in gate(POLICY, replace(state(9000.0), **changed))
