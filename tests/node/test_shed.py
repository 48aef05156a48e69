"""Shedding: when it is wanted, once, and put back whatever failed in between."""

from __future__ import annotations

import queue

import pytest

from powerguard.core.types import LoadStep
from powerguard.node.gpus import Limits
from powerguard.node.shed import Direct, Shedder, ShedFailed, Unit, choose, expected
from powerguard.sim.nvml import FakeGpu, FakeNvml

WAIT_S = 20.0


class FakeWay:
    """Counts; *broken* fails."""

    name = "fake"

    def __init__(self) -> None:
        self.did: queue.Queue[str] = queue.Queue()
        self.broken = False

    def lower(self) -> str:
        return self._do("lower")

    def restore(self) -> str:
        return self._do("restore")

    def _do(self, what: str) -> str:
        self.did.put(what)
        if self.broken:
            raise RuntimeError("the driver hangs")
        return what


@pytest.fixture
def way():
    return FakeWay()


@pytest.fixture
def steps():
    return queue.Queue()


def test_the_first_word_is_carried_out_either_way(way, steps, eventually):
    """A daemon that starts on mains puts back what a dead one may have left; that is no step of the load."""
    shedder = Shedder(way, steps.put)
    shedder.want(False)

    assert "restore" == way.did.get(timeout=WAIT_S)
    shedder.close(restore=True)
    assert steps.empty()


def test_lowered_on_battery_and_put_back(way, steps):
    """Each change once, however often it is wanted, and the estimator is told the factor and its inverse."""
    shedder = Shedder(way, steps.put, factor=0.8)
    for _ in range(3):
        shedder.want(True)
    assert LoadStep(0.8) == steps.get(timeout=WAIT_S)
    assert shedder.lowered
    for _ in range(3):
        shedder.want(False)
    assert LoadStep(1.25) == steps.get(timeout=WAIT_S)
    shedder.close(restore=True)

    assert ["lower", "restore"] == [way.did.get_nowait(), way.did.get_nowait()]
    assert way.did.empty()
    assert not shedder.lowered


def test_a_failure_is_told_and_tried_again(way, steps, eventually):
    """Whatever the driver does, the thread goes on; the trouble ends when it works."""
    way.broken = True
    shedder = Shedder(way, steps.put, retry_s=0.01)
    shedder.want(True)
    eventually(lambda: "isn't lowered: the driver hangs" in shedder.trouble())
    assert not shedder.lowered
    way.broken = False
    eventually(lambda: shedder.lowered)

    assert "" == shedder.trouble()
    shedder.close(restore=True)


class HalfWay:
    """Lowers the first of two, and fails at the second."""

    name = "half"

    def __init__(self) -> None:
        self.low = queue.Queue()

    def lower(self) -> str:
        self.low.put(True)
        raise ShedFailed("GPU 1: Insufficient Permissions")

    def restore(self) -> str:
        self.low.put(False)
        return "restored"


@pytest.mark.parametrize("closed", [False, True], ids=["mains back", "stopped"])
def test_what_was_lowered_before_a_failure_is_put_back(steps, closed):
    """The next word is carried out, whatever is believed of the limits; the load was never told to be lower."""
    way = HalfWay()
    shedder = Shedder(way, steps.put, retry_s=1e6)
    shedder.want(False)
    assert way.low.get(timeout=WAIT_S) is False
    shedder.want(True)
    assert way.low.get(timeout=WAIT_S) is True
    if not closed:
        shedder.want(False)
        assert way.low.get(timeout=WAIT_S) is False
    shedder.close(restore=True, wait_s=WAIT_S)

    assert ([False] if closed else []) == list(way.low.queue)
    assert steps.empty()
    assert "" == shedder.trouble()


def test_closing_restores_unless_the_node_goes_down(way, steps):
    """A daemon that is stopped leaves no GPU slow; one that ends with its node leaves it be."""
    for restore, left in ((True, ["lower", "restore"]), (False, ["lower"])):
        shedder = Shedder(way, steps.put)
        shedder.want(True)
        steps.get(timeout=WAIT_S)
        shedder.close(restore=restore)
        assert left == [way.did.get_nowait() for _ in left]
        assert way.did.empty()


def test_nothing_to_shed_is_nothing(steps):
    """Without a way no thread is started and nothing is in trouble."""
    shedder = Shedder(None, steps.put)
    shedder.want(True)
    shedder.close(restore=True)

    assert (False, "") == (shedder.lowered, shedder.trouble())
    assert choose(0.0, "auto", "boot") is None


def test_the_ways(monkeypatch):
    """root does it itself, anybody else through the unit, unless the configuration says which."""
    assert isinstance(choose(60.0, "direct", "boot"), Direct)
    assert isinstance(choose(60.0, "unit", "boot"), Unit)
    monkeypatch.setattr("os.geteuid", lambda: 999)
    assert isinstance(choose(60.0, "auto", "boot"), Unit)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert isinstance(choose(60.0, "auto", "boot"), Direct)


def test_direct_says_what_it_did_and_what_failed(tmp_path):
    """By NVML in this process: done in words, or ShedFailed with NVML's."""
    nvml = FakeNvml([FakeGpu()])
    way = Direct(60.0, lambda: Limits(tmp_path / "note", "boot", nvml))

    assert "700 W -> 420 W" in way.lower()
    assert "420 W -> 700 W" in way.restore()
    nvml.gpus[0].locked = True
    with pytest.raises(ShedFailed, match="Insufficient Permissions"):
        way.lower()
    nvml.missing = True
    with pytest.raises(ShedFailed, match="NVML"):
        way.lower()


def test_the_unit_is_started_and_stopped(tmp_path):
    """Through systemctl, which may not ask anybody; its failure is told with where to look."""
    fake = tmp_path / "systemctl"
    fake.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/said\n')
    fake.chmod(0o755)
    way = Unit("shed.service", str(fake))
    way.lower()
    way.restore()

    assert ["--no-ask-password start shed.service", "--no-ask-password stop shed.service"] == (
        (tmp_path / "said").read_text().splitlines()
    )
    fake.write_text("#!/bin/sh\necho Access denied >&2\nexit 4\n")
    with pytest.raises(ShedFailed, match=r"Access denied; see: journalctl -u shed\.service"):
        way.lower()


@pytest.mark.parametrize(("pct", "factor"), [(100.0, 1.0), (60.0, 0.78), (50.0, 0.725), (20.0, 0.7)])
def test_what_is_expected_of_it(pct, factor):
    """GPUs are about half of a node; less than 0.7 would be taken for a park."""
    assert factor == pytest.approx(expected(pct))
