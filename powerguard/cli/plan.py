"""Whether this UPS can carry this job: the daemon's own arithmetic on what is known beforehand."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from powerguard import generations
from powerguard.cli.out import seconds, size
from powerguard.config import Config
from powerguard.core import feeds
from powerguard.core.capacity import LOAD_EXPONENT
from powerguard.core.job import Job, Member
from powerguard.core.messages import Pace
from powerguard.core.need import Need, reckon
from powerguard.core.policy import Policy
from powerguard.core.types import Sample
from powerguard.errors import DirectoryError, UsageError
from powerguard.generations import paces
from powerguard.generations.paces import Save
from powerguard.train.pace import PaceMeter

RATE_S = 2.0
"""The disk is written for this long to measure it."""
BLOCK = 8 << 20
RATE_BYTES_MAX = 4 << 30

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}


class Plan(Struct, frozen=True):
    """Runway, need and spare of an outage that begins now; None is unknown."""

    runway_s: float | None
    idle_runway_s: float | None
    runway_by: str
    load_pct: float | None
    need_s: float
    save_s: float
    halt_s: float
    need_by: str
    margin_s: float
    spare_s: float | None
    state_bytes: float | None
    write_mbps: float | None

    @property
    def carries(self) -> bool | None:
        """Whether a job that trains when the mains fail is saved and the node halted; None: not known."""
        return None if self.spare_s is None else self.spare_s >= 0.0


def make(
    config: Config,
    samples: tuple[Sample, ...],
    now: float,
    *,
    need: Need,
    load_pct: float | None = None,
    state_bytes: float | None = None,
    write_mbps: float | None = None,
) -> Plan:
    """The plan for *samples*, one of each feed, as if read on mains a moment ago; at *load_pct* if given."""
    samples = tuple(_at_load(sample, load_pct) for sample in samples)
    policy = config.policy
    known = feeds.absorb(policy, {}, samples, now)
    power = feeds.view(policy, known, now, save_s=need.total_s + policy.margin_s, halt_s=need.halt_s)
    runway_s = power.runway_s
    loads = [f.reading.load_pct for f in known.values() if f.reading is not None and f.reading.load_pct is not None]
    return Plan(
        runway_s=runway_s,
        idle_runway_s=power.idle_runway_s,
        runway_by=power.by,
        load_pct=max(loads, default=None),
        need_s=need.total_s,
        save_s=need.save_s,
        halt_s=need.halt_s,
        need_by=need.by,
        margin_s=policy.margin_s,
        spare_s=None if runway_s is None else runway_s - need.total_s - policy.margin_s,
        state_bytes=state_bytes,
        write_mbps=write_mbps,
    )


def need_of(config: Config, state_bytes: float | None, write_mbps: float | None) -> Need:
    """The need of one job of *state_bytes* written at *write_mbps*; with either unknown, the configured default."""
    write_s = state_bytes / (write_mbps * 1e6) if state_bytes is not None and write_mbps else 0.0
    pace = Pace(write_s=write_s, state_bytes=int(state_bytes or 0))
    by = (
        f"{size(state_bytes)} at {write_mbps:.0f} MB/s"
        if write_s and write_mbps
        else "nothing measured: flush_default_s"
    )
    return need_of_pace(config.policy, pace, by)


def pace_of(saves: Sequence[Save], ranks: int) -> Pace:
    """The pace by *saves* of ranks of which *ranks* write to one disk at once."""
    meter = PaceMeter()
    meter.shared_by(ranks)
    meter.recall(saves, max((save.bytes for save in saves), default=0))
    return meter.pace()


def need_of_pace(policy: Policy, pace: Pace, by: str) -> Need:
    """The need of one job whose slowest rank has *pace*."""
    need = reckon(policy, {"this job": Job("this job", 1, members={0: Member(0, 1, os.getpid(), pace=pace)})}, 0.0)
    return msgspec.structs.replace(need, by=by)


def kept_need(policy: Policy, directory: Path | None, state_bytes: float | None) -> Need | None:
    """The need by what saves into *directory* have taken, or a calibration; None where nothing fitting is known."""
    saves = paces.everybody(directory) if directory is not None else ()
    if not saves:
        return None
    rank_bytes = float(saves[-1].bytes)
    size_now = state_bytes or rank_bytes
    ranks = max(1, round(size_now / rank_bytes))
    alike = paces.like(saves, int(size_now / ranks))[-paces.SAVES :]
    if not alike:
        return None
    return need_of_pace(policy, pace_of(alike, ranks), f"{len(alike)} saves measured there, the slowest counts")


def newest_bytes(directory: Path | None) -> float | None:
    """The size of the newest whole generation there, if there is one that can be seen."""
    if directory is None:
        return None
    try:
        return next((float(one.bytes) for one in generations.scan(directory) if one.whole), None)
    except DirectoryError:
        return None  # what is wrong with the directory is a finding of its own


def measure_mbps(directory: Path, for_s: float = RATE_S) -> float:
    """Megabytes a second that reach the disk under *directory*, synced; DirectoryError if it can't be written."""
    path = directory / f".powerguard-rate-{os.getpid()}"
    block, written, began = os.urandom(BLOCK), 0, time.monotonic()
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            while time.monotonic() - began < for_s and written < RATE_BYTES_MAX:
                written += os.write(fd, block)
                os.fdatasync(fd)
        finally:
            os.close(fd)
            path.unlink()
    except OSError as err:
        raise DirectoryError(f"{directory} can't be measured: {err.strerror}", todo="give --write-mbps") from None
    return written / 1e6 / max(1e-6, time.monotonic() - began)


def parse_bytes(text: str) -> float:
    """ "80GB", "80GiB", "512M" or a plain number of bytes."""
    digits = text.strip().rstrip("bB").lower()
    unit = digits.lstrip("0123456789.")
    try:
        value = float(digits.removesuffix(unit)) * _UNITS[unit.strip()]
    except (ValueError, KeyError):
        raise UsageError(f"{text!r} isn't a size", todo="write it as 80GB, 80GiB or a number of bytes") from None
    if not 0 < value < 1e18:
        raise UsageError(f"{text!r} isn't a size of a training state", todo="write it as 80GB")
    return value


def words(plan: Plan, on_battery: str) -> list[str]:
    """The plan for people."""
    load = "" if plan.load_pct is None else f" at a load of {plan.load_pct:.0f} %"
    by = f" ({plan.runway_by})" if plan.runway_by else ""
    lines = [
        f"runway  {seconds(plan.runway_s)}{load}{by}, {seconds(plan.idle_runway_s)} with ranks parked",
        f"need    {seconds(plan.need_s)}: save {seconds(plan.save_s)} ({plan.need_by}), halt {seconds(plan.halt_s)}",
        f"spare   {seconds(plan.spare_s)}, after a margin of {seconds(plan.margin_s)}",
    ]
    if plan.spare_s is None:
        return [*lines, "on mains this UPS doesn't say enough to know: the first outage, or a drill on it, will"]
    if plan.spare_s >= 0 and on_battery == "ride":
        return [
            *lines,
            f"an outage now: training goes on for {seconds(plan.spare_s)}, then all is saved and the node halts",
        ]
    if plan.spare_s >= 0:
        return [
            *lines,
            "an outage now: training stops soon, all is saved, ranks wait for mains while the battery lasts",
        ]
    return lines


def _at_load(sample: Sample, load_pct: float | None) -> Sample:
    """The same UPS at another load: its runtime falls with the load's power (see `core.capacity`)."""
    values = dict(sample.variables)
    if load_pct is None:
        return sample
    try:
        old, runtime = float(values["ups.load"]), float(values["battery.runtime"])
        values["battery.runtime"] = f"{runtime * (max(old, 1.0) / load_pct) ** LOAD_EXPONENT:.0f}"
    except (KeyError, ValueError):
        pass
    values["ups.load"] = f"{load_pct:g}"
    return msgspec.structs.replace(sample, variables=values)
