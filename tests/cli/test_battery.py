"""`powerguard battery` where no daemon runs: the record itself is shown, and edited."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
from pathlib import Path

import msgspec
import pytest
import zmq

from powerguard.cli import run
from powerguard.core.discharge import Discharge
from powerguard.core.learn import Record, learn
from powerguard.core.policy import Policy
from powerguard.journal import Journal
from powerguard.node.ask import CONTROL_SOCKET, Answer, Control, served
from powerguard.node.learned import LEARNED_FILE
from powerguard.node.learned_file import NOTHING, read, write

FEED = "rack@nut:3493"
WHOLE = Discharge(
    lasted_s=600.0, load_pct=60.0, used=0.60, basis="promised", basis_s=1000.0, volts_last=1.76, knee_used=0.57
)


@pytest.fixture
def node(tmp_path) -> Path:
    """A configuration, and a record of a battery that gives 60 %."""
    text = f'[node]\nrun_dir = "{tmp_path}/run"\nstate_dir = "{tmp_path}"\n[[ups]]\nname = "{FEED}"\n'
    (tmp_path / "pg.toml").write_text(text)
    write(tmp_path / LEARNED_FILE, _record(learn(Record(FEED), WHOLE, day=20000.0)))
    return tmp_path


def _record(record: Record) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(NOTHING, batteries={FEED: record}))


def called(arguments: str, node: Path, capsys) -> tuple[int, str, str]:
    code = run([*arguments.split(), "-c", str(node / "pg.toml")])
    return (code, *capsys.readouterr())


def test_the_list_tells_capacity_and_odds(node, capsys):
    """What was measured, aged to today, and how likely a short outage stays short."""
    code, out, err = called("battery list", node, capsys)
    assert (code, err) == (0, "")
    assert "% of rated" in out
    assert "measured (capacity 0.60 of rated)" in out
    assert "end within 5 min (the default" in out
    code, out, _ = called("battery list --json", node, capsys)
    (battery,) = json.loads(out)["batteries"]

    assert battery["feed"] == FEED
    assert 0.0 < battery["capacity"] <= 0.6


def test_a_replaced_battery_is_unknown_again(node, capsys):
    """The record is gone, the day is kept, and the file is the only one there."""
    code, out, err = called("battery replaced rack --on 2026-05-17", node, capsys)
    assert (code, err) == (0, "")
    assert "battery of 2026-05-17" in out
    assert {} == read(node / LEARNED_FILE).batteries
    assert "2026-05-17" in called("battery list", node, capsys)[1]
    assert {"pg.toml", LEARNED_FILE} == {path.name for path in node.iterdir()}


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ("battery replaced other", 2, FEED),
        ("battery replaced rack --on soon", 2, "2026-05-17"),
        ("battery replaced rack --on 2999-01-01", 2, "future"),
        ("battery replaced", 2, "UPS"),
        ("battery", 2, ""),
    ],
)
def test_mistakes_change_nothing(node, capsys, arguments, code, says):
    """One line, and the record is as it was."""
    before = (node / LEARNED_FILE).read_bytes()
    got, out, err = called(arguments, node, capsys)

    assert got == code
    assert says in out + err
    assert before == (node / LEARNED_FILE).read_bytes()


def test_without_daemon_and_configuration_it_is_said(tmp_path, capsys):
    """There is nothing to look at."""
    code = run(["battery", "list", "--run-dir", str(tmp_path)])

    assert 10 == code
    assert "no daemon serves" in capsys.readouterr().err


def test_a_damaged_record_is_left_alone_by_who_looks(node, capsys):
    """`list` says so and moves nothing: the daemon sets it aside."""
    (node / LEARNED_FILE).write_bytes(b"{")
    code, _, err = called("battery list", node, capsys)

    assert 8 == code
    assert "can't be read" in err
    assert b"{" == (node / LEARNED_FILE).read_bytes()


def test_a_disk_that_refuses_is_said(node, capsys):
    """The exit code is that of a directory that can't be written."""
    (node / f".{LEARNED_FILE}.{os.getpid()}").mkdir()
    code, _, err = called("battery replaced rack", node, capsys)

    assert 8 == code
    assert "can't be written" in err
    assert FEED in read(node / LEARNED_FILE).batteries


def test_replay_tells_promise_and_outcome(tmp_path, capsys):
    """A line of its own for each discharge, in its place in the night."""
    book = Journal(tmp_path, boot="5a0f0b5e-6f0e", node="n", version="0")
    book.begin(100.0, Policy())
    lesson = learn(Record(FEED), msgspec.structs.replace(WHOLE, bound_s=400.0), day=1.0).lessons[-1]
    assert book.learnt(160.0, FEED, lesson, phi=0.6, proven=None)
    book.close()
    (path,) = tmp_path.glob("journal-*")
    code = run(["replay", str(path)])

    assert 0 == code
    assert f"{FEED}: 10 min on battery, promised 7 min at least; capacity 0.60 of rated" in capsys.readouterr().out


def test_a_daemon_that_answers_is_the_one_to_edit(node, capsys):
    """Two writers would overwrite each other: with a daemon there the file isn't touched, whatever it answers."""
    with tempfile.TemporaryDirectory(prefix="pg-") as run_dir:
        path, before = Path(run_dir) / CONTROL_SOCKET, (node / LEARNED_FILE).read_bytes()
        for ok in (True, False):
            with contextlib.closing(Control(path, serve=lambda ask, ok=ok: Answer(ok, f"{ask.ups} {ask.day}"))):
                assert served(path)
                code, out, err = called(f"battery replaced rack --on 2026-01-02 --run-dir {run_dir}", node, capsys)
                assert (0 if ok else 1) == code
                assert "rack 2026-01-02" in (out if ok else err)
        assert not served(path)
        assert before == (node / LEARNED_FILE).read_bytes()


def test_a_daemon_that_cannot_be_understood_is_not_gone_round(node, capsys):
    """Something serves the socket and answers noise: it may hold the record, so the file isn't touched."""
    with tempfile.TemporaryDirectory(prefix="pg-") as run_dir, zmq.Context() as context:
        path, before = Path(run_dir) / CONTROL_SOCKET, (node / LEARNED_FILE).read_bytes()
        with context.socket(zmq.ROUTER) as router:
            router.bind(f"ipc://{path}")

            def answer() -> None:
                router.send_multipart([*router.recv_multipart()[:2], b"noise"])

            thread = threading.Thread(target=answer)
            thread.start()
            code, _, err = called(f"battery replaced rack --run-dir {run_dir}", node, capsys)
            thread.join()

        assert 10 == code
        assert "strangely" in err
        assert before == (node / LEARNED_FILE).read_bytes()
