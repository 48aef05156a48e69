"""The daemon's end of the bus, with real sockets and real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import zmq

from powerguard import wire
from powerguard.core import page
from powerguard.core.agree import FORGET_S
from powerguard.core.messages import (
    Beat,
    Bye,
    Decide,
    Exit,
    Held,
    Hello,
    Message,
    Notice,
    Plan,
    Purpose,
    Resume,
    ToRank,
    Welcome,
)
from powerguard.core.types import RankReport
from powerguard.errors import DirectoryError
from powerguard.node.bus import BURST, DEAD_S, Bus

CONTEXT = zmq.Context()


class Rank:
    """A peer that speaks the protocol, or whatever it is told to send."""

    def __init__(self, path: Path, name: bytes = b"job/0") -> None:
        self.socket = CONTEXT.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 200)
        if name:
            self.socket.setsockopt(zmq.IDENTITY, name)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self.socket.connect(f"ipc://{path}")

    def say(self, message: Message) -> None:
        self.socket.send_multipart(wire.encode(message))

    def hear(self, within_s: float = 5.0) -> ToRank | None:
        if not self.socket.poll(int(within_s * 1000)):
            return None
        return wire.decode_to_rank(self.socket.recv_multipart())

    def close(self) -> None:
        self.socket.close()


class Node:
    """A bus and what it has reported."""

    def __init__(self, path: Path, **options: object) -> None:
        self.path = path
        self.reports: list[RankReport] = []
        self.bus = Bus(path, put=self.reports.append, clock=time.monotonic, **options)  # type: ignore[arg-type]
        self.ranks: list[Rank] = []

    def rank(self, name: bytes = b"job/0") -> Rank:
        self.ranks.append(Rank(self.path, name))
        return self.ranks[-1]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.bus.close(0.0)


@pytest.fixture
def node(tmp_path):
    """A running bus."""
    with contextlib.closing(Node(tmp_path / "r.sock")) as running:
        yield running


def hello(rank: int = 0, *, pid: int | None = None, page: str = "", job: str = "job") -> Hello:
    return Hello(job, rank, rank, 2, os.getpid() if pid is None else pid, "/ckpt", page)


def test_words_go_both_ways(node, eventually):
    """A rank's message comes in with its identity, the daemon's goes out by job and rank."""
    rank = node.rank(b"my%20job/3")
    rank.say(hello(3, job="my job"))
    eventually(lambda: node.reports)

    assert [("my job", 3, hello(3, job="my job"))] == [(r.job, r.rank, r.message) for r in node.reports]
    node.bus.send("my job", 3, Welcome("n", "online", 7))
    assert rank.hear() == Welcome("n", "online", 7)


def test_a_restarted_daemon_reaches_ranks_before_they_speak(node, eventually):
    """The identity is fixed: once a rank has reconnected it can be spoken to, no HELLO needed."""
    rank = node.rank()
    rank.say(hello())
    eventually(lambda: node.reports)
    node.bus.close()
    node.bus = Bus(node.path, put=node.reports.append, clock=time.monotonic)

    def reached() -> bool:
        node.bus.send("job", 0, Resume(1, "r"))
        return rank.hear(0.05) is not None

    eventually(reached)


def test_what_cannot_be_delivered_is_dropped(node, eventually):
    """A rank that isn't there costs nothing: no error, no trouble, and the others hear."""
    rank = node.rank()
    rank.say(hello())
    eventually(lambda: node.reports)
    for number in range(100):
        node.bus.send("job", 1 + number, Resume(1, "r"))
    node.bus.send("job", 0, Resume(2, "r"))

    assert rank.hear() == Resume(2, "r")
    assert node.bus.care() == ""


@pytest.mark.slow
def test_a_peer_that_never_reads_blocks_nobody(node, eventually):
    """Ten thousand messages to a peer that doesn't take them: `send` stays quick, another rank hears at once."""
    stuck, rank = node.rank(b"job/0"), node.rank(b"job/1")
    stuck.say(hello())
    rank.say(hello(1))
    eventually(lambda: len(node.reports) == 2)
    began = time.monotonic()
    for number in range(10_000):
        node.bus.send("job", 0, Notice(number, 1.0, "x" * 500))
    node.bus.send("job", 1, Resume(2, "r"))

    assert rank.hear(10.0) == Resume(2, "r")
    assert time.monotonic() - began < 10.0


@pytest.mark.parametrize(
    "frames",
    [[b""], [b"pg1"], [b"pg1", b"\xc1"], [b"pg9", b"x"], [b"x"] * 50, [b"pg1", b"\x80", b""]],
)
def test_nonsense_is_refused_and_told_once(node, eventually, frames):
    """Whatever a peer sends: it is counted and told once, and the bus goes on."""
    rank = node.rank()
    rank.socket.send_multipart(frames)
    eventually(lambda: node.bus.refused)
    assert "refused a message" in node.bus.care()
    assert node.bus.care() == ""
    rank.say(hello())

    eventually(lambda: node.reports)


@pytest.mark.parametrize("name", [b"job", b"job/x", b"job/01", b"a/b/0", b"%zz/0", b"", b"\xff/0"])
def test_a_peer_without_a_proper_identity_is_not_heard(node, eventually, name):
    """Only canonical identities count; the anonymous ones that ZeroMQ makes up don't."""
    stranger = node.rank(name)
    stranger.say(Beat(1))
    eventually(lambda: node.bus.refused)

    assert node.reports == []


def test_an_oversized_message_costs_its_sender_the_connection(node, eventually):
    """A frame beyond the limit never reaches us; the next rank is heard as ever."""
    big, rank = node.rank(b"job/0"), node.rank(b"job/1")
    big.socket.send_multipart([b"pg1", b"\0" * (wire.FROM_RANK_BYTES + 1)])
    rank.say(hello(1))
    eventually(lambda: node.reports)

    assert [report.rank for report in node.reports] == [1]


@pytest.mark.slow
def test_a_flood_is_dammed(node, eventually):
    """One rank says 20,000 things: at most its burst and its rate get through, and another rank is heard."""
    flood, rank = node.rank(b"job/0"), node.rank(b"job/1")
    began = time.monotonic()
    for step in range(20_000):
        flood.say(Beat(step))
    rank.say(hello(1))
    eventually(lambda: any(report.rank == 1 for report in node.reports))
    eventually(lambda: sum(node.bus.refused.values()) + len(node.reports) >= 20_001, 30.0)
    took = time.monotonic() - began

    assert len(node.reports) <= BURST + 2 + took * 100.0
    assert "says too much" in node.bus.care()


def test_hello_for_somebody_else_is_refused(node, eventually):
    """The socket's identity is who it is; a HELLO under another name registers nobody."""
    rank = node.rank()
    rank.say(hello(1))
    eventually(lambda: node.bus.refused)

    assert (node.reports, node.bus.pages(0.0)) == ([], ())


def test_one_path_one_daemon(node, tmp_path):
    """A second daemon on the same path is refused in words; after the first has ended it is free."""
    with pytest.raises(DirectoryError, match="another daemon serves"):
        Node(node.path)
    node.bus.close()

    Node(node.path).close()


def test_a_socket_left_by_a_killed_daemon_is_no_obstacle(tmp_path, eventually):
    """SIGKILL leaves the file behind; the next daemon takes its place."""
    path = tmp_path / "r.sock"
    code = (
        "import sys, time; from powerguard.node.bus import Bus\n"
        f"Bus({str(path)!r}, put=print, clock=time.monotonic); print('up', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    child.kill()
    child.wait()
    child.stdout.close()
    assert path.exists()
    with contextlib.closing(Node(path)) as node:
        node.rank().say(hello())

        eventually(lambda: node.reports)


def test_the_socket_gets_its_mode(tmp_path):
    """The mode is what was asked for, whatever the umask; the folder is made."""
    with contextlib.closing(Node(tmp_path / "new" / "r.sock", mode=0o622)) as node:
        assert stat.S_IMODE(node.path.stat().st_mode) == 0o622
        assert stat.S_ISSOCK(node.path.stat().st_mode)


def test_a_socket_that_cannot_be_made_says_why(tmp_path):
    """Too long a path, a folder that is a file, a group that isn't: each one line with what to do."""
    (tmp_path / "file").write_text("")
    for path, group in (
        (tmp_path / ("x" * 120), ""),
        (tmp_path / "file" / "r.sock", ""),
        (tmp_path / "r.sock", "no-such-group"),
    ):
        with pytest.raises(DirectoryError) as caught:
            Node(path, group=group)
        assert caught.value.todo
    Node(tmp_path / "r.sock").close()


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


RANK_PROCESS = """
import os, sys, time, zmq
from powerguard import wire
from powerguard.core import page
from powerguard.core.messages import Hello
path, pages = sys.argv[1:]
with open(pages, "wb") as file:
    file.write(page.blank(os.getpid(), 41))
socket = zmq.Context().socket(zmq.DEALER)
socket.setsockopt(zmq.IDENTITY, b"job/0")
socket.connect("ipc://" + path)
socket.send_multipart(wire.encode(Hello("job", 0, 0, 1, os.getpid(), "/c", pages)))
print("said", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_process_is_seen_from_outside(node, tmp_path, eventually):
    """Its page's step while it lives, stopped or not; dead as soon as it is killed, zombie or reaped."""
    child = subprocess.Popen([sys.executable, "-c", RANK_PROCESS, node.path, tmp_path / "p"], stdout=subprocess.PIPE)
    try:
        eventually(lambda: node.reports)
        (seen,) = node.bus.pages(5.0)
        assert (seen.job, seen.rank, seen.at, seen.step, seen.alive, seen.pid) == ("job", 0, 5.0, 41, True, child.pid)
        child.send_signal(signal.SIGSTOP)
        assert node.bus.pages(6.0)[0].alive
        child.kill()
        eventually(lambda: not node.bus.pages(7.0)[0].alive)
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
    assert not node.bus.pages(8.0)[0].alive


def test_a_page_must_be_a_plain_file_of_that_process(node, tmp_path, eventually):
    """A fifo, a link, a device, a relative name or another process's page is no page, and nothing blocks."""
    real = tmp_path / "page"
    real.write_bytes(page.blank(os.getpid() + 1, 3))
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(real)
    rank = node.rank()
    for path in ("", "page", "/dev/zero", str(tmp_path / "fifo"), str(tmp_path / "link"), str(real), "/a\0b"):
        said = len(node.reports)
        rank.say(hello(page=path))
        eventually(lambda said=said: len(node.reports) > said)

        assert [seen.step for seen in node.bus.pages(0.0)] == [-1]


def test_registering_again_leaks_nothing(node, tmp_path, eventually):
    """A rank that says HELLO a hundred times holds no more descriptors than one that said it once."""
    (tmp_path / "page").write_bytes(page.blank(os.getpid(), 3))
    rank = node.rank()
    rank.say(hello(page=str(tmp_path / "page")))
    eventually(lambda: node.reports)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        rank.say(hello(page=str(tmp_path / "page")))
    eventually(lambda: len(node.reports) == 101)

    assert len(os.listdir("/proc/self/fd")) == before
    assert node.bus.pages(0.0)[0].step == 3


def answers(path: Path) -> bool:
    """Somebody accepts connections there."""
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def test_a_full_node_refuses_more(tmp_path, eventually):
    """With every place taken by a living process a new rank is told about, not registered; the dead make room."""
    with contextlib.closing(Node(tmp_path / "r.sock", peers_max=5)) as node:
        for rank in range(5):
            node.rank(b"job/%d" % rank).say(hello(rank))
        eventually(lambda: len(node.reports) == 5)
        eventually(lambda: node.bus.refused)
        assert "no more connections" in node.bus.care()
        eventually(lambda: not answers(node.path))
        late = node.rank(b"job/5")
        late.say(hello(5))
        node.ranks[0].close()
        eventually(lambda: any("too many ranks" in why for why in node.bus.refused))


@pytest.mark.slow
def test_a_rank_that_has_ended_is_shown_for_a_while(tmp_path, eventually):
    """Longer than its job is remembered, and no longer: a node that runs job after job doesn't keep them all."""
    with contextlib.closing(Node(tmp_path / "r.sock")) as node:
        child = subprocess.Popen([sys.executable, "-c", RANK_PROCESS, str(node.path), str(tmp_path / "page")])
        eventually(lambda: node.reports, 30.0)
        node.rank(b"other/0").say(hello(job="other"))
        eventually(lambda: len(node.reports) == 2)
        child.kill()
        child.wait()
        before = {page.job: page.alive for page in node.bus.pages(1000.0)}
        open_files = len(os.listdir("/proc/self/fd"))
        still = [page.job for page in node.bus.pages(1000.0 + DEAD_S)]
        node.bus.pages(1001.0 + DEAD_S)
        after = [page.job for page in node.bus.pages(1001.0 + DEAD_S)]

        assert {"job": False, "other": True} == before
        assert ["job", "other"] == sorted(still)
        assert ["other"] == after
        assert len(os.listdir("/proc/self/fd")) < open_files
        assert DEAD_S > FORGET_S
        node.rank(b"job/0").say(hello())  # a name may come back
        eventually(lambda: {page.job for page in node.bus.pages(2000.0)} == {"job", "other"})


def test_a_thread_that_ends_is_started_anew(tmp_path, eventually):
    """Should the thread end, `care` says so once and starts it again."""
    reports: list[RankReport] = []

    def put(report: RankReport) -> None:
        if isinstance(report.message, Bye):
            raise RuntimeError("planted")
        reports.append(report)

    bus = Bus(tmp_path / "r.sock", put=put, clock=time.monotonic)
    rank = Rank(tmp_path / "r.sock")
    try:
        rank.say(Bye())
        eventually(lambda: "planted" in bus.care())
        rank.say(hello())
        eventually(lambda: reports)
        assert bus.care() == ""
    finally:
        rank.close()
        bus.close()


def test_close_sends_what_is_queued(node, eventually):
    """The last words, EXIT above all, still leave; a second close is nothing."""
    rank = node.rank()
    rank.say(hello())
    eventually(lambda: node.reports)
    for number in range(50):
        node.bus.send("job", 0, Exit(number, 75, "r"))
    node.bus.close(2.0)
    node.bus.close()

    assert [rank.hear() for _ in range(50)] == [Exit(number, 75, "r") for number in range(50)]


def say_as_nobody(path: Path) -> None:
    """In a forked child: HELLO as another user, for somebody else's job and for one of their own."""
    os.setgid(65534)
    os.setuid(65534)
    context = zmq.Context()
    for name, job in ((b"job/1", "job"), (b"other/0", "other")):
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IDENTITY, name)
        dealer.connect(f"ipc://{path}")
        dealer.send_multipart(wire.encode(hello(int(name[-1:]), job=job)))
    time.sleep(60)


@pytest.mark.root
@pytest.mark.slow
def test_another_user_cannot_speak_for_a_job(eventually):
    """While a process of the owner lives, what another user says for that job is dropped; their own jobs are theirs."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Node(Path(folder) / "r.sock")) as node:
        os.chmod(folder, 0o755)
        node.rank(b"job/0").say(hello())
        eventually(lambda: node.reports)
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                say_as_nobody(node.path)
            os._exit(0)
        try:
            eventually(lambda: any(report.job == "other" for report in node.reports), 20.0)
            eventually(lambda: any("isn't theirs" in why for why in node.bus.refused), 20.0)
            assert sorted((report.job, report.rank) for report in node.reports) == [("job", 0), ("other", 0)]
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_deputy_speaks_for_its_rank_and_hears_what_concerns_staged_states(node, eventually):
    """What it may say comes in as its rank's; it hears DECIDE of plan STAGED only; it can't register."""
    rank, deputy = node.rank(b"job/0"), node.rank(b"job/0+")
    rank.say(hello())
    deputy.say(Held(os.getpid(), (5, 10)))
    eventually(lambda: len(node.reports) == 2)
    fresh = Decide(7, Purpose.STOP, Plan.FRESH, 12, "step-0000000012.e-7")
    staged = Decide(8, Purpose.STOP, Plan.STAGED, 10, "step-0000000010.e-8")
    node.bus.send("job", 0, fresh)
    node.bus.send("job", 0, staged)

    assert {Hello, Held} == {type(report.message) for report in node.reports}
    assert {("job", 0)} == {(report.job, report.rank) for report in node.reports}
    assert [fresh, staged] == [rank.hear(), rank.hear()]
    assert staged == deputy.hear()
    deputy.say(hello())
    eventually(lambda: any("it may not" in why for why in node.bus.refused))
    assert 2 == len(node.reports)
