"""Lines between nodes: words go both ways over one connection, over restarts and cuts, and never to somebody else."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from powerguard.errors import PowerguardError
from powerguard.node.peers import Peers
from tests.node.peers_rig import Node, free_port, pairs, report, ring


@pytest.fixture
def nodes():
    """Makes nodes that are closed in the end."""
    made: list[Node] = []
    with contextlib.ExitStack() as stack:

        def make(*args, **options) -> Node:
            made.append(Node(*args, **options))
            stack.callback(made[-1].close)
            return made[-1]

        yield make


def test_one_line_carries_words_both_ways(nodes, eventually):
    """Only one of the two dials; the other answers over the same connection, before it was ever spoken to."""
    a, b = pairs("a", "b")
    one, two = nodes(a, b), nodes(b, a)
    two.peers.reach({"a": (one.at,)})
    eventually(lambda: "b" in one.peers.heard_at)  # the probe: nothing was said yet
    one.peers.send("b", report("a", 1))
    eventually(lambda: two.heard)
    two.peers.send("a", report("b", 1))
    eventually(lambda: one.heard)

    assert two.words() == [("a", report("a", 1))]
    assert one.words() == [("b", report("b", 1))]
    assert one.peers.refusals.counts == two.peers.refusals.counts == {}


def test_one_word_to_many_is_framed_once_and_reaches_each(nodes, eventually):
    """A leader says the same to every node of a job; the newest of many words in a row is never forgotten."""
    a, b, c = pairs("a", "b", "c")
    one, two, three = nodes(a, b, c), nodes(b, a), nodes(c, a)
    for other in (two, three):
        other.peers.reach({"a": (one.at,)})
    eventually(lambda: {"b", "c"} <= one.peers.heard_at.keys())
    for n in range(1, 500):
        word = report("a", n)
        for name in ("b", "c"):
            one.peers.send(name, word)
        assert one.peers._frames(word) is one.peers._frames(word)
    for other in (two, three):
        eventually(lambda other=other: other.heard and other.heard[-1].message.n == 499)


def test_what_is_to_be_said_waits_for_no_queue_of_words(nodes, eventually):
    """An answer goes out before the next word is read, however many have come."""
    a, b = pairs("a", "b")
    one, two = nodes(a, b), nodes(b, a)
    waiting, go_on = [], threading.Event()

    def put(heard) -> None:
        go_on.wait(60.0)
        waiting.append(len(one.peers._out))
        one.peers.send("b", report("a", heard.message.n))

    one.peers._put = put
    two.peers.reach({"a": (one.at,)})
    eventually(lambda: "b" in one.peers.heard_at)
    for n in range(20):
        two.peers.send("a", report("b", n))
        eventually(lambda: not two.peers._out)
    go_on.set()
    eventually(lambda: len(waiting) >= 10)

    assert {0} == set(waiting)


def test_a_node_that_was_restarted_is_spoken_to_without_a_greeting(nodes, eventually):
    """The line comes back by itself, and the restarted side can speak first."""
    a, b = pairs("a", "b")
    two = nodes(b, a)
    first = Node(a, b)
    two.peers.reach({"a": (first.at,)})
    eventually(lambda: "b" in first.peers.heard_at)
    first.close()
    again = nodes(a, b, port=first.port)
    eventually(lambda: "b" in again.peers.heard_at)
    again.peers.send("b", report("a", 2))
    eventually(lambda: two.heard)

    assert two.words() == [("a", report("a", 2))]


def test_lines_that_arent_wanted_any_more_are_given_up(nodes, eventually):
    """A job is over: no connection is left of it."""
    a, b = pairs("a", "b")
    one, two = nodes(a, b), nodes(b, a)
    two.peers.reach({"a": (one.at,)})
    eventually(lambda: one.peers._connected == 1)
    two.peers.reach({})

    eventually(lambda: one.peers._connected == 0)
    two.peers.send("a", report("b"))
    time.sleep(0.1)
    assert one.heard == []


def test_the_first_address_that_works_is_used(nodes, eventually):
    """A node may be listed under addresses that nobody answers on, or that somebody else does."""
    a, b, c = pairs("a", "b", "c")
    one, two, other = nodes(a, b), nodes(b, a), nodes(c, a, b)
    two.peers.reach({"a": (f"127.0.0.1:{free_port()}", other.at, one.at)})
    eventually(lambda: "b" in one.peers.heard_at)
    two.peers.send("a", report("b"))
    eventually(lambda: one.heard)

    assert one.words() == [("b", report("b"))]
    assert other.heard == []


def test_nobody_waits_for_a_node_that_isnt_there(nodes):
    """Words for it are dropped: the next one says it all again."""
    a, b = pairs("a", "b")
    one = nodes(a, b)
    one.peers.reach({"b": (f"127.0.0.1:{free_port()}",)})
    began = time.monotonic()
    for n in range(2000):
        one.peers.send("b", report("a", n))
        one.peers.send("nobody", report("a", n))

    assert time.monotonic() - began < 5.0
    one.peers.close(0.0)
    assert time.monotonic() - began < 10.0


@pytest.mark.slow
def test_trust_can_be_given_and_taken_while_it_runs(nodes, eventually):
    """A node added by a reload is let in, and one that was taken out isn't heard any more."""
    a, b = pairs("a", "b")
    one, two = nodes(a), nodes(b, a)
    two.peers.reach({"a": (one.at,)})
    eventually(lambda: any("isn't trusted here" in why for why in one.peers.refusals.counts))
    one.peers.trust(ring(a, b))
    eventually(lambda: "b" in one.peers.heard_at)
    one.peers.trust(ring(a))
    eventually(
        lambda: (
            two.peers.send("a", report("b"))
            or any("isn't trusted any more" in why for why in one.peers.refusals.counts)
        )
    )

    assert one.heard == []


def test_a_taken_port_is_said(nodes):
    """With what to change."""
    a, b = pairs("a", "b")
    one = nodes(a, b)

    with pytest.raises(PowerguardError, match=r"can't listen for other nodes on 127.0.0.1:\d+: Address already in use"):
        Peers("127.0.0.1", one.port, ring(b), put=one.heard.append, clock=time.monotonic)


def test_keys_that_dont_belong_together_are_said():
    """Nobody could ever be reached with them."""
    a, b = pairs("a", "b")
    mixed = type(a)("a", b.public, a.secret)

    with pytest.raises(PowerguardError, match="don't belong together"):
        Peers("127.0.0.1", free_port(), ring(mixed), put=print, clock=time.monotonic)


def test_its_thread_is_started_anew(nodes, eventually):
    """A fault in it is said, and the line is there again."""
    a, b = pairs("a", "b")
    one, two = nodes(a, b), nodes(b, a)

    def broken(_report: object) -> None:
        one.peers._put = one.heard.append
        raise RuntimeError("planted")

    one.peers._put = broken
    two.peers.reach({"a": (one.at,)})
    eventually(lambda: two.peers.send("a", report("b")) or not one.peers._thread.is_alive())

    assert "planted" in one.peers.care()
    eventually(lambda: two.peers.send("a", report("b")) or one.heard)


def test_a_closed_line_leaves_nothing(nodes, eventually):
    """The port is free at once, and a second close is nothing."""
    a, b = pairs("a", "b")
    one = Node(a, b)
    one.close()
    one.close()
    again = nodes(a, b, port=one.port)

    assert again.peers.port == one.port
