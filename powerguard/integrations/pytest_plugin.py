"""pytest fixtures that make the mains fail, so that anybody can test that their own training survives it.

Installed with powerguard and found by pytest by itself::

    def test_my_training_survives(blackout):
        train = ["train.py", "--dir", "{checkpoints}", "--save", "{out}/model.pt"]
        blackout.run(["torchrun", "--nproc-per-node", "2", *train]).assert_resumed_exactly()

Three fixtures, each for one test:

* `ups`: a simulated UPS on a NUT server of its own (`drill.power.SimulatedUps`): `address`, `cut_mains()`,
  `restore_mains()`, `load(pct)`, `fault(kind)`;
* `powerguard_daemon`: a real daemon that watches `ups` (`drill.trial.RunningDaemon`): `env`, `phase`, `steps()`,
  `wait_for(phase)`, `order(verb)`, `halted`;
* `blackout`: runs a command through a power failure and a restart (`drill.trial.Blackout.run`, `Survival`).

They need the extras `node` and, for training with the hook, `train`. Nothing here is loaded before a test asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from powerguard.drill.power import SimulatedUps
    from powerguard.drill.trial import Blackout, RunningDaemon


@pytest.fixture
def ups() -> Iterator[SimulatedUps]:
    """A UPS of one minute at full training load, on line."""
    from powerguard.drill.power import simulated

    with simulated() as each:
        yield each


@pytest.fixture
def powerguard_daemon(ups: SimulatedUps, tmp_path: Path) -> Iterator[RunningDaemon]:
    """A daemon that watches `ups`, listening."""
    from powerguard.drill.trial import running_daemon

    with running_daemon(tmp_path / "powerguard", ups.address) as each:
        yield each


@pytest.fixture
def blackout(ups: SimulatedUps, tmp_path: Path) -> Iterator[Blackout]:
    """A power failure for a command."""
    from powerguard.drill.trial import Blackout

    each = Blackout(tmp_path / "blackout", ups.supply, ups.address)
    try:
        yield each
    finally:
        each.close()
