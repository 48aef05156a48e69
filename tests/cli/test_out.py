"""Standard output that can't be written: one line that says so, code 1, and nothing is kept as our own fault."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from powerguard.cli import run

ROOT = Path(__file__).resolve().parents[2]
LOST = "powerguard: can't write to standard output: No space left on device\n"
TRACE = "t_s,status,charge_pct\n0,OB,100\n5,OB,90\n"


@pytest.fixture
def full(tmp_path, monkeypatch) -> Iterator[Callable[..., int]]:
    """Calls one command whose standard output is on a full disk; files for tracebacks would go to tmp_path."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "trace.csv").write_text(TRACE)
    streams = []

    def call(*arguments: str, unbuffered: bool = False) -> int:
        stream = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115 - closed at the end of the test
        if unbuffered:
            stream.reconfigure(write_through=True, line_buffering=True)
        streams.append(stream)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            return run([word.replace("@", str(tmp_path)) for word in arguments])

    yield call
    for stream in streams:
        stream.close()  # what was left in it has gone to nowhere: no error here


COMMANDS = [
    ("exit-codes",),
    ("--version",),
    ("--help",),
    ("replay", "@/trace.csv", "--json"),
    ("checkpoints", "list", "@"),
    ("drill", "--list"),
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_full_disk_behind_standard_output_is_one_line(arguments, unbuffered, full, capsys, tmp_path):
    """Whoever writes there, at once or at the end: no traceback is kept, and nothing asks for a report."""
    assert full(*arguments, unbuffered=unbuffered) == 1
    assert LOST == capsys.readouterr().err
    assert [] == list(tmp_path.glob("powerguard-traceback-*"))


def test_a_refusal_after_lost_words_is_told_too(full, capsys, tmp_path):
    """What a command says on standard error stands; the code is that of the lost output."""
    (tmp_path / "step-0000000001.aaaaaaaa").mkdir()

    assert full("checkpoints", "verify", "@", "--all") == 1
    said = capsys.readouterr().err
    assert said.startswith("powerguard: can't be trusted: step-0000000001")
    assert said.endswith(LOST)
    assert said.count("\n") == 2


def test_nothing_said_is_nothing_lost(full, capsys):
    """A command that prints nothing has its own code, and standard output is what it was."""
    before = sys.stdout

    assert full("checkpoints", "list", "@/absent") == 8
    assert capsys.readouterr().err.count("\n") == 1
    assert before is sys.stdout


def test_an_error_of_another_disk_is_not_taken_for_standard_output(tmp_path, capsys):
    """Only what standard output itself raises is told of it."""
    (tmp_path / "trace.csv").write_text(TRACE)

    assert run(["replay", str(tmp_path / "trace.csv"), "--plot", "/dev/full/x.svg"]) == 8
    assert "standard output" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("env", [{}, {"PYTHONUNBUFFERED": "1"}])
def test_a_process_ends_without_another_word(env):
    """Python's own flush at the exit has nothing left to complain of."""
    with open("/dev/full", "w") as out:
        done = subprocess.run(
            [sys.executable, "-m", "powerguard.cli", "exit-codes"],
            stdout=out, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | env, check=False,
        )  # fmt: skip

    assert (1, LOST) == (done.returncode, done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["replay {trace} --all --json", "checkpoints verify {folder} --all"])
def test_a_reader_that_goes_is_no_error(command, tmp_path):
    """`powerguard ... | true`: neither the words nor a refusal after them end in a complaint about the pipe."""
    (tmp_path / "trace.csv").write_text(TRACE)
    (tmp_path / "step-0000000001.aaaaaaaa").mkdir()
    words = command.format(trace=tmp_path / "trace.csv", folder=tmp_path)
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m powerguard.cli {words} 2>{tmp_path}/said | true"],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip

    assert 0 == done.returncode
    assert "pipe" not in (tmp_path / "said").read_text().lower()
