"""A run on a bench whose UPS is simulated and whose plug is a real HTTP peer: mains always come back."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hil.__main__ import main
from hil.bench import Bench
from hil.rig import load
from powerguard.cli.trace import read
from powerguard.errors import ConfigError, UpsNotReady, UsageError
from tests.hil.plug import Plug

RIGS = Path(__file__).parents[2] / "hil" / "rigs"
PLAN = {"before_s": 0.2, "dark_s": 0.6, "after_s": 0.3, "edge_s": 5, "blind_s": 5, "charge_min_pct": 50, "retry_s": 0.1}


class Person:
    """Answers what it was told to; what it is asked and told is kept."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.heard: list[str] = []

    def ask(self, question: str) -> str:
        self.heard.append(question)
        return self.answers.pop(0) if self.answers else ""

    def say(self, text: str) -> None:
        self.heard.append(text)


@pytest.fixture
def plug(upsd):
    """A plug that the simulated UPS hangs on."""
    with Plug("tasmota", moved=lambda on: upsd.set("demo", {"ups.status": "OL" if on else "OB DISCHRG"})) as made:
        yield made


@pytest.fixture
def bench(upsd, plug, tmp_path):
    """bench(person, **plan): a bench of that rig."""

    def make(person: Person, **plan) -> Bench:
        lines = "\n".join(f"{key} = {value}" for key, value in (PLAN | plan).items())
        path = tmp_path / "rig.toml"
        path.write_text(
            f'name = "desk"\nwhat = "a simulation"\nups = "{upsd.address("demo")}"\nmains = "wall"\npoll_s = 0.05\n'
            f"[plan]\n{lines}\n[[outlet]]\n"
            f'driver = "tasmota"\nname = "wall"\nfeeds = "the UPS"\nurl = "{plug.url}"\nsettle_s = 0.3\n'
        )
        return Bench(load(path), tmp_path / "recordings", person.ask, person.say)

    return make


@pytest.mark.slow
def test_an_outage_is_recorded_and_ends(bench, plug):
    """On battery, on line again, and the recording is a trace that the estimator reads."""
    person = Person("desk")
    result = bench(person).run()

    assert result.edge_s is not None
    assert result.back_s is not None
    assert "the time was over" == result.ended_by
    assert plug.relays[0]
    rows = read(result.recording, {})
    seen = [row.variables["ups.status"] for row in rows]
    assert ["OL", "OB DISCHRG", "OL"] == [
        word for word, before in zip(seen, ["", *seen], strict=False) if word != before
    ]
    assert "battery.runtime" in rows[0].variables
    assert "# wall goes off\n" in result.recording.read_text()
    assert any("wall feeds the UPS" in line for line in person.heard)


@pytest.mark.slow
def test_a_low_charge_ends_it(bench, plug, upsd):
    """Whatever the plan's time."""
    plug.moved = lambda on: upsd.set("demo", {"ups.status": "OL" if on else "OB", "battery.charge": "49"})
    result = bench(Person("desk"), dark_s=60).run()

    assert "the charge was below 50 %" == result.ended_by
    assert 49 == result.charge_pct
    assert plug.relays[0]


@pytest.mark.slow
def test_a_ups_that_doesnt_notice_ends_it(bench, plug):
    """The wrong outlet was named, or the UPS is blind: it isn't waited out."""
    plug.moved = None
    result = bench(Person("desk"), dark_s=60, edge_s=0.3).run()

    assert "the UPS had not noticed after 0 s" == result.ended_by
    assert result.edge_s is None
    assert plug.relays[0]


@pytest.mark.slow
def test_a_ups_that_cant_be_read_ends_it(bench, plug, upsd):
    """The driver is gone while it is dark: mains come back, and the recording says why."""
    plug.moved = lambda on: upsd.clear() if on else upsd.fault("driver-gone")
    result = bench(Person("desk"), dark_s=60, edge_s=60, blind_s=0.3).run()

    assert "the UPS couldn't be read for 0 s" == result.ended_by
    assert "driver not connected" in result.recording.read_text()
    assert plug.relays[0]


@pytest.mark.slow
def test_an_interrupt_ends_it(bench, plug):
    """Ctrl-C while it is dark: mains come back first."""

    def interrupted(on: bool) -> None:
        if not on:
            os.kill(os.getpid(), signal.SIGINT)

    plug.moved = interrupted
    # a shell that begins us in the background has it ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            bench(Person("desk"), dark_s=60).run()
    finally:
        signal.signal(signal.SIGINT, before)
    assert plug.relays[0]


@pytest.mark.slow
def test_a_plug_that_wont_go_on_again(bench, plug, upsd):
    """It is tried again and again, and then the person is told to do it."""

    def moved(on: bool) -> None:
        plug.stuck = not on
        upsd.set("demo", {"ups.status": "OB DISCHRG"})

    plug.moved = moved
    person = Person("desk", "on")
    bench(person, edge_s=0.5).run()

    assert 3 == sum("can't be switched on" in line for line in person.heard)
    assert any("SWITCH wall ON BY HAND NOW (the UPS)" in line for line in person.heard)


@pytest.mark.slow
def test_nobody_agrees(bench, plug):
    """Another word than the rig's name: the plug isn't even asked."""
    with pytest.raises(UsageError, match="nothing was switched"):
        bench(Person("yes")).run()
    assert [] == plug.asked


def test_nothing_but_the_rigs_outlets(bench, plug):
    """An outlet that the rig doesn't name is refused, before anybody is asked anything."""
    person = Person("other")
    with pytest.raises(UsageError, match=r"no outlet 'other'; nothing was switched; it has: wall"):
        bench(person).switch("other", False)
    assert [] == plug.asked == person.heard


def test_one_outlet_by_hand(bench, plug):
    """With the person's agreement, by its name."""
    with pytest.raises(UsageError, match="not agreed"):
        bench(Person("")).switch("wall", False)
    bench(Person("wall")).switch("wall", False)
    assert not plug.relays[0]


@pytest.mark.parametrize(
    ("variables", "why"),
    [({"ups.status": "OB"}, "isn't on line power"), ({"battery.charge": "50"}, "has 50 %, the plan ends at 50 %")],
)
def test_it_begins_on_mains_and_charged(bench, plug, upsd, variables, why):
    """Else nothing is asked, of anybody."""
    upsd.set("demo", variables)
    person = Person("desk")
    with pytest.raises(UpsNotReady, match=why):
        bench(person).run()
    assert [] == plug.asked == person.heard


# ---- the file --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(RIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_the_rigs_that_ship_can_be_read(path, capsys):
    """Each by `python -m hil show`, which names what a run would switch."""
    assert main(["show", str(path)]) == 0
    assert "<- a run switches this one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("driver =", "motor ="), "driver"),
        (('mains = "plug"', 'mains = "wall"'), "mains = 'wall' is none of its outlets"),
        (('name = "node"', 'name = "plug"'), "two outlets have one name"),
        (("channel = 1", "relay = 1"), "relay"),
        (("ups = ", "usp = "), "usp"),
        (('"ups@127.0.0.1:3493"', '"@127.0.0.1"'), "isn't|not the address"),
        (('mains = "plug"', 'mains = "plug"\n[plan]\ncharge_min_pct = 5'), "charge_min_pct"),
    ],
)
def test_a_rig_that_makes_no_sense(tmp_path, change, why):
    """What can't be meant is refused when the file is read, not when power is off."""
    text = (RIGS / "example-person.toml").read_text()
    assert change[0] in text
    path = tmp_path / "rig.toml"
    path.write_text(text.replace(*change))
    with pytest.raises(ConfigError, match=why):
        load(path)


def test_an_unknown_outlet_on_the_command_line(capsys):
    """Exit code 2, as for every command line that makes no sense."""
    assert main(["switch", str(RIGS / "example-shelly.toml"), "lamp", "off"]) == 2
    assert "nothing was switched" in capsys.readouterr().err
