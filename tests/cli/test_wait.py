"""`powerguard wait-ready` against a control socket that answers as a daemon would."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from powerguard.cli import run
from powerguard.config import loads
from powerguard.core.state import initial
from powerguard.node.ask import CONTROL_SOCKET, Answer, Ask, Control
from powerguard.node.status import Shell, describe

CONFIG = loads('[[ups]]\nname = "rack@nut"\n', env={})
SHELL = Shell("0", 1, 0.0, "dry-run", "", "", "", {}, {})


class Gate:
    """A daemon's control socket: *gates* are its answers, the last one for ever."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.gates, self.asked = run_dir, [""], 0
        self._status = describe(CONFIG, initial("boot", 0.0), SHELL, 1.0)
        self._control: Control | None = None

    def open(self) -> None:
        self._control = Control(self.run_dir / CONTROL_SOCKET, serve=self._answer)

    def _answer(self, question: Ask) -> Answer:
        self.asked += 1
        gate = self.gates.pop(0) if len(self.gates) > 1 else self.gates[0]
        if question.verb != "status":
            return Answer(True, "resume: done")
        return Answer(True, data=msgspec.to_builtins(msgspec.structs.replace(self._status, gate=gate)))

    def close(self) -> None:
        if self._control is not None:
            self._control.close()


@pytest.fixture
def gate() -> Iterator[Gate]:
    with tempfile.TemporaryDirectory(prefix="pg-gate-") as folder:  # a socket's path is short
        one = Gate(Path(folder))
        yield one
        one.close()


def wait(gate: Gate, *more: str) -> int:
    return run(["wait-ready", "--run-dir", str(gate.run_dir), *more])


def test_an_open_gate_lets_through_at_once(gate, capsys):
    """Exit code 0, and one word."""
    gate.open()

    assert 0 == wait(gate)
    assert "ready\n" == capsys.readouterr().out


def test_a_closed_gate_is_looked_at_once_with_timeout_0(gate, capsys):
    """Exit code 17 with the daemon's reason and what to do."""
    gate.gates = ["runway 62 s < need 105 s + margin 10 s"]
    gate.open()

    assert 17 == wait(gate, "--timeout", "0")
    assert "runway 62 s < need 105 s + margin 10 s; wait for the batteries" in capsys.readouterr().err
    assert 1 == gate.asked


@pytest.mark.slow
def test_it_waits_until_the_gate_opens(gate, capsys):
    """What it waits for is said once, not for each number."""
    gate.gates = ["runway 60 s < need 105 s", "runway 80 s < need 105 s", ""]
    gate.open()

    assert 0 == wait(gate)
    assert 1 == capsys.readouterr().err.count("waiting:")


@pytest.mark.slow
def test_the_time_is_kept(gate):
    """A gate that stays closed costs --timeout and not much more."""
    gate.gates = ["on battery"]
    gate.open()
    began = time.monotonic()

    assert 17 == wait(gate, "--timeout", "1.5")
    assert 1.4 < time.monotonic() - began < 6.0


def test_no_daemon_is_said_with_its_own_code(gate):
    """Exit code 10, as everywhere."""
    assert 10 == wait(gate, "--timeout", "0")


@pytest.mark.slow
def test_a_daemon_that_comes_later_is_waited_for(gate):
    """At boot the unit may be asked before the daemon is up."""
    import threading

    later = threading.Timer(0.5, gate.open)
    later.start()

    assert 0 == wait(gate, "--timeout", "20")
    later.join()


def test_a_negative_time_is_a_mistake(gate):
    """Exit code 2."""
    assert 2 == wait(gate, "--timeout=-1")


def test_resume_warns_where_the_gate_is_closed(gate, capsys):
    """The operator's word is done; what it risks is said."""
    gate.gates = ["runway 60 s < need 105 s"]
    gate.open()

    assert 0 == run(["resume", "--run-dir", str(gate.run_dir)])
    assert "too little for a flush and a halt: runway 60 s" in capsys.readouterr().err
