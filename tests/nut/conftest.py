"""A real NUT for the tests of this folder; they are skipped, with the reason, where there is none."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator

import pytest

from powerguard.core.types import Comm, Sample
from powerguard.node.ups import UpsReader
from powerguard.node.ups_line import UpsAddress
from powerguard.sim.nut import RealNut, missing

DEVICE = {"ups.status": "OL", "battery.charge": "100", "battery.runtime": "1200", "ups.load": "35", "ups.mfr": "Acme"}

ODD = r"""
ups.status: OL
ups.mfr: A"B\C
device.description: he said "hi" and \\ back
"""

STORY = """
ups.status: OL
TIMER 1
ups.status: OB DISCHRG
TIMER 1
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs NUT."""
    why = missing("upsd", "dummy-ups")
    for item in items:
        if "/tests/nut/" in item.path.as_posix():
            item.add_marker(pytest.mark.nut)
            item.add_marker(pytest.mark.slow)
            if why:
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def nut() -> Iterator[RealNut]:
    """A running upsd with dummy UPSes, `demo`, `other` and more, for all tests, which leave it as it was."""
    with RealNut({"demo": DEVICE, "other": DEVICE, "odd": ODD, "story": STORY}, maxage_s=3) as running:
        yield running


class Listener:
    """One reader and its samples."""

    def __init__(self, address: UpsAddress, **options) -> None:
        self.samples: queue.SimpleQueue[Sample] = queue.SimpleQueue()
        options = {"poll_s": 0.1, "answer_s": 0.5, "poll_max_s": 1.0, **options}
        self.reader = UpsReader(address, self.samples.put, time.monotonic, **options)
        self.reader.start()

    def until(self, wanted: Callable[[Sample], bool], within_s: float = 10.0) -> list[Sample]:
        """The samples up to the first *wanted* one, which is the last of them."""
        seen: list[Sample] = []
        ends = time.monotonic() + within_s
        while not seen or not wanted(seen[-1]):
            try:
                seen.append(self.samples.get(timeout=max(0.01, ends - time.monotonic())))
            except queue.Empty:
                raise AssertionError(f"not within {within_s} s; the last samples: {seen[-3:]}") from None
        return seen

    def comm(self, comm: Comm, within_s: float = 10.0) -> Sample:
        """The next sample in that state."""
        return self.until(lambda sample: sample.comm is comm, within_s)[-1]


@pytest.fixture
def listen(nut) -> Iterator[Callable[..., Listener]]:
    """Starts readers of the shared NUT (or of another address) and ends them."""
    started: list[Listener] = []

    def start(ups: str = "demo", address: UpsAddress | None = None, **options) -> Listener:
        started.append(Listener(address or UpsAddress.parse(nut.address(ups)), **options))
        return started[-1]

    yield start
    for each in started:
        assert each.reader.close()
