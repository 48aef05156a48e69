"""Real hardware: POWERGUARD_HIL_RIG=hil/rigs/mine.toml python -m pytest -s -m hil tests/hil (see hil/README.md)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hil.__main__ import RECORDINGS, ask, tell
from hil.bench import Bench
from hil.rig import load
from powerguard.cli.trace import read
from powerguard.core.status import parse
from powerguard.core.types import Comm, Sample

pytestmark = [pytest.mark.hil, pytest.mark.timeout(0)]


def test_an_outage():
    """The UPS sees both edges, and every row of the recording is one that the estimator can read."""
    rig = load(Path(os.environ["POWERGUARD_HIL_RIG"]))
    result = Bench(rig, RECORDINGS, ask, tell).run()
    tell(str(result))

    assert result.edge_s is not None
    assert result.back_s is not None
    readings = [parse(Sample(rig.name, row.at, Comm.OK, row.variables)) for row in read(result.recording, {})]
    assert {True, False} <= {reading.on_battery for reading in readings}
    tell("\n".join(sorted({note for reading in readings for note in reading.notes})) or "nothing odd was reported")
