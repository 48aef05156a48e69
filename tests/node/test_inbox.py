"""Everything comes in at one place, in order, bounded."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from powerguard.core.between import PeerReport, Report
from powerguard.core.messages import Beat, Bye, Held, Promise
from powerguard.core.types import Comm, Command, PageReport, RankReport, Sample
from powerguard.node.inbox import HELD_MAX, TAKE_MAX, Inbox, Wish
from powerguard.node.poweroff import Result


def report(message, rank: int = 0) -> RankReport:
    return RankReport("job", rank, 1.0, message)


def test_values_are_sorted_by_kind_and_keep_their_order():
    """Samples, reports, pages and commands arrive in the order they were put, beats among the other reports."""
    inbox = Inbox()
    sample = Sample("u", 1.0, Comm.OK)
    order = [report(Promise(1, 5)), report(Beat(6)), report(Promise(2, 7)), report(Bye("x"))]
    for item in (order[0], sample, order[1], Command("flush"), order[2], PageReport("j", 0, 1.0, 3, True), order[3]):
        inbox.put(item)
    inbox.put(Result(True, False, "dry"))
    inbox.put(Wish("stop"))
    taken = inbox.drain(0)

    assert list(taken.seen.reports) == order
    assert taken.seen.samples == (sample,)
    assert len(taken.seen.pages) == len(taken.seen.commands) == len(taken.results) == 1
    assert taken.wishes == ("stop",)
    assert inbox.drain(0).seen.reports == ()


def test_beats_wait_for_the_next_tick_and_everything_else_wakes_the_loop():
    """A beat alone doesn't end the wait; a promise does, at once."""
    inbox = Inbox()
    inbox.put(report(Beat(1)))
    inbox.put(report(Held(1, (5,))))
    began = time.monotonic()
    assert len(inbox.drain(0.1).seen.reports) == 2
    assert time.monotonic() - began >= 0.09
    threading.Timer(0.05, inbox.put, [report(Promise(1, 2))]).start()
    began = time.monotonic()
    assert len(inbox.drain(10).seen.reports) == 1
    assert time.monotonic() - began < 5


def test_a_flood_is_bounded_and_hides_no_order():
    """What comes in faster than it is decided is dropped and counted; commands and wishes never are."""
    inbox = Inbox()
    for n in range(HELD_MAX + 10):
        inbox.put(report(Promise(n, n)))
    inbox.put(Command("park"))
    for n in range(2 * HELD_MAX):
        inbox.put(report(Beat(n)))

    assert inbox.dropped == 10
    commands, ticks = 0, 0
    while True:
        taken = inbox.drain(0)
        if not (taken.seen.reports or taken.seen.commands):
            break
        assert len(taken.seen.reports) <= 2 * TAKE_MAX
        commands += len(taken.seen.commands)
        ticks += 1
    assert commands == 1
    assert ticks > 5


def test_a_signal_handler_may_put():
    """A handler that interrupts the wait itself is heard at once, without a deadlock."""
    inbox = Inbox()
    old = signal.signal(signal.SIGUSR1, lambda *_: inbox.put(Wish("reload")))
    try:
        threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGUSR1]).start()
        began = time.monotonic()
        assert inbox.drain(10).wishes == ("reload",)
        assert time.monotonic() - began < 5
    finally:
        signal.signal(signal.SIGUSR1, old)


def test_of_a_nodes_words_the_newest_is_kept():
    """Each word says everything, so a node that says much takes no memory; words of others and other jobs stay."""
    inbox = Inbox()
    for n in range(10_000):
        inbox.put(PeerReport("b", 0.0, word("b", n)))
    inbox.put(PeerReport("c", 0.0, word("c", 1)))
    inbox.put(PeerReport("b", 0.0, word("b", 2, job="other")))
    taken = inbox.drain(0.0)

    assert [(each.node, each.message.job, each.message.n) for each in taken.seen.peers] == [
        ("b", "job", 9999),
        ("c", "job", 1),
        ("b", "other", 2),
    ]
    assert inbox.drain(0.0).seen.peers == ()
    inbox.put(PeerReport("b", 0.0, word("b", 3)))
    assert len(inbox.drain(5.0).seen.peers) == 1  # it wakes the loop


def word(node: str, n: int, job: str = "job") -> Report:
    return Report(node=node, boot="boot", n=n, job=job, term=0, world_size=2)


def test_words_of_many_nodes_are_taken_together():
    """With hundreds of nodes the loop wakes at most every tenth of a second for them."""
    inbox = Inbox()
    for n in range(400):
        inbox.put(PeerReport(f"n{n}", 0.0, word(f"n{n}", 1)))
    assert len(inbox.drain(5.0).seen.peers) == 400
    taken_at = time.monotonic()
    inbox.put(PeerReport("n1", 0.0, word("n1", 2)))

    assert len(inbox.drain(5.0).seen.peers) == 1
    assert time.monotonic() - taken_at > 0.09


def on_line(feed: str, at: float, status: str = "OL", comm: Comm = Comm.OK) -> Sample:
    return Sample(feed, at, comm, {"ups.status": status})


def woken(inbox: Inbox, look_s: float = 5.0) -> int | None:
    """Samples taken, or None where nothing would have ended the wait."""
    ends = time.monotonic() + 0.02
    taken = inbox.drain(0.02, look_s)
    return None if time.monotonic() >= ends else len(taken.seen.samples)


def test_feeds_that_stay_on_line_wake_the_loop_together_and_seldom():
    """Once every feed has spoken, and no sooner than look_s after the last time; none of them is lost."""
    inbox = Inbox()
    inbox.drain(0, 5.0)
    for feed in "ab":
        inbox.put(on_line(feed, 100.0))  # the first word of a feed is news
    assert woken(inbox) == 2
    woke = []
    for second in range(101, 116):
        for feed in "ab":
            inbox.put(on_line(feed, float(second)))
        woke.append(woken(inbox))
    assert woke.count(None) == 12
    assert all(n is None or n == 2 for n in woke)


@pytest.mark.parametrize(
    "news",
    [
        on_line("a", 101.0, "OB DISCHRG"), on_line("a", 101.0, "OL CHRG"), on_line("a", 101.0, "OL LB"),
        on_line("a", 101.0, comm=Comm.STALE), Sample("a", 101.0, Comm.UNREACHABLE),
    ],
)  # fmt: skip
def test_news_of_a_feed_wakes_the_loop_at_once(news):
    """Whatever isn't the word of before, and what is said on battery, every time."""
    inbox = Inbox()
    for feed in "ab":
        inbox.put(on_line(feed, 100.0))
    inbox.drain(0, 5.0)
    inbox.put(news)
    assert woken(inbox) == 1
    inbox.put(on_line("a", 102.0, "OB DISCHRG"))
    assert woken(inbox) == 1
    inbox.put(on_line("a", 103.0, "OB DISCHRG"))
    assert woken(inbox) == 1


def test_a_feed_that_is_gone_is_not_waited_for():
    """The first wait for it ends by time; from then on the others wake the loop without it."""
    inbox = Inbox()
    for feed in "ab":
        inbox.put(on_line(feed, 100.0))
    inbox.drain(0, 1.0)
    inbox.put(on_line("a", 102.0))
    assert woken(inbox, 1.0) is None
    inbox.put(on_line("a", 104.0))
    assert woken(inbox, 1.0) == 1
