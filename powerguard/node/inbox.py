"""The one place where everything comes in: threads and signal handlers put values, the loop takes them."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque

from msgspec import Struct

from powerguard.core.between import PeerReport
from powerguard.core.messages import Beat, Held
from powerguard.core.types import Command, LoadStep, Observation, PageReport, RankReport, Sample
from powerguard.node.inhibit import Shutdown
from powerguard.node.poweroff import Result

TAKE_MAX = 4096
"""Values taken at once, so that a flood can't keep a decision from being made."""
HELD_MAX = 65536
"""Values held; beyond, new ones are dropped: every message of the protocol is repeated until it is answered."""


GATHER_S = 0.004
"""Feeds are looked at together, and answer within a few milliseconds: one decision for all of them."""
GAP_A_NODE_S, GAP_MAX_S = 0.0005, 0.1
"""Words of other nodes are taken together: each costs a decision over all ranks of the job, and a thousand nodes speak
at least once a second. So a leader of three waits for 1.5 ms at most, one of hundreds decides ten times a second.
"""


class Wish(Struct, frozen=True):
    """Something for the shell itself: "stop", "reload", or "" to look anew."""

    what: str = ""


Item = Sample | RankReport | PeerReport | PageReport | Command | LoadStep | Result | Shutdown | Wish


class Taken(Struct, frozen=True):
    """What came in, sorted by who it is for."""

    seen: Observation
    results: tuple[Result, ...] = ()
    shutdowns: tuple[Shutdown, ...] = ()
    wishes: tuple[str, ...] = ()


class Inbox:
    """`put` may be called from any thread and from a signal handler; `drain` by the loop alone.

    A beat, a deputy's too, doesn't wake the loop: with eight ranks there are eight a second, and they can wait for the
    next tick.
    Of another node's words about a job only the newest is held: each says everything.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._items: queue.SimpleQueue[tuple[int, Item]] = queue.SimpleQueue()
        self._beats: deque[tuple[int, Item]] = deque(maxlen=HELD_MAX)
        self._count = itertools.count()
        self._lock = threading.Lock()  # guards _words
        self._words: dict[tuple[str, str, type], PeerReport] = {}
        self._speakers: set[str] = set()  # no more than there are trusted keys
        self._words_at = 0.0  # not before then

    def put(self, item: Item) -> None:
        """Takes *item* in. Never waits."""
        numbered = (next(self._count), item)
        if isinstance(item, RankReport) and isinstance(item.message, (Beat, Held)):
            self._beats.append(numbered)
        elif isinstance(item, PeerReport):
            key = (item.node, item.message.job, type(item.message))
            with self._lock:
                if key not in self._words:
                    self._items.put(numbered)
                self._words[key] = item
        elif self._items.qsize() < HELD_MAX or isinstance(item, Wish | Result | Command | Shutdown | LoadStep):
            self._items.put(numbered)
        else:
            self.dropped += 1

    def _gather(self, first: Item) -> None:
        """Another node or a feed has spoken, and soon others will: a moment for them."""
        pause = GATHER_S if isinstance(first, Sample) else 0.0
        if isinstance(first, PeerReport):
            pause = self._words_at - time.monotonic()
        if pause > 0.0:
            time.sleep(pause)

    def drain(self, wait_s: float) -> Taken:
        """Everything that has come in, waiting at most *wait_s* for the first that isn't a beat."""
        got: list[tuple[int, Item]] = []
        try:
            got.append(self._items.get(timeout=max(0.0, wait_s)))
            self._gather(got[0][1])
            while len(got) < TAKE_MAX:
                got.append(self._items.get_nowait())
        except queue.Empty:
            pass
        got += [self._beats.popleft() for _ in range(min(TAKE_MAX, len(self._beats)))]
        got.sort(key=lambda numbered: numbered[0])
        items = [item for _, item in got]
        with self._lock:
            words, self._words = self._words, {}
        if words:
            self._speakers.update(node for node, _, _ in words)
            self._words_at = time.monotonic() + min(GAP_MAX_S, GAP_A_NODE_S * len(self._speakers))
        return Taken(
            Observation(
                samples=tuple(i for i in items if isinstance(i, Sample)),
                reports=tuple(i for i in items if isinstance(i, RankReport)),
                pages=tuple(i for i in items if isinstance(i, PageReport)),
                commands=tuple(i for i in items if isinstance(i, Command)),
                loads=tuple(i for i in items if isinstance(i, LoadStep)),
                peers=tuple(words.values()),
            ),
            results=tuple(i for i in items if isinstance(i, Result)),
            shutdowns=tuple(i for i in items if isinstance(i, Shutdown)),
            wishes=tuple(i.what for i in items if isinstance(i, Wish)),
        )
