"""The daemon may be killed after any decision: what follows is what would have followed."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from powerguard.core.messages import Purpose
from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.state import State, initial
from powerguard.core.types import Halt, Phase
from powerguard.sim import faults
from powerguard.sim.feed import Ramp, SimFeed
from powerguard.sim.noise import babble, babble_forgetfully
from powerguard.sim.rank import RankSpec
from powerguard.sim.world import JobSpec, World

POLICY = Policy(feeds=(FeedPolicy("ups", age_y=2.0),))
SHORT = replace(POLICY, halt_s=15.0, margin_s=5.0)
OUTAGES = {  # policy, when mains are back, whether the node halts
    "blackout": (SHORT, 300.0, True),
    "blip": (SHORT, 109.0, False),
    "parked at once": (replace(SHORT, on_battery="park"), 50.0, False),
}


def outage(policy: Policy, back_at: float, **options: object) -> World:
    """Two ranks and a short battery; mains are back at *back_at*."""
    feed = SimFeed("ups")
    world = World(
        policy,
        jobs=(JobSpec("gpt", 2, RankSpec(step_s=1.0, write_s=3.0)),),
        feeds=(feed,),
        begin_at=0.0,
        **options,  # type: ignore[arg-type]
    )
    world.at(5.0, lambda: feed.say({"ups.status": "OB DISCHRG"}))
    world.at(5.0, lambda: feed.ramp(Ramp("battery.charge", 5.0, 150.0, 100.0, 10.0, 5.0)))
    world.at(5.0, lambda: feed.ramp(Ramp("battery.runtime", 5.0, 150.0, 180.0, 20.0, 5.0)))
    world.at(back_at, lambda: feed.say({"ups.status": "OL CHRG"}))
    return world


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.binary(max_size=80))
def test_noise_goes_on_as_before(data: bytes):
    """With the state read back from JSON after every decision, every later decision is the same."""
    kept = [decision for _, decision, _ in babble(POLICY, initial("boot", 100.0), data)]
    forgotten = list(babble_forgetfully(POLICY, initial("boot", 100.0), data))

    for one, other in zip(kept, forgotten, strict=False):
        assert one == other


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_random_nights_go_on_as_before(seed: int):
    """The same night, with and without a crash after every decision, is the same night to the last message."""
    fault = [
        faults.RankDead(at=20.0 + seed, rank=seed % 2),
        faults.RankStopped(at=10.0 + seed, for_s=8.0, rank=seed % 2),
        faults.GilHeld(at=15.0 + seed / 2, for_s=3.0, rank=1),
        faults.DataStale(at=30.0, for_s=float(10 + 4 * seed)),
        faults.MainsFlap(at=10.0, for_s=40.0, period_s=1.0 + seed % 7),
        faults.WriteFails(at=25.0, rank=0),
    ][seed % 6]
    nights = []
    for through_json in (False, True):
        world = outage(POLICY, 100.0 + seed, faults=(fault,), seed=seed, through_json=through_json)
        world.run(220.0)
        nights.append([(entry.at, entry.decision) for entry in world.entries])

    assert nights[0] == nights[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTAGES)
def test_killed_between_journal_and_deed(name: str):
    """A daemon that is killed after writing a decision and before carrying it out, at each decision in turn: the same
    event goes on, nothing is ordered twice, the power-off isn't forgotten, and the night ends as it should."""
    policy, back_at, halts = OUTAGES[name]
    plain = outage(policy, back_at)
    plain.run(250.0)
    ends = (plain.halted_at is not None, plain.phase, plain.newest("gpt") is not None)

    assert halts == ends[0]
    for n in range(1, plain.acted + 1):
        world = outage(policy, back_at, crash_at=n)
        world.run(250.0)

        assert ends == (world.halted_at is not None, world.phase, world.newest("gpt") is not None), f"killed at {n}"
        assert stops(world) == 1, f"killed at {n}: {stops(world)} stops"
        assert sum(isinstance(action, Halt) for entry in world.entries for action in entry.decision.actions) <= 1
        last = max(rank.step for rank in world.ranks.values())
        if world.halted_at is not None:
            assert last == world.newest("gpt"), f"killed at {n}: a step was lost"


def stops(world: World) -> int:
    """How many STOP orders were given in all."""
    seqs = {
        job.order.seq
        for entry in world.entries
        for job in entry.decision.state.jobs.values()
        if job.order is not None and job.order.purpose is Purpose.STOP
    }
    return len(seqs)


def test_the_state_is_its_json():
    """A state in the middle of a flush is equal to what is read back of it."""
    world = outage(POLICY, 300.0)
    world.run(40.0)
    world.command("park")
    world.run(42.0)

    assert Phase.FLUSHING is world.phase
    assert world.state == msgspec.json.decode(msgspec.json.encode(world.state), type=State)


def test_seq_grows_without_a_journal():
    """A daemon that lost its journal numbers its orders above those of the one before."""
    world = outage(POLICY, 300.0, faults=(faults.DaemonKilled(at=30.0, journal_lost=True),))
    world.run(20.0)
    world.command("flush")
    world.run(29.0)
    before = world.state.seq
    world.run(32.0)

    assert world.state.seq > before
