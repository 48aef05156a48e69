"""False alarms that the policy benchmark found: what a healthy battery's gauge and runtime may do without a stop."""

from __future__ import annotations

from typing import Any

import pytest

from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.runway import EMPTY, Bound, absorb, bound, load_step
from powerguard.core.types import Comm, Reading

MAINS: dict[str, Any] = {"charge_pct": 100.0, "runtime_s": 1500.0, "load_pct": 60.0, "voltage": 27.2}


class Night:
    """One UPS with 12 cells of lead-acid, polled every two seconds."""

    def __init__(self, **mains: Any) -> None:
        self.policy, self.feed = Policy(), FeedPolicy("ups")
        self.state, self.now = EMPTY, 5000.0
        for _ in range(15):
            self.poll(False, **(MAINS | mains))

    def poll(self, on_battery: bool, **values: Any) -> Bound:
        """One reading, and the bound after it."""
        self.now += 2.0
        reading = Reading(
            "ups", self.now, Comm.OK, on_battery=on_battery, **({"voltage_nominal": 24.0, "pollfreq_s": 2.0} | values)
        )
        self.state = absorb(self.policy, self.feed, self.state, reading, self.now)
        return bound(self.policy, self.feed, self.state, self.now, save_s=130.0, halt_s=45.0)

    def step(self, factor: float) -> None:
        """We change the load."""
        self.state = load_step(self.state, self.now, factor)


def least(said: list[Bound]) -> float:
    """The lowest bound that was given."""
    return min(each.runway_s for each in said if each.runway_s is not None)


def plunge(t: float) -> float:
    """A gauge made of loaded volts: 100 to 62 within half a minute, then a point in twenty seconds."""
    return round(100.0 - 38.0 * min(1.0, t / 30.0) - max(0.0, t - 30.0) / 20.0)


def test_a_gauge_that_plunges_stops_nobody_while_the_voltage_stands():
    """Charge 100 -> 62 in 30 s at 2.05 V per cell: half of what voltage and runtime say is the least that is given."""
    night = Night()
    said = [night.poll(True, charge_pct=plunge(t), load_pct=60.0, voltage=24.6 - t / 600.0) for t in range(2, 120, 2)]

    assert least(said) > 350.0


def test_the_same_plunge_counts_where_the_voltage_has_left_its_plateau():
    """At 1.93 V per cell and falling nothing holds the bound up."""
    night = Night()
    said = [night.poll(True, charge_pct=plunge(t), load_pct=60.0, voltage=23.2 - t / 60.0) for t in range(2, 120, 2)]

    assert least(said) < 60.0


def test_the_plunge_counts_where_there_is_no_voltage():
    """With nothing to contradict it the gauge is believed."""
    night = Night()
    said = [night.poll(True, charge_pct=plunge(t), load_pct=60.0) for t in range(2, 120, 2)]

    assert least(said) < 60.0


def test_a_runtime_that_wobbles_with_the_load_is_no_fast_discharge():
    """15 % of swing in the load, and a runtime that follows it: the bound stays above a third of the truth."""
    night, said = Night(), []
    for t in range(2, 400, 2):
        load = 60.0 + (9.0 if (t // 14) % 2 else -9.0)
        runtime = float(round((1500.0 - t) * (60.0 / load) ** 1.3))
        said.append(
            night.poll(True, charge_pct=100.0 - t // 15, runtime_s=runtime, load_pct=load, voltage=24.8 - t / 900.0)
        )

    assert least(said[30:]) > (1500.0 - 400.0) / 3.0


@pytest.mark.parametrize("refresh_s", [2, 30])
def test_a_power_cap_is_no_fast_discharge(refresh_s: int):
    """Capped to 75 % at 12 s, with a load that the UPS averages over 10 s: the runtime uses a second a second, whether
    values come every 2 or every 30 s."""
    night, load, shown, said = Night(), 60.0, {}, []
    for t in range(2, 300, 2):
        if t == 12:
            night.step(0.75)
        load += ((45.0 if t > 12 else 60.0) - load) * 0.17
        runtime = float(round((2000.0 - t) * (45.0 / load) ** 1.25))
        if not shown or t % refresh_s == 0:
            shown = {
                "charge_pct": 100.0 - t // 20,
                "runtime_s": runtime,
                "load_pct": round(load),
                "voltage": 25.0 - t / 900.0,
            }
        said.append(night.poll(True, **shown))

    assert max(each.evidence.get("kappa", 1.0) for each in said) < 2.0
    assert least(said) > 500.0


def test_the_voltage_answers_before_the_prior_while_nothing_else_speaks():
    """No runtime, a charge that stands at 100: the prior of a UPS of unknown size gives next to nothing; a voltage on
    its plateau gives its level, and a low one gives little."""
    answers = []
    for volts in (25.0, 23.0):
        night = Night(runtime_s=None)
        for t in range(2, 24, 2):
            said = night.poll(True, charge_pct=100.0, load_pct=90.0 + t % 4, voltage=volts)
        answers.append(said.runway_s)

    assert answers[0] is not None
    assert answers[0] > 400.0
    assert answers[1] is not None
    assert answers[1] < 160.0


@pytest.mark.parametrize(("runtime_s", "said"), [(200.0, True), (900.0, False)])
def test_a_small_prior_does_not_wait_for_a_slow_driver(runtime_s: float, said: bool):
    """Values come every 30 s, and until then they are the mains': what the UPS promised there is all that is known. If
    a prior of it is less than the need, the save starts after four seconds; a dead battery is flat before it shows."""
    night = Night(runtime_s=runtime_s, pollfreq_s=30.0)
    answers = [night.poll(True, **(MAINS | {"runtime_s": runtime_s, "pollfreq_s": 30.0})) for _ in range(5)]

    assert [bool(each.save_now) for each in answers] == [False, False, said, said, said]
    assert ("no word of the battery yet" in answers[-1].save_now) == said
