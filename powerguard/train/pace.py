"""How long a step, a staging copy and a write take here: high quantiles of what was measured, for the need."""

from __future__ import annotations

import math
import threading
from collections import deque

from powerguard.core.messages import Pace

STEPS = 256
SAVES = 32
QUANTILE = 0.95
"""Of 256 steps the 13th slowest; of fewer than 20 saves the slowest."""


class PaceMeter:
    """Collects measurements, from any thread; bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._stages: deque[float] = deque(maxlen=SAVES)
        self._writes: deque[float] = deque(maxlen=SAVES)
        self._fsyncs: deque[float] = deque(maxlen=SAVES)
        self._bytes = 0

    def step(self, seconds: float) -> None:
        """A step took *seconds*."""
        with self._lock:
            _note(self._steps, seconds)

    def staged(self, seconds: float, size: int) -> None:
        """A state of *size* bytes was copied."""
        with self._lock:
            _note(self._stages, seconds)
            self._bytes = max(0, size)

    def wrote(self, write_s: float, fsync_s: float, size: int) -> None:
        """A shard of *size* bytes was made durable."""
        with self._lock:
            _note(self._writes, write_s)
            _note(self._fsyncs, fsync_s)
            self._bytes = max(0, size)

    def pace(self) -> Pace:
        """The quantiles; 0 where nothing was measured."""
        with self._lock:
            return Pace(
                step_s=_high(self._steps),
                stage_s=_high(self._stages),
                write_s=_high(self._writes),
                fsync_s=_high(self._fsyncs),
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


def _high(values: deque[float]) -> float:
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(QUANTILE * len(ordered)) - 1)] if len(ordered) >= 20 else ordered[-1]
