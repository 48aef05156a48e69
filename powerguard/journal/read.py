"""Reading a journal that may end anywhere: every whole record before a cut, never an exception for what is torn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct, field

from powerguard.core.decide import decide
from powerguard.core.policy import Policy
from powerguard.core.state import State
from powerguard.errors import JournalError
from powerguard.journal.records import (
    FORMAT,
    LINE_MAX_BYTES,
    Base,
    Done,
    Fault,
    Head,
    Line,
    Record,
    Rules,
    Tick,
    decode_line,
)


class Recording(Struct):
    """A journal in memory, its records in the order of their numbers."""

    path: str
    heads: list[Head] = field(default_factory=list)  # one for each start of the daemon
    records: list[Record] = field(default_factory=list)
    damaged: int = 0  # lines that can't be read; one torn line at the end is usual after a power cut

    @property
    def head(self) -> Head | None:
        """The first head: which boot of which node this is."""
        return self.heads[0] if self.heads else None

    @property
    def nothing(self) -> bool:
        """No line of it is a journal's."""
        return not self.heads and not self.records


class Folded(Struct, frozen=True):
    """What a restart of the daemon goes on from."""

    state: State | None = None  # None: nothing usable of this boot
    next_n: int = 0
    seq_floor: int = 0  # orders already given may have numbers up to this one
    halt_done: bool = False  # the node was really told to power off in this boot
    path: str = ""
    segment: int = 0


def read(path: str | Path) -> Recording:
    """The journal at *path*. JournalError: it can't be opened, or no line of it is a journal's."""
    recording = read_any(path)
    if recording.nothing and recording.damaged:
        raise JournalError(f"{path}: not a journal of powerguard", todo="name a journal-*.jsonl of its state_dir")
    return recording


def read_any(path: str | Path) -> Recording:
    """As `read`, but a file without a line of a journal's is nothing but damaged lines."""
    recording = Recording(str(path))
    seen: set[int] = set()
    for line in _lines(path):
        if isinstance(line, Head):
            recording.heads.append(line)
        elif line is None:
            recording.damaged += 1
        elif line.n not in seen:
            seen.add(line.n)
            recording.records.append(line)
    recording.records.sort(key=lambda r: r.n)
    return recording


def fold(directory: str | Path, boot: str) -> Folded:
    """The last state of *boot* in the newest journal of *directory*; records after it are decided anew.

    Nothing of another boot is used: its instants mean nothing now. A record that decides differently today than
    it did (the program was updated in mid-outage) ends the fold there, so that no order arises from history.
    """
    path = newest(directory, boot)
    if path is None:
        return Folded()
    try:
        return _fold(path, boot)
    except JournalError:
        return Folded()


def newest(directory: str | Path, boot: str) -> Path | None:
    """The file of *boot* with the highest segment, or None."""
    best: tuple[int, Path] | None = None
    for path in Path(directory).glob(f"journal-*-{boot[:8]}-*.jsonl"):
        segment = path.stem.rpartition("-")[2]
        if segment.isdigit() and (best is None or int(segment) > best[0]):
            best = (int(segment), path)
    return best[1] if best else None


def _fold(path: Path, boot: str) -> Folded:
    policy, state, state_n, top, floor, segment, done = Policy(), None, -1, -1, 0, 0, False
    later: list[Tick | Rules] = []
    for line in _lines(path):
        if line is None:
            continue
        if isinstance(line, Head):
            if line.boot != boot:
                return Folded()
            segment = line.segment
            continue
        top = max(top, line.n)
        if isinstance(line, Done):
            done = done or (line.done and line.real)
        elif isinstance(line, Fault):
            state, state_n, later, floor = None, line.n, [], max(floor, line.seq)
        elif line.n <= state_n:
            continue
        elif isinstance(line, Base) or (isinstance(line, Tick) and line.state is not None):
            policy = _policy_until(later, line.n, policy)
            state, state_n, later = line.state, line.n, [r for r in later if r.n > line.n]
        elif isinstance(line, Tick | Rules):
            later.append(line)
    state = _redecide(policy, state, sorted(later, key=lambda r: r.n)) if state is not None else None
    return Folded(state, top + 1, floor, done, str(path), segment)


def _policy_until(records: list[Tick | Rules], n: int, policy: Policy) -> Policy:
    rules = [r for r in records if isinstance(r, Rules) and r.n < n]
    return max(rules, key=lambda r: r.n).policy if rules else policy


def _redecide(policy: Policy, state: State, records: list[Tick | Rules]) -> State:
    for record in records:
        if isinstance(record, Rules):
            policy = record.policy
            continue
        decision = decide(policy, state, record.seen, record.at)
        if decision.actions != record.actions:
            break
        state = decision.state
    return state


def _lines(path: str | Path) -> Iterator[Line | None]:
    """Each line decoded, or None where it can't be; empty lines and blocks of NUL (a power cut's) are skipped."""
    try:
        with Path(path).open("rb") as file:
            for raw in _raw_lines(file):
                text = raw.strip(b"\0\r\n ")
                if text:
                    yield _decoded(text)
    except (OSError, ValueError) as err:
        why = err.strerror if isinstance(err, OSError) else str(err)
        raise JournalError(f"{path}: can't be read: {why}", todo="check the path and who may read it") from None


def _raw_lines(file: BinaryIO) -> Iterator[bytes]:
    while raw := file.readline(LINE_MAX_BYTES):
        yield raw


def _decoded(text: bytes) -> Line | None:
    try:
        line = decode_line(text)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None
    return None if isinstance(line, Head) and line.format != FORMAT else line
