"""Whatever comes in from outside: an answer or a documented error, never anything else, and never much memory.

What one module promises of its own input is tested beside it (NUT lists, frames, journals, texts of a configuration).
Here are the ways in as a whole.
"""

from __future__ import annotations

import os
import random
import socket
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from powerguard import wire
from powerguard.cli.ask import Refused, fetch
from powerguard.config import Config, load
from powerguard.core.messages import Beat, Hello
from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.types import Comm, Observation, Sample
from powerguard.errors import ConfigError, DaemonUnreachable, PowerguardError, UpsError
from powerguard.journal import Folded, Journal, fold
from powerguard.node.ask import CONTROL_SOCKET
from powerguard.node.bus import Bus
from powerguard.node.status import Status
from powerguard.node.ups_line import UpsAddress
from powerguard.node.ups_probe import Probe, discover, probe
from powerguard.sim.world import JobSpec, World

BOUNDED = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
MIB = 1 << 20


def outcome(ask: Callable[[], object], *documented: type[Exception]):
    """The answer, or the error that is documented; anything else fails the test."""
    try:
        return ask()
    except documented as err:
        return err


# ---- an upsd that says anything --------------------------------------------------------------------

ANSWERS = st.lists(
    st.sampled_from([
        b"OK\n", b"OK PRIMARY-GRANTED\n", b"ERR ACCESS-DENIED\n", b"ERR DATA-STALE\n", b"ERR\n", b"ERR X Y\n",
        b"BEGIN LIST UPS\n", b'UPS demo "the rack"\n', b"END LIST UPS\n", b"Network UPS Tools upsd 2.8.0\n",
        b"BEGIN LIST VAR demo\n", b'VAR demo ups.status "OL"\n', b'VAR demo ups.status "WAIT"\n',
        b"END LIST VAR demo\n",
        b"NUMLOGINS demo 2\n", b"NUMLOGINS demo many\n", b"BEGIN LIST CLIENT demo\n", b"CLIENT demo ::1\n",
        b"END LIST CLIENT demo\n", b'"', b"\\", b"\n", b"\xff\xfb\x01", b"\x00", b"x" * 9000,
    ]) | st.binary(max_size=40),
    max_size=16,
)  # fmt: skip


class Says:
    """A server that answers each question with the next of its lines, whatever was asked, and then hangs up."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.lines: list[bytes] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(2.0)
                try:
                    for line in list(self.lines):
                        connection.recv(4096)
                        connection.sendall(line)
                    connection.shutdown(socket.SHUT_WR)
                except OSError:
                    continue

    def close(self) -> None:
        self._listener.close()


@pytest.fixture(scope="module")
def says() -> Iterator[Says]:
    one = Says()
    yield one
    one.close()


@pytest.mark.slow
@BOUNDED
@given(lines=ANSWERS)
def test_any_upsd_is_probed_or_an_operating_error(says, lines):
    """`check` and `service install` against a server that may say anything: findings, or an error with an exit code."""
    says.lines = lines
    address = UpsAddress("demo", "127.0.0.1", says.port)
    for ask in (
        lambda: probe(address, user="u", password="p", within_s=0.2),
        lambda: discover("127.0.0.1", says.port, within_s=0.2),
    ):
        answer = outcome(ask, UpsError)
        assert isinstance(answer, (Probe, dict)) or (answer.exit_code > 3 and answer.todo)


@pytest.mark.slow
def test_an_endless_answer_takes_no_memory():
    """A server that never stops talking is given up, and what it said is not kept."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def flood() -> None:
            connection, _ = listener.accept()
            with connection:
                try:
                    connection.recv(100)
                    connection.sendall(b"BEGIN LIST UPS\n")
                    while True:
                        connection.sendall(b'UPS u%d "x"\n' % random.getrandbits(60) * 1000)
                except OSError:
                    return

        threading.Thread(target=flood, daemon=True).start()
        tracemalloc.start()
        with pytest.raises(UpsError):
            discover("127.0.0.1", port, within_s=5.0)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()

    assert most < 16 * MIB


# ---- ranks, or whoever reaches their socket --------------------------------------------------------


@pytest.mark.slow
def test_raw_bytes_on_the_ranks_socket_harm_nobody(tmp_path):
    """Two hundred connections that aren't ZeroMQ's at all: a rank that comes after them is heard."""
    noise = random.Random(3)
    heard: list[object] = []
    folder = tempfile.mkdtemp(prefix="pg-fuzz-")
    path = Path(folder, "ranks.sock")
    bus = Bus(path, put=heard.append, clock=time.monotonic)
    greeting = b"\xff" + b"\x00" * 8 + b"\x7f\x03\x00NULL" + b"\x00" * 16 + b"\x00" + b"\x00" * 31
    try:
        for n in range(200):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(str(path))
                raw.settimeout(0.2)
                try:
                    raw.sendall(noise.randbytes(noise.randrange(1, 300)) if n % 2 else greeting + noise.randbytes(200))
                except OSError:
                    continue
        with zmq.Context() as context, context.socket(zmq.DEALER) as rank:
            rank.setsockopt(zmq.IDENTITY, wire.identity("job", 0))
            rank.setsockopt(zmq.LINGER, 0)
            rank.connect(f"ipc://{path}")
            rank.send_multipart(wire.encode(Hello("job", 0, 0, 1, os.getpid(), "/ckpt")))
            ends = time.monotonic() + 20
            while not heard:
                assert time.monotonic() < ends
                time.sleep(0.01)
    finally:
        bus.close()
        path.with_name("ranks.sock.lock").unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        os.rmdir(folder)


STEPS = st.integers(-3, 2**40)
SECONDS = st.floats(-1.0, 1e9)


@pytest.mark.slow
@BOUNDED
@given(st.lists(st.tuples(st.integers(0, 3), STEPS, SECONDS), max_size=30), st.integers(1, 2**40))
def test_any_beats_leave_decisions_lawful(beats, world_size):
    """A rank may claim any step, any pace and any world: the laws hold, and nothing is stopped on mains by it."""
    from powerguard.core.messages import Pace
    from powerguard.core.types import RankReport

    world = World(Policy(feeds=(FeedPolicy("ups", age_y=2.0),)), jobs=(JobSpec("job", ranks=1),))
    world.run(5.0 + world.now)
    for rank, step, seconds in beats:
        hello = Hello("other", rank, rank, world_size, 77, "/x", step=step, pace=Pace(step_s=abs(seconds)))
        reports = (RankReport("other", rank, world.now, hello), RankReport("other", rank, world.now, Beat(step)))
        sample = Sample("ups", world.now, Comm.OK, {"ups.status": "OL", "battery.charge": "100"})
        world.decide(Observation((sample,), reports), world.now)  # raises for what breaks a law
    world.run(5.0 + world.now)

    assert "online" == world.phase.value


# ---- a daemon that answers anything ----------------------------------------------------------------


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=6),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def impostor() -> Iterator[tuple[Path, list[list[bytes]]]]:
    """A control socket whose answers are whatever is put into the list."""
    folder = tempfile.mkdtemp(prefix="pg-fuzz-")
    path, answers = Path(folder, CONTROL_SOCKET), [[b""]]
    context, stop = zmq.Context(), threading.Event()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.bind(f"ipc://{path}")

    def serve() -> None:
        while not stop.is_set():
            if router.poll(50):
                envelope = router.recv_multipart()[:2]
                router.send_multipart([*envelope, *answers[0]])

    thread = threading.Thread(target=serve)
    thread.start()
    yield Path(folder), answers
    stop.set()
    thread.join()
    router.close()
    context.term()
    path.unlink(missing_ok=True)
    os.rmdir(folder)


@pytest.mark.slow
@BOUNDED
@given(st.one_of(
    st.lists(st.binary(max_size=60), min_size=1, max_size=3),
    JSON.map(lambda value: [wire.VERSION, msgspec.json.encode(value)]),
    JSON.map(lambda value: [wire.VERSION, msgspec.json.encode({"ok": True, "data": {"node": value, "feeds": value}})]),
))  # fmt: skip
def test_any_answer_of_a_daemon_is_a_status_or_an_operating_error(impostor, frames):
    """The command line speaks with whoever has the socket: a status, or one line about it."""
    folder, answers = impostor
    answers[0] = frames
    assert isinstance(outcome(lambda: fetch(str(folder)), DaemonUnreachable, Refused), (Status, PowerguardError))


# ---- files -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> bytes:
    """The journal of an outage."""
    folder = tmp_path_factory.mktemp("recorded")
    world = World(Policy(feeds=(FeedPolicy("ups", age_y=2.0),)), jobs=(JobSpec("job", ranks=2),))
    world.at(10.0 + world.now, lambda: world.feeds["ups"].say({"ups.status": "OB DISCHRG"}))
    before = world.state
    journal = Journal(folder, boot="boot-1234", node="n", version="0")
    journal.begin(world.now, world.policy)
    world.run(60.0 + world.now)
    for entry in world.entries:
        decision = entry.decision
        journal.tick(entry.at, before, entry.seen, decision.state, actions=decision.actions, reason=decision.reason)
        before = decision.state
    journal.close()
    (path,) = folder.glob("journal-*")
    assert fold(folder, "boot-1234").state is not None
    return path.read_bytes()


@pytest.mark.slow
@BOUNDED
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 40), st.binary(max_size=40)), min_size=1, max_size=6))
def test_a_damaged_journal_folds_to_something(tmp_path_factory, recorded, wounds):
    """Bytes cut, put in or overwritten anywhere: a restart goes on from what can be believed, and never fails."""
    raw = bytearray(recorded)
    for where, gone, put in wounds:
        at = int(where * len(raw))
        raw[at : at + gone] = put
    folder = tmp_path_factory.mktemp("fold")
    (folder / "journal-20260101T000000Z-boot-123-0.jsonl").write_bytes(raw)

    assert isinstance(fold(folder, "boot-1234"), Folded)


@pytest.mark.slow
def test_a_huge_line_in_a_journal_takes_no_memory(tmp_path):
    """A file that isn't ours at all, without a line's end: bounded, whatever its size."""
    path = tmp_path / "journal-20260101T000000Z-boot-123-0.jsonl"
    with path.open("wb") as file:
        file.truncate(512 * MIB)  # NULs, as a power cut leaves them
    tracemalloc.start()
    folded = fold(tmp_path, "boot-1234")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert folded.state is None
    assert most < 128 * MIB


@pytest.mark.slow
@BOUNDED
@given(st.one_of(st.binary(max_size=300), st.binary(max_size=60).map(lambda raw: b'[[ups]]\nname = "a@b"\n' + raw)))
def test_any_file_is_a_configuration_or_a_config_error(tmp_path_factory, raw):
    """Bytes, not only texts: `-c` may name any file."""
    path = tmp_path_factory.mktemp("config") / "any.toml"
    path.write_bytes(raw)
    answer = outcome(lambda: load(path), ConfigError)
    assert isinstance(answer, Config) or answer.message


def test_an_endless_configuration_takes_no_memory():
    """`-c /dev/zero` is a mistake like any other."""
    with pytest.raises(ConfigError, match="longer than"):
        load("/dev/zero")
