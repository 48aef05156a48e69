"""The rank's end of the bus against a bare ROUTER: what it says, when, and what it doesn't listen to."""

from __future__ import annotations

import contextlib
import os
import threading
import time

import pytest
import zmq

from powerguard import wire
from powerguard.core.messages import (
    Ack,
    Beat,
    Bye,
    FromRank,
    Hello,
    Message,
    Prepare,
    Promise,
    Purpose,
    Resume,
    ToRank,
    Welcome,
)
from powerguard.train.link import Link

HELLO = Hello("job", 0, 0, 1, 1, "/c")
PREPARE = Prepare(7, "ev", Purpose.STOP, 5.0, "ev-7")


class Ear:
    """Answers PREPARE, and counts."""

    def __init__(self) -> None:
        self.heard: list[ToRank] = []
        self.up: list[bool] = []
        self.troubles: list[Exception] = []
        self.alone_paths: list[str] = []
        self.unsaid: list[FromRank] = []
        self.fail = False

    def hello(self) -> Hello:
        return HELLO

    def beat(self) -> Beat:
        if self.fail:
            self.fail = False
            raise RuntimeError("planted")
        return Beat(5)

    def hear(self, message: ToRank) -> tuple[FromRank, ...]:
        self.heard.append(message)
        return (Promise(message.seq, 6),) if isinstance(message, Prepare) else ()

    def due(self) -> tuple[FromRank, ...]:
        unsaid, self.unsaid = tuple(self.unsaid), []
        return unsaid

    def next_due(self) -> float | None:
        return 0.0 if self.unsaid else None

    def connected(self, *, yes: bool) -> None:
        self.up.append(yes)

    def alone(self, path: str) -> None:
        self.alone_paths.append(path)

    def trouble(self, error: Exception) -> None:
        self.troubles.append(error)


class Server:
    """A ROUTER that says what it is told."""

    def __init__(self, path: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.bind(f"ipc://{path}")

    def hear(self, within_s: float = 10.0) -> FromRank:
        assert self.socket.poll(int(within_s * 1000)), "silence"
        name, *frames = self.socket.recv_multipart()
        assert name == b"job/0"
        return wire.decode_from_rank(frames)

    def until(self, message: Message) -> None:
        for _ in range(50):
            if self.hear() == message:
                return
        raise AssertionError(f"never heard {message}")

    def say(self, *messages: Message) -> None:
        for message in messages:
            self.socket.send_multipart([b"job/0", *wire.encode(message)])

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def path(tmp_path):
    """Where the socket is."""
    return str(tmp_path / "l.sock")


@pytest.fixture
def linked(path):
    """A link and its ear."""
    ear = Ear()
    link = Link(path, b"job/0", ear)
    link.start()
    yield link, ear
    link.stop("done")


@pytest.mark.slow
def test_hello_until_welcome_then_beats(path, linked):
    """It greets at once, again while nobody answers, and beats a second apart once it is welcome."""
    with contextlib.closing(Server(path)) as server:
        assert server.hear() == HELLO
        assert server.hear(2.0) == HELLO
        server.say(Welcome("n", "online", 0))
        assert server.hear(2.0) == Beat(5)
        began = time.monotonic()
        assert server.hear(2.0) == Beat(5)
        assert 0.7 < time.monotonic() - began < 1.9
        server.say(Welcome("n", "online", 0, hello=True))
        server.until(HELLO)


@pytest.mark.slow
def test_a_server_that_comes_back_is_greeted_again(path, linked, eventually):
    """Gone and back, however often: connected, said, greeted."""
    _, ear = linked
    for _ in range(3):
        server = Server(path)
        server.until(HELLO)
        server.say(Welcome("n", "online", 0))
        server.until(Beat(5))
        server.close()
    eventually(lambda: ear.up == [True, False] * 3)

    assert ear.troubles == []


@pytest.mark.slow
def test_orders_before_the_first_greeting_are_for_somebody_else(path, linked):
    """What arrives before WELCOME was meant for an earlier process under this name; after it, orders are answered."""
    _, ear = linked
    with contextlib.closing(Server(path)) as server:
        server.until(HELLO)
        server.say(PREPARE, Welcome("n", "online", 0), PREPARE)
        server.until(Promise(7, 6))

    assert ear.heard == [Welcome("n", "online", 0), PREPARE]


@pytest.mark.slow
def test_the_bell_sends_at_once(path, linked):
    """What another thread has to say doesn't wait for the next beat."""
    link, ear = linked
    with contextlib.closing(Server(path)) as server:
        server.until(HELLO)
        server.say(Welcome("n", "online", 0))
        server.until(Beat(5))
        began = time.monotonic()
        ear.unsaid.append(Ack(3, "Decide"))
        link.wake()
        server.until(Ack(3, "Decide"))

        assert time.monotonic() - began < 0.5


@pytest.mark.slow
def test_nonsense_and_faults_leave_it_alive(path, linked, eventually):
    """Frames that are no message, and an exception of its ear: told, and it goes on."""
    _, ear = linked
    with contextlib.closing(Server(path)) as server:
        server.until(HELLO)
        server.say(Welcome("n", "online", 0))
        for frames in ([b""], [b"pg1", b"\xc1"], [b"pg7", b"x"], [b"a"] * 9):
            server.socket.send_multipart([b"job/0", *frames])
        eventually(lambda: len(ear.troubles) == 4)
        ear.fail = True
        eventually(lambda: len(ear.troubles) == 5)
        server.until(HELLO)
        server.say(Welcome("n", "online", 0), Resume(1, "r"))
        eventually(lambda: ear.heard[-1:] == [Resume(1, "r")])


@pytest.mark.slow
def test_bye_is_the_last_word(path, linked):
    """`stop` says BYE with its reason, once, and the thread is gone; a wake afterwards touches nothing."""
    link, _ = linked
    with contextlib.closing(Server(path)) as server:
        server.until(HELLO)
        server.say(Welcome("n", "online", 0))
        server.until(Beat(5))
        link.stop("finished")
        server.until(Bye("finished"))
        link.stop("finished")
        link.wake()
        assert not server.socket.poll(300)

    assert "powerguard-listener" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.slow
def test_with_nobody_there_it_says_so_once(path, linked, eventually):
    """Three seconds without a daemon; stopping then takes no longer than a moment."""
    link, ear = linked
    eventually(lambda: ear.alone_paths)
    began = time.monotonic()
    link.stop("done")

    assert time.monotonic() - began < 1.5
    assert (ear.alone_paths, ear.up) == ([path], [])


@pytest.mark.slow
def test_a_forked_child_rings_no_bell(path, linked):
    """In a child the link is dead: neither `wake` nor `stop` reaches the parent's socket."""
    link, _ = linked
    with contextlib.closing(Server(path)) as server:
        server.until(HELLO)
        server.say(Welcome("n", "online", 0))
        server.until(Beat(5))
        child = os.fork()
        if child == 0:
            link.wake()
            link.stop("a child")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

        assert [server.hear(), server.hear()] == [Beat(5), Beat(5)]
