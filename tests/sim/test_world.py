"""Whole nights in the simulated world: what must hold at the end of them, whatever happened."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.types import Comm, Phase
from powerguard.sim import faults as f
from powerguard.sim.battery import SimUps, UpsSpec
from powerguard.sim.clock import FakeClock
from powerguard.sim.feed import Ramp, SimFeed
from powerguard.sim.rank import RankSpec
from powerguard.sim.world import OFF_S, JobSpec, World

CUT_AT = 40.0


def night(seed: int, *faults: f.Fault, phi: float = 0.95, back_at: float | None = None, dry_run: bool = False) -> World:
    """A node with one or two jobs on a healthy battery of a random size; the mains fail after 40 s."""
    rng = Random(seed)
    spec = UpsSpec(full_load_s=rng.uniform(240.0, 700.0), age_y=1.0, phi=phi)
    feed = SimFeed("ups", ups=SimUps(spec, seed=seed, load_pct=60.0))
    jobs = tuple(
        JobSpec(name, rng.choice((1, 2, 4)), RankSpec(rng.uniform(0.3, 3.0), 0.5, rng.uniform(1.0, 20.0)))
        for name in ("a", "b")[: rng.choice((1, 1, 2))]
    )
    policy = Policy(feeds=(FeedPolicy("ups", age_y=1.0),))
    world = World(policy, jobs=jobs, feeds=(feed,), seed=seed, begin_at=0.0, dry_run=dry_run)
    for fault in faults:
        world.ail(fault)
    world.at(CUT_AT, lambda: setattr(feed, "mains", False))
    if back_at is not None:
        world.at(back_at, lambda: setattr(feed, "mains", True))
    return world


def halted_in_time(world: World) -> bool:
    """The node was off before the battery was flat."""
    return world.halted_at is not None and world.dark_at == pytest.approx(world.halted_at + OFF_S, abs=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_a_blackout_on_a_healthy_battery_loses_nothing(seed: int):
    """Halted before the battery is flat, each job durable at the very step that it stopped at."""
    world = night(seed)
    world.run(6000.0)

    assert halted_in_time(world)
    for name in world.disks:
        steps = {rank.step for (job, _), rank in world.ranks.items() if job == name}
        assert {world.newest(name)} == steps
    assert {75} == {rank.left_with for rank in world.ranks.values()}
    assert all(rank.lone_saves == 0 for rank in world.ranks.values())


RANK_FAULTS = [
    f.RankDead(at=60.0, rank=0),
    f.RankDead(at=45.0, rank=0),
    f.RankStopped(at=60.0, rank=0),
    f.RankStopped(at=51.0, for_s=6.0, rank=0),
    f.GilHeld(at=50.0, rank=0, for_s=30.0),
    f.InEval(at=45.0, rank=0),
    f.StepSlow(at=45.0, rank=0, factor=50.0),
    f.WriteFails(at=45.0, rank=0),
    f.WriteSlow(at=45.0, rank=0, factor=50.0),
    f.LoaderWorkersDead(rank=0, step=40),
    f.InCompile(rank=0, step=40, for_s=30.0),
]


@pytest.mark.slow
@pytest.mark.parametrize("fault", RANK_FAULTS, ids=f.spell)
def test_a_sick_rank_never_stops_the_halt(fault: f.RankFault):
    """Dead, hung, deaf, away, slow or on a full disk: the node still halts before the battery is flat."""
    world = night(3, fault)
    world.run(6000.0)

    assert halted_in_time(world)


@pytest.mark.slow
@pytest.mark.parametrize("fault", RANK_FAULTS, ids=f.spell)
def test_a_sick_rank_never_causes_a_halt(fault: f.RankFault):
    """With mains back in the middle of the operator's stop, no sick rank leads to a halt; the node is itself again."""
    world = night(3, fault, back_at=75.0)
    world.at(65.0, lambda: world.command("park"))
    world.at(66.0, lambda: world.command("resume"))
    world.run(1200.0)

    assert world.halted_at is None
    assert Phase.ONLINE is world.phase


LIES = [
    f.StaleServed(at=20.0),
    f.DataStale(at=20.0, for_s=100.0),
    f.DriverGone(at=20.0),
    f.UpsdGone(at=20.0),
    f.UpsdRefuses(at=20.0),
    f.Waits(at=20.0, for_s=60.0),
    f.TokensReordered(at=0.0),
    f.RuntimeSentinel(at=0.0),
    f.RuntimeSentinel(at=0.0, value="0"),
    f.Missing(at=0.0, name="battery.charge"),
    f.LowBatteryFlash(at=0.0, period_s=20.0),
    f.CalibrationStuck(at=0.0),
    f.ChargeCliff(at=0.0, below=100.0, to=1.0),
    f.StatusStale(at=10.0),
    f.FsdSet(at=0.0),
]


@pytest.mark.parametrize("lie", LIES, ids=f.spell)
def test_no_lie_on_mains_stops_training(lie: f.UpsFault):
    """On line power nothing that a UPS or its link can say (but a new FSD) stops ranks, let alone halts the node."""
    world = night(5, lie)
    feed = world.feeds["ups"]
    world.at(CUT_AT, lambda: setattr(feed, "mains", True))
    world.run(240.0)

    assert Phase.ONLINE is world.phase
    assert world.halted_at is None
    assert all(entry.before is Phase.ONLINE for entry in world.entries)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lie", [*LIES[:-2], f.LowBatteryNever(), f.RuntimeScaled(factor=1.4), f.LowBatteryEarly()], ids=f.spell
)
def test_every_lie_on_battery_is_survived(lie: f.UpsFault):
    """In a blackout with that lie from the transfer on, a whole generation exists and the node is off in time, unless
    the link was lost before anybody could see the outage."""
    blind = isinstance(lie, (f.DriverGone, f.UpsdGone, f.UpsdRefuses, f.DataStale, f.Waits))
    fault = type(lie)(**{name: getattr(lie, name) for name in lie.__struct_fields__} | {"at": CUT_AT + 6.0 * blind})
    world = night(8, fault)
    world.run(6000.0)

    assert halted_in_time(world)
    assert all(world.newest(name) is not None for name in world.disks)


@pytest.mark.slow
@pytest.mark.parametrize("down_s", [1.0, 20.0])
@pytest.mark.parametrize("at", [45.0, 52.0, 300.0])
def test_the_daemon_may_die(at: float, down_s: float):
    """Killed in the outage and restarted from its journal: nothing is lost."""
    world = night(2, f.DaemonKilled(at=at, down_s=down_s), f.DaemonStopped(at=at + 60.0, for_s=10.0))
    world.run(6000.0)

    assert halted_in_time(world)
    assert all(world.newest(job) == rank.step for (job, _), rank in world.ranks.items())


def test_the_power_may_go_at_any_instant():
    """Cut at once: what the disk calls whole is whole, of one step, and never newer than what was trained."""
    for cut in (52.0, 56.0, 63.0, 70.0):
        world = night(4, f.PowerCut(at=cut))
        world.run(100.0)

        assert world.dark_at == pytest.approx(cut, abs=0.2)
        for name, disk in world.disks.items():
            size = sum(job == name for job, _ in world.ranks)
            assert set(disk.seals.items()) <= set(disk.whole(size).items())
            assert all(step <= world.ranks[name, 0].step for step in disk.seals.values())


def test_a_suspend_is_time_that_passed():
    """A machine that slept through its battery's margin acts on the first look, not on what it thought before."""
    world = night(6, f.Suspended(at=60.0, for_s=30.0))
    world.run(95.0)

    assert world.now >= 94.9
    assert world.phase is not Phase.ONLINE


def test_the_same_seed_is_the_same_night():
    """Two runs are equal to the last decision; another seed isn't."""
    nights = []
    for seed in (7, 7, 8):
        world = night(seed)
        world.run(90.0)
        nights.append([(entry.at, entry.decision.reason) for entry in world.entries])

    assert nights[0] == nights[1]
    assert nights[0] != nights[2]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("batch", range(4))
def test_random_nights_end_well(batch: int):
    """Random faults at random instants, mains coming and going: every decision is lawful, and with mains back for good
    the node is either on line again or had halted."""
    for seed in range(batch * 5, batch * 5 + 5):
        rng = Random(seed)
        flap = f.MainsFlap(period_s=rng.uniform(2.0, 30.0), for_s=90.0)
        picked = [rng.choice(RANK_FAULTS), rng.choice(LIES[:-1]), flap]
        again = [
            type(fault)(
                **{name: getattr(fault, name) for name in fault.__struct_fields__}
                | {"at": rng.uniform(20.0, 120.0), "for_s": rng.uniform(1.0, 60.0)}
            )
            for fault in rng.sample(picked, rng.choice((1, 2, 3)))
        ]
        back_at = rng.uniform(60.0, 400.0)
        world = night(seed, *again, back_at=back_at)
        world.run(back_at + 700.0)

        assert world.halted_at is not None or world.phase is Phase.ONLINE, f"seed {seed}: {world.phase} with {again}"


# ---- the parts -------------------------------------------------------------------------------------


def test_the_clock_only_goes_on():
    """It stands, it advances, it jumps on, and never back."""
    clock = FakeClock(5.0)

    assert clock() == clock.now() == 5.0
    assert clock.advance(1.5) == 6.5
    assert clock.jump(10.0) == clock() == 10.0
    with pytest.raises(ValueError, match="doesn't go back"):
        clock.jump(9.0)


@pytest.mark.parametrize("name", sorted(f.KINDS))
def test_every_fault_is_spelt_as_it_is_read(name: str):
    """A fault in words is read back as itself; the list of faults is closed."""
    fault = f.parse(name, {}, 3.0)
    words = f.spell(fault).split()

    assert name == words[0]
    assert fault == f.parse(words[0], dict(word.split("=") for word in words[1:]), 3.0)
    assert fault.where in ("ups", "rank", "storage", "daemon", "clock", "power")


def test_a_fault_has_its_time():
    """It begins at its instant and ends after for_s; 0 is for ever."""
    assert [f.DataStale(at=5.0, for_s=2.0).active(t) for t in (4.9, 5.0, 6.9, 7.0)] == [False, True, True, False]
    assert f.DataStale(at=5.0).active(1e9)
    with pytest.raises(ValueError, match="no such fault"):
        f.parse("flood", {}, 0.0)


def test_a_fault_can_wait_for_a_step():
    """A fault of the UPS or the daemon with a step begins when that rank has completed it, and not before."""
    stale, killed = f.DataStale(rank=1, step=20), f.DaemonKilled(rank=0, step=25, down_s=5.0)
    world = World(Policy(feeds=(FeedPolicy("ups"),)), jobs=(JobSpec("gpt"),), faults=(stale, killed))

    world.run(115.0)
    early = [sample.comm for entry in world.entries for sample in entry.seen.samples]
    world.run(160.0)
    late = [(entry.at, sample.comm) for entry in world.entries for sample in entry.seen.samples]

    assert {Comm.OK} == set(early)
    begun = min(at for at, comm in late if comm is Comm.STALE)
    assert begun - 100.0 >= 20 * 1.0
    decided = [entry.at for entry in world.entries]
    assert max(b - a for a, b in pairwise(decided)) >= 5.0


def test_a_cut_takes_back_what_a_volatile_cache_confirmed():
    """Without the fault a sealed stop outlives the power cut; with it, what was confirmed last is gone."""
    newest = []
    for faults in ((), (f.VolatileCache(rank=1, lost_s=30.0),)):
        world = World(Policy(feeds=(FeedPolicy("ups"),)), jobs=(JobSpec("gpt"),), faults=faults)
        world.at(110.0, lambda world=world: world.command("park"))
        world.ail(f.PowerCut(at=130.0))
        world.run(140.0)
        newest.append(world.newest("gpt"))

    assert newest[0] is not None
    assert newest[1] is None


SAYS = {"ups.status": "OB DISCHRG", "battery.charge": "70", "battery.runtime": "600"}


@pytest.mark.parametrize(("fault", "expected"), [
    (f.TokensReordered(), {"ups.status": "DISCHRG ob"}),
    (f.RuntimeSentinel(value="65535"), {"battery.runtime": "65535"}),
    (f.RuntimeScaled(factor=1.5), {"battery.runtime": "900"}),
    (f.RuntimeJumps(factor=2.0, period_s=5.0), {"battery.runtime": "1200"}),
    (f.Missing(name="battery.charge"), {"battery.charge": None}),
    (f.LowBatteryEarly(), {"ups.status": "OB DISCHRG LB"}),
    (f.ChargeCliff(below=80.0, to=30.0), {"battery.charge": "30"}),
    (f.ChargeCliff(below=60.0, to=30.0), {"battery.charge": "70"}),
    (f.CalibrationStuck(), {"ups.status": "OB DISCHRG CAL"}),
    (f.FsdSet(), {"ups.status": "FSD OB DISCHRG"}),
    (f.MainsFlap(period_s=4.0), {"ups.status": "OB DISCHRG"}),
], ids=lambda value: f.spell(value) if isinstance(value, f.Fault) else "")  # fmt: skip
def test_what_a_sick_ups_says(fault: f.UpsFault, expected: dict[str, str | None]):
    """Each fault changes one thing of what is said, and only while it holds."""
    feed = SimFeed("ups", faults=(fault,))
    feed.say(SAYS)
    variables = feed.sample(1.0).variables
    well = SimFeed("ups")
    well.say(SAYS)

    assert expected == {name: variables.get(name) for name in expected}
    rest = {name: value for name, value in well.sample(1.0).variables.items() if name not in expected}
    assert rest == {name: value for name, value in variables.items() if name not in expected}


@pytest.mark.parametrize(("fault", "comm"), [
    (f.DataStale(at=1.0, for_s=2.0), Comm.STALE), (f.DriverGone(at=1.0, for_s=2.0), Comm.DRIVER_GONE),
    (f.UpsdGone(at=1.0, for_s=2.0), Comm.UNREACHABLE), (f.UpsdRefuses(at=1.0, for_s=2.0), Comm.REFUSED),
    (f.HalfOpen(at=1.0, for_s=2.0), Comm.UNREACHABLE), (f.Silent(at=1.0, for_s=2.0), Comm.UNREACHABLE),
])  # fmt: skip
def test_a_lost_link_says_nothing(fault: f.UpsFault, comm: Comm):
    """While the link is lost there are no variables, afterwards they are there again."""
    feed = SimFeed("ups", faults=(fault,))

    assert [Comm.OK, comm, Comm.OK] == [feed.sample(t).comm for t in (0.5, 1.5, 3.5)]
    assert feed.sample(1.5).variables == {}


def test_the_link_that_drops_on_the_edge():
    """The word "on battery" gets through once, or not at all, and then it is silent for its time."""
    for seen, first in ((True, Comm.OK), (False, Comm.STALE)):
        feed = SimFeed("ups", faults=(f.CommLostOnEdge(for_s=10.0, seen=seen),))
        assert feed.sample(1.0).comm is Comm.OK
        feed.say({"ups.status": "OB"})
        assert [first, Comm.STALE, Comm.OK] == [feed.sample(t).comm for t in (2.0, 4.0, 13.0)]


def test_stale_values_are_served_as_fresh():
    """The numbers stand still; the status too, if everything is stale."""
    for fault, status in ((f.StaleServed(at=2.0), "OB"), (f.StatusStale(at=2.0), "OL")):
        feed = SimFeed("ups", faults=(fault,))
        feed.sample(1.0)
        feed.say({"ups.status": "OB", "battery.charge": "10"})

        assert (status, "100") == tuple(feed.sample(3.0).variables[name] for name in ("ups.status", "battery.charge"))


def test_a_ramp_moves_in_reports():
    """A variable moves from one number to the other in steps, and stays where it ended."""
    feed = SimFeed("ups")
    feed.ramp(Ramp("battery.charge", 10.0, 30.0, 100.0, 80.0, 5.0))

    seen = [feed.sample(t).variables["battery.charge"] for t in (10.0, 14.0, 15.0, 29.9, 30.0, 99.0)]
    assert seen == ["100", "100", "95", "85", "80", "80"]
