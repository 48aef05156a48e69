"""Staged states in shared memory: what a reader finds, whenever the writer stops."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from powerguard.errors import StateError
from powerguard.generations import shelf as shelves
from powerguard.generations.ledger import Facts, Ledger
from powerguard.generations.shelf import PREFIX, Shelf, SlotFile, read_content, slot_path, sweep

SIZE = 3 * 1024 * 1024


def facts(tmp_path: Path, **changes: object) -> Facts:
    values = {
        "job": "a job",
        "rank": 1,
        "world_size": 2,
        "pid": os.getpid(),
        "socket": str(tmp_path / "s"),
        "directory": str(tmp_path / "ckpt"),
        "unit": "optimizer_step",
    }
    return Facts(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def shelf(tmp_path):
    """A shelf with room."""
    made = Shelf(facts(tmp_path), folder=tmp_path)
    made.make(SIZE, 100)
    yield made
    made.close()


def put(shelf: Shelf, step: int, size: int = SIZE) -> bool:
    """Stages a state of so many bytes, all of the step's value."""
    opened = shelf.open(size, 10)
    if opened is None:
        return False
    slot, held = opened
    for begin in range(0, size, 65536):
        end = min(size, begin + 65536)
        held.view[begin:end] = bytes([step % 251]) * (end - begin)
    shelf.fill(slot, step=step, data_bytes=size, content=b"%010d" % step)
    return True


def read(path: Path) -> dict[int, bytes]:
    """What another process finds: step -> data, checked."""
    ledger = Ledger.open(path)
    found = {}
    for line in ledger.lines():
        held = SlotFile(slot_path(ledger, line))
        assert read_content(ledger, line, held) == b"%010d" % line.step
        found[line.step] = bytes(held.view[: line.data_bytes])
        held.close()
    ledger.close()
    return found


def test_the_last_two_states_are_there(shelf):
    """Each new state takes the place of the older one; another process reads both as they were put."""
    for step in (3, 6, 9):
        assert put(shelf, step)

    assert {6: bytes([6]) * SIZE, 9: bytes([9]) * SIZE} == read(shelf.ledger.path)


def test_a_state_in_the_making_is_not_there(shelf):
    """From the first byte on the older state is gone, and the new one isn't there before it is whole."""
    put(shelf, 3)
    put(shelf, 6)
    opened = shelf.open(SIZE, 10)

    assert opened is not None
    assert [6] == list(read(shelf.ledger.path))
    shelf.fill(opened[0], step=9, data_bytes=SIZE, content=b"%010d" % 9)
    assert [6, 9] == list(read(shelf.ledger.path))


@pytest.mark.parametrize("kept", [3, 6])
def test_what_the_deputy_keeps_stays(shelf, kept):
    """While a step is kept nothing is staged, not even over the other one; afterwards it goes on."""
    put(shelf, 3)
    put(shelf, 6)
    shelf.ledger.keep = kept

    assert not put(shelf, 9)
    assert [3, 6] == list(read(shelf.ledger.path))
    shelf.ledger.keep = -1
    assert put(shelf, 9)


def test_a_step_kept_in_the_last_moment_stays(shelf):
    """The deputy may ask between the rank's choice of a slot and its first byte: the slot is given up unharmed."""
    put(shelf, 3)
    before = shelf.ledger.line(0)
    shelf.ledger.keep = 3

    assert not shelf.ledger.open_slot(0)
    assert before == shelf.ledger.line(0)


@pytest.mark.parametrize("at", range(0, 64, 3))
def test_a_flipped_bit_in_a_line_is_found(shelf, at):
    """No line with a byte changed anywhere is believed."""
    put(shelf, 3)
    ledger = Ledger.open(shelf.ledger.path)
    ledger._map[64 + at] = ledger._map[64 + at] ^ 1

    assert [] == ledger.lines()
    ledger.close()


def test_a_state_that_changes_while_it_is_read_is_found(shelf):
    """The content of a line that isn't the slot's any more isn't given out."""
    put(shelf, 3)
    ledger = Ledger.open(shelf.ledger.path)
    (line,) = ledger.lines()
    held = SlotFile(slot_path(ledger, line))
    put(shelf, 6)
    put(shelf, 9)

    with pytest.raises(StateError, match="isn't there any more"):
        read_content(ledger, line, held)
    held.close()
    ledger.close()


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_leaves_whole_states_only(tmp_path):
    """SIGKILL at 25 random moments of restless staging: at least one state is there, and each is all of one step."""
    chance = random.Random(7)
    seen = 0
    for _ in range(25):
        child = os.fork()
        if child == 0:
            made = Shelf(facts(tmp_path, pid=os.getpid()), folder=tmp_path)
            made.make(SIZE, 100)
            step = 0
            while True:
                step += 1
                put(made, step)
        path = tmp_path / f"{PREFIX}.{child}.a_job.1.ledger"
        ends = time.monotonic() + 60.0
        while not (path.exists() and path.stat().st_size and _steps(path)):
            assert time.monotonic() < ends
            time.sleep(0.005)
        time.sleep(chance.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        states = read(path)
        assert states
        for step, data in states.items():
            assert data == bytes([step % 251]) * SIZE
        seen += len(states)
        shelves.remove(path)
    assert 25 <= seen < 50  # some were hit with one slot in the making


def _steps(path: Path) -> list[int]:
    try:
        ledger = Ledger.open(path)
    except StateError:
        return []
    steps = [line.step for line in ledger.lines()]
    ledger.close()
    return steps


def test_a_shelf_that_does_not_fit_is_refused_with_the_numbers(tmp_path, shelf):
    """Too little room is said at the start, with how much there would have to be, and leaves nothing behind."""
    before = sorted(tmp_path.iterdir())

    with pytest.raises(StateError, match=r"staging takes 2 x 1000000\.\d+ GB more .* only \d+\.\d+ GB are free"):
        shelf.make(10**15, 10)
    assert len(before) - 2 == len(list(tmp_path.iterdir()))  # the smaller slots were given up for it


def test_a_full_shm_is_refused_with_the_numbers(tmp_path, monkeypatch, shelf):
    """Room that goes between the look and the allocation is found too: no later write can fail."""

    def full(_fd: int, _offset: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", full)

    with pytest.raises(StateError, match="staging takes"):
        put(shelf, 3, 2 * SIZE)


def test_a_state_that_grows_gets_a_larger_slot(shelf):
    """The other slot keeps what it holds; both are right in the end."""
    put(shelf, 3)
    assert put(shelf, 6, 2 * SIZE)

    assert {3: bytes([3]) * SIZE, 6: bytes([6]) * 2 * SIZE} == read(shelf.ledger.path)


def test_a_closed_shelf_leaves_nothing(tmp_path):
    """No file remains, and whoever had the ledger open reads that it is closed."""
    made = Shelf(facts(tmp_path), folder=tmp_path)
    made.make(SIZE, 100)
    put(made, 3)
    other = Ledger.open(made.ledger.path)
    made.close()

    assert other.closed
    assert [] == list(tmp_path.iterdir())
    other.close()


def test_leftovers_are_swept_and_what_lives_is_not(tmp_path, shelf):
    """A shelf that neither rank nor deputy holds goes at the next start; one that is held stays."""
    child = os.fork()
    if child == 0:
        made = Shelf(facts(tmp_path, rank=5, pid=os.getpid()), folder=tmp_path)
        made.make(SIZE, 100)
        os._exit(0)
    os.waitpid(child, 0)
    put(shelf, 3)
    assert list(tmp_path.glob("*.5.ledger"))
    sweep(tmp_path)

    assert not list(tmp_path.glob(f"{PREFIX}.{child}.*"))
    assert [3] == list(read(shelf.ledger.path))


def test_no_sweep_takes_a_shelf_that_is_being_made(tmp_path):
    """Ranks of a node start at once, and each sweeps: a ledger is there only with its lock."""
    done = threading.Event()

    def sweeps() -> None:
        while not done.is_set():
            sweep(tmp_path)

    others = [threading.Thread(target=sweeps) for _ in range(3)]
    for thread in others:
        thread.start()
    made: list[Shelf] = []
    try:
        made += [Shelf(facts(tmp_path, pid=number + 1, rank=number), folder=tmp_path) for number in range(150)]
        gone = [each.ledger.path.name for each in made if not each.ledger.path.exists()]
    finally:
        done.set()
        for thread in others:
            thread.join()
        for each in made:
            each.close()

    assert [] == gone
    assert [] == list(tmp_path.iterdir())


def test_what_a_killed_maker_left_without_a_name_is_swept(tmp_path):
    """After a minute; one that is being made stays."""
    fresh, old = (tmp_path / f"{PREFIX}.{pid}.job.0.ledger.new" for pid in (1, 2))
    for path in (fresh, old):
        path.write_bytes(b"")
    os.utime(old, (time.time() - 61.0,) * 2)
    sweep(tmp_path)

    assert [fresh] == list(tmp_path.iterdir())


def test_a_new_process_of_a_rank_closes_the_old_shelf(tmp_path, shelf):
    """Its deputy reads that it isn't needed any more, and is waited for; shelves of other jobs and ranks are let be."""
    others = [
        Shelf(facts(tmp_path, pid=1, rank=2), folder=tmp_path),
        Shelf(facts(tmp_path, pid=1, job="b job"), folder=tmp_path),
    ]

    def deputy() -> None:
        while not shelf.ledger.closed:
            time.sleep(0.005)
        time.sleep(0.1)
        shelf.close()

    leaving = threading.Thread(target=deputy)
    leaving.start()
    new = Shelf(facts(tmp_path, pid=2), folder=tmp_path)

    assert not shelf.ledger.path.exists()
    leaving.join()
    assert not any(other.ledger.closed for other in others)
    for other in [*others, new]:
        other.close()


def test_only_its_user_may_read_a_shelf(shelf):
    """Weights are nobody else's business: ledger and slots are readable by their owner alone."""
    put(shelf, 3)

    assert {0o600} == {path.stat().st_mode & 0o777 for path in shelf.folder.iterdir()}
