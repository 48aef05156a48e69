"""`powerguard record`: a trace of a real UPS, a row a poll, as `powerguard replay` reads it (docs/traces.md).

Only the columns below are kept: no serial number, no name of a host, nothing that says whose UPS it is.
"""

from __future__ import annotations

import contextlib
import csv
import queue
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from powerguard import __version__
from powerguard.cli.limits import within
from powerguard.cli.out import say, seconds, warn
from powerguard.core.status import parse
from powerguard.core.types import Comm, Sample
from powerguard.errors import DirectoryError, UpsNotReady, UsageError
from powerguard.node import clock
from powerguard.node.ups import UpsReader
from powerguard.node.ups_line import UpsAddress
from powerguard.node.ups_probe import probe

FORMAT = "powerguard trace 1"
COLUMNS = (
    "ups.status",
    "ups.load",
    "ups.alarm",
    "battery.charge",
    "battery.charge.low",
    "battery.runtime",
    "battery.runtime.low",
    "battery.voltage",
    "battery.voltage.nominal",
    "battery.temperature",
    "input.voltage",
)
"""What the estimator reads, and what tells a strange discharge from a plain one."""
ABOUT = (
    "ups.mfr",
    "ups.model",
    "ups.power.nominal",
    "ups.realpower.nominal",
    "ups.firmware",
    "battery.type",
    "battery.date",
    "battery.mfr.date",
    "battery.packs",
    "driver.name",
    "driver.version",
    "driver.parameter.pollfreq",
    "driver.parameter.pollinterval",
)
"""Said once, in comments at the top."""
EVERY_S = (0.5, 3600.0)
FIRST_S = 15.0
"""A UPS that hasn't answered for so long isn't recorded."""


def register(app: typer.Typer) -> None:
    """Adds the command to *app*."""
    app.command()(record)


def record(
    ups: Annotated[str, typer.Argument(metavar="UPS", help="name[@host[:port]] as NUT has it", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="the .csv; trace-UPS-DATE.csv by default", show_default=False)
    ] = None,
    every: Annotated[float, typer.Option(help="seconds between polls")] = 5.0,
    for_s: Annotated[float, typer.Option("--for", help="seconds to record; 0 = until Ctrl-C")] = 0.0,
) -> None:
    """Record a UPS into a trace: before, in and after an outage or a test on battery.

    Every row is handed to the system before the next poll, so a power cut loses the last seconds at most. `powerguard
    replay TRACE.csv` tells what the runway would have said of it.
    """
    within("--every", every, *EVERY_S, todo="upsd's drivers poll every 2 s or slower")
    within("--for", for_s, 0.0, todo="give seconds, 0 to record until Ctrl-C")
    address = UpsAddress.parse(ups)
    path = out or Path(f"trace-{address.ups}-{datetime.now():%Y%m%d-%H%M%S}.csv")  # noqa: DTZ005 - a name for people
    probe(address)
    samples: queue.SimpleQueue[Sample] = queue.SimpleQueue()
    reader = UpsReader(address, samples.put, clock.now, poll_s=every)
    reader.start()
    try:
        rows = _write(path, samples, for_s)
    finally:
        reader.close()
    say(f"{rows} rows: {path}")


def _write(path: Path, samples: queue.SimpleQueue[Sample], for_s: float) -> int:
    """Rows until the time is over or Ctrl-C; how many."""
    first = _first(samples)
    rows = 0
    try:
        with path.open("x", encoding="utf-8", newline="") as file:
            file.write(head(first.variables))
            table = csv.writer(file)
            table.writerow(["t_s", "wall", "comm", *COLUMNS])
            with contextlib.suppress(KeyboardInterrupt):
                sample: Sample | None = first
                was: bool | None = None
                while sample is not None:
                    table.writerow(row(sample, sample.at - first.at, datetime.now(tz=UTC)))
                    file.flush()
                    rows += 1
                    was = _tell(sample, sample.at - first.at, was)
                    sample = _next(samples, first.at + for_s if for_s > 0.0 else None)
    except FileExistsError:
        raise UsageError(f"{path} is there already", todo="name another file with --out") from None
    except OSError as err:
        raise DirectoryError(f"{path} can't be written: {err.strerror or err}", todo="name another file") from None
    return rows


def _first(samples: queue.SimpleQueue[Sample]) -> Sample:
    """The first good sample; UpsNotReady says what came instead."""
    end = time.monotonic() + FIRST_S
    said = "nothing came"
    while time.monotonic() < end:
        with contextlib.suppress(queue.Empty):
            sample = samples.get(timeout=0.5)
            if sample.comm is Comm.OK:
                return sample
            said = f"{sample.comm.value}{f', {sample.detail}' if sample.detail else ''}"
    raise UpsNotReady(f"this UPS can't be read: {said}", todo="see: upsc")


def _next(samples: queue.SimpleQueue[Sample], end: float | None) -> Sample | None:
    while True:
        with contextlib.suppress(queue.Empty):
            sample = samples.get(timeout=0.2)
            return None if end is not None and sample.at > end else sample
        if end is not None and clock.now() > end:
            return None


def head(variables: Mapping[str, str]) -> str:
    """The comments at the top."""
    lines = [f"# {FORMAT}, powerguard {__version__}"]
    lines += [f"# {name}: {variables[name]}".replace("\n", " ") for name in ABOUT if variables.get(name)]
    return "\n".join(lines) + "\n"


def row(sample: Sample, at: float, wall: datetime) -> list[str]:
    """One poll; what couldn't be read is empty."""
    values = [sample.variables.get(name, "") for name in COLUMNS]
    return [f"{at:.1f}", wall.isoformat(timespec="seconds"), sample.comm.value, *values]


def _tell(sample: Sample, at: float, was: bool | None) -> bool | None:
    """A word when mains go or come."""
    reading = parse(sample)
    if reading.on_battery is not None and reading.on_battery is not was:
        charge = "" if reading.charge_pct is None else f", charge {reading.charge_pct:g} %"
        runtime = "" if reading.runtime_s is None else f", runtime {seconds(reading.runtime_s)}"
        warn(f"{at:.0f} s: {'on battery' if reading.on_battery else 'on line'}{charge}{runtime}")
        return reading.on_battery
    return was
