"""The hook: one call a step, and the rest happens by itself.

::

    guard = powerguard.attach({"model": model, "optimizer": optimizer, "loader": loader}, "/checkpoints/run1")
    for step in range(guard.resume(), steps):
        train_one_step()
        if guard.boundary(step):  # after optimizer, scheduler and loader have moved
            break

Unarmed, `boundary` stores the step into the shared page and looks at one attribute. Armed, it holds, saves, parks and
leaves as the order says (`core/follow.py`); everything bounded but a park, which lasts as long as the daemon is there.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping, MutableSequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from powerguard import wire
from powerguard.core.messages import Notice
from powerguard.core.page import CELL
from powerguard.errors import UsageError
from powerguard.generations.lives import ANNOUNCED, FINISHED
from powerguard.train import single
from powerguard.train.desk import Desk
from powerguard.train.identity import Identity
from powerguard.train.leaver import Leaver
from powerguard.train.link import Link
from powerguard.train.listener import Listener
from powerguard.train.log import Log, explain
from powerguard.train.page import SharedPage
from powerguard.train.stand import stand
from powerguard.train.verdict import GO, Mutating, Verdict

__all__ = ["GO", "Guard", "StagingGuard", "Verdict"]

CLOSE_S = 30.0
"""A write under way is finished when the guard is closed, for at most so long."""


if TYPE_CHECKING:
    from powerguard.train.ledger import Ledger
    from powerguard.train.rhythm import Rhythm


class Guard:
    """One rank's guard, made by `attach`. A context manager: leaving it says BYE.

    `boundary`, `mutating`, `resume` and `save` belong to the training thread.
    """

    def __init__(
        self,
        state: Mapping[str, object],
        dir: str | Path,
        identity: Identity,
        *,
        keep: int,
        unit: str,
        allow_pickle: bool,
        reserve: bool,
        storage: Literal["local", "shared"] = "local",
        replicated: Collection[str] = (),
    ) -> None:
        from powerguard.train.data import examine, isolate
        from powerguard.train.metered import MeteredFlusher
        from powerguard.train.pace import PaceMeter
        from powerguard.train.saver import Saver

        self.identity = identity
        self.resumed: Any = None  # the LoadReport of `resume`: its values hold what couldn't be changed in place
        self.closed = False
        self._pid = os.getpid()
        self._foreign = False  # a forked child of the process that attached
        self._log = Log(job=identity.job, rank=identity.rank)
        for warning in examine(state):
            self._say(warning, position="not exact")
        isolate(state)
        self._step = -1
        self._armed = False
        self._verdict = GO
        self._mutating = Mutating()
        meter = PaceMeter()
        flusher = MeteredFlusher(
            dir,
            meter=meter,
            rank=identity.rank,
            world_size=identity.world_size,
            local_rank=identity.local_rank,
            allow_pickle=allow_pickle,
            reserve=reserve,
            unit=unit,
            storage=storage,
            replicated=replicated,
        )
        self._desk = Desk(step_now=lambda: int(self._step), arm=self._arm, pace=meter.pace)
        self._saver = Saver(flusher, state, self._desk, keep=keep, log=self._log)
        self._leaver: Leaver | None = None
        self._link: Link | None = None
        self._page: SharedPage | None = None
        self._cells: MutableSequence[int] | memoryview = [0] * 8
        self._ledger: Ledger | None = None  # rank 0's
        self._rhythm: Rhythm | None = None
        self._periodic: Any = None  # a Checkpointer, once there was a reason for one
        self._staging: Any = None  # a Staging, likewise
        self.stage_every = 0  # 0 = only where `stage` is called
        self._path = ""  # of the daemon's socket

    def begin(self, path: str, prove: bool, leaver: Leaver | None) -> None:
        """Makes memory and room, then looks for the daemon. What is raised leaves nothing behind. Called by `attach`,
        as `keep_time` before it."""
        with self._or_nothing():
            self._begin(path, prove, leaver)

    @contextlib.contextmanager
    def _or_nothing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close("not attached")
            raise

    def _begin(self, path: str, prove: bool, leaver: Leaver | None) -> None:
        flusher = self._saver.flusher
        ready = flusher.prepare(self._saver.state, prove=prove)
        for warning in ready.warnings:
            self._log.warning(warning)
        self._leaver, self._path = leaver, path
        if self.stage_every:
            self._stager()
        self._page = SharedPage(f"{self.identity.job}.{self.identity.rank}")
        self._cells = self._page.cells
        listener = Listener(self.identity, self._desk, self._saver, leaver, page=self._page.path, log=self._log)
        self._link = Link(path, wire.identity(self.identity.job, self.identity.rank), listener)
        self._desk.wake = self._link.wake
        self._say(
            "guard attached",
            directory=str(flusher.directory),
            state_bytes=ready.state_bytes,
            memory_bytes=ready.memory_bytes,
            writer=ready.writer,
            write_s=None if ready.write_s is None else round(ready.write_s + (ready.fsync_s or 0.0), 3),
        )
        if not os.path.exists(path):
            listener.alone(path)
        self._keep_book()
        single.claim(self)
        self._link.start()

    def _keep_book(self) -> None:
        from powerguard.train.ledger import Ledger

        if self._rhythm is not None:
            self._checkpointer()  # whose ranks must have a name in common: better said now than at the first save
            self._rhythm.begin(self._step)
        if self.identity.rank == 0:
            every = "" if self._rhythm is None else str(self._rhythm.every)
            self._ledger = Ledger(
                self.directory, self.identity.world_size, every, lambda: int(self._step), lambda: self._desk.busy
            )
            self._ledger.start()

    def keep_time(self, every: int | str, mtbf: str | float | None) -> None:
        from powerguard.train.rhythm import Rhythm

        pace = self._saver.flusher.meter.pace
        with self._or_nothing():
            self._rhythm = Rhythm(every, self.directory, self.identity.world_size, pace, mtbf)

    def _arm(self, yes: bool) -> None:
        if not self._foreign:
            self._armed = yes

    def _say(self, text: str, **facts: object) -> None:
        """To people: one rank of a node is enough."""
        (self._log.info if self.identity.local_rank == 0 else self._log.debug)(text, **facts)

    # ---- the training loop's side --------------------------------------------------------------------

    def boundary(self, step: int) -> Verdict:
        """To be called once optimizer step *step* is complete, and optimizer, scheduler and loader have moved.

        Falsy: go on with the next step. Truthy: the node halts and everything is saved; leave the loop. May wait
        inside: for a decision, for a write, for the mains. Raises UsageError for a step lower than the last one.
        """
        if step < self._step:
            raise self._backwards(step)
        self._cells[CELL] = self._step = step  # the store ...
        if self._armed:  # ... and the load, in this order: see Desk.hear
            return self._stand(step)
        return GO

    def _stand(self, step: int) -> Verdict:
        """The boundary of an armed guard."""
        if self._foreign:
            raise UsageError(
                "boundary() was called in a forked child of the process that attached the guard",
                todo="call it in the training process only",
            )
        verdict = stand(self._desk, self._saver, int(step), self._say)
        if verdict:
            self._verdict = verdict
            if self._ledger is not None:
                self._ledger.close(ANNOUNCED)
            if self._leaver is not None:
                self._leaver.start(verdict.code)
        return verdict

    def _backwards(self, step: int) -> UsageError:
        return UsageError(
            f"boundary({step}) after boundary({self._step}): steps must never go back",
            todo="count optimizer steps over the whole run, not per epoch; after loading an older state call resume()",
        )

    def mutating(self) -> Mutating:
        """A context for the part of a step that changes the state: optimizer, scheduler and loader."""
        return self._mutating

    def resume(self) -> int:
        """Loads the newest generation that all ranks can trust; the first step to run, 0 where there is none.

        Ranks find out over torch.distributed, if it is initialised; else each verifies every rank's part and so finds
        the same. Raises CheckpointError where all are damaged, StateError where the state doesn't fit.
        """
        from powerguard.train.resume import beginning, load_newest

        self._desk.busy = "resuming"
        try:
            report = load_newest(self._saver.flusher, self._saver.state, self._checkpointer)
        finally:
            self._desk.busy = ""
        self.resumed = report
        step = report.step if report is not None else -1
        self.goes_on(step)
        text = report.describe() if report is not None else beginning(self._saver.flusher.directory)
        self._say(text, first_step=step + 1, load_s=round(report.load_s, 3) if report is not None else None)
        return step + 1

    def goes_on(self, step: int) -> None:
        """Training goes on after *step*, whose state somebody has loaded; `resume` says so by itself."""
        self._cells[CELL] = self._step = step
        if self._rhythm is not None:
            self._rhythm.begin(step)
        before = self._ledger.resumed(step) if self._ledger is not None else None
        if before is not None:
            self._say(
                f"the run was interrupted ({before.ended or 'without a word'})",
                lost_steps=before.lost_steps,
                lost_s=round(before.lost_s, 1),
                lost_gpu_hours=round(before.gpu_hours, 3),
                down_s=round(before.down_s),
            )

    def save(self, step: int, *, wait: bool = False) -> None:
        """A periodic save of the state after *step*: copied here, made durable in the background unless *wait*.

        All ranks call it at the same steps. Raises what an earlier save in the background has met.
        """
        saver = self._checkpointer()
        if wait:
            saver.save(self._saver.state, step)
        else:
            saver.save_async(self._saver.state, step)

    def _checkpointer(self) -> Any:
        if self._periodic is None:
            from powerguard.train.periodic import Checkpointer

            self._periodic = Checkpointer(
                self._saver.flusher.directory,
                rank=self.identity.rank,
                world_size=self.identity.world_size,
                keep=self._saver.keep,
                flusher=self._saver.flusher,
            )
            self._saver.savings = self._periodic.savings
        return self._periodic

    def stage(self) -> bool:
        """Copies the state as it is after the step last completed into shared memory, where it outlives this process.

        Should a rank hang or die in an outage, the newest step that all ranks have staged is made durable by processes
        of their own. Called by all ranks after the same steps, on the training thread, outside of a step. False, with a
        warning, where it can't be (or while an order keeps what is there). Raises StateError, with the numbers, where
        there is no room for two copies: at the first call, or in `attach` where it was told *stage_every*.
        """
        staging = self._stager()
        self._desk.busy = "staging"
        try:
            return bool(staging.stage(self._saver.state, self._step)) if self._step >= 0 else False
        finally:
            self._desk.busy = ""

    def _stager(self) -> Any:
        if self._staging is None:
            from powerguard.train.staging import Staging, facts_of

            flusher = self._saver.flusher
            self._staging = Staging(
                flusher, self._saver.state, facts_of(flusher, self.identity, self._path), log=self._log
            )
        return self._staging

    # ---- what there is to know -----------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The step last completed; -1 = none."""
        return self._step

    @property
    def directory(self) -> Path:
        """Where generations go, absolute."""
        return self._saver.flusher.directory

    @property
    def connected(self) -> bool:
        """A daemon is there."""
        return self._desk.alone_since is None

    @property
    def notice(self) -> Notice | None:
        """The daemon's last word on what is coming; None = none yet."""
        return self._desk.notice

    @property
    def stopped(self) -> bool:
        """The order to leave has come: the process ends with `exit_code`."""
        return bool(self._verdict) or self._desk.exit is not None

    @property
    def exit_code(self) -> int:
        """What to exit with: 75 once the node halts (schedulers requeue on it), else 0."""
        return self._verdict.code or (self._desk.exit.code if self._desk.exit is not None else 0)

    # ---- the end -------------------------------------------------------------------------------------

    def close(self, why: str = "finished") -> None:
        """Finishes what is being written, says BYE, gives memory and room back. A repeat is nothing."""
        if self.closed or self._foreign:
            self.closed = True
            return
        self.closed = True
        self._cells, self._armed = [0] * 8, False
        self._foreign = True  # nothing arms it any more
        if self._ledger is not None:
            self._ledger.close(ANNOUNCED if self.stopped else why)
        wait_s = 1.0 if self.stopped else CLOSE_S
        if self._periodic is not None:
            self._saver.finish(self._periodic.close)
        if self._staging is not None and not self.stopped:
            self._staging.close()  # halting, the deputy waits for the daemon's word
        self._saver.close(wait_s)
        if self._link is not None:
            self._link.stop(why)
        if self._page is not None:
            self._page.close()
        if not self.stopped:
            single.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        well = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        self.close(FINISHED if well else f"failed: {type(error).__name__}")

    def in_child(self) -> None:
        """In a forked child: the parent's page and socket are not to be touched."""
        self._foreign = True
        self._cells, self._armed = [0] * 8, True

    def at_exit(self) -> None:
        """The interpreter ends."""
        if os.getpid() != self._pid:
            return
        if self.stopped and self._leaver is not None:
            self._leaver.now(self.exit_code)
        last = getattr(sys, "last_value", None)
        self.close(FINISHED if last is None else f"failed: {type(last).__name__}")


class StagingGuard(Guard):
    """A guard that stages or saves by itself now and then; a class of its own, so that the others don't pay for it."""

    def boundary(self, step: int) -> Verdict:
        """As its base does; then the state is staged, or saved, if it is time."""
        armed = time.monotonic() if self._armed else 0.0
        verdict = super().boundary(step)
        if verdict or self._foreign:
            return verdict
        if self.stage_every and step % self.stage_every == 0:
            self.stage()
        if self._rhythm is not None:
            if armed:
                self._rhythm.waited(time.monotonic() - armed)
            if step >= self._rhythm.due:
                self._save_in_time(step)
        return verdict

    def _save_in_time(self, step: int) -> None:
        """A save that nobody called for; what it meets is logged, and training goes on."""
        assert self._rhythm is not None
        began = time.monotonic()
        try:
            if not self._desk.stopping:
                self._saver.collect(leave=1)
                self.save(step)
        except Exception as error:
            self._log.error("a periodic save failed", step=step, why=explain(error))
        if self._ledger is not None:
            self._ledger.saved(time.monotonic() - began)
        self._rhythm.saved(step, self.identity.rank, lambda: str(self._checkpointer().attempt))
