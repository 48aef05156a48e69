"""Keeps the book of the run's lives while it trains: rank 0, on a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from powerguard.generations import lives
from powerguard.generations.lives import ANNOUNCED, Life

RENEW_S = 10.0
"""A life that ends without a word is known up to so many seconds before its end."""


class Ledger:
    """One life of a run. *step* tells the step last completed, *busy* what training waits for ("" = it trains)."""

    def __init__(
        self, directory: Path, world_size: int, every: str, step: Callable[[], int], busy: Callable[[], str]
    ) -> None:
        self._directory, self._step, self._busy = directory, step, busy
        now = time.time()
        self._life = Life(started_at=now, seen_at=now, world_size=world_size, every=every)
        self._before = lives.current(directory)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._looked_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="powerguard-ledger", daemon=True)

    def resumed(self, resumed_step: int) -> Life | None:
        """The run goes on after *resumed_step* (-1: from scratch); the life before with its costs, if interrupted."""
        before, self._before = self._before, None
        with self._lock:
            self._life = replace(self._life, first_step=resumed_step + 1, step=resumed_step)
        if before is None or before.settled or not before.steps:
            return None
        settled = lives.settle(before, resumed_step, time.time())
        lives.bury(self._directory, settled)
        return settled if settled.interrupted else None

    def start(self) -> None:
        """Renews the book from now on."""
        self._looked_at = time.monotonic()
        self._thread.start()

    def saved(self, blocked_s: float) -> None:
        """A periodic save blocked training for *blocked_s*."""
        with self._lock:
            self._life = replace(self._life, saves=self._life.saves + 1, blocked_s=self._life.blocked_s + blocked_s)

    def _run(self) -> None:
        while not self._over.wait(RENEW_S):
            self._renew()

    def _renew(self, ended: str = "") -> None:
        now = time.monotonic()
        step, busy = self._step(), self._busy()
        if busy == "writing" and not ended:
            return  # the disk is the flush's
        if busy == "parked":  # the power may go now without another word: that end was announced
            ended = ended or ANNOUNCED
        with self._lock:
            trained = 0.0 if busy else now - self._looked_at
            self._looked_at = now
            life = self._life
            self._life = life = replace(
                life, seen_at=time.time(), step=step, ended=ended,
                trained_s=life.trained_s + trained,
            )  # fmt: skip
        if step >= life.first_step:
            lives.write_current(self._directory, life)

    def close(self, ended: str) -> None:
        """The life ends as *ended* says."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(5.0)
        self._renew(ended)
