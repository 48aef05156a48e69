"""The operator's program is told, and can hurt nobody."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from powerguard.core.types import Announce
from powerguard.node.tell import WAITING_MAX, Teller

NEWS = Announce("warning", "on battery", {"runway_s": 412.0, "feeds": "a"})


def script(path: Path, body: str) -> tuple[str, ...]:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return (str(path),)


def test_the_program_gets_level_text_and_facts(tmp_path):
    """Everything of an announcement is in the environment, the facts as JSON."""
    out = tmp_path / "out"
    words = '"$POWERGUARD_LEVEL" "$POWERGUARD_TEXT" "$POWERGUARD_NODE"'
    body = f'printf "%s\\n" {words} > {out}\nprintf "%s" "$POWERGUARD_FACTS" > {out}.json'
    command = script(tmp_path / "p", body)
    teller = Teller(command, "gpu7")
    teller.tell(NEWS)
    teller.close(10)

    assert out.read_text().splitlines() == ["warning", "on battery", "gpu7"]
    assert json.loads(Path(f"{out}.json").read_text()) == NEWS.facts


@pytest.mark.parametrize("command", [(), ("/nowhere/p",), ("/bin/false",), ("/etc/passwd",)])
def test_a_program_that_is_absent_or_fails_costs_nothing(command):
    """No program, a missing one, a failing one: nothing is raised, nothing waits."""
    teller = Teller(command, "n")
    teller.tell(NEWS)
    teller.close(10)


def test_a_failure_is_tried_again_in_order(tmp_path):
    """A program that fails twice gets the same news a third time, and what came after it comes after it."""
    out = tmp_path / "out"
    body = f'echo "$POWERGUARD_TEXT $POWERGUARD_ATTEMPT" >> {out}\n[ $POWERGUARD_ATTEMPT -ge 3 ]'
    teller = Teller(script(tmp_path / "p", body), "n", retry_s=(0.0, 0.0, 0.0))
    teller.tell(Announce("warning", "one", {}))
    teller.tell(Announce("info", "two", {}))
    ends = time.monotonic() + 60.0
    while not out.exists() or len(out.read_text().splitlines()) < 6:
        assert time.monotonic() < ends
        time.sleep(0.01)
    teller.close(10)

    assert out.read_text().splitlines() == [f"{word} {n}" for word in ("one", "two") for n in (1, 2, 3)]


def test_a_program_that_goes_on_failing_is_given_up(tmp_path):
    """The last attempt is the last; the next announcement gets its turn."""
    out = tmp_path / "out"
    body = f'echo "$POWERGUARD_TEXT $POWERGUARD_ATTEMPT" >> {out}\n[ "$POWERGUARD_TEXT" = two ]'
    teller = Teller(script(tmp_path / "p", body), "n", retry_s=(0.0,))
    teller.tell(Announce("warning", "one", {}))
    teller.tell(Announce("info", "two", {}))
    ends = time.monotonic() + 60.0
    while not out.exists() or "two" not in out.read_text():
        assert time.monotonic() < ends
        time.sleep(0.01)
    teller.close(10)

    assert out.read_text().splitlines() == ["one 1", "one 2", "two 1"]


@pytest.mark.slow
def test_a_program_that_hangs_is_ended_and_the_queue_is_bounded(tmp_path):
    """A program that never returns is given up; more news than it can take is dropped without waiting."""
    teller = Teller(script(tmp_path / "p", "exec sleep 60"), "n", program_s=0.2)
    began = time.monotonic()
    for _ in range(3 * WAITING_MAX):
        teller.tell(NEWS)
    assert time.monotonic() - began < 1.0
    teller.command = ()
    teller.close(10)
    assert time.monotonic() - began < 10.0
