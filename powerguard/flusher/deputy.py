"""The deputy's life: as long as its rank lives, and after the rank's death only while it may still be needed.

It ends when the rank has closed its guard (or another process has taken the rank's place), when the daemon says EXIT,
or `linger_s` after the rank's death. SIGTERM ends it once the rank is dead and nothing is being written: whoever ends a
job's processes one by one must not end the one that saves the others' work. Its files in /dev/shm go with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import select
import signal
import sys
import time
from pathlib import Path

from powerguard import wire
from powerguard.core.messages import Decide, Failed, Held, Seal, SealWritten
from powerguard.errors import PowerguardError
from powerguard.flusher.post import Order, Post
from powerguard.flusher.writing import Pen
from powerguard.generations.ledger import Ledger
from powerguard.generations.seal import seal
from powerguard.generations.shelf import remove
from powerguard.train.link import Link

LOOK_S = 0.5
OVERTIME_S = 60.0
"""A deed that nobody acknowledges keeps the deputy no longer than this beyond its time."""
RETRY_S = 10.0


def serve(path: Path) -> int:
    """Serves the shelf whose ledger is at *path* to its end; the exit code."""
    try:
        ledger = Ledger.open(path)
        fcntl.flock(ledger.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        deputy = Deputy(ledger)
    except (OSError, PowerguardError) as error:
        _log(f"can't serve {path}: {error}")
        return 1
    try:
        deputy.run()
    finally:
        deputy.close()
    return 0


class Deputy:
    """One rank's deputy."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.facts = ledger, ledger.facts
        self.pen = Pen(ledger, self.facts)
        self.post = Post(self.held, self._keep)
        self._rank_fd = _pidfd(self.facts.pid)
        self._died_at: float | None = None if self._rank_fd >= 0 else time.monotonic()
        self._closed_at: float | None = None
        self._terminated = False
        self._written: set[str] = set()
        self._retry_at = 0.0
        self._said = ""
        identity = wire.identity(self.facts.job, self.facts.rank, deputy=True)
        self.link = Link(self.facts.socket, identity, self.post, registers=False)
        self.post.wake = self.link.wake

    def held(self) -> Held:
        """What can be made durable without the rank now."""
        lines = self.ledger.lines()
        size = max((line.data_bytes for line in lines), default=0)
        return Held(os.getpid(), tuple(line.step for line in lines), size, self.pen.write_s)

    def _keep(self, step: int) -> None:
        self.ledger.keep = step

    def run(self) -> None:
        """Until it isn't needed any more."""
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._terminate)
        self.ledger.deputy = os.getpid()
        self.link.start()
        steps: tuple[int, ...] = ()
        while not self._over(time.monotonic()):
            with contextlib.suppress(queue.Empty):
                order = self.post.orders.get(timeout=LOOK_S)
                if order is not None:
                    self._do(order)
            found = tuple(line.step for line in self.ledger.lines())
            if found != steps:
                steps = found
                self.link.wake()
            self._prepare()

    def _terminate(self, _number: int, _frame: object) -> None:
        self._terminated = True

    def _prepare(self) -> None:
        """What a write will need is made ready as soon as something is staged; a failure is tried again later."""
        lines = self.ledger.lines()
        if not lines or time.monotonic() < self._retry_at:
            return
        try:
            self.pen.ready(max(lines, key=lambda line: line.data_bytes))
        except (OSError, PowerguardError) as error:
            self._retry_at = time.monotonic() + RETRY_S
            self._tell(f"not ready to write: {error}")

    # ---- orders --------------------------------------------------------------------------------------

    def _do(self, order: Order) -> None:
        try:
            if isinstance(order, Decide):
                self.post.say(self.pen.write(order.seq, order.step, order.generation))
                self._written.add(order.generation)
                self._tell(f"{order.generation}: the staged state of rank {self.facts.rank} is durable")
            elif order.generation in self._written:
                self._seal(order)
        except Exception as error:  # whatever it is: the daemon must hear that nothing will come
            self._tell(f"{order.generation}: {type(error).__name__}: {error}")
            if isinstance(order, Decide):
                self._keep(-1)
            self.post.say(Failed(order.seq, order.step, f"deputy: {error}"[:500]))

    def _seal(self, order: Seal) -> None:
        seal(
            self.facts.directory,
            order.generation,
            step=order.step,
            world_size=order.world_size,
            unit=self.facts.unit,
            shards=order.shards,
        )
        self.post.say(SealWritten(order.seq, order.step, order.generation))

    # ---- the end -------------------------------------------------------------------------------------

    def _over(self, now: float) -> bool:
        open_ = self.post.open()
        if self._died_at is None and not _runs(self._rank_fd):
            self._died_at = now
            self._tell(f"rank {self.facts.rank} is gone; staged: {[line.step for line in self.ledger.lines()]}")
        if self.ledger.closed:
            self._closed_at = self._closed_at or now
            return not open_ or now - self._closed_at > OVERTIME_S
        if self._died_at is None:
            return False
        dead_s = now - self._died_at
        if dead_s > self.facts.linger_s + OVERTIME_S:
            return True
        return not open_ and (self.post.leave or self._terminated or dead_s > self.facts.linger_s)

    def close(self) -> None:
        """Gives everything back; the shelf too, unless its rank lives and may start another deputy."""
        self.link.stop("")
        self.pen.close()
        if self.ledger.closed or self._died_at is not None:
            remove(self.ledger.path)
        self.ledger.close()

    def _tell(self, text: str) -> None:
        if text != self._said:
            self._said = text
            _log(text)


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def _runs(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return not poll.poll(0)


def _log(text: str) -> None:
    """For people, into the rank's own file: the training's streams aren't ours to hold open."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} deputy {os.getpid()}: {text}\n")
        sys.stderr.flush()
