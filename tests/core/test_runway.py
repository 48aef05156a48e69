"""The bound of one feed: each witness, how they combine, and what overrules them."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest

from powerguard.core import capacity
from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.runway import EMPTY, Bound, absorb, bound, load_step
from powerguard.core.types import Comm, Reading
from powerguard.core.volts import level_s, light
from powerguard.sim.battery import SimUps, UpsSpec

NAME = "ups@host"
ON_LINE: dict[str, Any] = {"charge_pct": 100.0, "runtime_s": 1000.0, "load_pct": 50.0, "voltage": 27.3}


class Story:
    """One UPS as told by a test: time passes in polls of 2 s, values are what is said."""

    def __init__(self, *, scale: float = 1.0, policy: Policy | None = None, **feed: Any) -> None:
        self.policy = policy or Policy(time_scale=scale)
        self.feed = FeedPolicy(NAME, **feed)
        self.scale = scale
        self.state = EMPTY
        self.now = 5000.0 * scale

    def say(self, on_battery: bool | None, comm: Comm = Comm.OK, **values: Any) -> Bound:
        """One poll, two seconds after the last."""
        self.now += 2.0 * self.scale
        values.setdefault("voltage_nominal", 24.0)
        if comm is not Comm.OK:
            values = {}
        reading = Reading(feed=NAME, at=self.now, comm=comm, on_battery=on_battery, **values)
        self.state = absorb(self.policy, self.feed, self.state, reading, self.now)
        return self.ask()

    def mains(self, polls: int = 15, **values: Any) -> Story:
        """On line."""
        for _ in range(polls):
            self.say(False, **(ON_LINE | values))
        return self

    def drain(self, seconds: float, **values: Any) -> list[Bound]:
        """On battery for so long; a value may be a function of the seconds since this call."""
        said = []
        for i in range(round(seconds / 2.0)):
            t = 2.0 * (i + 1)
            said.append(self.say(True, **{k: v(t) if callable(v) else v for k, v in values.items()}))
        return said

    def silence(self, seconds: float, comm: Comm = Comm.STALE) -> Bound:
        """Unreadable for so long."""
        for _ in range(round(seconds / 2.0)):
            said = self.say(True, comm)
        return said

    def park(self, factor: float = 0.3) -> Bound:
        """We step the load."""
        self.state = load_step(self.state, self.now, factor)
        return self.ask()

    def ask(self, save_s: float = 130.0, halt_s: float = 45.0) -> Bound:
        """The bound now."""
        return bound(self.policy, self.feed, self.state, self.now, save_s=save_s, halt_s=halt_s)


def left(said: Bound) -> float:
    """The bound, which must be known."""
    assert said.runway_s is not None
    return said.runway_s


def jitter(t: float) -> float:
    """A load that is never quite still, so that every poll is fresh."""
    return 50.0 + (t // 2.0) % 2.0


def fall(start: float, per_s: float, step: float = 1.0) -> Any:
    """A value that falls at *per_s*, reported in whole steps."""
    return lambda t: step * round((start - per_s * t) / step)


# ---- the whole ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("load_pct", "full_load_s"), [(90.0, 300.0), (60.0, 300.0), (30.0, 600.0), (60.0, 1500.0)])
def test_an_honest_ups_is_bounded_from_below_and_not_far(load_pct, full_load_s):
    """With honest firmware the bound is below the truth at every poll, and above half of it after a minute."""
    ups = SimUps(UpsSpec(full_load_s=full_load_s), 1, load_pct=load_pct)
    story = Story().mains(load_pct=load_pct, runtime_s=round(ups.truth_s(load_pct)), voltage=54.6, voltage_nominal=48.0)
    said = []
    while ups.alive:
        ups.step(2.0, mains=False, load_pct=load_pct)
        if ups.alive:
            report = ups.report
            answer = story.say(
                True, charge_pct=report.charge_pct, runtime_s=report.runtime_s, load_pct=report.load_pct,
                voltage=report.voltage, voltage_nominal=48.0,
            )  # fmt: skip
            said.append((story.now, answer))
    end = story.now + 2.0
    given = [(end - at, left(answer)) for at, answer in said if answer.runway_s is not None]

    assert all(mine <= truth for truth, mine in given)
    late = [mine / truth for truth, mine in given[30:] if truth > 0.5 * given[0][0]]
    assert min(late) > 0.3
    assert statistics.median(late) > 0.5


def test_no_bound_in_the_first_sixteen_seconds():
    """Just after the transfer the bound is unknown, says for how long, and gives the reason."""
    said = Story().mains().drain(20.0, charge_pct=99.0, runtime_s=900.0, load_pct=50.0, voltage=25.0)

    assert [each.runway_s for each in said[:8]] == [None] * 8
    assert said[0].settling_s + 2.0 - 2.0 + 0.0 - 2.0 == 14.0 or said[0].settling_s == 16.0
    assert "too early" in said[0].reason
    assert said[8].runway_s is not None
    assert said[8].settling_s == 0.0


def test_the_bound_runs_down_between_polls():
    """A second without a poll takes a second, down to nothing."""
    story = Story().mains()
    before = left(story.drain(60.0, charge_pct=fall(99, 0.1), runtime_s=fall(900, 1.0), load_pct=50.0)[-1])
    later = bound(story.policy, story.feed, story.state, story.now + 7.5, save_s=0.0, halt_s=0.0)
    gone = bound(story.policy, story.feed, story.state, story.now + 1e6, save_s=0.0, halt_s=0.0)

    assert left(later) == pytest.approx(before - 7.5)
    assert gone.runway_s == 0.0


@pytest.mark.parametrize("scale", [0.125, 0.5])
def test_a_scaled_story_gives_scaled_bounds(scale):
    """With `time_scale` every constant shrinks alike: the same story told faster gives the same bounds, shrunk."""

    def play(scale: float) -> list[float | None]:
        story = Story(scale=scale).mains(runtime_s=1000.0 * scale)
        said = story.drain(
            200.0, charge_pct=fall(99, 0.1), runtime_s=lambda t: (900.0 - 1.5 * t) * scale, load_pct=50.0,
            voltage=fall(24.6, 0.004, 0.1),
        )  # fmt: skip
        said += [story.park()]
        said += story.drain(60.0, charge_pct=fall(78, 0.03), load_pct=20.0, voltage=24.6)
        return [None if each.runway_s is None else each.runway_s / scale for each in said]

    assert play(scale) == pytest.approx(play(1.0))


# ---- firmware runtime -----------------------------------------------------------------------------


def test_a_runtime_that_runs_fast_is_corrected_by_its_own_rate():
    """A runtime that uses two reported seconds a second is worth half of what it says."""
    honest = Story().mains(voltage=None).drain(150.0, runtime_s=fall(900, 1.0), load_pct=50.0)[-1]
    hasty = Story().mains(voltage=None).drain(150.0, runtime_s=fall(1050, 2.0), load_pct=50.0)[-1]

    assert honest.evidence["runtime_s"] == pytest.approx(750.0, abs=8.0)
    assert hasty.evidence["runtime_s"] == pytest.approx(375.0, rel=0.03)
    assert hasty.evidence["kappa"] == pytest.approx(2.0, rel=0.03)


def test_a_runtime_that_runs_slowly_is_not_stretched():
    """A runtime that hardly falls is still spent second by second: kappa is never below 1."""
    said = Story().mains(voltage=None).drain(200.0, runtime_s=fall(900, 0.3), load_pct=50.0)[-1]

    assert said.evidence["kappa"] == 1.0
    assert said.evidence["runtime_s"] <= 900.0 - 0.3 * 200.0


def test_a_frozen_runtime_runs_down_with_the_clock():
    """A runtime that stands still for the whole discharge (GE NetPro) is counted down by us."""
    story = Story().mains(voltage=None)
    said = story.drain(300.0, runtime_s=600.0, load_pct=jitter)[-1]

    assert said.evidence["runtime_s"] == pytest.approx(570.0 - 298.0, abs=5.0)


def test_whole_minutes_make_no_rate_of_their_own():
    """A runtime in whole minutes whose first step comes right after the first look isn't taken for a fast one."""
    said = (
        Story()
        .mains(voltage=None, runtime_s=840.0)
        .drain(60.0, runtime_s=lambda t: 780.0 if t < 26.0 else 720.0 if t < 44.0 else 660.0, load_pct=50.0)[-1]
    )

    assert said.evidence["kappa"] == 1.0


def test_a_runtime_is_not_believed_at_once_when_it_jumps_up():
    """A jump up is taken in over its own mean, and by the median of three polls."""
    story = Story().mains()
    calm = {"charge_pct": fall(99, 0.05), "load_pct": 50.0, "voltage": 25.4}
    before = left(story.drain(100.0, runtime_s=fall(500, 1.0), **calm)[-1])
    jump = left(story.say(True, runtime_s=4000.0, charge_pct=94.0, load_pct=50.0, voltage=25.4))

    assert jump <= before


@pytest.mark.parametrize(
    "values",
    [
        {"runtime_s": 65000.0},
        {"runtime_s": 0.0},
        {"runtime_s": 5000.0, "load_pct": 8.0},
        {"runtime_s": 5000.0, "overload": True},
    ],
)
def test_a_runtime_that_cannot_be_is_no_witness(values):
    """Sentinels, zero at full charge, a load below 10 % and an overload make the runtime say nothing."""
    said = Story().drain(40.0, **({"charge_pct": 90.0, "load_pct": 50.0} | values))[-1]

    assert "runtime_s" not in said.evidence


# ---- charge ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("load_pct", [jitter, 50.0])
def test_the_charge_witness_needs_three_steps(load_pct):
    """Three steps after the first change seen make a slope, (charge - 8) / slope; two make none."""
    story = Story().mains(voltage=None)
    said = story.drain(120.0, charge_pct=lambda t: 99.0 - (t + 4.0) // 10.0, load_pct=load_pct)
    speaks = [round(2.0 * (i + 1)) for i, each in enumerate(said) if "charge_s" in each.evidence]

    assert 46 == speaks[0]  # changes at 16, 26, 36 and 46 s
    assert said[22].evidence["charge_s"] == pytest.approx((94.0 - 8.0) / 0.1)


def test_the_steeper_of_the_mean_and_the_near_slope_counts():
    """A charge that falls faster now than on the whole is worth what the near slope says."""
    story = Story().mains(voltage=None)
    story.drain(300.0, charge_pct=fall(99, 0.05), load_pct=jitter)
    said = story.drain(60.0, charge_pct=fall(84, 0.2), load_pct=jitter)[-1]

    assert said.evidence["charge_s"] == pytest.approx((72.0 - 8.0) / 0.2, rel=0.15)


def test_a_fall_of_twelve_points_counts_at_once():
    """A coarse charge that falls by twelve points or more makes a slope with a single step."""
    said = Story().mains(voltage=None).drain(60.0, charge_pct=lambda t: 100.0 if t < 50 else 80.0, load_pct=jitter)[-1]

    assert said.evidence["charge_s"] == pytest.approx((80.0 - 8.0) / (20.0 / 36.0) - 10.0, rel=0.1)


def test_no_rate_is_taken_across_the_transfer():
    """A gauge that falls 21 points at the transfer and slowly afterwards is judged by the slow part."""
    story = Story(chemistry="li-ion").mains(charge_pct=99.0, runtime_s=None, load_pct=None, voltage=None)
    said = story.drain(240.0, charge_pct=lambda t: 78.0 - 2.0 * (t // 30.0))

    assert min(each.evidence["charge_s"] for each in said if "charge_s" in each.evidence) > 600.0


def test_the_poll_that_brings_the_batterys_values_is_no_step():
    """The battery's values come after 20 s: what they differ by from the mains' is no fall, and no beginning of one."""
    mains = {"charge_pct": 99.0, "load_pct": 50.0, "runtime_s": None, "voltage": None, "pollfreq_s": 30.0}
    story = Story(chemistry="li-ion").mains(**mains)
    story.drain(20.0, **mains)
    said = story.drain(200.0, charge_pct=lambda t: 78.0 if t < 4 else 76.0 - 2.0 * ((t - 4.0) // 30.0), load_pct=jitter)

    assert min(each.evidence["charge_s"] for each in said if "charge_s" in each.evidence) > 700.0


def test_values_of_the_mains_are_no_evidence():
    """A UPS that refreshes every 30 s shows the mains' values at first: until then only the prior speaks."""
    story = Story().mains()
    said = story.drain(28.0, **ON_LINE, pollfreq_s=30.0)[-1]

    assert said.by == "prior"
    assert "charge_s" not in said.evidence
    assert "voltage_s" not in said.evidence


def test_a_charge_without_change_is_run_down():
    """Between two changes the charge's answer falls with the clock."""
    story = Story().mains(voltage=None)
    first = story.drain(100.0, charge_pct=fall(99.5, 0.1), load_pct=50.0)[-1]
    later = story.drain(40.0, charge_pct=90.0, load_pct=jitter)[-1]

    assert later.evidence["charge_s"] == pytest.approx(first.evidence["charge_s"] - 40.0, abs=12.0)


# ---- voltage --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cell_v", "seconds"), [(1.854, 120.0), (1.891, 180.0), (1.918, 240.0), (1.941, 300.0)])
def test_the_voltage_table_is_the_published_one(cell_v, seconds):
    """The level at full load is that of Eaton's table 15."""
    assert seconds == level_s(cell_v)


def test_the_level_is_ordered_and_bounded():
    """More volts never mean less time; at 1.70 V nothing is left; above the table it ends."""
    levels = [level_s(1.6 + 0.001 * i) for i in range(700)]

    assert sorted(levels) == levels
    assert 0.0 == level_s(1.70) == level_s(0.0)
    assert level_s(2.16) == level_s(9.0) < 3000.0


def test_the_same_volts_last_longer_at_a_light_load():
    """Never less than at full load, at most 2.5 times, under Eaton's table at 20 %; an unknown load counts as full."""
    loads = [0.01 * i for i in range(1, 120)]

    assert sorted((light(load) for load in loads), reverse=True) == [light(load) for load in loads]
    assert 2.5 == light(0.01)
    assert 1.0 == light(0.30) == light(1.0) == light(-1.0) == light(0.0)
    for volts, minutes in ((1.783, 2), (1.805, 3), (1.822, 4), (1.835, 5)):
        assert light(0.20) * level_s(volts) < 60.0 * minutes


def test_a_light_load_counts_while_ranks_train():
    """1.93 V at 15 % of the load is worth more than at 60 %; parked ranks get nothing on top."""

    def at(load: float) -> Story:
        story = Story().mains(load_pct=load)
        values = {"charge_pct": fall(99.0, 0.02), "voltage": 23.2}
        story.drain(90.0, load_pct=lambda t: load + (t // 2.0) % 2.0, **values)
        return story

    light_s, heavy_s = (at(load).ask().evidence["voltage_s"] for load in (15.0, 60.0))
    parked = at(15.0)
    parked.park(1 / 3)
    parked.drain(60.0, load_pct=lambda t: 5.0 + (t // 2.0) % 2.0, charge_pct=97.0, voltage=23.2)

    assert light_s == pytest.approx(heavy_s * light(0.155), rel=0.05)
    assert parked.ask().evidence["voltage_s"] == pytest.approx(level_s(23.2 / 12.0), rel=0.05)


@pytest.mark.parametrize(
    ("feed", "values", "why"),
    [
        ({"age_y": 5.5}, {}, "the battery is 5.5 years old"),
        ({"learned_phi": 0.2}, {}, "capacity is known"),
        ({}, {"replace_battery": True}, "asks for a new battery"),
        ({}, {"test_failed": "Done and error"}, "calls its last self-test 'Done and error'"),
        ({"age_y": 4.0}, {}, ""),
        ({}, {}, ""),
        ({"age_y": 5.5, "proven_phi": 0.6}, {}, ""),
    ],
)
def test_a_frail_battery_is_not_waited_for(feed, values, why):
    """Old, known to be small, or asking for another: a prior of less than the need stops at the second look."""
    story = Story(**feed).mains(runtime_s=400.0)
    said = story.drain(4.0, charge_pct=99.0, runtime_s=399.0, load_pct=50.0, voltage=24.6, **values)

    assert "" == said[0].save_now
    assert (why in story.ask().save_now) if why else "" == story.ask().save_now
    assert "" == story.ask(save_s=20.0).save_now


@pytest.mark.parametrize(("voltage", "load", "stops"), [(22.9, 60.0, True), (23.4, 60.0, False), (22.9, 12.0, False)])
def test_low_volts_of_the_first_minute_count_against_a_long_need(voltage, load, stops):
    """The dip isn't waited out where its volts give less than the need even so; at a light load they give more."""
    story = Story().mains(load_pct=load)
    for i in range(6):
        story.say(True, charge_pct=99.0, runtime_s=3000.0 - i, load_pct=load + i % 2, voltage=voltage)

    assert stops == ("so soon" in story.ask(save_s=250.0).save_now)
    assert "" == story.ask(save_s=100.0).save_now


def test_the_dip_of_the_transfer_is_waited_out():
    """The voltage says nothing for 40 s, unless it is below 1.80 V per cell."""
    story = Story().mains()
    dip = story.drain(38.0, charge_pct=98.0, load_pct=50.0, voltage=lambda t: 22.8 + 0.1 * (t // 20))[-1]
    later = story.drain(6.0, charge_pct=97.0, load_pct=50.0, voltage=23.3)[-1]
    dead = Story().mains().drain(6.0, charge_pct=98.0, load_pct=50.0, voltage=lambda t: 21.5 - 0.1 * t)[-1]

    assert "voltage_s" not in dip.evidence
    assert later.evidence["voltage_s"] == pytest.approx(level_s(23.3 / 12.0), abs=5.0)
    assert dead.evidence["voltage_s"] < 45.0


def test_a_falling_voltage_is_worth_less_than_its_level():
    """Below 1.94 V the fall counts: 0.40 x what is left to 1.74 V at that rate."""
    said = (
        Story()
        .mains()
        .drain(100.0, charge_pct=fall(99, 0.1), load_pct=50.0, voltage=lambda t: round(12 * (2.05 - 0.0015 * t), 2))[-1]
    )
    cell = 2.05 - 0.15

    assert said.evidence["voltage_s"] == pytest.approx(0.40 * (cell - 1.74) / 0.0015, rel=0.05)
    assert said.evidence["voltage_s"] < level_s(cell)


@pytest.mark.parametrize(
    ("mains", "battery", "feed"),
    [
        ({"voltage": 12.0}, {}, {}),  # 1.0 V per cell on mains: the unit isn't volts of twelve cells
        ({}, {"chemistry": "lifepo4"}, {}),
        ({}, {}, {"chemistry": "lfp"}),
        ({"voltage": 27.3, "voltage_nominal": None}, {"voltage": 62.0}, {}),
    ],
)
def test_a_voltage_that_cannot_be_lead_acid_is_no_witness(mains, battery, feed):
    """Implausible units and lithium cells leave the voltage out, and its strong signals too."""
    values = {"charge_pct": fall(99, 0.1), "load_pct": 50.0, "voltage": 21.0, "voltage_nominal": 24.0}
    said = Story(**feed).mains(**mains).drain(60.0, **(values | battery))[-1]

    assert "voltage_s" not in said.evidence
    assert "V per cell" not in said.save_now


def test_the_number_of_cells_is_guessed_from_the_float_voltage():
    """Without a nominal voltage the float voltage of a small battery tells its cells."""
    story = Story().mains(voltage=27.3, voltage_nominal=None)
    values = {"charge_pct": fall(99, 0.1), "load_pct": 50.0, "voltage_nominal": None}
    said = story.drain(60.0, voltage=lambda t: 24.0 - 0.1 * (t // 20), **values)[-1]

    assert said.evidence["cell_v"] == pytest.approx(23.7 / 12.0, abs=0.01)


# ---- combination ----------------------------------------------------------------------------------


def test_two_kinds_of_witness_give_four_fifths_of_the_least():
    """Charge or runtime and voltage: 0.80 x the earliest, whatever the prior says."""
    said = (
        Story(age_y=7.0)
        .mains()
        .drain(80.0, runtime_s=fall(400, 1.0), charge_pct=fall(99, 0.05), load_pct=50.0, voltage=25.0)[-1]
    )

    assert said.by == "runtime"
    assert left(said) == pytest.approx(0.80 * 320.0, abs=8.0)


def test_one_kind_of_witness_gives_three_fifths_and_the_prior_bounds_it():
    """Without a voltage: 0.60 x the least, and no more than the prior."""
    new = Story(age_y=0.0).mains(voltage=None).drain(80.0, runtime_s=fall(700, 1.0), load_pct=50.0)[-1]
    old = Story(age_y=6.0).mains(voltage=None).drain(80.0, runtime_s=fall(700, 1.0), load_pct=50.0)[-1]

    assert left(new) == pytest.approx(0.60 * 620.0, abs=8.0)
    assert old.by == "prior"
    assert left(old) == pytest.approx(0.18 * 1000.0 - 80.0, abs=6.0)


def test_with_no_witness_the_prior_stands_alone():
    """A UPS that says nothing on battery but its load has what its age promises of the runtime promised on mains."""
    said = Story(age_y=3.0).mains(voltage=None).drain(40.0, load_pct=50.0)[-1]

    assert said.by == "prior"
    assert left(said) == pytest.approx(0.60 * 1000.0 - 40.0, abs=5.0)


def test_a_ups_of_unknown_size_is_sized_by_its_charge():
    """With neither a rating nor a promise the default of 150 s stands until the charge shows a slower fall."""
    story = Story(age_y=0.0).mains(runtime_s=None, voltage=None, load_pct=None)
    early = left(story.drain(30.0, charge_pct=100.0)[-1])
    late = left(story.drain(300.0, charge_pct=fall(100.4, 0.02))[-1])

    assert early < 0.75 * capacity.DEFAULT_FULL_S
    assert late > 1000.0


def test_learned_capacity_bounds_even_two_witnesses():
    """With a learned capacity the bound is never above 0.85 of it, less what was used."""
    values = {"runtime_s": fall(990, 1.0), "charge_pct": fall(99, 0.05), "load_pct": 50.0, "voltage": 25.4}
    blind = Story().mains().drain(100.0, **values)[-1]
    wise = Story(learned_phi=0.4).mains().drain(100.0, **values)[-1]

    assert left(blind) > 600.0
    assert wise.by == "learned capacity"
    assert left(wise) == pytest.approx(0.85 * 0.4 * 1000.0 - 100.0, abs=6.0)


def test_a_proven_share_lifts_the_prior():
    """What a battery gave and survived may be counted on, whatever its age says."""
    story = Story(age_y=7.0, proven_phi=0.5).mains(voltage=None)

    assert left(story.drain(40.0, load_pct=50.0)[-1]) == pytest.approx(0.5 * 1000.0 - 40.0, abs=5.0)


@pytest.mark.parametrize("doubt", [{"replace_battery": True}, {"test_failed": "Done and error"}])
def test_a_ups_that_doubts_its_battery_is_trusted_less(doubt):
    """RB, or a failed self-test, takes the voltage's second voice away and a good part of the prior."""
    values = {"runtime_s": fall(900, 1.0), "charge_pct": fall(99, 0.05), "load_pct": 50.0, "voltage": 25.4}
    sound = Story(age_y=2.0).mains().drain(80.0, **values)[-1]
    worn = Story(age_y=2.0).mains().drain(80.0, **doubt, **values)[-1]

    assert left(worn) == pytest.approx(0.6 * 0.70 * 1000.0 - 80.0, abs=6.0)
    assert left(worn) < 0.6 * left(sound)


def test_rated_points_replace_the_promise():
    """The vendor's table, if configured, is the base of the prior: a power law through its points."""
    feed = FeedPolicy(NAME, rated=((50.0, 900.0), (100.0, 300.0)))

    assert capacity.rated_now(feed, 4000.0, 0.5, 1.0) == (pytest.approx(900.0), "rated")
    assert capacity.rated_now(feed, 0.0, 1.0, 1.0)[0] == pytest.approx(300.0)
    assert 300.0 < capacity.rated_now(feed, 0.0, 0.7, 1.0)[0] < 900.0
    assert capacity.rated_now(feed, 0.0, 0.25, 1.0)[0] == pytest.approx(1800.0)
    assert capacity.rated_now(feed, 0.0, 2.0, 1.0)[0] < 150.0
    assert capacity.rated_now(feed, 0.0, -1.0, 1.0)[0] == pytest.approx(300.0)


# ---- load -----------------------------------------------------------------------------------------


def test_parking_stretches_what_was_left_by_the_load_as_measured():
    """Parked, the bound is what was left times load before to load after, until the witnesses speak anew."""
    values = {"runtime_s": fall(500, 1.0), "charge_pct": fall(99, 0.15), "voltage": 24.6}
    story = Story().mains()
    before = left(story.drain(200.0, load_pct=50.0, **values)[-1])
    story.park()
    half = left(story.drain(20.0, load_pct=25.0, charge_pct=69.0, runtime_s=640.0, voltage=24.9)[-1])

    assert half == pytest.approx(2.0 * before - 20.0, abs=1.0)


def test_a_park_is_given_the_time_to_show():
    """Right after a park the load still reads as before: 0.8 of what is expected counts, then what is read."""
    values = {"runtime_s": fall(500, 1.0), "charge_pct": fall(99, 0.15), "voltage": 24.6}
    story = Story().mains()
    before = left(story.drain(200.0, load_pct=50.0, **values)[-1])
    at_once = left(story.park(0.5))
    said = story.drain(20.0, load_pct=50.0, **{**values, "charge_pct": fall(69, 0.15), "runtime_s": fall(300, 1.0)})

    assert at_once == pytest.approx(0.8 / 0.5 * before, abs=1.0)
    assert left(said[1]) > 1.4 * before
    assert left(said[-1]) == pytest.approx(before - 20.0, abs=2.0)


def test_a_park_never_stretches_more_than_four_times():
    """However far the load falls, four times what was left is the most."""
    story = Story().mains()
    before = left(story.drain(200.0, load_pct=80.0, runtime_s=fall(500, 1.0), charge_pct=fall(99, 0.15))[-1])
    story.park()

    said = story.drain(6.0, load_pct=5.0, charge_pct=69.0, runtime_s=900.0)[-1]

    assert left(said) == pytest.approx(4.0 * before - 6.0, abs=1.0)


def test_parked_ranks_are_judged_by_half_of_fresh_evidence():
    """After 24 s parked the witnesses answer anew at the idle load, and half of the least is the bound."""
    story = Story().mains()
    story.drain(200.0, load_pct=50.0, runtime_s=fall(500, 1.0), charge_pct=fall(99, 0.15), voltage=24.6)
    story.park()
    said = story.drain(60.0, load_pct=15.0, runtime_s=fall(1300, 1.0), charge_pct=fall(69, 0.04), voltage=25.0)[-1]

    assert said.runway_s == said.idle_runway_s
    assert left(said) == pytest.approx(0.5 * min(v for k, v in said.evidence.items() if k in WITNESSES), abs=30.0)


WITNESSES = ("runtime_s", "charge_s", "voltage_s")


def test_parking_twice_is_parking_once():
    """A repeated park changes nothing: a daemon that was restarted may say it again."""
    story = Story().mains()
    story.drain(100.0, load_pct=50.0, runtime_s=fall(500, 1.0), charge_pct=fall(99, 0.15), voltage=24.6)
    story.park()
    once = story.state
    story.park()

    assert once == story.state


def test_a_load_that_we_raise_cuts_the_bound_at_once():
    """Twice the load leaves less than half, before anything is measured."""
    story = Story().mains()
    before = left(
        story.drain(100.0, load_pct=30.0, runtime_s=fall(900, 1.0), charge_pct=fall(99, 0.1), voltage=24.9)[-1]
    )

    assert left(story.park(2.0)) == pytest.approx(before / 2.0**1.3, rel=0.01)


def test_a_foreign_load_step_rebases_the_slopes():
    """Other gear doubles the load: the charge's old slope, scaled, is in force at once; the measured one later."""
    story = Story().mains()
    story.drain(200.0, load_pct=30.0, charge_pct=fall(99, 0.05), voltage=25.0)
    calm = story.ask().evidence["charge_s"]
    story.drain(60.0, load_pct=60.0, charge_pct=fall(89, 0.12), voltage=24.6)
    soon = story.ask().evidence["charge_s"]
    story.drain(120.0, load_pct=60.0, charge_pct=fall(81.8, 0.12), voltage=24.5)
    late = story.ask().evidence["charge_s"]

    assert soon < 0.6 * calm
    assert late == pytest.approx((67.4 - 8.0) / 0.12, rel=0.12)


def test_what_parking_once_bought_is_expected_again():
    """Before any park the idle bound is twice the bound; after one, what the measured load made of it."""
    story = Story().mains()
    values = {"runtime_s": fall(900, 1.0), "charge_pct": fall(99, 0.1), "voltage": 25.0}
    first = story.drain(100.0, load_pct=60.0, **values)[-1]
    story.park()
    story.drain(60.0, load_pct=20.0, **values)
    story.mains(600)
    again = story.drain(100.0, load_pct=60.0, **values)[-1]

    assert first.idle_runway_s == pytest.approx(2.0 * left(first))
    assert again.idle_runway_s == pytest.approx(3.0 * left(again), rel=0.1)


# ---- strong signals -------------------------------------------------------------------------------

WELL: dict[str, Any] = {"charge_pct": fall(99, 0.05), "runtime_s": fall(990, 1.0), "load_pct": 50.0, "voltage": 25.2}


def test_low_battery_saves_after_two_polls_only():
    """LB for one poll is nothing, for two it starts the save."""
    story = Story().mains()
    story.drain(40.0, **WELL)
    once = story.drain(2.0, low_battery=True, **WELL)[-1]
    twice = story.drain(2.0, low_battery=True, **WELL)[-1]

    assert once.save_now == ""
    assert "LB" in twice.save_now


@pytest.mark.parametrize(
    ("lows", "explained"),
    [
        ({"runtime_low_s": 1000.0}, True),
        ({"charge_low_pct": 99.0}, True),
        ({"runtime_low_s": 120.0, "charge_low_pct": 10.0}, False),
        ({"runtime_low_s": 3600.0}, False),  # nobody's threshold
        ({}, False),
    ],
)
def test_low_battery_that_thresholds_explain_waits_for_the_bound(lows, explained):
    """LB that says no more than the UPS's runtime or charge do doesn't start the save by itself."""
    story = Story().mains()
    story.drain(40.0, **WELL)
    said = story.drain(8.0, low_battery=True, **(WELL | lows))[-1]

    assert explained == ("LB" not in said.save_now)


def test_a_runtime_below_the_need_saves_whatever_the_bound():
    """The UPS's own runtime below the need starts the save after four seconds."""
    said = Story().mains().drain(6.0, runtime_s=120.0, charge_pct=99.0, load_pct=50.0)

    assert said[0].save_now == ""
    assert "the UPS itself gives 120 s" in said[-1].save_now


@pytest.mark.parametrize(
    ("volts", "seconds", "why"),
    [(21.4, 10.0, True), (21.4, 120.0, True), (22.2, 10.0, True), (22.2, 120.0, False), (23.5, 10.0, False)],
)
def test_a_voltage_that_is_too_low_saves_at_once(volts, seconds, why):
    """Below 1.80 V per cell always, below 1.86 V in the first minute."""
    said = (
        Story()
        .mains()
        .drain(
            seconds,
            runtime_s=fall(2000, 1.0),
            charge_pct=99.0,
            load_pct=50.0,
            voltage=lambda t: volts + 0.1 * (t % 4 < 2),
        )[-1]
    )

    assert why == ("V per cell" in said.save_now)


def test_silence_on_battery_saves():
    """No readable poll for 45 s starts the save; on line it starts nothing."""
    story = Story().mains()
    story.drain(40.0, **WELL)

    assert story.silence(44.0).save_now == ""
    assert "no fresh value" in story.silence(4.0).save_now

    online = Story().mains()
    online.silence(600.0)
    assert online.ask().save_now == ""


def test_a_flap_of_the_link_does_not_start_the_silence_anew():
    """Blind seconds add up over short recoveries, and are paid back second by second."""
    story = Story().mains()
    story.drain(40.0, **WELL)
    story.silence(30.0)
    story.drain(4.0, **WELL)
    before = story.ask().blind_s
    after = story.silence(26.0)

    assert 20.0 < before < 30.0
    assert "no fresh value" in after.save_now
    story.drain(100.0, **WELL)
    assert story.ask().blind_s < 4.0


def test_values_that_stand_still_for_long_are_silence():
    """Readable and frozen: after three minutes the values are stale, whatever upsd says."""
    story = Story().mains()
    still = {"charge_pct": 80.0, "runtime_s": 800.0, "load_pct": 50.0, "voltage": 25.0}

    assert "no fresh value" not in story.drain(170.0, **still)[-1].save_now
    assert "no fresh value" in story.drain(30.0, **still)[-1].save_now


def test_a_big_battery_may_stand_still():
    """While more than twice the frozen time is left, values that stand still are no silence: they run down anyway."""
    story = Story(age_y=0.0).mains(runtime_s=9000.0)
    said = story.drain(600.0, charge_pct=95.0, runtime_s=8000.0, load_pct=50.0, voltage=25.6)[-1]

    assert "no fresh value" not in said.save_now
    assert left(said) > 1000.0


def test_status_alone_does_not_count_as_frozen():
    """A UPS that reports no numbers at all can't stand still."""
    assert "no fresh value" not in Story().drain(400.0)[-1].save_now


# ---- parked ---------------------------------------------------------------------------------------


def parked(**values: Any) -> Story:
    """A story of 100 s on battery, then parked for 40 s with *values*."""
    story = Story().mains()
    story.drain(100.0, load_pct=50.0, runtime_s=fall(900, 1.0), charge_pct=fall(99, 0.1), voltage=25.0)
    story.park()
    idle = {"load_pct": 15.0, "runtime_s": fall(2400, 1.0), "charge_pct": fall(89, 0.02), "voltage": 25.4}
    story.drain(40.0, **(idle | values))
    return story


def test_parked_ranks_wait_while_there_is_much_left():
    """Healthy and parked: no reason to halt."""
    assert parked().ask().halt_now == ""


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"runtime_s": 100.0}, "a halt needs"),
        ({"voltage": fall(23.4, 0.01, 0.1)}, "V per cell at idle load"),
        ({"low_battery": True, "runtime_s": fall(240, 1.0)}, "LB"),
    ],
)
def test_parked_ranks_leave_when_power_is_nearly_gone(values, why):
    """The bound at half trust, a voltage off its plateau, or LB for four seconds halt."""
    assert why in parked(**values).ask().halt_now


def test_lb_is_doubted_for_a_minute_where_much_is_left():
    """LB that nothing supports doesn't halt a parked node at once, and does after a minute."""
    story = parked(low_battery=True)
    assert story.ask().halt_now == ""

    idle = {"load_pct": 15.0, "runtime_s": fall(2360, 1.0), "charge_pct": fall(88, 0.02), "voltage": 25.4}
    assert "LB" in story.drain(24.0, low_battery=True, **idle)[-1].halt_now


def test_parked_ranks_leave_when_nothing_can_be_read():
    """Twenty seconds without a fresh value halt a parked node."""
    story = parked()

    assert story.silence(18.0).halt_now == ""
    assert "no fresh value" in story.silence(6.0).halt_now


def test_parked_ranks_leave_in_the_end():
    """Parking has a limit, and a short one where no voltage is known."""
    story = parked()
    story.drain(840.0, load_pct=15.0, charge_pct=fall(88, 0.02), runtime_s=fall(2400, 1.0), voltage=25.3)
    assert story.ask().halt_now == ""
    story.drain(40.0, load_pct=15.0, charge_pct=fall(70, 0.02), runtime_s=fall(2400, 1.0), voltage=25.3)
    assert "as long as is allowed" in story.ask().halt_now

    dark = Story().mains(voltage=None)
    dark.drain(100.0, load_pct=50.0, runtime_s=fall(900, 1.0))
    dark.park()
    assert "as long as is allowed" in dark.drain(70.0, load_pct=15.0, runtime_s=fall(2400, 1.0))[-1].halt_now


def test_training_ranks_are_never_told_to_halt():
    """While ranks train or flush, `halt_now` stays silent: a halt would lose what can still be saved."""
    story = Story().mains()
    story.drain(100.0, load_pct=50.0, runtime_s=10.0, charge_pct=9.0, voltage=20.0, low_battery=True)

    assert story.ask().runway_s == 0.0
    assert story.ask().halt_now == ""


# ---- one outage after another ---------------------------------------------------------------------


def test_a_flap_of_the_mains_keeps_what_was_left():
    """Mains for ten seconds: the next outage begins with what the last one left, not with a blank."""
    story = Story().mains()
    before = left(
        story.drain(200.0, load_pct=50.0, runtime_s=fall(500, 1.0), charge_pct=fall(99, 0.2), voltage=24.0)[-1]
    )
    story.mains(5, charge_pct=60.0)
    again = story.drain(2.0, load_pct=50.0, runtime_s=800.0, charge_pct=60.0, voltage=25.0)[-1]

    assert left(again) <= before
    assert left(again) > 0.8 * before


def test_a_recent_outage_lowers_trust_until_the_battery_is_recharged():
    """Soon after a long outage everything counts for less; a day later it does not."""
    values = {"runtime_s": fall(900, 1.0), "charge_pct": fall(99, 0.05), "load_pct": 50.0, "voltage": 25.3}
    fresh, soon, later = Story(), Story(), Story()
    answers = []
    for story, wait_s in ((fresh, None), (soon, 3000.0), (later, 90_000.0)):
        story.mains()
        if wait_s is not None:
            story.drain(600.0, **(values | {"charge_pct": fall(99, 0.1)}))
            story.mains(2)
            story.now += wait_s
        story.mains()
        answers.append(left(story.drain(100.0, **values)[-1]))

    assert answers[1] == pytest.approx(0.65 * answers[0], rel=0.05)
    assert answers[2] == pytest.approx(answers[0], rel=0.02)


def test_a_blip_does_not_lower_trust_for_long():
    """Two seconds on battery are recharged within a minute."""
    story = Story().mains()
    story.drain(2.0, **ON_LINE)
    story.mains(60)

    assert story.state.recover_at < story.now


def test_a_daemon_that_starts_in_the_middle_of_an_outage_has_a_bound_soon():
    """Nothing was seen on mains: the charge now is the charge at the start, and the voltage has no second voice."""
    story = Story(age_y=0.0)
    said = story.drain(90.0, charge_pct=fall(50, 0.1), runtime_s=fall(600, 1.0), load_pct=50.0, voltage=25.0)

    assert said[0].reason != ""
    assert left(said[-1]) <= 0.60 * 520.0


def test_the_discharge_is_summed_up_when_mains_return():
    """What was promised, what was used, how it went: one record a discharge."""
    story = Story().mains()
    story.drain(120.0, charge_pct=fall(99, 0.1), runtime_s=fall(950, 1.0), load_pct=50.0, voltage=24.6)
    story.mains(1)
    last = story.state.last

    assert last is not None
    assert story.state.discharges == 1
    assert last.lasted_s == 120.0
    assert last.used == pytest.approx(0.12, abs=0.01)
    assert last.basis == "promised"
    assert last.basis_s == pytest.approx(1000.0, rel=0.01)
    assert last.load_pct == pytest.approx(50.0, abs=1.0)
    assert last.promised_s == 948.0
    assert last.reported_s == 830.0
    assert last.bound_after_s == 16.0
    assert last.bound_s is not None
    assert last.volts_least == pytest.approx(2.05)
    assert last.knee_used is None
    assert last.seen_whole


# ---- on line --------------------------------------------------------------------------------------


def test_on_line_the_bound_is_what_an_outage_would_surely_give():
    """On mains the prior answers: the sure share of the promised runtime at the present charge and load."""
    said = Story(age_y=2.0).mains(charge_pct=80.0, runtime_s=800.0).ask()

    assert said.by == "prior"
    assert left(said) == pytest.approx(0.70 * 0.80 * 1000.0, rel=0.01)


def test_on_bypass_there_is_no_autonomy():
    """A UPS on bypass has a runway of nothing."""
    assert Story().mains(bypass=True).ask().runway_s == 0.0


def test_nothing_heard_is_nothing_known():
    """Before the first reading, and from readings that can't be read, there is no bound; the reason says so."""
    story = Story()
    assert story.ask().reason == "never heard from"
    story.silence(60.0)
    assert story.ask().runway_s is None


@pytest.mark.slow
def test_a_reading_is_absorbed_in_time():
    """A reading and its bound take less than 200 us together on any machine of this century."""
    story = Story().mains()
    took = []
    for i in range(2000):
        t0 = time.perf_counter()
        story.say(True, charge_pct=99.0 - i // 40, runtime_s=4000.0 - 2 * i, load_pct=50.0 + i % 3, voltage=25.0)
        took.append(time.perf_counter() - t0)

    assert statistics.median(took) < 200e-6
