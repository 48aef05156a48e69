"""What a run leaves: a trace of the UPS as CSV, with what was done to it as comments.

A column is a NUT variable, `t_s` is seconds since the first row. `powerguard replay` reads that, so every run on real
hardware can be put before the estimator again.
"""

from __future__ import annotations

import csv
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from powerguard import __version__
from powerguard.node.ups_line import printable

COLUMNS = (
    "ups.status", "battery.charge", "battery.runtime", "battery.voltage", "ups.load", "input.voltage", "output.voltage",
    "battery.charge.low", "battery.runtime.low",
)  # fmt: skip
ABOUT = (
    "device.mfr", "device.model", "ups.mfr", "ups.model", "ups.firmware", "ups.power.nominal", "ups.realpower.nominal",
    "battery.type", "battery.date", "battery.mfr.date", "battery.voltage.nominal", "battery.capacity",
    "driver.name", "driver.version",
)  # fmt: skip
"""What is said of the UPS in the head. No serial number: recordings are meant to be passed on."""


class Recording:
    """A file that is on the disk after every line: the node that writes it may be the one whose power goes."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        created = datetime.now(UTC)
        self.path = folder / f"{name}-{created:%Y%m%dT%H%M%SZ}.csv"
        self._file = self.path.open("x", encoding="utf-8", newline="")
        self._rows = csv.writer(self._file, lineterminator="\n")
        self._first: float | None = None
        self.note(f"rig {name}, {created.isoformat(timespec='seconds')}, powerguard {__version__}, {platform.system()}")

    def row(self, at: float, variables: Mapping[str, str]) -> None:
        """One poll at *at* (seconds of any steady clock)."""
        if self._first is None:
            self._first = at
            for name in ABOUT:
                if variables.get(name):
                    self.note(f"{name}: {variables[name]}")
            self._rows.writerow(("t_s", *COLUMNS))
        values = [printable(variables.get(name, "")) for name in COLUMNS]
        self._rows.writerow((f"{at - self._first:.2f}", *values))
        self._sync()

    def note(self, text: str) -> None:
        """Something that was done or seen."""
        self._file.write(f"# {' '.join(printable(text).split())}\n")
        self._sync()

    def close(self) -> None:
        self._file.close()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
