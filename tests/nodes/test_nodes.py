"""A job over three hosts, each with its own UPS and daemon: whatever fails, all ranks end at one step or it is said.

Real daemons in network namespaces, real CURVE lines, real files. Ranks are real gloo ones with the real hook ("gloo"),
or processes without torch on the real link ("light"). A small part runs by default; with POWERGUARD_TEST_NODES=1 all.
"""

from __future__ import annotations

import os
import time

import pytest

from powerguard.core.job import Stage
from powerguard.generations import latest
from tests.nodes.hosts import missing
from tests.nodes.rig import EMPTY, LOW, OUTAGE, Rig

pytestmark = [pytest.mark.root, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

ALL = os.environ.get("POWERGUARD_TEST_NODES") == "1"
more = pytest.mark.skipif(not ALL, reason="only with POWERGUARD_TEST_NODES=1 (make test-nodes)")
gloo = pytest.param(True, id="gloo", marks=pytest.mark.torch)
light = pytest.param(False, id="light")
MAINS = {"ups.status": "OL", "battery.charge": "80", "battery.runtime": "900"}


@pytest.fixture
def made(tmp_path):
    """Makes three hosts, not yet started, and takes them away in the end."""
    why = missing()
    if why:
        pytest.skip(why)
    rigs: list[Rig] = []

    def make(**options) -> Rig:
        rigs.append(Rig(tmp_path, **options))
        return rigs[-1]

    yield make
    for each in rigs:
        each.close()


@pytest.fixture
def rig(made):
    """They train on battery while it lasts."""
    return made()


@pytest.fixture
def parks(made):
    """They stop training as soon as an outage begins, with all the time in the world."""
    return made(park=True)


def newest(rig: Rig):
    """The newest generation that is whole and verifies."""
    return latest(rig.checkpoints, verify=True).generation


def all_left_at_one_step(rig: Rig) -> int:
    """Every rank has left with 75, at one step, which is sealed and verifies; the step."""
    assert rig.exits() == [75] * 6, rig.story()
    left = {event["at"] for rank in range(6) for event in rig.heard(rank) if "verdict" in event}
    assert len(left) == 1, rig.story()
    generation = newest(rig)
    assert generation.step == next(iter(left)), rig.story()
    assert (generation.path / "seal.json").exists(), rig.story()
    return generation.step


def others_stay(rig: Rig, *failed: int) -> None:
    """Only the nodes whose power failed have halted."""
    rig.wait(lambda: all(rig.nodes[number].marker.exists() for number in failed), "the failed node halts")
    assert [node.number for node in rig.nodes if node.marker.exists()] == list(failed), rig.story()
    assert all(node.phase == "online" for node in rig.nodes if node.number not in failed), rig.story()


def trains_on(rig: Rig) -> None:
    """Every rank makes steps again."""
    then = [rig.step(rank) for rank in range(6)]
    rig.wait(lambda: all(rig.step(rank) > then[rank] + 3 for rank in range(6)), "training goes on")


def up(rig: Rig, *, gloo: bool, wish: dict | None = None) -> None:
    rig.start()
    rig.train(gloo=gloo, wish=wish)


@pytest.mark.parametrize("ranks", [gloo, pytest.param(False, id="light", marks=more)])
def test_one_ups_fails(rig, ranks):
    """All six ranks stop at one step and it is sealed; that node halts, the others don't, and their ranks requeue."""
    up(rig, gloo=ranks)
    ups = rig.nodes[1].upsd
    ups.set("demo", OUTAGE)
    rig.wait(lambda: rig.nodes[1].phase == "on_battery", "an outage")
    ups.set("demo", LOW)
    rig.wait(lambda: rig.nodes[1].phase == "parked", "parked")
    ups.set("demo", EMPTY)
    all_left_at_one_step(rig)
    others_stay(rig, 1)


@pytest.mark.parametrize("back", ["as systemd does", "never"])
@pytest.mark.parametrize(
    ("stage", "wish"),
    [
        pytest.param(Stage.PREPARE, {}, id="PREPARE"),
        pytest.param(Stage.DECIDED, {"write_s": 2.0}, id="DECIDE"),
        pytest.param(Stage.SEALING, {"fsync_s": 1.5}, id="last-SHARD"),
    ],
)
def test_the_leaders_daemon_is_killed(parks, stage, wish, back):
    """SIGKILL for the daemon on the master's node after PREPARE, after DECIDE, after the last SHARD."""
    rig = parks
    if not ALL and (stage, back) != (Stage.DECIDED, "as systemd does"):
        pytest.skip("only with POWERGUARD_TEST_NODES=1 (make test-nodes)")
    up(parks, gloo=False, wish=wish)
    lead, failing = rig.nodes[0], rig.nodes[1]
    if stage is Stage.PREPARE:
        rig.stop(4, on=True)  # its promise is waited for
    failing.upsd.set("demo", OUTAGE)
    rig.wait(lambda: lead.seen(stage), f"a STOP at stage {stage.value}")
    lead.kill()
    if stage is Stage.PREPARE:
        rig.stop(4, on=False)
    if back == "as systemd does":
        time.sleep(1.0)
        lead.start()
    rig.wait(lambda: failing.phase in ("parked", "halting"), "parked")
    failing.upsd.set("demo", EMPTY)
    rig.wait(failing.marker.exists, "the failed node halts")
    if back == "never":
        ended_honestly(parks, without=(0, 1))
    else:
        ended_honestly(rig)


def ended_honestly(rig: Rig, *, without: tuple[int, ...] = ()) -> None:
    """A generation that loads, or a word in a log that none comes; no rank hangs but those *without* a daemon."""
    guarded = [rank for rank in range(6) if rank not in without]
    rig.wait(lambda: all(rig.ranks[rank].poll() is not None for rank in guarded), "ranks leave")
    assert [rig.ranks[rank].poll() for rank in guarded] == [75] * len(guarded), rig.story()
    stops = {event["at"] for rank in guarded for event in rig.heard(rank) if "verdict" in event}
    assert said_so(rig) or (len(stops) == 1 and newest(rig).step in stops), rig.story()
    assert [node.number for node in rig.nodes if node.marker.exists()] == [1], rig.story()


@pytest.mark.parametrize("ranks", [pytest.param(True, id="gloo", marks=[pytest.mark.torch, more]), light])
@pytest.mark.parametrize("comes_back", [True, pytest.param(False, marks=more)])
def test_the_network_is_cut_while_flushing(parks, ranks, comes_back):
    """The failing node's cable is pulled once its ranks have the decision: whole by its records, or it is said."""
    rig = parks
    up(parks, gloo=ranks, wish={} if ranks else {"write_s": 1.5})
    failing = rig.nodes[1]
    failing.upsd.set("demo", OUTAGE)
    rig.wait(lambda: failing.seen(Stage.DECIDED), "a decision has arrived")
    rig.hosts.cable(1, plugged=False)
    if comes_back:
        time.sleep(6.0)
        rig.hosts.cable(1, plugged=True)
    rig.wait(lambda: failing.phase in ("parked", "halting"), "parked")
    failing.upsd.set("demo", EMPTY)
    rig.wait(failing.marker.exists, "the failed node halts")
    if comes_back:
        assert rig.exits() == [75] * 6, rig.story()
        assert newest(rig).step >= 0
    else:
        rig.wait(lambda: all(rig.ranks[rank].poll() is not None for rank in (2, 3)), "its ranks leave")
    assert [node.number for node in rig.nodes if node.marker.exists()] == [1], rig.story()
    stops = {event["at"] for rank in range(6) for event in rig.heard(rank) if "verdict" in event}
    assert said_so(rig) or newest(rig).step in stops, rig.story()


@more
@pytest.mark.parametrize("ranks", [gloo, light])
def test_a_rank_is_stopped_by_sigstop(rig, ranks):
    """A rank of another host never answers: the job is given up in time, with its name, and nobody waits for it."""
    up(rig, gloo=ranks)
    failing = rig.nodes[1]
    failing.upsd.set("demo", OUTAGE)
    rig.wait(lambda: newest_or_none(rig) is not None, "a snapshot of this outage")
    rig.stop(5, on=True)
    failing.upsd.set("demo", LOW)
    rig.wait(lambda: failing.phase in ("flushing", "parked"), "a stop")
    time.sleep(3.0)
    failing.upsd.set("demo", EMPTY)
    rig.wait(failing.marker.exists, "the failed node halts")
    rig.stop(5, on=False)
    rig.wait(lambda: all(rig.ranks[rank].poll() is not None for rank in range(5)), "the others leave")

    assert newest(rig).step > 0
    assert [node.number for node in rig.nodes if node.marker.exists()] == [1], rig.story()


def said_so(rig: Rig) -> bool:
    """A daemon has told that the last steps are lost."""
    return rig.said("no generation comes of this order") or rig.said("not durable: job")


def newest_or_none(rig: Rig):
    try:
        return newest(rig)
    except Exception:
        return None


@more
@pytest.mark.torch
def test_a_rank_holds_the_gil(parks):
    """Two seconds without a listener: promised for from its page; all stop at one step all the same."""
    rig = parks
    up(rig, gloo=True, wish={"hog": [40, 2.0, 4], "step_s": 0.1})
    rig.wait(lambda: rig.step(4) >= 39, "the hog is near")
    rig.nodes[1].upsd.set("demo", OUTAGE)
    rig.wait(lambda: rig.nodes[1].phase == "parked", "parked")
    rig.nodes[1].upsd.set("demo", EMPTY)
    all_left_at_one_step(rig)
    others_stay(rig, 1)


@more
@pytest.mark.parametrize("ranks", [gloo, light])
def test_mains_come_back(rig, ranks):
    """Before the stop step: the flush completes, then training goes on. After it, parked: the same. Nobody halts."""
    up(rig, gloo=ranks)
    failing = rig.nodes[1]
    failing.upsd.set("demo", LOW)
    rig.wait(lambda: failing.seen(Stage.PREPARE) or failing.phase == "flushing", "a stop is ordered")
    failing.upsd.set("demo", MAINS)
    rig.wait(lambda: failing.phase == "online", "online again")
    trains_on(rig)
    first = newest(rig).step
    failing.upsd.set("demo", LOW)
    rig.wait(lambda: failing.phase == "parked", "parked")
    failing.upsd.set("demo", MAINS)
    rig.wait(lambda: failing.phase == "online", "online again")
    trains_on(rig)

    assert newest(rig).step > first >= 0
    assert not any(node.marker.exists() for node in rig.nodes)
    assert all(rank.poll() is None for rank in rig.ranks)
