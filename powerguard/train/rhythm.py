"""When the run's periodic saves are due: every so many steps, every so many minutes, or as often as pays.

All ranks must save after the same steps, and none may ask the others in each step. So an interval of time is turned
into one of steps: at each save rank 0 reckons, by what the last steps took, after which step the next one is due, and
the others read it from torch.distributed's store; there is no other exchange.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from powerguard.core.interval import PRIOR_S, learned_mtbf_s, optimum_s, unannounced_mtbf_s
from powerguard.core.messages import Pace
from powerguard.errors import UsageError
from powerguard.generations import lives

FIRST_STEPS = 20
"""With an interval of time, the first save is after so many steps: by then a step's time is known."""
GROWTH = 4
"""An interval is at most so many times the one before, in steps: a few fast steps prove nothing."""

_UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(text: str | float, what: str) -> float:
    """ "90s", "5min", "1.5h", "30d", or a number of seconds; raises UsageError."""
    if isinstance(text, (int, float)):
        value: float = float(text)
    else:
        match = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]*)\s*", text.lower())
        try:
            value = float(match[1]) * _UNITS[match[2] or "s"] if match else math.nan
        except (KeyError, ValueError):
            value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise UsageError(f"{what}={text!r} is no time", todo='give "90s", "5min", "2h" or "30d"')
    return value


class Rhythm:
    """The interval of one run. *every*: a number of steps, a time, or "auto"."""

    def __init__(
        self,
        every: int | str,
        directory: Path,
        world_size: int,
        pace: Callable[[], Pace],
        mtbf: str | float | None = None,
    ) -> None:
        self.every, self._directory, self._world_size, self._pace = every, directory, world_size, pace
        self._steps = self._fixed(every)
        self._seconds = None if self._steps or every == "auto" else seconds(str(every), "save_every")
        self._mtbf_s = None if mtbf is None else seconds(mtbf, "mtbf")
        self.due = 0  # the save after this step or a later one
        self._interval = self._steps or FIRST_STEPS
        self._last, self._last_at, self._waited_s = -1, 0.0, 0.0
        self._rounds = 0

    @staticmethod
    def _fixed(every: int | str) -> int:
        text = str(every).strip()
        if text.isdigit():
            if int(text) < 1:
                raise UsageError(f"save_every={every!r}", todo='give a number of steps, a time ("5min"), or "auto"')
            return int(text)
        return 0

    def begin(self, step: int) -> None:
        """Training goes on after *step*."""
        self._last, self._last_at, self._waited_s = step, time.monotonic(), 0.0
        self.due = self._after(step)

    def _after(self, step: int) -> int:
        if self._steps:
            return (step // self._steps + 1) * self._steps
        return step + self._interval

    def waited(self, waited_s: float) -> None:
        """Training stood still for an order."""
        self._waited_s += waited_s

    def saved(self, step: int, rank: int, attempt: Callable[[], str]) -> None:
        """A save after *step* was begun; all ranks call it there."""
        if not self._steps:
            spent = time.monotonic() - self._last_at - self._waited_s
            step_s = max(1e-6, spent / max(1, step - self._last))
            self._interval = self._agree(rank, attempt, self._reckon(step_s))
        self.begin(step)

    def _reckon(self, step_s: float) -> int:
        """The next interval, in steps of *step_s*."""
        want_s = self._seconds if self._seconds is not None else self.optimum_s()
        steps = max(1, round(want_s / step_s))
        return min(steps, GROWTH * self._interval)

    def optimum_s(self) -> float:
        """What pays most now: by the time a save blocks, and how often failures come unannounced."""
        known = lives.past(self._directory)
        ran_s = sum(life.trained_s for life in known)
        bad = sum(life.interrupted and not life.announced for life in known)
        good = sum(life.announced for life in known)
        if self._mtbf_s is None:
            mtbf_s = learned_mtbf_s(ran_s, bad, PRIOR_S)
        else:
            mtbf_s = unannounced_mtbf_s(self._mtbf_s, min(0.95, good / (good + bad)) if good + bad else 0.0)
        pace = self._pace()
        return max(optimum_s(pace.stage_s, mtbf_s), pace.write_s + pace.fsync_s)

    def _agree(self, rank: int, attempt: Callable[[], str], mine: int) -> int:
        """Rank 0's interval, on all ranks."""
        if self._world_size == 1:
            return mine
        store = store_of("save_every as a time")
        self._rounds += 1
        digest = hashlib.sha256(str(self._directory).encode()).hexdigest()[:16]
        key = f"powerguard/rhythm/{digest}/{attempt()}/{self._rounds}"
        if rank == 0:
            store.set(key, str(mine))
        return int(store.get(key).decode())


def store_of(what: str) -> Any:
    """torch.distributed's store; raises UsageError where there is none."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise UsageError(
            f"{what} needs torch.distributed, for ranks to agree on a step",
            todo="initialise it before attach(), or give a number of steps",
        )
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
