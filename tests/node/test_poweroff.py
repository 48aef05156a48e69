"""Powering off: once, tried again until it is done, and again where it has no effect."""

from __future__ import annotations

import queue

from powerguard.node.halt_ways import DryRun
from powerguard.node.poweroff import Poweroff, Result

WAIT_S = 20.0


class Flaky:
    """A way that fails a number of times."""

    name, logs_out = "flaky", False

    def __init__(self, failures: int, real: bool = True) -> None:
        self.failures, self.calls, self.real = failures, 0, real

    def prove(self) -> str:
        return ""

    def halt(self, reason: str) -> str:
        self.calls += 1
        if self.calls <= self.failures:
            raise RuntimeError("broken in some way nobody thought of")
        return reason


def test_a_failed_halt_is_tried_again_and_a_done_one_is_not():
    """Asked five times it is one halt; two failures of any kind are reported and retried."""
    results: queue.Queue[Result] = queue.Queue()
    way = Flaky(2)
    power = Poweroff(way, results.put, retry_s=0.01)
    for _ in range(5):
        power.halt("why")
    got = [results.get(timeout=WAIT_S) for _ in range(3)]

    assert [r.done for r in got] == [False, False, True]
    assert got[-1].text == "why"
    power.halt("again")
    assert way.calls == 3


def test_a_node_that_stays_up_is_powered_off_again():
    """A power-off that has no effect is repeated; after a restart it is watched first."""
    results: queue.Queue[Result] = queue.Queue()
    way = Flaky(0)
    power = Poweroff(way, results.put, again_s=0.05)
    power.halt("why", done=True)
    first = results.get(timeout=WAIT_S)
    second = results.get(timeout=WAIT_S)
    power.close()

    assert "still up 0.05 s after" in first.text
    assert second.done
    idle = Flaky(0)
    patient = Poweroff(idle, results.put, again_s=60.0)
    patient.halt("why", done=True)
    patient.close()
    assert idle.calls == 0


def test_a_dry_run_can_be_ordered_anew():
    """After a dry run the next outage's halt is another one."""
    results: queue.Queue[Result] = queue.Queue()
    power = Poweroff(DryRun(), results.put)
    power.halt("one")
    first = results.get(timeout=WAIT_S)
    power.again()
    power.halt("two")

    assert not first.real
    assert "two" in results.get(timeout=WAIT_S).text
