"""How a launched command speaks with the daemon: as one rank, which is always at a boundary."""

from __future__ import annotations

import os
import time

import powerguard
from powerguard.core.messages import Beat, FromRank, Hello, Pace, Seal, SealWritten, ToRank
from powerguard.train.desk import Desk
from powerguard.train.identity import Identity
from powerguard.train.log import Log, explain

SAY_AGAIN_S = 60.0


class Ear:
    """The link's ear for a command. *pace* is what its save was said to take."""

    def __init__(self, identity: Identity, desk: Desk, pace: Pace, log: Log) -> None:
        self._identity, self._desk, self._pace, self._log = identity, desk, pace, log
        self._was_there = False
        self._said_at = -SAY_AGAIN_S

    def hello(self) -> Hello:
        """How the command registers."""
        me = self._identity
        return Hello(
            job=me.job,
            rank=me.rank,
            local_rank=0,
            world_size=me.world_size,
            pid=os.getpid(),
            directory="",
            unit="command",
            version=powerguard.__version__,
            master=me.master,
            step=self._desk.step,
            pace=self._pace,
            seq=self._desk.seq,
        )

    def beat(self) -> Beat:
        """How it is."""
        return Beat(self._desk.step, self._pace, self._desk.busy)

    def hear(self, message: ToRank) -> tuple[FromRank, ...]:
        """Takes a message in. A seal is nothing to write: what the program saved is its own."""
        replies = self._desk.hear(message)
        if isinstance(message, Seal) and not any(isinstance(reply, SealWritten) for reply in replies):
            self._desk.say(SealWritten(message.seq, message.step, message.generation))
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
        if yes:
            self._log.info("guarded: a daemon is connected")
        elif self._was_there:
            self._log.warning("the daemon is gone: running on unguarded until it is back")
        self._was_there = yes

    def alone(self, path: str) -> None:
        """No daemon has been there so far."""
        self._log.warning("no powerguard daemon: running on unguarded until one appears", socket=path)

    def trouble(self, error: Exception) -> None:
        """Something went wrong in the link, which goes on."""
        now = time.monotonic()
        if now - self._said_at >= SAY_AGAIN_S:
            self._said_at = now
            self._log.warning("trouble with the daemon's socket", why=explain(error))
