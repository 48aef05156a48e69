"""The journal: readable wherever it was cut, folded to where the daemon was, never in the way of a flush."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard.core.decide import decide
from powerguard.core.messages import (
    Ack,
    Decide,
    Hello,
    Pace,
    Parked,
    Prepare,
    Promise,
    Seal,
    Sealed,
    SealWritten,
    Shard,
    ShardRecord,
    Staged,
)
from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.state import Decision, State, initial
from powerguard.core.types import Comm, Observation, Phase, RankReport, Sample, Send
from powerguard.errors import JournalError
from powerguard.journal import Base, Fault, File, Folded, Journal, Rules, Tick, fold, read, several
from powerguard.journal.read import newest
from powerguard.journal.records import encode

BOOT = "0f7c1c3a-5e1e-4f7e-9d57-6a2f3f0c1b22"
FEED = "rack@nut:3493"
POLICY = Policy(feeds=(FeedPolicy(FEED),))
WAIT_S = 20.0


class Script:
    """A node with one obedient rank, on a clock of its own: what a daemon would see, decision after decision."""

    def __init__(self, start: float = 1000.0) -> None:
        self.now = start
        self.state: State = initial(BOOT, start, node="n")
        self.rank: list[RankReport] = []
        self.say(Hello("job", 0, 0, 1, 4711, "/ckpt", pace=Pace(0.5, 0.2, 5.0, 0.5, 1 << 20)))

    def say(self, *messages) -> None:
        self.rank += [RankReport("job", 0, self.now, m) for m in messages]

    def step(self, status: str, wait_s: float = 2.0, *, runtime: float = 900.0) -> tuple[State, Observation, Decision]:
        self.now += wait_s
        variables = {
            "ups.status": status,
            "battery.runtime": f"{runtime:.0f}",
            "battery.charge": "90",
            "ups.load": "40",
        }
        seen = Observation(samples=(Sample(FEED, self.now, Comm.OK, variables),), reports=tuple(self.rank))
        self.rank = []
        before = self.state
        decision = decide(POLICY, before, seen, self.now)
        for action in decision.actions:
            if isinstance(action, Send):
                self._answer(action.message)
        self.state = decision.state
        return before, seen, decision

    def _answer(self, message) -> None:
        if isinstance(message, Prepare):
            self.say(Promise(message.seq, 7))
        elif isinstance(message, Decide):
            shard = ShardRecord(0, "rank-00000", 1 << 20, "d1")
            self.say(Staged(message.seq, message.step), Shard(message.seq, message.step, message.generation, shard))
        elif isinstance(message, Seal):
            self.say(SealWritten(message.seq, message.step, message.generation), Parked(message.seq, message.step))
        elif isinstance(message, Sealed):
            self.say(Ack(message.seq, "Sealed"))

    def outage(self, until: Phase, online: int = 3):
        """Steps up to and with the one that enters *until*."""
        for _ in range(online):
            yield self.step("OL")
        for n in range(400):
            yield self.step("OB DISCHRG", runtime=max(30.0, 900.0 - 12.0 * n))
            if self.state.phase is until:
                return
        raise AssertionError(f"{until} was never entered")


def journal(directory: Path, **how) -> Journal:
    book = Journal(directory, boot=BOOT, node="n", version="0", **how)
    book.begin(1000.0, POLICY)
    return book


def note(book: Journal, script: Script, until: Phase, online: int = 3) -> State:
    for before, seen, decision in script.outage(until, online):
        book.tick(script.now, before, seen, decision.state, actions=decision.actions, reason=decision.reason)
    return script.state


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> tuple[bytes, State]:
    """The bytes of a journal of an outage up to PARKED, and the state at its end."""
    directory = tmp_path_factory.mktemp("journal")
    book = journal(directory)
    script = Script()
    note(book, script, Phase.PARKED)
    for _ in range(3):  # nothing happens: these carry no state
        before, seen, decision = script.step("OL")
        book.tick(script.now, before, seen, decision.state, actions=decision.actions, reason=decision.reason)
    book.close()
    state = script.state
    (path,) = directory.glob("journal-*.jsonl")
    return path.read_bytes(), state


def test_what_was_written_is_read_in_order(recorded, tmp_path):
    """Head, policy and every decision come back, in the order of events, the quiet minutes before the outage too."""
    path = tmp_path / "j"
    path.write_bytes(recorded[0])
    recording = read(path)

    assert recording.head is not None
    assert (recording.head.boot, recording.head.node) == (BOOT, "n")
    assert recording.damaged == 0
    numbers = [r.n for r in recording.records]
    assert numbers == sorted(set(numbers))
    phases = [r.phase for r in recording.records if isinstance(r, Tick)]
    assert phases[:2] == [Phase.ONLINE, Phase.ONLINE]
    assert phases[-1] is Phase.PARKED
    assert isinstance(recording.records[-1], Tick)
    assert recording.records[-1].state is None
    assert {type(r) for r in recording.records} >= {Rules, Base, Tick}


def test_a_restart_finds_exactly_the_last_state(recorded, tmp_path):
    """Fold of the whole journal is the state that the daemon had, quiet decisions since the last order included."""
    (tmp_path / f"journal-x-{BOOT[:8]}-0.jsonl").write_bytes(recorded[0])
    folded = fold(tmp_path, BOOT)

    assert folded.state == recorded[1]
    assert not folded.halt_done
    assert folded.next_n > 0


def test_nothing_of_another_boot_is_used(recorded, tmp_path):
    """Instants of another boot mean nothing: the fold is empty, also if the file's name lies."""
    other = BOOT[:8] + "-0000-0000-0000-000000000000"
    (tmp_path / f"journal-x-{BOOT[:8]}-0.jsonl").write_bytes(recorded[0])

    assert fold(tmp_path, other) == Folded()
    assert fold(tmp_path, "another-boot") == Folded()
    assert fold(tmp_path / "absent", BOOT) == Folded()


@pytest.mark.slow
def test_cut_at_every_byte(tmp_path):
    """Wherever a power cut ends the file, every whole record before the cut is read, and nothing raises."""
    script = Script()
    book = journal(tmp_path)
    for status in ("OL", "OB DISCHRG", "OB DISCHRG FSD", *["OB FSD"] * 4):
        before, seen, decision = script.step(status)
        book.tick(script.now, before, seen, decision.state, actions=decision.actions, reason=decision.reason)
    book.close()
    (path,) = tmp_path.glob("journal-*")
    data = path.read_bytes()
    assert {b"online", b"on_battery", b"flushing", b"parked"} <= set(data.replace(b'"', b" ").split(b" "))
    lines = data.splitlines()
    order = [int(line.split(b'"n":', 1)[1].split(b",", 1)[0]) for line in lines[1:]]
    ends = [len(b"\n".join(lines[: n + 1])) for n in range(len(lines))]  # without the newline: it carries nothing
    for cut in range(len(data), ends[0] - 1, -1):
        os.truncate(path, cut)
        complete = sum(end <= cut for end in ends)
        recording = read(path)
        assert {r.n for r in recording.records} == set(order[: complete - 1]), cut
        assert recording.damaged == (cut not in ends and cut - 1 not in ends), cut
        if cut % 97 == 0:
            fold(tmp_path, BOOT)


def test_a_cut_head_is_not_a_journal_but_an_empty_file_is(recorded, tmp_path):
    """A file without one readable line is refused in words; one that holds nothing yet is simply empty."""
    path = tmp_path / "j"
    path.write_bytes(recorded[0][:20])
    with pytest.raises(JournalError, match="not a journal"):
        read(path)
    path.write_bytes(b"")
    assert read(path).records == []
    with pytest.raises(JournalError, match="No such file"):
        read(tmp_path / "absent")
    with pytest.raises(JournalError):
        read(tmp_path)


@pytest.mark.parametrize(
    "block", [b"\0" * 4096, b"\0" * 3, b'{"k":"tick"', b"\xff\xfe garbage\n", b"\n\n", b"[" * 9999 + b"\n"]
)
def test_damage_in_the_middle_costs_only_itself(recorded, tmp_path, block):
    """Blocks of NUL and half lines left by a power cut don't hide what was written after the next start."""
    lines = recorded[0].splitlines(keepends=True)
    path = tmp_path / "j"
    at = len(lines) // 2
    path.write_bytes(b"".join(lines[:at]) + block + (b"" if block.endswith(b"\n") else b"\n") + b"".join(lines[at:]))
    recording = read(path)

    assert len(recording.records) == len(lines) - 1
    assert recording.damaged == (0 if not block.strip(b"\0\n") else 1)


@given(st.binary(max_size=400), st.integers(0, 400))
def test_any_bytes_are_a_recording_or_a_journal_error(tmp_path_factory, noise, at):
    """Whatever stands in the file, reading gives records or JournalError, and nothing else."""
    path = tmp_path_factory.getbasetemp() / "noise"
    good = b'{"k":"fault","n":1,"at":2.0,"seq":3,"text":"x"}\n'
    path.write_bytes(noise[:at] + good + noise[at:])
    try:
        read(path)
    except JournalError:
        return


def test_a_torn_tail_is_continued_on_a_new_line(recorded, tmp_path):
    """After a crash in mid-line the next daemon of the boot writes on, and both halves of history are read."""
    path = tmp_path / f"journal-x-{BOOT[:8]}-0.jsonl"
    path.write_bytes(recorded[0][:-20])
    folded = fold(tmp_path, BOOT)
    before = len(read(path).records)
    book = Journal(tmp_path, boot=BOOT, node="n", version="0", folded=folded)
    book.begin(2000.0, POLICY)
    book.fault(2001.0, 5, "x")
    book.close()
    recording = read(path)

    assert len(list(tmp_path.glob("journal-*"))) == 1
    assert recording.damaged == 1
    assert [head.at for head in recording.heads] == [1000.0, 2000.0]
    assert len(recording.records) == before + 2
    assert isinstance(recording.records[-1], Fault)


def test_online_the_disk_stays_quiet_and_the_last_minutes_are_kept(tmp_path):
    """Hours of quiet write nothing; at the outage the last ten minutes or so are there, with a state to start from."""
    script = Script()
    book = journal(tmp_path)
    script.step("OL")  # the rank's HELLO: written at once
    (path,) = _wait_for_file(tmp_path)
    _eventually(lambda: b'"k":"rules"' in path.read_bytes())
    for before, seen, decision in script.outage(Phase.ON_BATTERY, online=7200 // 5):
        size = path.stat().st_size
        book.tick(script.now, before, seen, decision.state, actions=decision.actions, reason=decision.reason)
        assert path.stat().st_size == size or decision.state.phase is Phase.ON_BATTERY
        script.now += 3.0
    book.close()
    records = read(path).records
    ticks = [r for r in records if isinstance(r, Tick)]

    assert 600 <= ticks[-1].at - ticks[0].at <= 750
    assert isinstance(records[1], Base)
    assert fold(tmp_path, BOOT).state == script.state


def _wait_for_file(directory: Path) -> list[Path]:
    end = time.monotonic() + WAIT_S
    while not (found := list(directory.glob("journal-*"))) and time.monotonic() < end:
        time.sleep(0.005)
    return found


def test_orders_are_on_the_disk_before_append_returns(tmp_path):
    """A decision with orders is synced before it may be acted on; a quiet one doesn't wait for the disk."""
    synced: list[int] = []
    book = journal(tmp_path, file=File(os.write, lambda fd: synced.append(os.fstat(fd).st_size)))
    script = Script()
    for before, seen, decision in script.outage(Phase.PARKED):
        count = len(synced)
        durable = book.tick(script.now, before, seen, decision.state, actions=decision.actions, reason=decision.reason)
        assert durable
        if decision.state.phase is not before.phase:
            (path,) = tmp_path.glob("journal-*")
            assert len(synced) > count
            assert synced[-1] == path.stat().st_size
    book.close()


class Broken:
    """A disk that fails: *fault* is None or the errno of every write (or sync) from now on."""

    def __init__(self, of: str, partial: int = 0) -> None:
        self.fault: int | None = None
        self.of, self.partial = of, partial
        self.writes = 0
        self.synced = 0

    def write(self, fd: int, data: bytes) -> int:
        self.writes += 1
        if self.fault and self.of == "write":
            if self.partial:
                return os.write(fd, data[: self.partial]) if self.writes % 2 else self._fail()
            return self._fail()
        return os.write(fd, data)

    def sync(self, fd: int) -> None:
        if self.fault and self.of == "sync":
            os.ftruncate(fd, self.synced)  # as a kernel that gave the dirty pages up
            self._fail()
        self.synced = os.fstat(fd).st_size

    def _fail(self) -> int:
        assert self.fault is not None
        raise OSError(self.fault, os.strerror(self.fault))


@pytest.mark.parametrize(("of", "partial"), [("write", 0), ("write", 30), ("sync", 0)])
@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO])
def test_a_failing_disk_stops_nothing_and_is_said_so(tmp_path, of, partial, fault):
    """ENOSPC and EIO on writing or syncing never raise; `trouble` names them; all is written once the disk is back."""
    disk = Broken(of, partial)
    book = journal(tmp_path, file=File(disk.write, disk.sync))
    script = Script()
    steps = list(script.outage(Phase.PARKED))
    said: list[str] = []
    for n, (before, seen, decision) in enumerate(steps):
        disk.fault = fault if 4 <= n < len(steps) - 2 else None
        if not book.tick(1000.0 + n, before, seen, decision.state, actions=decision.actions, reason=decision.reason):
            said.append(book.trouble)
    assert os.strerror(fault) in "".join(said)
    _eventually(lambda: book.fault(3000.0, 1, "flushes what was queued") and not book.trouble)
    book.close()
    (path,) = tmp_path.glob("journal-*")
    ticks = [r for r in read(path).records if isinstance(r, Tick)]

    assert [t.at for t in ticks] == sorted({t.at for t in ticks})
    assert ticks[-1].phase is Phase.PARKED
    assert len(ticks) == len(steps)


def _eventually(condition):
    end = time.monotonic() + WAIT_S
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return value


@pytest.mark.slow
def test_a_choked_disk_is_waited_for_only_so_long(tmp_path):
    """A sync that never returns costs one bounded wait, then nearly nothing: the flush goes on."""
    release = threading.Event()
    book = journal(tmp_path, file=File(os.write, lambda _fd: release.wait(WAIT_S) and None))
    began = time.monotonic()
    assert not book.fault(1.0, 1, "first")
    first_s = time.monotonic() - began
    began = time.monotonic()
    for n in range(10):
        book.fault(2.0 + n, 1, "again")
    more_s = time.monotonic() - began
    release.set()
    book.close()

    assert 1.5 < first_s < 4.0
    assert more_s < 2.0
    assert book.trouble == "" or "longer than" in book.trouble


def test_a_directory_that_cannot_be_made_is_only_trouble(tmp_path):
    """A journal without a place says so and lets the daemon work."""
    (tmp_path / "file").write_text("")
    book = journal(tmp_path / "file" / "state")

    assert not book.fault(1.0, 1, "x")
    assert "Not a directory" in book.trouble or "File exists" in book.trouble
    book.close(0.1)


def _fill(path: Path) -> None:
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    for size in (4096, 1):
        with contextlib.suppress(OSError):
            while True:
                os.write(fd, b"x" * size)
    os.close(fd)


@pytest.mark.root
def test_a_full_disk_gives_up_its_ballast(tmp_path):
    """On a really full file system the outage is still written: the ballast makes room for it."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    mount = tmp_path / "mnt"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", mount], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        book = journal(mount)
        _eventually((mount / "ballast").exists)
        _fill(mount / "filler")
        script = Script()
        state = note(book, script, Phase.PARKED)
        _eventually(lambda: book.fault(1.0, 0, "x") and not book.trouble)
        book.close()
        assert not (mount / "ballast").exists()
        (path,) = mount.glob("journal-*")
        assert [r for r in read(path).records if isinstance(r, Tick)][-1].phase is state.phase
    finally:
        subprocess.run(["umount", "-l", mount], check=False)


def test_a_fault_ends_trust_in_the_state(tmp_path):
    """After a broken law the next daemon starts anew, with order numbers above the last resort's."""
    script = Script()
    book = journal(tmp_path)
    note(book, script, Phase.FLUSHING)
    book.fault(script.now, 9_999_999, "law broken")
    book.close()
    folded = fold(tmp_path, BOOT)

    assert folded.state is None
    assert folded.seq_floor == 9_999_999


def test_history_that_would_decide_differently_today_orders_nothing(tmp_path):
    """A program updated in mid-outage: the fold ends before the first record that no longer decides as it did."""
    script = Script()
    book = journal(tmp_path)
    steps = list(script.outage(Phase.ON_BATTERY))
    for before, seen, decision in steps:
        book.tick(script.now, before, seen, decision.state, actions=decision.actions, reason=decision.reason)
    quiet = script.step("OB DISCHRG")
    book.tick(script.now, quiet[0], Observation(), quiet[2].state, reason="of old")
    good = script.state
    lb = script.step("OB DISCHRG FSD")
    assert lb[2].actions
    book.close()
    (path,) = tmp_path.glob("journal-*")
    with path.open("ab") as file:  # what an older program made of the same observation: nothing
        file.write(encode(Tick(9000, script.now, Phase.ON_BATTERY, "of old", lb[1])) + b"\n")
    folded = fold(tmp_path, BOOT)

    assert folded.state is not None
    assert folded.state.phase is Phase.ON_BATTERY
    assert folded.state.seq == good.seq


def test_long_journals_go_on_in_a_new_file_that_stands_alone(tmp_path):
    """Beyond its size a journal is continued in another file, from which alone the state comes back."""
    script = Script()
    book = journal(tmp_path, segment_bytes=20_000)
    state = note(book, script, Phase.PARKED)
    book.close()
    files = sorted(tmp_path.glob("journal-*"))
    path = newest(tmp_path, BOOT)

    assert len(files) > 1
    assert path is not None
    for other in files:
        if other != path:
            other.unlink()
    assert fold(tmp_path, BOOT).state == state


def test_the_files_of_a_long_journal_are_read_as_one(tmp_path):
    """However they are named: every record of them once, in the order of numbers, under the first head."""
    script = Script()
    book = journal(tmp_path, segment_bytes=20_000)
    note(book, script, Phase.PARKED)
    book.close()
    files = sorted(tmp_path.glob("journal-*"))
    (one,) = several([tmp_path, *reversed(files)])

    assert len(files) > 1
    assert [n for path in files for n in (r.n for r in read(path).records)] == [r.n for r in one.records]
    assert sorted(r.n for r in one.records) == [r.n for r in one.records]
    assert one.head == read(files[0]).head
    assert len(several([files[-1]])[0].records) < len(one.records)


def test_numbers_that_begin_anew_are_another_journal(tmp_path):
    """A daemon that could make nothing of its own boot's file begins again; neither hides the other's records."""
    for folder in ("first", "again"):
        (tmp_path / folder).mkdir()
        note(book := journal(tmp_path / folder), Script(), Phase.PARKED)
        book.close()
    both = several([tmp_path / "first", tmp_path / "again"])

    assert 2 == len(both)
    assert [len(r.records) for r in both] == [len(several([tmp_path / f])[0].records) for f in ("first", "again")]


def test_a_file_of_noise_beside_journals_is_only_damage(tmp_path):
    """Alone it is no journal."""
    (tmp_path / "journal-noise.jsonl").write_bytes(b"noise\n")
    with pytest.raises(JournalError, match="not a journal"):
        several([tmp_path])
    note(book := journal(tmp_path), Script(), Phase.PARKED)
    book.close()

    assert [(1, 0), (0, 1)] == [(r.damaged, len(r.heads)) for r in several([tmp_path])]


def test_old_journals_are_retired_by_count_and_size(tmp_path):
    """No more files and bytes are kept than allowed, the newest ones first."""
    for n in range(20):
        (tmp_path / f"journal-2020010{n // 10}T0000{n:02d}Z-aaaaaaaa-0.jsonl").write_bytes(b"x" * 1000)
    book = journal(tmp_path, keep_files=5, keep_bytes=3500, wall=lambda: datetime(2026, 1, 1, tzinfo=UTC))
    book.fault(1.0, 1, "x")
    book.close()
    kept = sorted(p.name for p in tmp_path.glob("journal-*"))

    assert len(kept) == 4
    assert kept[-1].startswith("journal-20260101")
    assert "000019Z" in kept[-2]


def test_a_halt_that_was_ordered_is_known_to_the_next_daemon(tmp_path):
    """After a crash the fold says that a halt was ordered, and whether it was carried out."""
    script = Script()
    book = journal(tmp_path)
    note(book, script, Phase.HALTING)
    for _ in range(60):
        before, seen, decision = script.step("OB LB", runtime=20)
        book.tick(script.now, before, seen, decision.state, actions=decision.actions, reason=decision.reason)
        if script.state.halted_at is not None:
            break
    book.done(script.now, "no bus", done=False, real=True)
    book.done(script.now, "dry run", done=True, real=False)
    book.close()
    folded = fold(tmp_path, BOOT)

    assert folded.state is not None
    assert folded.state.halted_at is not None
    assert not folded.halt_done
    book = Journal(tmp_path, boot=BOOT, node="n", version="0", folded=folded)
    book.begin(script.now, POLICY)
    book.done(script.now, "done", done=True, real=True)
    book.close()
    assert fold(tmp_path, BOOT).halt_done
