"""Makes a staged state durable: the same files, in the same order, as the rank's own save."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from powerguard.core.messages import Shard, ShardRecord
from powerguard.errors import StateError
from powerguard.generations.disk import DISK, Disk
from powerguard.generations.ledger import Facts, Ledger, Line
from powerguard.generations.names import RECORD, SHARD, parse_generation, rank_name
from powerguard.generations.record import Content
from powerguard.generations.scan import read_head
from powerguard.generations.shelf import SlotFile, read_content, slot_path
from powerguard.train import commit as commits
from powerguard.train.reserve import Reserve
from powerguard.train.writer import DIRECT_THREADS, Mode, choose

INSTANCE = 90
"""The deputy's own place in the reserve, beside its rank's."""


class Pen:
    """Writes for one deputy. *write_s* is what its last write took."""

    def __init__(self, ledger: Ledger, facts: Facts, *, disk: Disk = DISK) -> None:
        self.ledger, self.facts, self.disk = ledger, facts, disk
        self.directory = Path(facts.directory)
        self.write_s = facts.write_s
        self._pool = ThreadPoolExecutor(DIRECT_THREADS, "powerguard-deputy")
        self._reserve: Reserve | None = None
        self._reserved = 0
        self._mode: Mode | None = None

    def ready(self, line: Line) -> None:
        """Keeps disk space for a state as large as *line*'s, and finds the fastest way of writing; raises what fails.

        Cheap when nothing has grown.
        """
        size = line.data_bytes + line.content_bytes
        if self._mode is not None and size <= self._reserved:
            return
        reserve = self._open_reserve()
        if self.facts.reserve:
            reserve.fill(1, line.data_bytes, line.content_bytes)
        with contextlib.closing(SlotFile(slot_path(self.ledger, line))) as held:
            folder = reserve.bare()
            try:
                self._mode = choose(self.disk, folder / SHARD, held.view)
            finally:
                reserve.discard(folder)
        self._reserved = size

    def _open_reserve(self) -> Reserve:
        if self._reserve is None:
            reserve = Reserve(self.disk, self.directory, self.facts.rank)
            reserve.instance = INSTANCE
            reserve.open()
            self._reserve = reserve
        return self._reserve

    def write(self, seq: int, step: int, generation: str) -> Shard:
        """The staged state of *step* as this rank's part of *generation*; durable on return. Raises what fails."""
        parsed = parse_generation(generation)
        if parsed is None or parsed[0] != step:
            raise StateError(f"{generation!r} is no name for a generation of step {step}")
        line = next((line for line in self.ledger.lines() if line.step == step), None)
        if line is None:
            held = ", ".join(str(line.step) for line in self.ledger.lines()) or "none"
            raise StateError(f"step {step} isn't staged (staged: {held})")
        with contextlib.closing(SlotFile(slot_path(self.ledger, line))) as slot:
            content = msgspec.json.decode(read_content(self.ledger, line, slot), type=Content)
            return self._commit(seq, generation, line, slot, content)

    def _commit(self, seq: int, generation: str, line: Line, slot: SlotFile, content: Content) -> Shard:
        facts, folder = self.facts, self.directory / generation / rank_name(self.facts.rank)

        def still_there() -> None:
            if self.ledger.line(line.slot) != line:
                raise StateError(f"the staged state of step {line.step} was overwritten while it was read")

        shard = commits.Shard(
            data=slot.view,
            size=line.data_bytes,
            fill=None,
            content=content,
            generation=generation,
            step=line.step,
            unit=facts.unit,
            rank=facts.rank,
            world_size=facts.world_size,
            attempt=facts.attempt,
            portable=facts.portable,
            check=still_there,
        )
        begun = time.monotonic()
        try:
            done = commits.commit(
                self.disk,
                self.directory,
                shard,
                self._open_reserve(),
                mode=self._mode or Mode.BUFFERED,
                pool=self._pool,
            )
        except FileExistsError:  # by this deputy's predecessor, whose word was lost
            head = read_head(folder, generation, line.step, facts.rank)
            size = sum((folder / name).stat().st_size for name in (SHARD, RECORD))
            return Shard(seq, line.step, generation, ShardRecord(facts.rank, folder.name, size, head.digest))
        self.write_s = time.monotonic() - begun
        record = ShardRecord(facts.rank, folder.name, done.bytes, done.digest)
        return Shard(seq, line.step, generation, record, done.write_s, done.fsync_s)

    def close(self) -> None:
        """Gives the reserved space back."""
        if self._reserve is not None:
            self._reserve.close()
        self._pool.shutdown()
