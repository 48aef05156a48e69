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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from powerguard.core.messages import ShardRecord
from powerguard.errors import DirectoryError, StateError
from powerguard.generations import resumes
from powerguard.generations.disk import DISK, Disk
from powerguard.generations.durable import trouble
from powerguard.generations.names import parse_generation, rank_name
from powerguard.generations.record import Content
from powerguard.generations.retire import retire, sweep
from powerguard.generations.scan import Generation, latest
from powerguard.generations.split import SHARE_MAX
from powerguard.train import rng
from powerguard.train.answers import Copied, Readiness, Written
from powerguard.train.blobs import Blob
from powerguard.train.commit import Shard, commit
from powerguard.train.divide import divide
from powerguard.train.foresee import foreseen_bytes
from powerguard.train.layout import Layout, plan, signature
from powerguard.train.load import LoadReport, load_newest, load_state
from powerguard.train.prove import Proof, cant_write, choose_mode, prove
from powerguard.train.replicas import Replicas, Storage
from powerguard.train.reserve import Reserve
from powerguard.train.slots import Slots, Staged
from powerguard.train.stage import Copy, Place
from powerguard.train.tree import gather
from powerguard.train.writer import FILL_THREADS, Cancelled

__all__ = ["Cancelled", "Flusher", "LoadReport", "Readiness", "Staged", "Written"]

SLOTS = 2
"""One being written, one being staged."""


class Flusher:
    """See the module. `stage` and `flush` belong to the training thread, `write` and `settle` to any."""

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
        portable: bool = False,
        slots: int = SLOTS,
        storage: Storage = "local",
        replicated: Collection[str] = (),
        disk: Disk = DISK,
    ) -> None:
        if not 0 <= rank < world_size:
            raise StateError(f"there is no rank {rank} among {world_size}")
        self.directory = Path(os.path.abspath(directory))
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        self.unit, self.attempt = unit, attempt
        self.portable = portable  # a whole state of no rank's own: without random states, for any world size
        self.allow_pickle = allow_pickle
        self.disk = disk
        self.replicas = Replicas(rank, world_size, storage=storage, replicated=replicated)
        self._pool = ThreadPoolExecutor(FILL_THREADS, "powerguard-flush")
        self._slots = Slots(slots, self._pool)
        self._layout: Layout | None = None
        self._proof: Proof | None = None
        self._reserve: Reserve | None = None
        self._reserve_count = SLOTS if reserve else 0
        self._record_bytes = 0
        self._disk_lock = threading.Lock()  # one save at a time; guards _reserve

    @property
    def reserves(self) -> bool:
        """Whether disk space is kept for coming saves."""
        return self._reserve_count > 0

    # ---- before the emergency ---------------------------------------------------------------------

    def prepare(self, state: Mapping[str, object], *, prove: bool = True) -> Readiness:
        """Makes memory and disk space for *state*, and finds the fastest way of writing; cheap when nothing changed.

        With *prove* a slot is written once, at whole size, which is the first measurement of a save. Raises StateError
        where the state can't be saved, DirectoryError where the directory can't be written. That space can't be
        reserved is a warning in the answer.
        """
        self.replicas.check(state)
        blobs, content = self._take_apart(state)
        layout = self._plan(blobs)
        capacity = layout.file_bytes + self._foreseen(state, layout, content)
        grown = capacity > self._slots.capacity
        warnings = self._slots.make(capacity) if grown else []
        self._record_bytes = max(self._record_bytes, len(content.state))
        with self._disk_lock:
            reserve = self._fill_reserve()
            if grown or self._proof is None:
                self._proof = self._prove(reserve, layout, blobs, prove)
                reserve = self._fill_reserve()
        if reserve.reason:
            warnings.append(reserve.reason)
        assert self._proof is not None
        return Readiness(
            state_bytes=layout.file_bytes,
            capacity_bytes=self._slots.capacity,
            memory_bytes=self._slots.memory_bytes,
            slots=self._slots.count,
            reserved=reserve.count,
            writer=self._proof.mode.value,
            stage_s=self._proof.stage_s,
            write_s=self._proof.write_s,
            fsync_s=self._proof.fsync_s,
            warnings=tuple(warnings),
        )

    def _foreseen(self, state: Mapping[str, object], layout: Layout, content: Content) -> int:
        """Bytes that this rank's part is going to grow by: optimizers make their moments, weights may be unequal."""
        elsewhere = sum(item.bytes for item in content.shared) - sum(p.end - p.begin for p in content.pieces)
        share = layout.file_bytes / max(1, layout.file_bytes + elsewhere)
        more = sum(split.bytes * (SHARE_MAX - 1.0) / len(split.group) for split in content.splits)
        return int(foreseen_bytes(dict(state)) * share + (more if self.replicas.storage == "shared" else 0.0))

    def _take_apart(self, state: Mapping[str, object], weights: Sequence[float] = ()) -> tuple[list[Blob], Content]:
        if rng.KEY in state:
            raise StateError(f"{rng.KEY!r} is powerguard's own name in a state", todo="give that source another name")
        random_states = {} if self.portable else {rng.KEY: rng.capture()}
        known = self.replicas.of_state(state)
        gathered = gather({**state, **random_states}, allow_pickle=self.allow_pickle, known=known)
        mine = divide(gathered.blobs, self.rank, weights)
        return mine.blobs, Content(gathered.state, mine.splits, mine.shared, mine.pieces)

    def _plan(self, blobs: list[Blob]) -> Layout:
        if self._layout is None or self._layout.signature != signature(blobs):
            self._layout = plan(blobs)
        return self._layout

    def _open_reserve(self) -> Reserve:
        if self._reserve is None:
            reserve = Reserve(self.disk, self.directory, self.rank)
            reserve.open()
            self._reserve = reserve
            sweep(self.directory, disk=self.disk)
        return self._reserve

    def _fill_reserve(self) -> Reserve:
        reserve = self._open_reserve()
        if self._reserve_count and self._slots.capacity:
            reserve.fill(self._reserve_count, self._slots.capacity, self._record_bytes)
        return reserve

    def _prove(self, reserve: Reserve, layout: Layout, blobs: list[Blob], thoroughly: bool) -> Proof:
        slot = self._slots.claim()
        stage = (lambda: Copy(slot, layout, blobs).run(self._pool)) if thoroughly else None
        return prove(self.disk, reserve, slot, self._slots.capacity, stage=stage, pool=self._pool)

    # ---- the save ---------------------------------------------------------------------------------

    def stage(self, state: Mapping[str, object], step: int, *, weights: Sequence[float] = ()) -> Staged:
        """Copies *state* into the arena; what happens to it afterwards doesn't matter.

        *weights*, by rank and the same on all ranks, say who is to write how much of what ranks hold alike; () = all
        the same. Waits only if every slot is just being written. Raises StateError where the state can't be saved.
        """
        begun = time.monotonic()
        staged, copy = self._begin(state, step, weights)
        copy.run(self._pool)
        staged.stage_s = time.monotonic() - begun
        self._slots.keep(staged)
        return staged

    def flush(
        self,
        state: Mapping[str, object],
        step: int,
        generation: str,
        *,
        weights: Sequence[float] = (),
        cancelled: Callable[[], bool] | None = None,
    ) -> tuple[Staged, Written]:
        """`stage` and `write` in one, the copy overlapping the writing: the shortest way to durable.

        *state* must not change until it returns. Raises what they raise.
        """
        begun = time.monotonic()
        staged, copy = self._begin(state, step, weights)
        copy.begin()
        staged.fill = copy.fill
        self._slots.keep(staged)
        try:
            written = self.write(staged, generation, cancelled=cancelled)
        except BaseException:
            self._slots.drop(staged)  # its copy may be incomplete
            raise
        staged.fill = None
        staged.stage_s = time.monotonic() - begun
        return staged, written

    def _begin(self, state: Mapping[str, object], step: int, weights: Sequence[float]) -> tuple[Staged, Copy]:
        blobs, content = self._take_apart(state, weights)
        layout = self._plan(blobs)
        if not self._slots.fits(layout.file_bytes):
            self._slots.make(layout.file_bytes)
        slot = self._slots.claim()
        return Staged(step, layout.file_bytes, 0.0, slot, content), Copy(slot, layout, blobs)

    def copy(self, state: Mapping[str, object], place: Callable[[int, int], Place | None]) -> Copied | None:
        """Copies *state* to where *place* (of the bytes of data and of content) says; None where that is nowhere.

        For memory that isn't the arena's. Raises StateError where the state can't be saved.
        """
        begun = time.monotonic()
        blobs, content = self._take_apart(state)
        layout = self._plan(blobs)
        encoded = msgspec.json.encode(content)
        target = place(layout.file_bytes, len(encoded))
        if target is None:
            return None
        Copy(target, layout, blobs).run(self._pool)
        return Copied(layout.file_bytes, encoded, time.monotonic() - begun)

    def foreseen(self, state: Mapping[str, object]) -> tuple[int, int]:
        """Bytes of data and of content that a copy of *state* takes, once the optimizer has all its moments."""
        blobs, content = self._take_apart(state)
        layout = self._plan(blobs)
        return layout.file_bytes + self._foreseen(state, layout, content), len(msgspec.json.encode(content))

    def write(self, staged: Staged, generation: str, *, cancelled: Callable[[], bool] | None = None) -> Written:
        """Makes *staged* this rank's part of *generation*; durable on return, from any thread.

        *cancelled* is asked every few milliseconds; once true, Cancelled is raised and nothing remains. Raises
        StateError where *staged* is no longer held, DirectoryError where nothing could be made durable.
        """
        parsed = parse_generation(generation)
        if parsed is None or parsed[0] != staged.step:
            raise StateError(f"{generation!r} is no name for a generation of step {staged.step}")
        with self._slots.writing(staged) as slot:
            shard = Shard(
                data=slot.view,
                size=staged.bytes,
                fill=staged.fill,
                content=staged.content,
                generation=generation,
                step=staged.step,
                unit=self.unit,
                rank=self.rank,
                world_size=self.world_size,
                attempt=self.attempt,
                portable=self.portable,
            )
            return self._commit(shard, cancelled)

    def _commit(self, shard: Shard, cancelled: Callable[[], bool] | None) -> Written:
        try:
            with self._turn(cancelled):
                reserve = self._open_reserve()
                if self._proof is None:  # never prepared: the writer is chosen now
                    self._proof = Proof(choose_mode(self.disk, reserve, shard.data))
                done = commit(
                    self.disk,
                    self.directory,
                    shard,
                    reserve,
                    mode=self._proof.mode,
                    pool=self._pool,
                    cancelled=cancelled,
                )
        except OSError as error:
            raise self._failed(trouble(error, "can't write to", self.directory), shard.generation) from error
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

    def _failed(self, error: DirectoryError, generation: str) -> DirectoryError:
        try:
            left = latest(self.directory, verify=False).generation
        except DirectoryError:
            left = None
        return cant_write(error, generation, left.name if left else "")

    def settle(self, keep: int | None = None) -> tuple[str, ...]:
        """After a seal: retires all but the *keep* newest sealed generations, and reserves space for the next saves.

        Only one rank of a directory should retire. Returns warnings; raises DirectoryError.
        """
        if keep is not None:
            retire(self.directory, keep, disk=self.disk)
        with self._disk_lock:
            reserve = self._fill_reserve()
            return (reserve.reason,) if reserve.reason else ()

    # ---- the way back -----------------------------------------------------------------------------

    def load(self, generation: Generation, state: Mapping[str, object], *, strict: bool = True) -> LoadReport:
        """Loads this rank's part of *generation* into the objects of *state*, random states last.

        Raises StateError where the state doesn't fit, CheckpointError where a byte is wrong: then *state* is partly
        overwritten and another generation must be loaded.
        """
        if generation.world_size != self.world_size and not generation.portable:
            raise StateError(
                f"{generation.name} was written by {generation.world_size} ranks, this run has {self.world_size}",
                todo="resume with the same number of ranks, or export the generation to DCP and load that",
            )
        rank = 0 if generation.portable else self.rank
        return load_state(generation, rank, dict(state), allow_pickle=self.allow_pickle, strict=strict)

    def resume(
        self, state: Mapping[str, object], *, strict: bool = True, cap: int | None = resumes.CAP
    ) -> LoadReport | None:
        """Loads the newest generation that can be trusted; see `load.load_newest`. For runs of one rank."""
        return load_newest(
            self.directory,
            lambda generation: self.load(generation, state, strict=strict),
            world_size=self.world_size,
            cap=cap,
        )

    def close(self) -> None:
        """Waits for running writes, gives memory and reserved space back. What was staged is gone."""
        self._slots.close()
        with self._disk_lock:
            if self._reserve is not None:
                self._reserve.close()
                self._reserve = None
        self._pool.shutdown()
