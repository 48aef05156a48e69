"""Runs a command, and turns the daemon's order to stop into the signal that the command saves on.

It is one rank for the whole process tree. What it can't do it doesn't pretend: an order to snapshot is answered with a
failure unless there is a signal for it, a program that has exited isn't resumed but started again (or left to whoever
requeues it, by exit code 75), and one that has not saved is never killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType

from msgspec import Struct

from powerguard import wire
from powerguard.core.follow import Go, Leave, Park, Rest, Save
from powerguard.core.messages import Failed, Pace, Quiesced, Shard, ShardRecord, Staged
from powerguard.errors import EXIT_REQUEUE, UsageError
from powerguard.launch.ear import Ear
from powerguard.launch.saved import Files, Pump, Sign
from powerguard.launch.tree import To, descendants, open_for_writing, targets, tell
from powerguard.train.desk import Desk
from powerguard.train.identity import Identity
from powerguard.train.link import Link
from powerguard.train.log import Log

PARK_ALONE_S = 120.0
"""The command has ended on an order, and no daemon was connected for so long: nobody will say anything any more."""
LOOK_S = 0.2
FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class How(Struct, frozen=True):
    """What the command understands."""

    signal: int = signal.SIGTERM
    to: To = To.AUTO
    saved: Sign = Sign()
    takes_s: float = 0.0  # from the signal to saved; 0 = not known
    snapshot: int = 0  # a signal on which it saves and goes on; 0 = none
    restart: bool = False  # start it again when the mains are back


class Launch:
    """One command under guard, as rank *identity*."""

    def __init__(self, command: Sequence[str], how: How, identity: Identity, socket: str) -> None:
        if how.snapshot and how.saved.kind == "exit":
            raise UsageError("a snapshot doesn't end the program", todo="give --saved file:GLOB or log:REGEX")
        self._command, self._how, self._rank = list(command), how, identity.rank
        self._log = Log(job=identity.job, rank=identity.rank)
        self._armed = False
        self._step = 0
        pace = Pace(write_s=how.takes_s)
        self._desk = Desk(step_now=lambda: self._step, arm=self._arm, pace=lambda: pace)
        ear = Ear(identity, self._desk, pace, self._log)
        self._link = Link(socket, wire.identity(identity.job, identity.rank), ear)
        self._desk.wake = self._link.wake
        self._process: subprocess.Popen[bytes] | None = None
        self._pumps: list[Pump] = []
        self._lines = 0  # of its output, that matched
        self._ordered = False  # the command was told to stop

    def _arm(self, yes: bool) -> None:
        self._armed = yes

    def run(self) -> int:
        """Runs the command to its end; the code to exit with. Raises UsageError where it can't be started."""
        # What is ignored stays ignored, for the command too. A terminal's SIGINT reaches the command by itself.
        heard = [number for number in (*FORWARDED, signal.SIGINT) if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._forward) for number in heard}
        try:
            self._start()
            self._link.start()
            code = self._serve()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        self._link.stop("finished" if code == 0 else f"exited with {code}")
        return code

    # ---- the command ---------------------------------------------------------------------------------

    def _start(self) -> None:
        pipe = subprocess.PIPE if self._how.saved.kind == "log" else None
        try:
            process = subprocess.Popen(self._command, stdout=pipe, stderr=pipe)
        except OSError as error:
            raise UsageError(f"{self._command[0]}: {error.strerror}", todo="check the command after --") from None
        self._process, self._ordered = process, False
        sources = [(process.stdout, sys.stdout.fileno()), (process.stderr, sys.stderr.fileno())] if pipe else []
        self._pumps = [Pump(source, sink, self._how.saved.what, self._matched) for source, sink in sources if source]
        for pump in self._pumps:
            pump.start()
        threading.Thread(target=self._wait, args=(process,), name="powerguard-wait", daemon=True).start()

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        self._desk.look()

    def _matched(self) -> None:
        self._lines += 1
        self._desk.look()

    @property
    def _code(self) -> int | None:
        """The command's exit code, as shells have it; None while it runs."""
        assert self._process is not None
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def _forward(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """A signal for us is one for the command."""
        if number != signal.SIGINT and self._process is not None and self._process.poll() is None:
            tell([self._process.pid], number)

    # ---- what the daemon orders ----------------------------------------------------------------------

    def _serve(self) -> int:
        """Until the command has ended, and nothing is expected of it any more."""
        while True:
            self._desk.enter()
            todo = self._desk.next(self._step)
            code = self._code
            if code is not None and not self._ordered:
                self._finish_output()
                return code
            if isinstance(todo, Leave) and code is not None:
                self._log.info("leaving", reason=todo.reason, code=todo.code)
                return todo.code
            if isinstance(todo, Save):
                self._save(todo)
                continue
            if isinstance(todo, Rest) and not self._desk.quiesced and code is not None:
                self._desk.say(Quiesced(todo.seq))
            elif isinstance(todo, Park):
                self._desk.busy = "parked"
            elif isinstance(todo, Go):
                if self._armed and code is None:
                    self._step += 1  # a boundary that was promised while we weren't at one
                    continue
                self._desk.busy = ""
                if code is not None:
                    if not self._restarted():
                        return EXIT_REQUEUE
                    continue
            if code is not None and self._desk.alone_s() > PARK_ALONE_S:
                return EXIT_REQUEUE
            self._desk.wait()

    def _restarted(self) -> bool:
        """The outage is over, and the command has ended for it: whether it runs again."""
        if self._how.restart:
            self._log.info("the outage is over: starting the command again")
            self._start()
        else:
            self._log.info("the outage is over; the command has ended for it", code=EXIT_REQUEUE)
        return self._how.restart

    def _save(self, save: Save) -> None:
        if not save.stop and not self._how.snapshot:
            why = "an unmodified program is saved by stopping it; give --snapshot-signal if it can save and go on"
            self._desk.say(Failed(save.seq, save.step, why))
            return
        began = time.monotonic()
        self._desk.busy = "writing"
        why = self._signal_and_wait(save, began)
        took = time.monotonic() - began
        if why:
            self._log.error("not saved", why=why, took_s=round(took, 1))
            self._desk.say(Failed(save.seq, save.step, why))
            return
        synced = time.monotonic()
        os.sync()  # a program that doesn't fsync has saved into the page cache
        fsync_s = time.monotonic() - synced
        self._log.info("saved", by=self._how.saved.kind, took_s=round(took, 1), sync_s=round(fsync_s, 1))
        self._desk.say(Staged(save.seq, save.step))
        record = ShardRecord(rank=self._rank, path="", bytes=0, digest="")
        self._desk.say(Shard(save.seq, save.step, save.generation, record, took, fsync_s))

    def _signal_and_wait(self, save: Save, began: float) -> str:
        """ "" once the program shows that it has saved; else why it doesn't. Nothing is killed."""
        how = self._how
        number = how.signal if save.stop else how.snapshot
        files = Files(how.saved.what) if how.saved.kind == "file" else None
        lines = self._lines
        assert self._process is not None
        pids = targets(self._process.pid, how.to)
        if self._code is None:
            told, refused = tell(pids, number)
            if refused:
                return f"this user may not signal process {refused[0]}: start exec as the user that it runs as"
            if not told:
                return "there is no process to signal"
        self._ordered = self._ordered or save.stop
        name = signal.Signals(number).name
        self._log.info(f"{name} sent", to=len(pids), budget_s=save.budget_s, saved_by=how.saved.kind)
        while True:
            code = self._code
            if code is not None:
                return self._ended(code, number, files, lines)
            if self._lines > lines or (files is not None and files.at_rest(time.monotonic(), self._written_to)):
                return ""
            if save.budget_s is not None and time.monotonic() - began > save.budget_s:
                return f"not within the {save.budget_s:.0f} s that were left after {name}; it is still running"
            self._desk.wait(time.monotonic() + LOOK_S)

    def _written_to(self) -> set[tuple[int, int]]:
        assert self._process is not None
        return open_for_writing([self._process.pid, *descendants(self._process.pid)])

    def _ended(self, code: int, number: int, files: Files | None, lines: int) -> str:
        """Whether an exit is that of a program that has saved."""
        assert self._process is not None
        self._finish_output()
        if self._how.saved.kind == "log":
            return "" if self._lines > lines else f"it exited with {code} without the line that it prints when saved"
        if files is not None:
            return "" if files.new() else f"it exited with {code} without a new file"
        if self._process.returncode == -number:
            return f"{signal.Signals(number).name} killed it: it has no handler, or the wrong process was signalled"
        return "" if code in (0, EXIT_REQUEUE, 128 + number) else f"it exited with {code}"

    def _finish_output(self) -> None:
        for pump in self._pumps:
            pump.join(1.0)
