"""Rig: the power of a real file system goes at every instant of a flush and of a retention delete.

Every instant: before each call by which the save changes the disk, in the middle of each write, and after the last
call; each with and without the file system's own log flushed; past the page cache and through it. After each cut comes
a reboot. Then must hold:

- the newest generation that is taken is at least as new as the last one reported durable, verifies, and loads: every
  value of every rank is that of its step;
- what counts as whole is whole, byte for byte, whether it is the newest or not, and nothing is sealed that isn't;
- what the retention was told to keep is there.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from msgspec import Struct

from hil.virtual.disks import FaultyDisk, PageCacheDisk
from hil.virtual.volume import Cut, Volume
from powerguard.errors import DrillFailed, PowerguardError
from powerguard.generations import generation_name, latest, retire, scan, seal
from powerguard.generations.verify import verify
from powerguard.train.flush import Flusher
from powerguard.train.load import load_state

KEEP = 2
FLOATS = (2_200_000, 100_000)  # of each rank: the first has a chunk of 8 MiB and a bit
DISKS: dict[str, type[FaultyDisk]] = {"O_DIRECT": FaultyDisk, "page cache": PageCacheDisk}
PHASES = ("flush", "retention")
INSTANTS_MAX = 300  # a save of two ranks makes 26 calls
TORN_BYTES = 4096  # what is written of a write before the cut; a multiple of what O_DIRECT asks for


class Tally(Struct):
    """What one file system went through."""

    kind: str
    flush: int = 0  # cuts in a flush
    retention: int = 0
    torn: int = 0  # of both: cuts in the middle of a write
    after: int = 0  # of both: cuts right after the last call
    newest: int = 0  # how often the generation being written was the one taken
    older: int = 0  # how often the one before it was

    @property
    def cuts(self) -> int:
        """All."""
        return self.flush + self.retention

    def __str__(self) -> str:
        return (
            f"{self.kind}: {self.cuts} cuts, {self.flush} in a flush ({self.torn} in a write) and {self.retention} in "
            "a retention delete; "
            f"the newest generation was taken {self.newest} times, the one before it {self.older} times; each verified "
            "and loaded, nothing half-written was taken, nothing that was to be kept is gone"
        )


class Run:
    """Ranks of a training run that save into one directory through one disk."""

    def __init__(self, directory: Path, disk: FaultyDisk) -> None:
        self.directory, self.disk = directory, disk
        world = len(FLOATS)
        self._flushers = [Flusher(directory, rank=rank, world_size=world, disk=disk) for rank in range(world)]
        for rank, flusher in enumerate(self._flushers):
            flusher.prepare(state_of(rank, 0), prove=False)
        self.step = max((generation.step for generation in scan(directory)), default=0)

    def flush(self) -> Iterator[str]:
        """Yields a new generation's name when every rank has reported its part durable, and again when it is sealed."""
        self.step += 1
        name = generation_name(self.step, "cut")
        records = [
            flusher.flush(state_of(rank, self.step), self.step, name)[1].record
            for rank, flusher in enumerate(self._flushers)
        ]
        yield name
        seal(self.directory, name, step=self.step, world_size=len(records), shards=records, disk=self.disk)
        yield name

    def retention(self) -> None:
        """Retires what is too old, and reserves room for the next saves."""
        retire(self.directory, KEEP, disk=self.disk)
        for flusher in self._flushers:
            flusher.settle()

    def close(self) -> None:
        for flusher in self._flushers:
            flusher.close()


def state_of(rank: int, step: int) -> dict[str, object]:
    """A state that tells its rank and step by every value."""
    return {"w": torch.full((FLOATS[rank],), float(10 * step + rank)), "step": step}


def cut_everywhere(volume: Volume, *, every: int = 1, disks: Mapping[str, type[FaultyDisk]] = DISKS) -> Tally:
    """Every *every*-th instant, and the last. Raises DrillFailed at the first broken promise."""
    tally = Tally(volume.kind)
    for number, (phase, disk, how) in enumerate(itertools.product(PHASES, disks, Cut)):
        series = _Series(phase, disk, disks[disk], how)
        for at in range(number % every, INSTANTS_MAX, every):
            call = _cut_one(volume, tally, series, at)
            if call.startswith("pwrite"):
                _cut_one(volume, tally, series, at, torn=True)
            if not call:
                break
        else:
            raise DrillFailed(f"a {phase} made more than {INSTANTS_MAX} calls")
    return tally


class _Series(Struct, frozen=True):
    """Cuts that differ in their instant alone."""

    phase: str
    through: str
    disk: type[FaultyDisk]
    how: Cut


def _cut_one(volume: Volume, tally: Tally, series: _Series, at: int, *, torn: bool = False) -> str:
    """One cut before call *at* of the phase, or in it; the reboot, and what must hold. That call, or ""."""
    disk = series.disk()
    run = Run(volume.path / "run", disk)
    while len(_sealed(run.directory)) < KEEP + (series.phase == "retention"):
        list(run.flush())
    must = _sealed(run.directory)[:KEEP]

    def cut(number: int, name: str) -> int | None:
        if torn and number == at and name.startswith("pwrite"):
            return TORN_BYTES  # the rest of it is the next call
        if number == at + torn:
            volume.cut(series.how)
        return None

    disk.number, disk.fault = 0, cut
    disk.names.clear()
    with contextlib.suppress(PowerguardError):
        if series.phase == "flush":
            for name in run.flush():
                must = [name, *must]
        else:
            run.retention()
    disk.fault = lambda _number, _name: None
    call = disk.names[at] if at < len(disk.names) else ""
    over = not volume.down
    if over:
        volume.cut(series.how)
    run.close()
    volume.reboot()
    where = f"{volume.kind}, cut {at} of a {series.phase}, {series.through}, {series.how.name}"
    taken = check(run.directory, must, where)
    setattr(tally, series.phase, getattr(tally, series.phase) + 1)
    tally.torn += torn
    tally.after += over
    tally.newest += taken == run.step
    tally.older += taken < run.step
    return call


def _sealed(directory: Path) -> list[str]:
    return [generation.name for generation in scan(directory) if generation.sealed and generation.whole]


def check(directory: Path, must: list[str], where: str) -> int:
    """The step of the generation that is taken; *must* are names that have to be there, newest first.

    Raises DrillFailed if anything of the module's list doesn't hold.
    """
    found = latest(directory)
    if found.generation is None:
        raise DrillFailed(f"{where}: nothing can be loaded; {found.describe()}")
    everything = {generation.name: generation for generation in scan(directory)}
    for name in must:
        if name not in everything or not everything[name].whole:
            raise DrillFailed(f"{where}: {name} was durable and is lost; {found.describe()}")
    if must and found.generation.step < everything[must[0]].step:
        raise DrillFailed(f"{where}: {found.generation.name} was taken though {must[0]} is durable")
    for generation in everything.values():
        if generation.sealed and not generation.whole:
            raise DrillFailed(f"{where}: {generation.name} is sealed and not whole: {generation.problems}")
        problems = verify(generation) if generation.whole else []
        if problems:
            raise DrillFailed(f"{where}: {generation.name} counts as whole: {problems[0]}")
    step = found.generation.step
    for rank in range(len(FLOATS)):
        there = state_of(rank, 0)
        values = load_state(found.generation, rank, there).values
        tensor = there["w"]
        assert isinstance(tensor, torch.Tensor)
        if values["step"] != step or not bool(tensor.eq(10 * step + rank).all()):
            raise DrillFailed(f"{where}: {found.generation.name} holds other values than were saved")
    return step
