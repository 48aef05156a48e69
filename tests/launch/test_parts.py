"""The parts of exec: whom a signal is for, and how a save shows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from powerguard.errors import UsageError
from powerguard.launch.saved import Files, Pump, Sign, parse
from powerguard.launch.tree import To, open_for_writing, targets, tell


def fake_proc(folder, processes):
    """A /proc of *processes*: pid to (parent, whether it is marked as a rank)."""
    for pid, (parent, marked) in processes.items():
        place = folder / str(pid)
        place.mkdir()
        (place / "stat").write_text(f"{pid} (a name) with ) brackets) S {parent} 0 0")
        (place / "environ").write_bytes(b"A=1\0LOCAL_RANK=0\0" if marked else b"A=1\0NOT_LOCAL_RANK=0\0")
    return folder


TORCHRUN = {
    1: (0, False), 10: (1, False), 11: (10, False),  # a shell, and torchrun below it
    20: (11, True), 21: (11, True),  # its ranks
    30: (20, True), 31: (21, True), 32: (30, True),  # workers of their loaders
    40: (11, False),
}  # fmt: skip


@pytest.mark.parametrize(
    ("to", "expected"),
    [
        (To.AUTO, [20, 21]),
        (To.RANKS, [20, 21]),
        (To.COMMAND, [10]),
        (To.TREE, [10, 11, 20, 21, 40, 30, 31, 32]),
    ],
)
def test_a_launchers_ranks_are_found_among_its_processes(tmp_path, to, expected):
    """Neither torchrun, which would kill after 30 s, nor the loaders' workers, which would take the rank with them."""
    assert targets(10, to, proc=fake_proc(tmp_path, TORCHRUN)) == expected


@pytest.mark.parametrize(("to", "expected"), [(To.AUTO, [20]), (To.RANKS, [])])
def test_a_command_that_is_a_rank_itself_gets_the_signal(tmp_path, to, expected):
    """Under torchrun with one exec per rank."""
    assert targets(20, to, proc=fake_proc(tmp_path, TORCHRUN)) == expected


def test_a_process_that_has_ended_is_left_out():
    """Between the look and the signal."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()

    assert tell([child.pid], signal.SIGUSR1) == (0, [])


def test_a_process_of_somebody_else_is_named(tmp_path):
    """It isn't signalled, the others are, and nothing is raised."""
    got = []

    def kill(pid, number):
        if pid == 2:
            raise PermissionError(1, "Operation not permitted")
        got.append((pid, number))

    assert (2, [2]) == tell([1, 2, 3], signal.SIGUSR1, kill=kill)
    assert [(1, signal.SIGUSR1), (3, signal.SIGUSR1)] == got


def test_files_open_for_writing_are_seen(tmp_path):
    """Those of a process that writes, not those that it reads."""
    written, read = tmp_path / "written", tmp_path / "read"
    read.write_text("r")
    with written.open("wb"), read.open("rb"):
        found = open_for_writing([os.getpid(), 2**22 + 1])
    both = [(stat.st_dev, stat.st_ino) for stat in (written.stat(), read.stat())]

    assert [True, False] == [one in found for one in both]


@pytest.mark.parametrize(
    ("text", "sign"),
    [("exit", Sign()), ("file:/a/*.pt", Sign("file", "/a/*.pt")), ("log:saved at \\d+", Sign("log", "saved at \\d+"))],
)
def test_signs_of_a_save(text, sign):
    """What --saved takes."""
    assert parse(text) == sign


@pytest.mark.parametrize("text", ["", "exit:0", "file:", "log:", "log:(", "never"])
def test_no_sign_is_refused_with_what_to_give(text):
    """One line, with the choices or what is wrong with the expression."""
    with pytest.raises(UsageError, match="--saved"):
        parse(text)


def test_a_file_counts_once_it_is_new_and_at_rest(tmp_path):
    """Not the one that was there, not one that still grows, not one that somebody has open; one written over does."""
    old = tmp_path / "old.pt"
    old.write_bytes(b"x")
    files = Files(str(tmp_path / "*.pt"))
    new = tmp_path / "new.pt"
    open_ones = set()
    looks = [files.at_rest(0.0, lambda: open_ones)]
    for now, size in ((10.0, 0), (11.0, 1), (12.0, 2), (12.5, 2)):
        new.write_bytes(b"y" * size)
        os.utime(new, ns=(size, size))
        looks.append(files.at_rest(now, lambda: open_ones))
    open_ones = {(new.stat().st_dev, new.stat().st_ino)}
    looks.append(files.at_rest(60.0, lambda: open_ones))
    open_ones = set()
    looks.append(files.at_rest(60.2, lambda: open_ones))

    assert [False] * 6 + [True] == looks
    assert [str(new)] == list(files.new())


def test_output_passes_through_and_matching_lines_are_noted():
    """Byte for byte, however it is cut into pieces."""
    source, source_end = os.pipe()
    sink_end, sink = os.pipe()
    seen = []
    with os.fdopen(source, "rb") as reading, os.fdopen(sink_end, "rb") as passed:
        pump = Pump(reading, sink, "saved .*7", lambda: seen.append(1))
        pump.start()
        for piece in (b"a\nsav", b"ed step 7\nsaved step 8\n", b"\xff no newline"):
            os.write(source_end, piece)
        os.close(source_end)
        pump.join(60)
        os.close(sink)

        assert passed.read() == b"a\nsaved step 7\nsaved step 8\n\xff no newline"
    assert seen == [1]
