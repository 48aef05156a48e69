"""Several feeds, one node: what counts as mains, as battery, as a command, as trouble."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.json import decode, encode

from powerguard.core.feeds import Feed, Power, absorb, bounds, step_load, view
from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.types import Comm, Sample

WELL = {
    "battery.charge": "100",
    "battery.runtime": "1200",
    "ups.load": "40",
    "battery.voltage": "27.3",
    "battery.voltage.nominal": "24",
}


class Node:
    """A node with feeds, told poll by poll: `say(a="OL", b="OB")` is one poll of each, two seconds later."""

    def __init__(self, *names: str, min_supplies: int = 1, policy: Policy | None = None) -> None:
        names = names or ("a",)
        self.policy = policy or Policy(feeds=tuple(FeedPolicy(name) for name in names), min_supplies=min_supplies)
        self.feeds: dict[str, Feed] = {}
        self.now = 1000.0
        self.began = 1000.0

    def say(self, polls: int = 1, variables: dict[str, str] | None = None, **status: str | Comm | None) -> Power:
        """A status, a state of the link, or None for no word at all."""
        for i in range(polls):
            self.now += 2.0
            samples = []
            for name, word in status.items():
                if isinstance(word, Comm):
                    samples.append(Sample(name, self.now, word, detail="a detail"))
                elif word is not None:
                    wear = {"ups.load": f"{40 + i % 2}"} if "OB" in word else {}
                    said = {"ups.status": word, **WELL, **wear, **(variables or {})}
                    samples.append(Sample(name, self.now, Comm.OK, said))
            self.feeds = absorb(self.policy, self.feeds, samples, self.now)
        return self.view()

    def drain(self, seconds: float, start: float = 0.0, **status: str) -> Power:
        """On battery for so long, charge and voltage falling."""
        for i in range(round(seconds / 2.0)):
            t = start + 2.0 * (i + 1)
            said = {
                "battery.charge": f"{99 - 0.05 * t:.0f}",
                "battery.runtime": f"{1190 - t:.0f}",
                "battery.voltage": f"{25.4 - 0.001 * t:.1f}",
            }
            power = self.say(variables=said, **status)
        return power

    def view(self, save_s: float = 130.0, halt_s: float = 45.0) -> Power:
        """The node now."""
        return view(self.policy, self.feeds, self.now, save_s=save_s, halt_s=halt_s)

    def wait(self, seconds: float) -> Power:
        """Nothing comes in."""
        self.now += seconds
        self.feeds = absorb(self.policy, self.feeds, (), self.now)
        return self.view()


# ---- one feed -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "on_battery"),
    [("OL", False), ("OL CHRG", False), ("OL LB RB", False), ("OL BYPASS", False), ("OB", True), ("OB LB", True),
     ("OL OB", True), ("TRIM", None), ("ALARM", None), ("", None), ("WAIT", None)],
)  # fmt: skip
def test_the_state_at_first_sight_is_the_state(status, on_battery):
    """A daemon that starts anywhere in an outage sees it at the first poll; no word about the line is no mains."""
    assert on_battery is Node().say(a=status).on_battery


def test_a_feed_never_heard_from_is_neither_mains_nor_battery():
    """Silence from the start is unknown, with the reason, for as long as it lasts."""
    node = Node()

    assert node.wait(1.0).on_battery is None
    power = node.say(a=Comm.UNREACHABLE)
    assert power.on_battery is None
    assert "never heard from" in power.reason
    assert power.runway_s is None
    assert "" == power.save_now
    assert node.wait(3600.0).on_battery is None


@pytest.mark.parametrize("comm", [Comm.STALE, Comm.DRIVER_GONE, Comm.UNREACHABLE, Comm.WAIT, Comm.REFUSED])
def test_a_link_lost_on_line_is_mains_for_a_while_and_unknown_then(comm):
    """On line and lost: still mains for 15 s, then unknown; never an outage, however long."""
    node = Node()
    node.say(5, a="OL")

    assert node.say(5, a=comm).on_battery is False
    later = node.say(10, a=comm)
    assert later.on_battery is None
    assert "was on line when last heard" in later.reason
    assert "" == node.say(300, a=comm).save_now
    assert node.say(a="OL").on_battery is False


def test_a_link_lost_on_battery_stays_an_outage():
    """On battery and lost: the outage goes on, the blind seconds are counted, and a save starts after 45."""
    node = Node()
    node.say(5, a="OL")
    node.drain(60.0, a="OB")
    early, late = node.say(15, a=Comm.STALE), node.say(10, a=Comm.STALE)

    assert early.on_battery
    assert early.blind_s == pytest.approx(30.0, abs=2.1)
    assert "" == early.save_now
    assert "no fresh value" in late.save_now


def test_no_samples_at_all_are_silence_too():
    """A reader thread that hangs leaves the node blind just as an unreachable upsd does."""
    node = Node()
    node.say(5, a="OL")
    node.drain(60.0, a="OB")

    assert "no fresh value" in node.wait(50.0).save_now
    online = Node()
    online.say(a="OL")
    assert "a: no reading comes in" in online.wait(20.0).troubles


def test_the_outage_begins_with_the_first_poll_on_battery():
    """`since` is the instant of the transfer as it was seen, and `online_since` that of the return."""
    node = Node()
    online = node.say(3, a="OL")
    node.now += 1.0
    out = node.say(5, a="OB")
    back = node.say(3, a="OL")

    assert 1002.0 == online.online_since
    assert 1009.0 == out.since
    assert out.online_since is None
    assert 1019.0 == back.online_since
    assert back.since is None


def test_a_word_about_neither_keeps_what_was_known():
    """TRIM alone in the middle of an outage doesn't end it (and on line doesn't begin one)."""
    node = Node()
    node.say(5, a="OB")
    assert node.say(30, a="TRIM").on_battery

    other = Node()
    other.say(5, a="OL")
    assert other.say(30, a="TRIM").on_battery is False


# ---- tests and calibration ------------------------------------------------------------------------


def test_a_test_of_the_battery_is_no_outage():
    """OB with CAL or TEST counts as mains, and is named as a trouble."""
    node = Node()
    node.say(5, a="OL")
    power = node.drain(120.0, a="OB CAL DISCHRG")

    assert power.on_battery is False
    assert "a: a test or calibration is running" in power.troubles


def test_a_test_without_end_is_an_outage():
    """After `cal_max_s` CAL excuses nothing: a stuck CAL must not hide a blackout."""
    node = Node(policy=Policy(feeds=(FeedPolicy("a"),), cal_max_s=100.0))
    node.say(5, a="OL")

    assert node.drain(98.0, a="OB CAL").on_battery is False
    power = node.drain(8.0, 98.0, a="OB CAL")
    assert power.on_battery
    assert "without end" in power.reason
    assert power.since == pytest.approx(1010.0 + 2.0 + 100.0)


def test_a_test_never_goes_below_the_floor():
    """A calibration that leaves less than the need, or shows a strong signal, is treated as the outage it may be."""
    node = Node()
    node.say(5, a="OL")
    node.drain(60.0, a="OB CAL")

    assert node.view(save_s=10.0).on_battery is False
    assert node.view(save_s=5000.0).on_battery
    low = node.say(3, {"battery.runtime": "100"}, a="OB CAL")
    assert low.on_battery
    assert "in a test" in low.reason


def test_a_test_that_ranks_are_parked_for_excuses_no_more():
    """Parking stretches the runway: that is no reason to call the battery tested again, and to let training go on."""
    node = Node()
    node.say(5, a="OL")
    node.drain(60.0, a="OB CAL")
    assert node.view(save_s=5000.0).on_battery
    node.feeds = step_load(node.policy, node.feeds, node.now, 0.5)

    assert node.view(save_s=10.0).on_battery
    assert node.say(1, a="OL").on_battery is False


def test_silence_in_a_test_is_not_a_halt_at_once():
    """CAL and a stale poll: excused until the silence is as long as an outage's may be."""
    node = Node()
    node.say(5, a="OL")
    node.drain(60.0, a="OB CAL")

    assert node.say(10, a=Comm.STALE).on_battery is False
    assert node.say(20, a=Comm.STALE).on_battery


def test_the_outage_after_a_test_begins_when_the_test_ends():
    """OB goes on without CAL: the outage began there, not with the test."""
    node = Node()
    node.say(5, a="OL")
    node.drain(60.0, a="OB CAL")

    assert 1072.0 == node.say(1, a="OB").since


# ---- off, bypass, low battery ---------------------------------------------------------------------


def test_off_for_seconds_is_a_self_test_and_for_long_an_absence():
    """OFF says nothing for 30 s; after that the feed is absent, which with one feed is unknown, not an outage."""
    node = Node()
    node.say(5, a="OL")

    assert node.say(10, a="OL OFF").on_battery is False
    power = node.say(10, a="OL OFF")
    assert power.on_battery is None
    assert "its output is off" in power.reason
    assert node.say(1, a="OL").on_battery is False


def test_bypass_is_mains_without_autonomy():
    """BYPASS is no reason to stop, but there is no battery behind it."""
    power = Node().say(5, a="OL BYPASS")

    assert power.on_battery is False
    assert 0.0 == power.runway_s
    assert "a: on bypass, there is no battery behind the output" in power.troubles


@pytest.mark.parametrize("status", ["OL LB", "OL CHRG LB", "ALARM OL LB RB"])
def test_low_battery_on_line_is_a_trouble_and_nothing_else(status):
    """LB without OB never saves and never halts."""
    power = Node().say(600, a=status)

    assert power.on_battery is False
    assert "" == power.save_now == power.halt_now == power.fsd
    assert any("LB" in text for text in power.troubles)


def test_troubles_have_words_that_stand_still():
    """A trouble that lasts is told in the same words at every poll: people hear of it once."""
    node = Node("a", "b")
    node.say(5, a="OL OVER RB ALARM", b="OL")
    first = node.say(20, a="OL OVER RB ALARM", b=Comm.REFUSED).troubles
    later = node.say(20, a="OL OVER RB ALARM", b=Comm.REFUSED).troubles

    assert first == later
    assert 5 == len(first)


def test_flapping_mains_are_named():
    """Four transfers within five minutes are flapping; an hour later they are not."""
    node = Node()
    for _ in range(2):
        node.say(5, a="OL")
        node.say(5, a="OB")
    node.say(5, a="OL")

    assert "a: the mains flap" in node.view().troubles
    assert "a: the mains flap" not in node.say(1800, a="OL").troubles


# ---- forced shutdown ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("story", "command"),
    [
        ([("OL FSD", 5)], False),  # latched before our time
        ([("FSD OL", 5), ("OL", 5)], False),
        ([("OL", 5), ("OL FSD", 1)], True),
        ([("OL", 5), ("FSD OB", 1)], True),
        ([("OB", 5), ("FSD OB LB", 1)], True),
        ([("FSD OB", 1)], True),  # a daemon that starts while the primary halts
        ([("OL FSD", 5), ("OL", 5), ("OL FSD", 1)], True),
        ([("OL FSD", 5), ("OB FSD", 1)], True),
        ([("OL", 5), ("OL FSD", 3), ("OL", 1)], False),  # withdrawn: upsd was restarted
    ],
)
def test_a_new_fsd_is_a_command_and_an_old_one_is_not(story, command):
    """FSD counts if it came after a poll without it, or with OB; latched at first sight on line it is only told."""
    node = Node()
    for status, polls in story:
        power = node.say(polls, a=status)

    assert command == ("a" == power.fsd)
    assert (story[-1][0] == "OL FSD" and not command) == any("latched" in text for text in power.troubles)


def test_a_stale_fsd_is_still_stale_after_a_gap():
    """The latch seen at our start isn't new because a poll was missed in between."""
    node = Node()
    node.say(5, a="OL FSD")
    node.say(5, a=Comm.STALE)

    assert "" == node.say(5, a="OL FSD").fsd


def test_after_an_fsd_the_runway_is_the_primarys_patience():
    """Fifteen seconds are left at most, and they run."""
    node = Node()
    node.say(5, a="OL")
    node.drain(100.0, a="OB")

    assert node.say(1, a="OB FSD").runway_s == pytest.approx(15.0)
    assert node.say(3, a="OB FSD").runway_s == pytest.approx(9.0)


def test_an_fsd_of_one_of_two_feeds_is_no_command():
    """One feed's primary halts, the other feed is enough: a trouble; if the other isn't mains or battery, a command."""
    node = Node("a", "b")
    node.say(5, a="OL", b="OL")

    assert "" == node.say(1, a="OL FSD", b="OL").fsd
    assert "a: forced shutdown (FSD)" in node.view().troubles

    lone = Node("a", "b", min_supplies=2)
    lone.say(5, a="OL", b="OL")
    assert "a" == lone.say(1, a="OL FSD", b="OL").fsd


# ---- several feeds --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("needed", "a", "b", "on_battery"),
    [
        (1, "OL", "OL", False),
        (1, "OB", "OL", False),
        (1, "OB", "OB", True),
        (1, "OB", None, True),  # one says outage, the other nothing: unknown isn't healthy
        (1, None, "OL", False),
        (1, None, None, None),
        (2, "OL", "OL", False),
        (2, "OB", "OL", True),
        (2, "OL", None, None),
        (2, "OB", None, True),
        (2, "OL", "OL OFF", None),
    ],
)
def test_enough_feeds_on_mains_are_mains(needed, a, b, on_battery):
    """The truth table of two feeds; None is a feed never heard from."""
    node = Node("a", "b", min_supplies=needed)
    power = node.say(20, a=a, b=b)

    assert on_battery is power.on_battery
    if on_battery is not False:
        assert power.reason


def test_a_link_that_dies_with_the_mains_is_no_second_feed():
    """One feed says OB, the other went silent in the same minute: an outage."""
    node = Node("a", "b")
    node.say(5, a="OL", b="OL")

    assert node.say(3, a="OB", b=Comm.UNREACHABLE).on_battery is False  # b was on line a moment ago
    assert node.say(10, a="OB", b=Comm.UNREACHABLE).on_battery


def test_the_nodes_outage_begins_when_one_feed_too_many_is_lost():
    """With one of two needed it begins with the second feed's loss, with two of two with the first's."""
    for needed, since in ((1, 1032.0), (2, 1012.0)):
        node = Node("a", "b", min_supplies=needed)
        node.say(5, a="OL", b="OL")
        node.say(10, a="OB", b="OL")

        assert since == node.say(5, a="OB", b="OB").since


def test_the_node_is_back_when_enough_feeds_are():
    """`online_since` is when the feed that was still missing came back."""
    node = Node("a", "b", min_supplies=2)
    node.say(5, a="OB", b="OB")
    node.say(5, a="OL", b="OB")

    assert node.view().on_battery
    assert 1022.0 == node.say(3, a="OL", b="OL").online_since


def test_the_survivor_carries_the_whole_load():
    """Two feeds on battery, one needed: the bound is the least of both, or what the stronger has at twice the load."""
    node = Node("a", "b")
    node.say(15, a="OL", b="OL")
    node.drain(120.0, a="OB", b="OB")
    own = bounds(node.policy, node.feeds, node.now, save_s=130.0, halt_s=45.0)

    assert node.view().runway_s == pytest.approx(min(each.runway_s or 0.0 for each in own.values()))

    for name, runtime in (("a", "1070"), ("b", "300")):  # b turns out weak
        for _ in range(4):
            node.now += 2.0
            said = {
                "ups.status": "OB",
                **WELL,
                "battery.runtime": runtime,
                "battery.charge": "93",
                "battery.voltage": "25.2",
            }
            node.feeds = absorb(node.policy, node.feeds, [Sample(name, node.now, Comm.OK, said)], node.now)
    own = bounds(node.policy, node.feeds, node.now, save_s=10.0, halt_s=45.0)
    strong, weak = own["a"].runway_s or 0.0, own["b"].runway_s or 0.0

    assert weak < strong / 2.0**1.3
    assert node.view(save_s=10.0).runway_s == pytest.approx(strong / 2.0**1.3)


def test_a_survivor_that_would_be_overloaded_does_not_count():
    """If one feed can't carry both halves of the load, the first to die takes the node with it."""
    node = Node("a", "b")
    node.say(15, a="OL", b="OL")
    node.drain(120.0, a="OB", b="OB")
    for name, runtime in (("a", "1070"), ("b", "300")):
        for i in range(4):
            node.now += 2.0
            said = {
                "ups.status": "OB",
                **WELL,
                "battery.runtime": runtime,
                "battery.charge": "93",
                "ups.load": f"{60 + i}",
            }
            node.feeds = absorb(node.policy, node.feeds, [Sample(name, node.now, Comm.OK, said)], node.now)
    weak = bounds(node.policy, node.feeds, node.now, save_s=10.0, halt_s=45.0)["b"].runway_s

    assert node.view(save_s=10.0).runway_s == pytest.approx(weak)


def test_a_strong_signal_of_one_feed_is_not_the_nodes():
    """LB of one feed stops the node only if that feed is needed; LB of both always does."""
    for needed, loud in ((1, ""), (2, "LB")):
        node = Node("a", "b", min_supplies=needed)
        node.say(15, a="OL", b="OL")
        node.drain(100.0, a="OB", b="OB")
        assert loud in node.drain(6.0, 100.0, a="OB LB", b="OB").save_now
        assert bool(loud) == bool(node.view().save_now)
        assert "LB" in node.drain(6.0, 106.0, a="OB LB", b="OB LB").save_now


def test_blind_on_one_feed_of_two_is_not_blind():
    """The node is blind when the feeds that it needs are."""
    node = Node("a", "b")
    node.say(15, a="OL", b="OL")
    node.drain(100.0, a="OB", b="OB")

    one = node.say(30, a=Comm.STALE, b="OB")
    assert one.blind_s is not None
    assert one.blind_s < 5.0
    assert "" == one.save_now
    assert "no fresh value" in node.say(30, a=Comm.STALE, b=Comm.STALE).save_now


def test_what_was_known_beforehand_is_told_from_the_first_poll():
    """While the runway is still unknown the prior isn't: a snapshot that can't wait has something to go by."""
    node = Node()
    node.say(15, a="OL")
    power = node.drain(4.0, a="OB")

    assert power.runway_s is None
    assert power.settling_s > 10.0
    assert power.prior_s == pytest.approx(0.38 * 1200.0, abs=10.0)


# ---- plumbing -------------------------------------------------------------------------------------


def test_in_a_silence_what_was_known_runs_down_from_the_last_word():
    """As if the mains had failed right after it. A feed never heard from, or off, says nothing of its battery."""
    node = Node()
    known = node.say(a="OL").prior_s
    silent = node.say(polls=10, a=Comm.STALE)

    assert known is not None
    assert (silent.on_battery, silent.prior_s) == (None, pytest.approx(known - 20.0))
    assert node.say(polls=500, a=Comm.STALE).prior_s == 0.0
    assert Node().say(polls=10, a=Comm.UNREACHABLE).prior_s is None
    assert Node().say(polls=20, a="OFF").prior_s is None


def test_in_a_silence_of_several_feeds_those_that_are_needed_count():
    """Both silent: as on battery, the load of both for as long as both live. One of two that are needed: its own."""
    both, one = Node("a", "b"), Node("a", "b", min_supplies=2)
    both.say(a="OL", b="OL")
    one.say(a="OL", b="OL")
    together = both.say(polls=10, a=Comm.STALE, b=Comm.STALE).prior_s
    alone = one.say(polls=10, a=Comm.STALE, b="OL").prior_s
    single = Node()
    single.say(a="OL")

    assert alone == single.say(polls=10, a=Comm.STALE).prior_s
    assert together == alone  # at the load of both for as long as both live
    assert both.say(a=Comm.STALE, b="OL").on_battery is False


def test_samples_of_other_feeds_are_dropped_and_missing_feeds_made():
    """What isn't configured (any more) is dropped; what is, exists before it was ever heard."""
    node = Node("a", "b")
    node.say(1, a="OL", c="OB")

    assert {"a", "b"} == set(node.feeds)
    assert Comm.NEVER is node.feeds["b"].comm


def test_a_park_reaches_every_feed():
    """`step_load` rebases the runway of each feed on battery."""
    node = Node("a", "b")
    node.say(15, a="OL", b="OL")
    node.drain(100.0, a="OB", b="OB")
    node.feeds = step_load(node.policy, node.feeds, node.now, 0.3)

    assert all(feed.runway.draw is not None and feed.runway.draw.idle for feed in node.feeds.values())


def test_a_node_without_feeds_knows_nothing():
    """No feed configured: unknown, and said so."""
    power = view(Policy(), {}, 1000.0, save_s=130.0, halt_s=45.0)

    assert power.on_battery is None
    assert "no feed is configured" == power.reason


WORDS = ["OL", "OB", "OB LB", "OL LB", "OB CAL", "OL FSD", "OB FSD", "FSD OL", "OFF", "OL OFF", "TRIM", "", "OL BYPASS"]
polls = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.one_of(st.sampled_from(WORDS), st.sampled_from([Comm.STALE, Comm.UNREACHABLE, Comm.REFUSED])),
        st.sampled_from([0.0, 1.0, 2.0, 2.0, 20.0, 400.0]),
    ),
    max_size=40,
)


@pytest.mark.slow
@given(polls, st.sampled_from([1, 2]))
@settings(max_examples=200, deadline=None)
def test_no_story_breaks_the_view(story, needed):
    """Any story of two feeds: an answer with sane instants, LB and silence on line stop nothing, and JSON keeps it."""
    node = Node("a", "b", min_supplies=needed)
    instants = [node.now]
    for name, word, gap in story:
        node.now += gap
        power = node.say(1, **{name: word})
        instants.append(node.now)

        assert power.since is None or node.began <= power.since <= node.now
        assert power.online_since is None or node.began <= power.online_since <= node.now
        for left in (power.runway_s, power.idle_runway_s):
            assert left is None or 0.0 <= left < 1e7
        if power.on_battery is not True:
            assert "" == power.save_now == power.halt_now
        if power.on_battery is None:
            assert power.reason
        if power.on_battery is False:
            assert (
                sum(feed.on_battery is False or feed.test_since is not None for feed in node.feeds.values()) >= needed
            )
    assert node.feeds == decode(encode(node.feeds), type=dict[str, Feed])
    assert all(a <= b for a, b in pairwise(instants))
