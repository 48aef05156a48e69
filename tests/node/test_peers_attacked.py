"""What somebody on the network can do to a daemon: nothing but use up a bounded share of it, and be counted."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time

import pytest
import zmq

from powerguard import wire
from powerguard.node.dial import new_pair
from powerguard.node.peers import BURST
from tests.node.peers_rig import Node, pairs, report

CONTEXT = zmq.Context()


@pytest.fixture
def two(eventually):
    """Node `a`, which is attacked, and node `b`, which it believes and which is connected."""
    a, b = pairs("a", "b")
    with contextlib.closing(Node(a, b)) as one, contextlib.closing(Node(b, a)) as other:
        other.peers.reach({"a": (one.at,)})
        eventually(lambda: "b" in one.peers.heard_at)
        yield one, other


def still_works(two, eventually) -> None:
    """Node `b` is heard as if nothing were the matter."""
    one, other = two
    n = 1000 + len(one.heard)
    eventually(lambda: other.peers.send("a", report("b", n)) or ("b", report("b", n)) in one.words())


def counted(one: Node, words: str) -> bool:
    return any(words in why for why in one.peers.refusals.counts)


class Dealer:
    """A ZeroMQ client that tries something."""

    def __init__(self, at: str, *, server: str = "", public: str = "", secret: str = "", name: bytes = b"") -> None:
        self.socket = CONTEXT.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 20)
        if name:
            self.socket.setsockopt(zmq.IDENTITY, name)
        if server:
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, server.encode())
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, public.encode())
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, secret.encode())
        self.socket.connect(f"tcp://{at}")

    def say(self, frames: list[bytes]) -> None:
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart(frames, zmq.NOBLOCK)

    def close(self) -> None:
        self.socket.close()


def as_owner(one: Node, own, **options) -> Dealer:
    return Dealer(one.at, server=one.own.public, public=own.public, secret=own.secret.reveal(), **options)


def test_a_key_that_nobody_gave_is_refused(two, eventually):
    """Whoever knows our public key but isn't trusted says nothing."""
    one, _ = two
    with contextlib.closing(as_owner(one, new_pair("b"))) as stranger:
        stranger.say(wire.encode_peer(report("b", 7)))
        eventually(lambda: counted(one, "that isn't trusted here"))
    still_works(two, eventually)

    assert all(each.message.n != 7 for each in one.heard)


def test_no_key_is_no_word(two, eventually):
    """A plain connection isn't understood; a CURVE one with another server's key neither."""
    one, other = two
    wrong = new_pair("x")
    plain = Dealer(one.at)
    misled = Dealer(one.at, server=wrong.public, public=other.own.public, secret=other.own.secret.reveal())
    with contextlib.closing(plain), contextlib.closing(misled):
        for _ in range(20):
            plain.say(wire.encode_peer(report("b", 7)))
            misled.say(wire.encode_peer(report("b", 7)))
            time.sleep(0.01)
    still_works(two, eventually)

    assert all(each.message.n != 7 for each in one.heard)


def test_a_trusted_node_speaks_in_no_other_name(eventually):
    """Neither by its routing id nor by what a word says of its sender; what is for another doesn't reach it."""
    a, b, c = pairs("a", "b", "c")
    with contextlib.closing(Node(a, b, c)) as one, contextlib.closing(Node(b, a)) as victim:
        victim.peers.reach({"a": (one.at,)})
        eventually(lambda: "b" in one.peers.heard_at)
        with contextlib.closing(as_owner(one, c, name=b"b")) as thief:
            thief.say(wire.encode_peer(report("b", 7)))
            eventually(lambda: counted(one, "node c speaks in the name of b"))
            thief.say(wire.encode_peer(report("c", 8)))
            eventually(lambda: one.heard)
            one.peers.send("b", report("a", 9))
            eventually(lambda: victim.heard)

            assert one.words() == [("c", report("c", 8))]
            assert victim.words() == [("a", report("a", 9))]
            assert thief.socket.poll(100) == 0


class Tap:
    """A wire-tap: passes bytes on, and remembers what went to the server."""

    def __init__(self, at: str) -> None:
        host, port = at.split(":")
        self._to = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.at = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.sent = b""
        self._threads = [threading.Thread(target=self._run)]
        self._open: list[socket.socket] = []
        self._threads[0].start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._to)
                self._open += [client, server]
                for ends in ((client, server, True), (server, client, False)):
                    self._threads.append(threading.Thread(target=self._pass, args=ends))
                    self._threads[-1].start()

    def _pass(self, source: socket.socket, target: socket.socket, keep: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.sent += data if keep else b""
                target.sendall(data)

    def close(self) -> None:
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join()


@pytest.mark.slow
def test_replayed_frames_are_no_words(eventually):
    """What was recorded of a true conversation, said again on a new connection, is said to nobody."""
    a, b = pairs("a", "b")
    with contextlib.closing(Node(a, b)) as one, contextlib.closing(Node(b, a)) as other:
        with contextlib.closing(Tap(one.at)) as tap:
            other.peers.reach({"a": (tap.at,)})
            eventually(lambda: other.peers.send("a", report("b", 7)) or one.heard)
            other.peers.reach({})
            eventually(lambda: one.peers._connected == 0)
            heard, recorded = len(one.heard), tap.sent
        assert len(recorded) > 500
        for cut in (len(recorded), 64, len(recorded) // 2):
            with socket.create_connection((one.address, one.port)) as again:
                again.sendall(recorded[:cut])
                again.settimeout(0.3)
                with contextlib.suppress(OSError):
                    while again.recv(65536):
                        pass
        assert len(one.heard) == heard
        other.peers.reach({"a": (one.at,)})
        still_works((one, other), eventually)


def test_a_word_heard_twice_is_the_same_word(two, eventually):
    """A trusted node may repeat itself: the count in each word tells the core."""
    one, other = two
    with contextlib.closing(as_owner(one, other.own)) as twin:
        for _ in range(3):
            twin.say(wire.encode_peer(report("b", 5)))
        eventually(lambda: len(one.heard) >= 3)

    assert {(each.node, each.message.n) for each in one.heard} == {("b", 5)}


@pytest.mark.slow
def test_oversized_and_broken_frames_cost_their_sender_alone(two, eventually):
    """Nonsense, another version, too many frames: refused. A frame beyond the limit ends the connection."""
    one, other = two
    with contextlib.closing(as_owner(one, other.own)) as twin:
        good = wire.encode_peer(report("b", 6))
        for frames in (
            [b"pg1"],
            [b"pg2", good[1]],
            [b"pg1", b"\xc1" * 100],
            [*good, b""],
            [b"pg1", b"\xdd\xff\xff\xff\xff"],
        ):
            twin.say(frames)
        eventually(lambda: sum(one.peers.refusals.counts.values()) >= 5)
        before = peak_kib()
        for _ in range(5):
            twin.say([b"pg1", b"x" * (17 << 20)])
            time.sleep(0.05)
        grown = peak_kib() - before
    still_works(two, eventually)

    assert one.peers._thread.is_alive()
    assert grown < 200 * 1024  # the sender is in this process too, with 17 MiB for each message


@pytest.mark.slow
def test_a_flood_of_a_trusted_node_is_dammed(two, eventually):
    """Beyond its rate it isn't listened to, however much it says; others are."""
    one, other = two
    with contextlib.closing(as_owner(one, other.own)) as twin:
        frames = wire.encode_peer(report("b", 5))
        ends = time.monotonic() + 30.0
        while not counted(one, "node b says too much") and time.monotonic() < ends:
            for _ in range(1000):
                twin.say(frames)
    assert counted(one, "node b says too much")
    assert len(one.heard) < 3 * BURST
    time.sleep(0.2)
    still_works(two, eventually)


@pytest.mark.slow
def test_a_flood_of_strangers_is_bounded_and_hurts_no_line(two, eventually):
    """Hundreds of connections that say nothing, or nonsense: a bounded number is let in, and dropped in time."""
    one, other = two
    limit = one.peers.connections_max
    strangers: list[socket.socket] = []
    before = len(os.listdir("/proc/self/fd"))
    try:
        for number in range(6 * limit):
            stranger = socket.socket()
            stranger.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                stranger.connect((one.address, one.port))
            strangers.append(stranger)
            if number % 3 == 0:
                with contextlib.suppress(OSError):
                    stranger.send(os.urandom(200))
        eventually(lambda: counted(one, "no more connections"))
        taken = len(os.listdir("/proc/self/fd")) - before - len(strangers)
        for n in range(20):  # the line that was there goes on
            other.peers.send("a", report("b", n))
        eventually(lambda: one.heard)

        assert taken <= 5 * limit  # of 6: what the kernel had accepted before the door was shut may still come
    finally:
        for stranger in strangers:
            stranger.close()
    eventually(lambda: one.peers._door.open, 20.0)
    still_works(two, eventually)


@pytest.mark.slow
def test_strangers_who_stay_are_dropped(two, eventually):
    """A connection that never proves a key is closed after the handshake's time, half a greeting or none."""
    one, _ = two
    strangers = [socket.create_connection((one.address, one.port)) for _ in range(5)]
    for stranger in strangers[:2]:
        stranger.sendall(b"\xff\0\0\0\0\0\0\0\x01\x7f\x03")
    ends = time.monotonic() + 20.0
    for stranger in strangers:
        stranger.settimeout(max(0.1, ends - time.monotonic()))
        while stranger.recv(4096):
            pass
        stranger.close()
    still_works(two, eventually)


def test_its_log_cant_be_flooded(two, eventually):
    """A reason is told once a minute, with how often it came."""
    one, _ = two
    for n in range(10_000):
        one.peers.refusals.note(f"reason {n}")
    said = one.peers.refusals.news(1e6)

    assert len(said) <= 101
    assert one.peers.refusals.news(1e6 + 1.0) == []


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
