"""A job over several nodes: a sample of the runs of `make sim-agree`, and the bugs that it must notice."""

from __future__ import annotations

import json
import os
import threading

import pytest
from msgspec.structs import replace

from powerguard.core.job import Stage
from powerguard.core.messages import Plan
from powerguard.core.types import Phase
from powerguard.errors import InvariantError
from powerguard.sim.agree import main, many
from powerguard.sim.chances import draw
from powerguard.sim.cluster import JOB, Cluster
from powerguard.sim.fates import Fall, Mishap, Outage, Run, Split, Window
from powerguard.sim.laws import Breach
from powerguard.sim.planted import BUGS, planted
from powerguard.sim.ranks import NEVER, Spec
from powerguard.sim.sim_node import BEGIN

RUNS = int(os.environ.get("POWERGUARD_TEST_SIM", "300"))

FORGETFUL = Run(
    seed=14,
    nodes=2,
    policy=replace(Run(seed=0).policy, snapshot="never"),
    coupled=False,
    outages=(Outage(), Outage(5.0, 11.5)),
    splits=(Split(Window(8.0, 6.0), frozenset({1})),),
    mishaps=(Mishap("daemon", 0, Window(2.9, 7.7)), Mishap("memory", 1, Window(12.5, 1.0))),
    calm_at=14.0,
)
"""Node 1 leads while node 0 is away, and has forgotten it when both are back."""

MADE = {
    "nobody says that ranks wait": (FORGETFUL,),
    "no successor": (
        Run(
            seed=11,
            nodes=3,
            outages=(Outage(), Outage(3.0, 9.0), Outage()),
            falls=(Fall("sealed", told=0.7, away_s=NEVER),),
            calm_at=14.0,
        ),
    ),
    "two leaders give one number": (
        Run(
            seed=12,
            nodes=4,
            outages=(Outage(8.0, 15.0), Outage(), Outage(8.0, 15.0), Outage()),
            splits=(Split(Window(2.5, 15.0), frozenset({2, 3})),),
            coupled=False,
            calm_at=18.0,
        ),
    ),
}
"""Runs that notice what chance rarely meets."""


def job_of(cluster: Cluster, node: int):
    """What a node's daemon knows of the job."""
    return cluster.nodes[node].state.jobs[JOB]


def until(cluster: Cluster, what, within_s: float = 60.0) -> None:
    """Lets the cluster live until *what* holds."""
    end = cluster.now + within_s
    while not what():
        assert cluster.now < end, cluster.stuck()
        cluster.tick()


@pytest.mark.slow
def test_a_sample_of_random_runs_keeps_every_law():
    """`make sim-agree` in small; a failure names its seeds."""
    assert {} == many(range(1, RUNS + 1)).breaches


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_planted_bug_is_noticed_by_its_law(bug):
    """Every law can fail: some seed of a few dozen breaks it as soon as the core has a small bug."""
    with planted(bug.name):
        for run in (*MADE.get(bug.name, ()), *map(draw, (bug.seed, *range(1, 400)))):
            if run.nodes * run.per_node > 12:
                continue
            try:
                Cluster(run).run()
            except (Breach, InvariantError) as error:
                if str(error).startswith(bug.law):
                    return
    raise AssertionError(f"no seed notices it: {bug.name}")


def test_an_outage_of_one_node_stops_all_at_one_step_and_halts_that_node_alone():
    """UPS of one host fails: six ranks, one step, one seal; the others don't halt, their ranks leave to be requeued."""
    cluster = Cluster(Run(seed=1, nodes=3, per_node=2, outages=(Outage(), Outage(3.0), Outage())))
    until(cluster, lambda: cluster.laws.seals)
    cluster.run()

    assert [True, False, True] == [node.powered for node in cluster.nodes]
    assert all(rank.exited for rank in cluster.ranks)
    assert [75] * 6 == [rank.f.exit.code for rank in cluster.ranks if rank.f.exit is not None]
    assert 1 == len({rank.step for rank in cluster.ranks})


def test_a_silence_at_one_node_pauses_the_job_for_its_snapshot_and_no_longer():
    """Nobody speaks for one small UPS: all ranks stop until what they save is whole, nobody halts, all train on."""
    cluster = Cluster(
        Run(
            seed=1,
            nodes=3,
            spec=Spec(write_s=10.0),
            policy=replace(Run(seed=0).policy, blind_save_s=4.0),
            outages=(Outage(), Outage(silent_at=2.0, heard_at=60.0, promises_s=20.0), Outage()),
            calm_at=61.0,
        )
    )
    cluster.run()

    assert cluster.paused
    assert cluster.laws.seals
    assert [True] * 3 == [node.powered for node in cluster.nodes]
    assert not any(rank.exited for rank in cluster.ranks)
    assert min(rank.step for rank in cluster.ranks) > max(cluster.laws.seals.values()) + 20


def test_mains_that_return_let_all_nodes_train_on():
    """The same outage, over before the battery is: everybody trains on in place."""
    cluster = Cluster(Run(seed=2, nodes=3, per_node=2, outages=(Outage(), Outage(3.0, 9.0), Outage()), calm_at=12.0))
    cluster.run()
    step = min(rank.step for rank in cluster.ranks)
    for _ in range(20):
        cluster.tick()

    assert all(rank.alive for rank in cluster.ranks)
    assert min(rank.step for rank in cluster.ranks) > step
    assert cluster.laws.seals


@pytest.mark.parametrize("stage", ["prepare", "decided", "sealing", "sealed"])
@pytest.mark.parametrize("away_s", [1.0, NEVER], ids=["restarted", "never-back"])
def test_the_leaders_daemon_is_lost_at_any_point(stage, away_s):
    """With a restart the generation is sealed; without one it ends all the same, in a halt or with an honest word."""
    fall = Fall(stage, told=0.4, away_s=away_s)
    cluster = Cluster(Run(seed=5, nodes=3, per_node=2, outages=(Outage(), Outage(3.0), Outage(3.5)), falls=(fall,)))
    cluster.run()

    assert not cluster.falls
    assert not cluster.nodes[1].powered
    if away_s < NEVER:
        assert cluster.laws.seals


def test_a_node_cut_off_saves_its_own_part_and_halts():
    """The network dies first: the lone node's ranks write their shards and it halts, though no seal can come of it."""
    split = Split(Window(2.5, 200.0), frozenset({1}))
    cluster = Cluster(
        Run(seed=3, nodes=2, per_node=2, outages=(Outage(), Outage(3.0)), splits=(split,), coupled=False, calm_at=60.0)
    )
    until(cluster, lambda: not cluster.nodes[1].powered)

    own = [shards for shards in cluster.laws.disk.values() if set(shards) == {2, 3}]
    assert own
    assert {} == cluster.laws.seals
    assert cluster.nodes[0].powered


def test_a_rank_that_hangs_is_saved_from_what_all_have_staged():
    """Plan B: a stopped rank, and still a sealed generation, of the newest step that every rank holds."""
    mishap = Mishap("stopped", 1, Window(4.0, 30.0))
    cluster = Cluster(
        Run(seed=4, nodes=2, per_node=2, spec=Spec(stage_every=2), outages=(Outage(3.0),), mishaps=(mishap,))
    )
    until(cluster, lambda: cluster.laws.seals)

    assert Plan.STAGED in cluster.plans
    assert all(step % 2 == 0 for step in cluster.laws.seals.values())


def test_a_job_of_one_node_needs_nobody():
    """The same code serves the single node, and says nothing to anybody."""
    cluster = Cluster(Run(seed=6, nodes=1, per_node=4, outages=(Outage(2.0),)))
    cluster.run()

    assert cluster.laws.seals
    assert 0 == cluster.net.sent
    assert not cluster.nodes[0].powered


def test_the_successor_is_the_next_seat_and_the_old_leader_follows_it():
    """The leader's daemon away for long: its heir by lowest rank leads; once back, it follows."""
    cluster = Cluster(Run(seed=7, nodes=3, per_node=1, mishaps=(Mishap("daemon", 0, Window(3.0, 12.0)),), calm_at=30.0))
    until(cluster, lambda: cluster.now >= BEGIN + 12.0)
    assert job_of(cluster, 1).leads
    assert "n1" == job_of(cluster, 2).lead
    until(cluster, lambda: cluster.now >= BEGIN + 20.0)

    assert "n1" == job_of(cluster, 0).lead
    assert [1, 1, 1] == [job_of(cluster, node).term for node in range(3)]


def test_two_halves_end_under_one_leader():
    """A split in two makes two leaders; once it is whole, the higher claim leads, and nobody is kept from training."""
    split = Split(Window(3.0, 14.0), frozenset({2, 3}))
    cluster = Cluster(Run(seed=8, nodes=4, per_node=1, splits=(split,), calm_at=22.0))
    until(cluster, lambda: cluster.now >= BEGIN + 15.0)
    assert {0, 2} == {node for node in range(4) if job_of(cluster, node).leads}
    cluster.run()

    assert {2} == {node for node in range(4) if job_of(cluster, node).leads}
    assert {Phase.ONLINE} == {node.state.phase for node in cluster.nodes}


def test_a_snapshot_spans_nodes():
    """One node's outage has all ranks stage at one step and train on; the generation is sealed."""
    ride = replace(Run(seed=0).policy, on_battery="ride", snapshot_after_s=2.0)
    cluster = Cluster(
        Run(seed=9, nodes=3, per_node=1, policy=ride, outages=(Outage(), Outage(3.0, 30.0)), calm_at=12.0)
    )
    until(cluster, lambda: cluster.laws.seals)

    order = job_of(cluster, 0).order
    assert Stage.SEALED is order.stage
    assert "snapshot" == order.purpose.value
    assert all(rank.alive and not rank.parked for rank in cluster.ranks)


def test_ranks_that_wait_by_an_order_that_nobody_remembers_train_on():
    """A successor parks its rank, loses its journal, follows again: the leader, who never knew the order, ends it."""
    cluster = Cluster(FORGETFUL)
    until(cluster, lambda: cluster.ranks[1].parked)
    assert job_of(cluster, 1).leads
    cluster.run()

    assert job_of(cluster, 0).leads
    assert not cluster.ranks[1].parked


class Litter:
    """Garbage in a ring, as a process with sockets has it: whoever collects it in another process waits forever."""

    def __init__(self) -> None:
        self.ring, self.pid = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.pid:
            threading.Event().wait()


def test_the_command_prints_its_seeds_and_says_which_failed(capfd):
    """`python -m powerguard.sim.agree`: one JSON line and 0, or 1 and each seed with the law that it broke."""
    assert 0 == main(["--runs", "3", "--json"])
    told = json.loads(capfd.readouterr().out)
    with planted("seals with one shard"):
        assert 1 == main(["--runs", "3"])
    words = capfd.readouterr()

    assert ([1, 3], 3, {}) == (told["seeds"], told["runs"], told["breaches"])
    assert "seeds 1 to 3" in words.err
    assert "seed 1: seal: " in words.err
    assert "breaches: {'seal': " in words.out


@pytest.mark.slow
def test_its_processes_take_over_nothing_of_the_one_that_starts_them(capfd):
    """With --jobs, whatever threads, locks and garbage that one has: such a fork once waited forever."""
    Litter()
    assert 0 == main(["--runs", "51", "--jobs", "2", "--json"])
    assert 51 == json.loads(capfd.readouterr().out)["runs"]
