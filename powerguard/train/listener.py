"""What the listener thread says and does for its rank; the training thread isn't needed for any of it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import powerguard
from powerguard.core.messages import Beat, Exit, FromRank, Hello, Resume, Seal, Sealed, SealWritten, ToRank
from powerguard.train.desk import Desk
from powerguard.train.identity import Identity
from powerguard.train.leaver import Leaver
from powerguard.train.log import Log, explain
from powerguard.train.pace import StepWatch

if TYPE_CHECKING:  # it needs torch
    from powerguard.train.saver import Saver

SAY_AGAIN_S = 60.0


def _local_world_size(env: Mapping[str, str]) -> int:
    """Ranks of the job on this node, as torchrun says; 0 = nobody says."""
    told = env.get("LOCAL_WORLD_SIZE", "")
    return int(told) if told.isdigit() else 0


class Listener:
    """The link's ear."""

    def __init__(
        self, identity: Identity, desk: Desk, saver: Saver, leaver: Leaver | None, *, page: str, log: Log
    ) -> None:
        self._identity, self._desk, self._saver, self._leaver = identity, desk, saver, leaver
        self._page, self._log = page, log
        self._meter = saver.flusher.meter
        self._watch = StepWatch(self._meter)
        self._said_alone = False
        self._said: dict[str, float] = {}

    def hello(self) -> Hello:
        """How this rank registers."""
        me, flusher = self._identity, self._saver.flusher
        return Hello(
            job=me.job,
            rank=me.rank,
            local_rank=me.local_rank,
            world_size=me.world_size,
            pid=os.getpid(),
            directory=str(flusher.directory),
            page=self._page,
            unit=flusher.unit,
            version=powerguard.__version__,
            master=me.master,
            step=self._desk.step,
            pace=self._meter.pace(),
            local_world_size=_local_world_size(os.environ),
            seq=self._desk.seq,
        )

    def beat(self) -> Beat:
        """How it is; looks at the step on the way, which is how steps are timed."""
        busy, step = self._desk.busy, self._desk.step
        if busy:
            self._watch.skip()
        else:
            self._watch.look(step, time.monotonic())
        return Beat(step, self._meter.pace(), busy)

    def hear(self, message: ToRank) -> tuple[FromRank, ...]:
        """Takes a message in; what to answer at once."""
        replies = self._desk.hear(message)
        if isinstance(message, Seal):
            if not any(isinstance(reply, SealWritten) for reply in replies):
                self._saver.seal(message)
        elif isinstance(message, Sealed):
            self._saver.sealed(message, now=not self._desk.stopping)
        elif isinstance(message, Resume):
            self._saver.settle()
        elif isinstance(message, Exit) and self._leaver is not None:
            self._leaver.start(message.code)
        return replies

    def due(self) -> tuple[FromRank, ...]:
        """What is to be said (again) now."""
        return self._desk.due()

    def next_due(self) -> float | None:
        """When there will be something to say."""
        return self._desk.next_due()

    def connected(self, *, yes: bool) -> None:
        """A daemon is there now, or isn't any more."""
        self._desk.alone_since = None if yes else time.monotonic()
        self._desk.look()
        if self._identity.local_rank != 0:
            return
        if yes:
            self._log.info("guarded: a daemon is connected")
        elif not self._said_alone:
            self._log.warning("the daemon is gone: training on unguarded until it is back")
        self._said_alone = not yes

    def alone(self, path: str) -> None:
        """No daemon has been there so far; said once."""
        if self._identity.local_rank == 0 and not self._said_alone:
            self._log.warning("no powerguard daemon: training on unguarded until one appears", socket=path)
        self._said_alone = True

    def trouble(self, error: Exception) -> None:
        """Something went wrong in the link, which goes on; said once a minute."""
        why, now = explain(error), time.monotonic()
        if now - self._said.get(why, -SAY_AGAIN_S) >= SAY_AGAIN_S:
            self._said = {why: now} if len(self._said) > 100 else {**self._said, why: now}
            self._log.warning("trouble with the daemon's socket", why=why)
