"""What tests of several rooms share; keep it small."""

from __future__ import annotations

import faulthandler
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from powerguard.sim.upsd import HEALTHY, SimUpsd

# The same examples each time, and no verdict by the clock: a slow machine isn't a bug.
settings.register_profile("tests", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """A thread or a child that a test left must not hold the process for ever: it says where it stands, and ends."""
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(60.0, exit=True, file=sys.__stderr__)


@pytest.fixture
def upsd() -> Iterator[SimUpsd]:
    """A simulated NUT server with one healthy UPS, `demo`."""
    with SimUpsd() as server:
        server.replace("demo", HEALTHY)
        yield server


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Waits, bounded, until a condition holds; fails with the condition's last value."""

    def wait(condition: Callable[[], object], within_s: float = 10.0) -> None:
        ends = time.monotonic() + within_s
        while not (value := condition()):
            assert time.monotonic() < ends, f"not within {within_s} s; last seen: {value!r}"
            time.sleep(0.005)

    return wait
