"""A flusher that measures every save, for whom ever it is made, and remembers over restarts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from powerguard.generations import paces
from powerguard.generations.paces import Save
from powerguard.generations.storage import counter, written_bytes
from powerguard.train.answers import Readiness, Written
from powerguard.train.flush import Flusher
from powerguard.train.pace import PaceMeter
from powerguard.train.sharers import sharers
from powerguard.train.slots import Staged


class MeteredFlusher(Flusher):
    """Tells *meter* what each save took."""

    def __init__(self, directory: str | Path, *, meter: PaceMeter, **options: Any) -> None:
        """*options* as of its base."""
        super().__init__(directory, **options)
        self.meter = meter
        self._counter: Path | None = None
        self._recalled = False

    def prepare(self, state: Mapping[str, object], *, prove: bool = True) -> Readiness:
        """As its base does; what earlier runs measured here counts from now on, and the proof as the newest save."""
        self._counter = counter(self.directory)
        before = written_bytes(self._counter)
        ready = super().prepare(state, prove=prove)
        if ready.write_s is not None and ready.stage_s is not None:
            self.meter.staged(ready.stage_s, ready.state_bytes)
            self._note(ready.write_s, ready.fsync_s or 0.0, ready.capacity_bytes, before)
        if not self._recalled:
            self._recalled = True
            self.meter.recall(paces.like(paces.known(self.directory, self.rank), ready.state_bytes), ready.state_bytes)
        self.meter.shared_by(sharers(self.directory))
        return ready

    def stage(self, state: Mapping[str, object], step: int, *, weights: Sequence[float] = ()) -> Staged:
        """As its base does."""
        staged = super().stage(state, step, weights=weights)
        self.meter.staged(staged.stage_s, staged.bytes)
        return staged

    def write(self, staged: Staged, generation: str, *, cancelled: Callable[[], bool] | None = None) -> Written:
        """As its base does."""
        before = written_bytes(self._counter)
        written = super().write(staged, generation, cancelled=cancelled)
        self._note(written.write_s, written.fsync_s, written.bytes, before)
        return written

    def settle(self, keep: int | None = None) -> tuple[str, ...]:
        """As its base does; what was measured is kept for the next run."""
        warnings = super().settle(keep)
        self.meter.shared_by(sharers(self.directory))
        self._remember()
        return warnings

    def close(self) -> None:
        """As its base does."""
        self._remember()
        super().close()

    def _note(self, write_s: float, fsync_s: float, size: int, before: int | None) -> None:
        after = written_bytes(self._counter)
        disk_bytes = after - before if before is not None and after is not None and after >= before else 0
        self.meter.wrote(Save(size, write_s, fsync_s, disk_bytes, at=time.time()))

    def _remember(self) -> None:
        own = self.meter.new_saves()
        if own:
            key = paces.rank_key(self.rank)
            paces.keep(self.directory, key, (*paces.read(self.directory, key), *own))
