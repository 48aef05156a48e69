"""The daemon's journal: what is written when, in which file, and how much of it is kept.

While ONLINE nothing happens and the disk stays quiet: the last ten minutes are kept in memory and written when the
phase changes. Decisions with orders are written and synced at once, with the state after them.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from msgspec.structs import replace

from powerguard.core.learn import Lesson
from powerguard.core.messages import Ack, Notice, Welcome
from powerguard.core.policy import Policy
from powerguard.core.state import State, memorable
from powerguard.core.types import Actions, Observation, Phase, Send
from powerguard.journal.read import Folded
from powerguard.journal.records import FORMAT, Base, Done, Fault, Head, Learnt, Record, Rules, Tick, encode
from powerguard.journal.write import Appender, File

RECORDER_S = 600.0
CHUNK_S = 60.0
"""The flight recorder forgets a minute at a time; each minute holds the state before it."""
CHUNK_MAX_BYTES = 1 << 20
STATE_EVERY = 100
"""A quiet record carries the state at least this often, so that a restart re-decides no more than this."""
KEEP_FILES = 32
KEEP_BYTES = 256 << 20
SEGMENT_BYTES = 32 << 20


class _Chunk:
    """A minute of the flight recorder."""

    __slots__ = ("at", "base", "bytes", "lines")

    def __init__(self, at: float, base: bytes) -> None:
        self.at, self.base, self.bytes, self.lines = at, base, 0, list[bytes]()


class Journal:
    """One boot's journal in *directory*, carried on from *folded*. Nothing here raises for what a disk may do."""

    def __init__(
        self,
        directory: str | Path,
        *,
        boot: str,
        node: str,
        version: str,
        folded: Folded | None = None,
        wall: Callable[[], datetime] = lambda: datetime.now(tz=UTC),
        segment_bytes: int = SEGMENT_BYTES,
        keep_files: int = KEEP_FILES,
        keep_bytes: int = KEEP_BYTES,
        file: File | None = None,
    ) -> None:
        folded = folded or Folded()
        self._directory, self._boot, self._node, self._version, self._wall = Path(directory), boot, node, version, wall
        self._segment_bytes, self._keep_files, self._keep_bytes = segment_bytes, keep_files, keep_bytes
        self._out = Appender(file or File())
        self._n, self._segment, self._size, self._quiet = folded.next_n, folded.segment, 0, 0
        self._path = Path(folded.path) if folded.path else None
        self._recorder: deque[_Chunk] = deque()
        self._policy = Policy()

    @property
    def trouble(self) -> str:
        """ "" or what is wrong with the disk now."""
        return self._out.trouble

    @property
    def path(self) -> str:
        """The file being written."""
        return str(self._path or "")

    def begin(self, at: float, policy: Policy, state: State | None = None) -> None:
        """Opens the file, a new one unless this boot has one, and notes the policy and the *state* to begin with."""
        self._policy = policy
        if self._path is None:
            self._path = self._name()
        else:
            with contextlib.suppress(OSError):
                self._size = self._path.stat().st_size
        self._retire()
        self._open(at)
        self._write(Rules(self._take(), at, policy), durable=False)
        if state is not None:
            self._write(Base(self._take(), at, state), durable=False)

    def rules(self, at: float, policy: Policy) -> None:
        """The policy from here on."""
        self._spill()
        self._policy = policy
        self._write(Rules(self._take(), at, policy), durable=False)

    def tick(
        self,
        at: float,
        before: State,
        seen: Observation,
        after: State,
        *,
        actions: tuple[Actions, ...] = (),
        reason: str = "",
    ) -> bool:
        """Notes a decision. True: a restart would know of it; False: the disk is in trouble."""
        changed = after.phase is not before.phase
        telling = memorable(before, after) or any(_binds(action) for action in actions)
        if not telling and after.phase is Phase.ONLINE:
            self._record(at, before, Tick(0, at, after.phase, reason, seen, actions))
            return True
        if after.phase is not Phase.ONLINE or changed:
            self._spill()
        self._quiet = 0 if telling else self._quiet + 1
        with_state = telling or self._quiet % STATE_EVERY == 0
        self._rotate(at, before)
        tick = Tick(self._take(), at, after.phase, reason, seen, actions, after if with_state else None)
        return self._write(tick, durable=telling)

    def fault(self, at: float, seq: int, text: str) -> bool:
        """Notes that the state can't be trusted, with the number of the last-resort order."""
        self._spill()
        return self._write(Fault(self._take(), at, seq, text), durable=True)

    def done(self, at: float, what: str, *, done: bool, real: bool) -> bool:
        """Notes what became of an attempt to halt."""
        return self._write(Done(self._take(), at, what, done, real), durable=True)

    def learnt(self, at: float, feed: str, lesson: Lesson, *, phi: float | None, proven: float | None) -> bool:
        """Notes what a discharge of *feed* was promised to be, what it was, and what it taught."""
        self._spill()
        return self._write(Learnt(self._take(), at, feed, lesson, phi, proven), durable=False)

    def close(self, wait_s: float = 2.0) -> None:
        """Writes what is queued, for at most *wait_s*. What the recorder holds of a quiet time is dropped."""
        self._out.close(wait_s)

    # ---- the flight recorder -----------------------------------------------------------------------

    def _record(self, at: float, before: State, tick: Tick) -> None:
        last = self._recorder[-1] if self._recorder else None
        if last is None or at - last.at >= CHUNK_S or last.bytes >= CHUNK_MAX_BYTES:
            last = _Chunk(at, encode(Base(self._take(), at, before)) + b"\n")
            self._recorder.append(last)
        line = encode(replace(tick, n=self._take())) + b"\n"
        last.lines.append(line)
        last.bytes += len(line)
        limit = int(RECORDER_S / CHUNK_S) + 1
        while len(self._recorder) > limit or at - self._recorder[0].at > RECORDER_S + CHUNK_S:
            self._recorder.popleft()

    def _spill(self) -> None:
        while self._recorder:
            chunk = self._recorder.popleft()
            self._raw(b"".join((chunk.base, *chunk.lines)), durable=False)

    # ---- files -------------------------------------------------------------------------------------

    def _take(self) -> int:
        self._n += 1
        return self._n - 1

    def _write(self, record: Record, durable: bool) -> bool:
        return self._raw(encode(record) + b"\n", durable)

    def _raw(self, lines: bytes, durable: bool) -> bool:
        self._size += len(lines)
        return self._out.append(lines, durable)

    def _open(self, at: float) -> None:
        assert self._path is not None
        created = self._wall().isoformat(timespec="milliseconds")
        head = Head(FORMAT, self._version, self._node, self._boot, at, created, self._segment)
        self._out.start(self._path, encode(head) + b"\n")

    def _rotate(self, at: float, state: State) -> None:
        """Goes on in a new file when this one is long: with head, policy and state it stands alone."""
        if self._size < self._segment_bytes:
            return
        self._segment, self._size = self._segment + 1, 0
        self._path = self._name()
        self._retire()
        self._open(at)
        self._write(Rules(self._take(), at, self._policy), durable=False)
        self._write(Base(self._take(), at, state), durable=True)

    def _name(self) -> Path:
        return self._directory / f"journal-{self._wall():%Y%m%dT%H%M%SZ}-{self._boot[:8]}-{self._segment}.jsonl"

    def _retire(self) -> None:
        """Removes the oldest files beyond the limits; the one being written is never removed."""
        with contextlib.suppress(OSError):
            files = sorted(self._directory.glob("journal-*.jsonl"), key=lambda p: p.name, reverse=True)
            total = 0
            for kept, path in enumerate((p for p in files if p != self._path), 1):
                total += path.stat().st_size
                if kept >= self._keep_files or total > self._keep_bytes:
                    path.unlink()


def _binds(action: Actions) -> bool:
    """Whether a restart must know of it. A greeting, an acknowledgement or a notice is only said again."""
    return not (isinstance(action, Send) and isinstance(action.message, (Welcome, Ack, Notice)))
