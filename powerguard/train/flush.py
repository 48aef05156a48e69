"""The flush engine of one rank: stage a state in host memory, make it durable, load it again.

::

    flusher = Flusher("/checkpoints/run1", rank=0, world_size=1)
    flusher.prepare(state)                             # once: memory, disk space, the fastest way of writing
    staged = flusher.stage(state, step)                # the training thread waits for this copy only
    flusher.write(staged, "step-0000000123.p1")        # durable on return; from any thread
    flusher.load(generation, state)                    # verified, into the objects that are there

No collective is ever called. Memory: two times the state, made at `prepare`; loading takes 8 MiB a thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch
from msgspec import Raw, Struct

from powerguard.core.messages import ShardRecord
from powerguard.errors import CheckpointError, DirectoryError, StateError
from powerguard.generations import resumes
from powerguard.generations.disk import DISK, Disk
from powerguard.generations.durable import trouble, uninterrupted
from powerguard.generations.names import SHARD, parse_generation, rank_name
from powerguard.generations.retire import retire, sweep
from powerguard.generations.scan import Generation, Skipped, latest
from powerguard.train import rng
from powerguard.train.arena import Slot, make_slots
from powerguard.train.blobs import Blob
from powerguard.train.commit import Shard, commit
from powerguard.train.foresee import foreseen_bytes
from powerguard.train.layout import Layout, plan, signature
from powerguard.train.load import LoadReport, load_state
from powerguard.train.reserve import Reserve
from powerguard.train.stage import copy_into
from powerguard.train.tree import gather
from powerguard.train.writer import DIRECT_THREADS, Cancelled, Mode, choose, open_for, write_data

__all__ = ["Cancelled", "Flusher", "LoadReport", "Readiness", "Staged", "Written"]

SLOTS = 2


class Readiness(Struct, frozen=True):
    """What `prepare` made and measured; *write_s* and *fsync_s* are None where nothing was written."""

    state_bytes: int
    capacity_bytes: int  # of one slot, in memory and on disk
    memory_bytes: int  # of the arena
    slots: int
    reserved: int  # saves that space is reserved for
    writer: str
    stage_s: float | None = None
    write_s: float | None = None
    fsync_s: float | None = None
    warnings: tuple[str, ...] = ()


class Written(Struct, frozen=True):
    """A durable rank folder."""

    record: ShardRecord
    write_s: float
    fsync_s: float
    bytes: int


@dataclass(eq=False)
class Staged:
    """A state copied into the arena. Valid until its slot is needed again: two saves later."""

    step: int
    bytes: int
    stage_s: float
    slot: Slot | None  # None once it isn't valid any more
    state: Raw
    writers: int = 0

    @property
    def valid(self) -> bool:
        """Whether it can still be written."""
        return self.slot is not None


class Flusher:
    """See the module. `stage` belongs to the training thread, `write` and `settle` to any; all are safe together."""

    def __init__(
        self,
        directory: str | Path,
        *,
        rank: int,
        world_size: int,
        local_rank: int = 0,
        allow_pickle: bool = False,
        reserve: bool = True,
        unit: str = "optimizer_step",
        attempt: str = "",
        slots: int = SLOTS,
        disk: Disk = DISK,
    ) -> None:
        if not 0 <= rank < world_size:
            raise StateError(f"rank {rank} of a world of {world_size} can't be")
        self.directory = Path(os.path.abspath(directory))
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        self.unit, self.attempt = unit, attempt
        self.allow_pickle = allow_pickle
        self.disk = disk
        self.mode = Mode.DIRECT
        self._reserve_count = SLOTS if reserve else 0
        self._slot_count = slots
        self._slots: list[Slot] = []
        self._staged: list[Staged] = []  # what the slots hold, oldest first
        self._layout: Layout | None = None
        self._capacity = 0
        self._record_bytes = 0
        self._reserve: Reserve | None = None
        self._pool = ThreadPoolExecutor(DIRECT_THREADS, "powerguard-write")
        self._changed = threading.Condition()  # guards _staged and their fields
        self._disk_lock = threading.Lock()  # guards _reserve

    # ---- before the emergency ---------------------------------------------------------------------

    def prepare(self, state: Mapping[str, object], *, prove: bool = True) -> Readiness:
        """Makes memory and disk space for *state*, and finds the fastest way of writing; cheap when nothing changed.

        With *prove* the slot is written once, at whole size, which is the first measurement of a save. Raises
        StateError where the state can't be saved, DirectoryError where the directory can't be written. That space
        can't be reserved is a warning in the answer.
        """
        warnings: list[str] = []
        blobs, record = self._take_apart(state)
        layout = self._plan(blobs)
        capacity = layout.file_bytes + foreseen_bytes(dict(state))
        grown = capacity > self._capacity or not self._slots
        if grown:
            warnings += self._make_arena(capacity)
        with self._disk_lock:
            reserve = self._open_reserve()
            self._record_bytes = max(self._record_bytes, len(record))
            reserved = reserve.fill(self._reserve_count, self._capacity, self._record_bytes)
            if reserve.reason and self._reserve_count:
                warnings.append(reserve.reason)
            measured = self._prove(reserve, layout, blobs, prove=prove) if grown else (None, None, None)
            reserved = reserve.fill(self._reserve_count, self._capacity, self._record_bytes)
        return Readiness(
            state_bytes=layout.file_bytes,
            capacity_bytes=self._capacity,
            memory_bytes=sum(slot.capacity for slot in self._slots),
            slots=len(self._slots),
            reserved=reserved,
            writer=self.mode.value,
            stage_s=measured[0],
            write_s=measured[1],
            fsync_s=measured[2],
            warnings=tuple(warnings),
        )

    def _take_apart(self, state: Mapping[str, object]) -> tuple[list[Blob], Raw]:
        if rng.KEY in state:
            raise StateError(f"{rng.KEY!r} is powerguard's own name in a state", todo="give that source another name")
        gathered = gather({**state, rng.KEY: rng.capture()}, allow_pickle=self.allow_pickle)
        return gathered.blobs, gathered.state

    def _plan(self, blobs: list[Blob]) -> Layout:
        if self._layout is None or self._layout.signature != signature(blobs):
            self._layout = plan(blobs)
        return self._layout

    def _make_arena(self, capacity: int) -> list[str]:
        """New slots, the old ones' memory given back first; what was staged in those is gone."""
        with self._changed:
            self._changed.wait_for(lambda: not any(staged.writers for staged in self._staged))
            for staged in self._staged:
                staged.slot = None
            self._staged.clear()
            for slot in self._slots:
                slot.release()
            self._slots.clear()
            self._slots, warnings = make_slots(self._slot_count, capacity, self._pool, pin=torch.cuda.is_available())
            self._capacity = capacity
        return warnings

    def _open_reserve(self) -> Reserve:
        if self._reserve is None:
            reserve = Reserve(self.disk, self.directory, self.rank)
            reserve.open()
            self._reserve = reserve
            sweep(self.directory, disk=self.disk)
        return self._reserve

    def _prove(
        self, reserve: Reserve, layout: Layout, blobs: list[Blob], *, prove: bool
    ) -> tuple[float | None, float | None, float | None]:
        """Chooses the writer on a folder that is used for nothing else; with *prove*, writes a whole slot there."""
        slot = self._slots[0]
        try:
            folder = reserve.take() or reserve.bare()
            try:
                self.mode = choose(self.disk, folder / SHARD, slot.view)
                if not prove:
                    return None, None, None
                begun = time.monotonic()
                copy_into(slot, layout, blobs)
                staged = time.monotonic()
                fd = open_for(self.disk, folder / SHARD, self.mode)
                try:
                    write_data(self.disk, fd, slot.view, self._capacity, mode=self.mode, pool=self._pool)
                    written = time.monotonic()
                    uninterrupted(partial(self.disk.fsync, fd))
                finally:
                    self.disk.close(fd)
                return staged - begun, written - staged, time.monotonic() - written
            finally:
                reserve.discard(folder)
        except OSError as error:
            raise trouble(error, "can't write to", self.directory) from error

    # ---- the save ---------------------------------------------------------------------------------

    def stage(self, state: Mapping[str, object], step: int) -> Staged:
        """Copies *state* into the arena; what happens to it afterwards doesn't matter.

        Waits only if every slot is just being written. Raises StateError where the state can't be saved.
        """
        begun = time.monotonic()
        blobs, record = self._take_apart(state)
        layout = self._plan(blobs)
        if not self._slots or layout.file_bytes > self._slots[0].capacity:
            self._make_arena(layout.file_bytes)
        slot = self._claim()
        copy_into(slot, layout, blobs)
        staged = Staged(step, layout.file_bytes, time.monotonic() - begun, slot, record)
        with self._changed:
            self._staged.append(staged)
        return staged

    def _claim(self) -> Slot:
        """A slot that holds nothing, or the oldest that isn't being written."""
        with self._changed:
            while True:
                used = {id(staged.slot) for staged in self._staged}
                for slot in self._slots:
                    if id(slot) not in used:
                        return slot
                idle = next((staged for staged in self._staged if not staged.writers), None)
                if idle is not None:
                    freed, idle.slot = idle.slot, None
                    self._staged.remove(idle)
                    assert freed is not None
                    return freed
                self._changed.wait()

    def write(self, staged: Staged, generation: str, *, cancelled: Callable[[], bool] | None = None) -> Written:
        """Makes *staged* this rank's part of *generation*; durable on return, from any thread.

        *cancelled* is asked every few milliseconds; once true, Cancelled is raised and nothing remains. Raises
        StateError where *staged* is no longer held, DirectoryError where nothing could be made durable.
        """
        parsed = parse_generation(generation)
        if parsed is None or parsed[0] != staged.step:
            raise StateError(f"{generation!r} is no name for a generation of step {staged.step}")
        with self._changed:
            if not staged.valid:
                raise StateError(f"the copy of step {staged.step} was replaced by a newer one")
            staged.writers += 1
        try:
            return self._write(staged, generation, cancelled)
        except OSError as error:
            raise self._failed(error, generation) from error
        finally:
            with self._changed:
                staged.writers -= 1
                self._changed.notify_all()

    def _write(self, staged: Staged, generation: str, cancelled: Callable[[], bool] | None) -> Written:
        assert staged.slot is not None
        shard = Shard(
            data=staged.slot.view,
            size=staged.bytes,
            state=staged.state,
            generation=generation,
            step=staged.step,
            unit=self.unit,
            rank=self.rank,
            world_size=self.world_size,
            attempt=self.attempt,
        )
        with self._turn(cancelled):
            done = commit(
                self.disk,
                self.directory,
                shard,
                self._open_reserve(),
                mode=self.mode,
                pool=self._pool,
                cancelled=cancelled,
            )
        record = ShardRecord(rank=self.rank, path=rank_name(self.rank), bytes=done.bytes, digest=done.digest)
        return Written(record, done.write_s, done.fsync_s, done.bytes)

    @contextlib.contextmanager
    def _turn(self, cancelled: Callable[[], bool] | None) -> Iterator[None]:
        """One save at a time: two would only share the disk."""
        while not self._disk_lock.acquire(timeout=0.05):
            if cancelled is not None and cancelled():
                raise Cancelled("the save was given up")
        try:
            yield
        finally:
            self._disk_lock.release()

    def _failed(self, error: OSError, generation: str) -> DirectoryError:
        """What went wrong, and what is left."""
        base = trouble(error, f"can't write {generation} to", self.directory)
        try:
            left = latest(self.directory, verify=False).generation
        except DirectoryError:
            left = None
        held = f"the newest whole generation there is {left.name}" if left else "no whole generation is there"
        return DirectoryError(f"{base.message}; {held}", todo=base.todo)

    def settle(self, keep: int | None = None) -> tuple[str, ...]:
        """After a seal: retires all but the *keep* newest sealed generations, and reserves space for the next saves.

        Only one rank of a directory should retire. Returns warnings; raises DirectoryError.
        """
        if keep is not None:
            retire(self.directory, keep, disk=self.disk)
        with self._disk_lock:
            reserve = self._open_reserve()
            if not self._capacity or not self._reserve_count:
                return ()
            reserve.fill(self._reserve_count, self._capacity, self._record_bytes)
            return (reserve.reason,) if reserve.reason else ()

    # ---- the way back -----------------------------------------------------------------------------

    def load(self, generation: Generation, state: Mapping[str, object], *, strict: bool = True) -> LoadReport:
        """Loads this rank's part of *generation* into the objects of *state*, random states last.

        Raises StateError where the state doesn't fit, CheckpointError where a byte is wrong: then *state* is partly
        overwritten and another generation must be loaded.
        """
        if generation.world_size != self.world_size:
            raise StateError(
                f"{generation.name} was written by {generation.world_size} ranks, this run has {self.world_size}",
                todo="resume with the same number of ranks, or export the generation to DCP and load that",
            )
        return load_state(generation, self.rank, dict(state), allow_pickle=self.allow_pickle, strict=strict)

    def resume(
        self, state: Mapping[str, object], *, strict: bool = True, cap: int | None = resumes.CAP
    ) -> LoadReport | None:
        """Loads the newest generation that can be trusted, falling back as often as needed; None where none is whole.

        For a run of one rank: with more, one of them must decide for all. Raises CheckpointError where there were whole
        generations and none could be trusted: a run mustn't start from scratch for that without anybody knowing.
        """
        skipped: list[Skipped] = []
        damaged = False
        while True:
            found = latest(
                self.directory,
                verify=False,
                world_size=self.world_size,
                cap=cap,
                exclude=[skip.name for skip in skipped],
            )
            skipped += [skip for skip in found.skipped if skip.name not in {s.name for s in skipped}]
            if found.generation is None:
                if damaged:
                    raise CheckpointError(
                        f"no generation in {self.directory} can be trusted: {'; '.join(map(str, skipped))}",
                        todo="move the directory away to start from scratch",
                    )
                return None
            try:
                report = self.load(found.generation, state, strict=strict)
            except CheckpointError as error:
                damaged = True
                skipped.append(Skipped(found.generation.name, error.message))
                continue
            if cap is not None and self.rank == 0:
                resumes.count(self.directory, found.generation.name, disk=self.disk)
            return msgspec.structs.replace(report, skipped=tuple(map(str, skipped)))

    # ---- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Waits for running writes, gives memory and reserved space back. Staged states are gone."""
        with self._changed:
            self._changed.wait_for(lambda: not any(staged.writers for staged in self._staged))
            for staged in self._staged:
                staged.slot = None
            self._staged.clear()
            for slot in self._slots:
                slot.release()
            self._slots.clear()
        with self._disk_lock:
            if self._reserve is not None:
                self._reserve.close()
                self._reserve = None
        self._pool.shutdown()
