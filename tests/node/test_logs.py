"""Log lines: facts, one each, never in the way."""

from __future__ import annotations

import io
import json
import os
import sys

import pytest
import structlog

from powerguard.node.logs import Repeats, set_up, under_systemd


@pytest.fixture(autouse=True)
def _undo():
    yield
    structlog.reset_defaults()


def test_json_lines_hold_the_fact_and_its_values():
    """Under systemd a line is one JSON object with message, level and the values as they are."""
    stream = io.StringIO()
    set_up(json=True, stream=stream)
    structlog.get_logger().info("phase changed", phase="on_battery", runway_s=412.5)
    line = json.loads(stream.getvalue())

    assert (line["message"], line["level"], line["phase"], line["runway_s"]) == (
        "phase changed",
        "info",
        "on_battery",
        412.5,
    )


def test_a_terminal_gets_text():
    """Otherwise a line is text with key=value."""
    stream = io.StringIO()
    set_up(json=False, stream=stream)
    structlog.get_logger().warning("comm lost", feed="a@b:1")

    assert "comm lost" in stream.getvalue()
    assert "feed=a@b:1" in stream.getvalue()


def test_levels_below_the_configured_one_are_dropped():
    """`[log] level` is a floor."""
    stream = io.StringIO()
    set_up(level="warning", stream=stream)
    structlog.get_logger().info("quiet")

    assert stream.getvalue() == ""


def test_repeats_are_counted_not_written():
    """A line said again within a minute is written once; the next one says how many were left out."""
    now = [0.0]
    repeats = Repeats(60.0, lambda: now[0])

    def say(event):
        try:
            return repeats(None, "warning", {"event": event})
        except structlog.DropEvent:
            return None

    assert say("comm lost") == {"event": "comm lost"}
    now[0] = 59.0
    assert say("comm lost") is None
    assert say("other") == {"event": "other"}
    now[0] = 61.0
    assert say("comm lost") == {"event": "comm lost", "repeated": 1}
    assert repeats(None, "warning", {"event": "other", "always": True}) == {"event": "other"}


def test_repeats_remember_a_bounded_number_of_lines():
    """Ten thousand different lines don't grow the memory of the daemon."""
    repeats = Repeats(60.0, lambda: 0.0)
    for n in range(10_000):
        repeats(None, "info", {"event": f"line {n}"})

    assert len(repeats._last) <= 256


def test_a_closed_stream_raises_nothing():
    """A log line can't end the daemon, even when nobody can read it."""
    stream = io.StringIO()
    set_up(stream=stream)
    stream.close()
    structlog.get_logger().error("still here")


def test_systemd_is_recognised_by_its_journal_stream(tmp_path):
    """JSON is chosen if stderr *is* the journal's stream, not merely because a parent's was."""
    with (tmp_path / "err").open("w+") as stream:
        stat = os.fstat(stream.fileno())
        own, other = f"{stat.st_dev}:{stat.st_ino}", f"{stat.st_dev}:{stat.st_ino + 1}"

        assert under_systemd({"JOURNAL_STREAM": own}, stream)
        assert not under_systemd({"JOURNAL_STREAM": other}, stream)
        assert under_systemd({"INVOCATION_ID": "x"}, stream)
        assert not under_systemd({}, sys.stderr)
