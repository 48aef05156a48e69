"""How long a step, a staging copy and a write take here: high quantiles of what was measured, for the need.

A write is measured as it happened, and counted as it would be with all ranks of the node writing to the same disk at
once, which is what an emergency is: see `paces.together`.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Sequence

from powerguard.core.messages import Pace
from powerguard.generations.paces import SAVES, Save, together

STEPS = 256
STEP_QUANTILE = 0.95
"""Of 256 steps the 13th slowest: an evaluation now and then isn't a step's time."""
SAVE_QUANTILE = 0.99
"""Of 100 saves the second slowest, of fewer the slowest."""


class PaceMeter:
    """Collects measurements, from any thread; bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._stages: deque[float] = deque(maxlen=SAVES)
        self._saves: deque[Save] = deque(maxlen=SAVES)
        self._new: deque[Save] = deque(maxlen=SAVES)
        self._stage_s = 0.0  # of the copy that the next save is made of
        self._bytes = 0
        self._sharers = 1

    def recall(self, saves: Iterable[Save], size: int) -> None:
        """What earlier runs measured, older than all that was measured since; the state has *size* bytes now."""
        with self._lock:
            old = list(saves)
            self._saves = deque([*old, *self._saves], maxlen=SAVES)
            self._stages = deque([*(s.stage_s for s in old if s.stage_s > 0), *self._stages], maxlen=SAVES)
            self._bytes = max(0, size)

    def shared_by(self, ranks: int) -> None:
        """So many ranks of this node write to the disk at once in an emergency."""
        with self._lock:
            self._sharers = max(1, ranks)

    def step(self, seconds: float) -> None:
        """A step took *seconds*."""
        with self._lock:
            _note(self._steps, seconds)

    def staged(self, seconds: float, size: int) -> None:
        """A state of *size* bytes was copied."""
        with self._lock:
            _note(self._stages, seconds)
            self._stage_s = self._stages[-1] if self._stages else 0.0
            self._bytes = max(0, size)

    def wrote(self, save: Save) -> None:
        """A shard was made durable."""
        if not all(math.isfinite(s) and s >= 0.0 for s in (save.write_s, save.fsync_s)) or save.bytes <= 0:
            return
        with self._lock:
            if save.stage_s <= 0.0 < self._stage_s:
                save = Save(save.bytes, save.write_s, save.fsync_s, save.disk_bytes, self._stage_s, save.at)
            self._stage_s = 0.0
            self._saves.append(save)
            self._new.append(save)
            self._bytes = save.bytes

    def new_saves(self) -> tuple[Save, ...]:
        """What was measured since this was last asked."""
        with self._lock:
            new = tuple(self._new)
            self._new.clear()
            return new

    def pace(self) -> Pace:
        """The quantiles; 0 where nothing was measured."""
        with self._lock:
            factors = [together(save, self._sharers) for save in self._saves]
            return Pace(
                step_s=_high(self._steps, STEP_QUANTILE),
                stage_s=_high(self._stages, SAVE_QUANTILE),
                write_s=_high([s.write_s * f for s, f in zip(self._saves, factors, strict=True)], SAVE_QUANTILE),
                fsync_s=_high([s.fsync_s * f for s, f in zip(self._saves, factors, strict=True)], SAVE_QUANTILE),
                state_bytes=self._bytes,
            )


class StepWatch:
    """Step times from looking at the step now and then, so that the hot path needs no clock.

    A look that finds no new step extends the one underway; waits that aren't training (`skip`) are left out.
    """

    def __init__(self, meter: PaceMeter) -> None:
        self._meter = meter
        self._step: int | None = None
        self._at = 0.0

    def look(self, step: int, now: float) -> None:
        """The step is *step* at *now*."""
        if self._step is None or step < self._step or self._step < 0:
            self._step, self._at = step, now
        elif step > self._step:
            self._meter.step((now - self._at) / (step - self._step))
            self._step, self._at = step, now

    def skip(self) -> None:
        """The training thread waits: the time until the next look doesn't count."""
        self._step = None


def _note(values: deque[float], seconds: float) -> None:
    if math.isfinite(seconds) and seconds >= 0.0:
        values.append(seconds)


def _high(values: Sequence[float], quantile: float) -> float:
    """The value that so large a share of *values* doesn't exceed; of fewer than 20 the largest."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[math.ceil(quantile * len(ordered)) - 1] if len(ordered) >= 20 else ordered[-1]
