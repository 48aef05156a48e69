"""Carries out saves: copies on the training thread, writes and seals on threads of their own; the desk is told.

A snapshot is staged by the training thread and written behind its back; a stop is written in front of it. Two worker
threads are up from the start: none has to be made in an emergency, and a seal never waits behind a write.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from powerguard.core.follow import Deed, Save
from powerguard.core.messages import Failed, Seal, Sealed, SealWritten, Shard, Staged
from powerguard.errors import PowerguardError
from powerguard.generations.names import parse_generation
from powerguard.generations.seal import seal
from powerguard.train.flush import Cancelled, Written
from powerguard.train.flush import Staged as Copied
from powerguard.train.log import Log, explain
from powerguard.train.metered import MeteredFlusher

if TYPE_CHECKING:
    from powerguard.train.periodic import Saving


class Worker:
    """A thread that does one thing after the other; what a thing raises goes to *trouble*."""

    def __init__(self, name: str, trouble: Callable[[Exception], None]) -> None:
        self._trouble = trouble
        self._things: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._open = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, thing: Callable[[], None]) -> None:
        """*thing*, when it is its turn."""
        with self._changed:
            self._open += 1
        self._things.put(thing)

    def idle(self, within_s: float) -> bool:
        """Whether nothing is left to do, at the latest after *within_s*."""
        with self._changed:
            return self._changed.wait_for(lambda: self._open == 0, within_s)

    def stop(self, wait_s: float) -> None:
        """Ends after what it is doing; waits for that at most *wait_s*."""
        self._things.put(None)
        self._thread.join(wait_s)

    def _run(self) -> None:
        while (thing := self._things.get()) is not None:
            try:
                thing()
            except Exception as error:
                self._trouble(error)
            finally:
                with self._changed:
                    self._open -= 1
                    self._changed.notify_all()


class Book(Protocol):
    """Where deeds are entered."""

    busy: str

    def say(self, deed: Deed) -> None:
        """A deed, to be told to the daemon."""


class Writing:
    """A write behind the training thread's back."""

    def __init__(self, seq: int, expected_s: float) -> None:
        self.seq = seq
        self.ends_at = time.monotonic() + expected_s
        self.given_up = threading.Event()
        self.done = threading.Event()


class Saver:
    """Saves *state* through *flusher*, for its owner's orders; keeps *keep* generations."""

    def __init__(
        self, flusher: MeteredFlusher, state: Mapping[str, object], book: Book, *, keep: int, log: Log
    ) -> None:
        self.flusher, self.state, self.keep = flusher, state, keep
        self._book, self._log = book, log
        self._writer = Worker("powerguard-writer", self._trouble)
        self._sealer = Worker("powerguard-sealer", self._trouble)
        self._writing: Writing | None = None
        self._sealing: set[int] = set()
        self._retire_after: set[int] = set()  # orders whose seal this rank wrote
        self._settle_later = False
        self.savings: list[Saving] = []  # the run's own, which nobody has asked after yet; its Checkpointer's list

    # ---- on the training thread ----------------------------------------------------------------------

    def snapshot(self, save: Save) -> None:
        """Stages the state and has it written; training goes on."""
        try:
            copied = self._stage(save)
        except Exception as error:
            self._failed(save, error)
            return
        self._book.say(Staged(save.seq, save.step, copied.stage_s))
        self._behind(Writing(save.seq, self._expected_s()), lambda up: self._write(save, copied, up))

    def stop(self, save: Save) -> None:
        """Makes the state durable here and now; a snapshot being written is waited for, or given up."""
        self._make_way(save.budget_s)
        self._book.busy = "writing"
        try:
            copied, written = self.flusher.flush(self.state, save.step, save.generation, weights=save.weights)
        except Exception as error:
            self._failed(save, error)
            return
        self._book.say(Staged(save.seq, save.step, copied.stage_s))
        self._wrote(save, written)

    def _stage(self, save: Save) -> Copied:
        self._book.busy = "staging"
        return self.flusher.stage(self.state, save.step, weights=save.weights)

    def _make_way(self, budget_s: float | None) -> None:
        """What is being written is finished; or given up, where not both fit into *budget_s* but the new one does."""
        writing = self._writing
        if writing is None or writing.done.is_set():
            return
        pace = self.flusher.meter.pace()
        left = max(0.0, writing.ends_at - time.monotonic())
        fresh = pace.stage_s + pace.write_s + pace.fsync_s
        if budget_s is not None and fresh <= budget_s < left + fresh:
            self._log.info("giving up the snapshot being written: the stop has no time for both", budget_s=budget_s)
            writing.given_up.set()
        while not writing.done.wait(0.5):
            pass  # bounded by the write itself; the flusher would queue behind it anyway

    def _expected_s(self) -> float:
        pace = self.flusher.meter.pace()
        return pace.write_s + pace.fsync_s

    def _trouble(self, error: Exception) -> None:
        self._log.error("a save's thread met what it should have handled", why=explain(error), exc_info=error)

    def quiet(self, within_s: float) -> bool:
        """Whether nothing is being written or sealed, at the latest after *within_s*."""
        ends = time.monotonic() + within_s
        for saving in tuple(self.savings):
            with contextlib.suppress(Exception):  # told to whoever calls the next save
                saving.result()
        return self._writer.idle(within_s) and self._sealer.idle(max(0.0, ends - time.monotonic()))

    def collect(self, *, leave: int) -> None:
        """Waits for all of the run's own saves but the *leave* newest, and logs what they met: nobody else asks."""
        while len(self.savings) > leave:
            saving = self.savings.pop(0)
            try:
                saving.result()
            except Exception as error:
                step, _ = parse_generation(saving.path.name) or (None, "")
                self._log.error("a periodic save failed", step=step, why=explain(error))

    def finish(self, closing: Callable[[], object]) -> None:
        """Ends the run's own saves; what they met is logged, since nobody asks any more."""
        self.collect(leave=0)
        try:
            closing()
        except Exception as error:
            self._log.error("a save in the background failed", why=explain(error))

    # ---- behind it -----------------------------------------------------------------------------------

    def _behind(self, writing: Writing, work: Callable[[Callable[[], bool]], None]) -> None:
        self._writing = writing

        def thing() -> None:
            try:
                work(writing.given_up.is_set)
            finally:
                writing.done.set()

        self._writer.do(thing)

    def _write(self, save: Save, copied: Copied, given_up: Callable[[], bool]) -> None:
        try:
            written = self.flusher.write(copied, save.generation, cancelled=given_up)
        except Exception as error:
            self._failed(save, error)
            return
        self._wrote(save, written)

    def _wrote(self, save: Save, written: Written) -> None:
        self._book.say(Shard(save.seq, save.step, save.generation, written.record, written.write_s, written.fsync_s))

    def _failed(self, save: Save, error: Exception) -> None:
        why = explain(error)
        level = self._log.info if isinstance(error, Cancelled) else self._log.error
        level("save failed", step=save.step, generation=save.generation, why=why)
        self._book.say(Failed(save.seq, save.step, why))

    # ---- the daemon's words about seals ----------------------------------------------------------------

    def seal(self, order: Seal) -> None:
        """Writes the seal, once; a repeat while it is being written is nothing."""
        if order.seq in self._sealing:
            return
        self._sealing.add(order.seq)
        self._sealer.do(lambda: self._seal(order))

    def _seal(self, order: Seal) -> None:
        try:
            seal(
                self.flusher.directory,
                order.generation,
                step=order.step,
                world_size=order.world_size,
                unit=self.flusher.unit,
                shards=order.shards,
            )
        except Exception as error:
            self._log.error("seal failed", generation=order.generation, why=explain(error))
            self._book.say(Failed(order.seq, order.step, f"seal: {explain(error)}"))
            return
        finally:
            self._sealing.discard(order.seq)
        self._retire_after.add(order.seq)
        self._book.say(SealWritten(order.seq, order.step, order.generation))

    def sealed(self, word: Sealed, *, now: bool) -> None:
        """The generation counts: old ones may go and space is reserved anew, at once, or with `settle` after a stop."""
        retire = word.seq in self._retire_after
        self._retire_after.discard(word.seq)
        if now:
            self._sealer.do(lambda: self._settle(retire))
        else:
            self._settle_later = self._settle_later or retire

    def settle(self) -> None:
        """Training goes on after a stop: what was left undone for it is done."""
        retire, self._settle_later = self._settle_later, False
        self._sealer.do(lambda: self._settle(retire))

    def _settle(self, retire: bool) -> None:
        try:
            for warning in self.flusher.settle(self.keep if retire else None):
                self._log.warning(warning)
        except PowerguardError as error:
            self._log.warning("old generations can't be retired", why=str(error))

    def close(self, wait_s: float) -> None:
        """Finishes what is being written, for at most *wait_s*."""
        ends = time.monotonic() + wait_s
        self._writer.stop(wait_s)
        self._sealer.stop(max(0.1, ends - time.monotonic()))
        if self._writer.idle(0.0) and self._sealer.idle(0.0):
            with contextlib.suppress(PowerguardError):
                self.flusher.close()
