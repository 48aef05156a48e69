"""An outage for a training that runs inside the test: a daemon commanded by hand stops it at a step, then halts."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from powerguard.core.messages import Purpose

pytest.importorskip("torch")

PATIENCE_S = 120.0


def _neighbour() -> Any:
    """The hook's own test daemon: the real agreement on the real bus."""
    path = Path(__file__).parent.parent / "train" / "guard" / "conftest.py"
    spec = importlib.util.spec_from_file_location("guard_conftest", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Outage:
    """Stops the run once it asks at step *at*; the node halts as soon as everything is durable."""

    def __init__(self, daemon: Any) -> None:
        self.daemon = daemon
        self.at: int | None = None
        self.options: dict[str, Any] = {"socket": daemon.path, "exit_on_halt": False, "reserve": False}
        self.purpose = Purpose.STOP
        self._thread: threading.Thread | None = None

    def __deepcopy__(self, memo: object) -> Outage:
        """A copy of a model that knows of it knows of the same one."""
        return self

    def tick(self, step: int) -> None:
        """To be called by the training at each of its steps, before the boundary."""
        if self.at != step or self._thread is not None:
            return
        self._until(lambda: any(job.alive for job in self.daemon.jobs.values()))
        self.daemon.order(self.purpose)
        self._thread = threading.Thread(target=self._then, daemon=True)
        self._thread.start()
        self._until(lambda: self.daemon.job.order.step >= 0)

    def _then(self) -> None:
        self._until(lambda: self.daemon.outcome in ("parked", "snapshotted", "lost"))
        if self.purpose is Purpose.STOP:
            self.daemon.halt()

    def _until(self, holds: Callable[[], bool]) -> None:
        ends = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < ends
            time.sleep(0.005)

    def over(self) -> None:
        """Everything that an outage began has ended, the node has rebooted, its daemon knows of nothing."""
        if self._thread is not None:
            self._thread.join(PATIENCE_S)
            assert not self._thread.is_alive()
        self.daemon.kill()
        self.daemon.journal = b"{}"
        self.daemon.start()
        self.at, self._thread = None, None


@pytest.fixture
def outage(tmp_path: Path) -> Iterator[Outage]:
    """A daemon, and an outage that begins when `at` says so."""
    neighbour = _neighbour()
    policy = neighbour.Policy(prepare_max_s=10.0, hold_max_s=30.0, seal_max_s=10.0, exit_wait_s=30.0, flush_max_s=60.0)
    daemon = neighbour.Daemon(tmp_path / "d.sock", policy).start()
    each = Outage(daemon)
    yield each
    each.over()
    daemon.kill()
