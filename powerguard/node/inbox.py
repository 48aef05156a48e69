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
from powerguard.core.types import Comm, Command, LoadStep, Observation, PageReport, RankReport, Sample
from powerguard.node.inhibit import Shutdown
from powerguard.node.poweroff import Result

TAKE_MAX = 4096
"""Values taken at once, so that a flood can't keep a decision from being made."""
HELD_MAX = 65536
"""Values held; beyond, new ones are dropped: every message of the protocol is repeated until it is answered."""

GAP_A_NODE_S, GAP_MAX_S = 0.0005, 0.1
"""Words of other nodes are taken together: each costs a decision over all ranks of the job, and a thousand nodes speak
at least once a second. So a leader of three waits for 1.5 ms at most, one of hundreds decides ten times a second.
"""


_ALARMING = frozenset({"OB", "LB", "FSD", "OFF"})


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

    def and_then(self, later: Taken) -> Taken:
        """Both, in this order."""
        seen = {name: getattr(self.seen, name) + getattr(later.seen, name) for name in Observation.__struct_fields__}
        return Taken(
            Observation(**seen),
            self.results + later.results,
            self.shutdowns + later.shutdowns,
            self.wishes + later.wishes,
        )


class Inbox:
    """`put` may be called from any thread and from a signal handler; `drain` by the loop alone.

    A beat, a deputy's too, doesn't wake the loop: with eight ranks there are eight a second, and they can wait for the
    next tick. Nor does a feed that says once more that it is on line: it is heard with the others, every `look_s`.
    Of another node's words about a job only the newest is held: each says everything.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._items: queue.SimpleQueue[tuple[int, Item]] = queue.SimpleQueue()
        self._patient: deque[tuple[int, Item]] = deque(maxlen=HELD_MAX)  # wakes nobody
        self._count = itertools.count()
        self._lock = threading.Lock()  # guards _words, _said and _heard
        self._said: dict[str, Sample] = {}  # by feed, the newest
        self._heard: set[str] = set()  # feeds, since the loop last took
        self._look_s, self._looked_at = 0.0, 0.0
        self._words: dict[tuple[str, str, type], PeerReport] = {}
        self._speakers: set[str] = set()  # no more than there are trusted keys
        self._words_at = 0.0  # not before then

    def put(self, item: Item) -> None:
        """Takes *item* in. Never waits."""
        numbered = (next(self._count), item)
        if self._can_wait(item):
            self._patient.append(numbered)
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

    def _can_wait(self, item: Item) -> bool:
        """A beat; or a feed that is on line as before while another is still to come, or it's too soon to look."""
        if isinstance(item, RankReport):
            return isinstance(item.message, (Beat, Held))
        return isinstance(item, Sample) and self._tells_nothing(item)

    def _tells_nothing(self, sample: Sample) -> bool:
        with self._lock:
            before = self._said.get(sample.feed)
            self._said[sample.feed] = sample
            self._heard.add(sample.feed)
            if not _on_line_as_before(before, sample):
                return False
            due = sample.at - self._looked_at >= self._look_s and self._heard >= self._said.keys()
            if due:
                self._looked_at = sample.at
            return not due

    def _await_words(self, first: Item) -> None:
        """Another node has spoken, and soon others will: a moment for them."""
        pause = self._words_at - time.monotonic() if isinstance(first, PeerReport) else 0.0
        if pause > 0.0:
            time.sleep(pause)

    def drain(self, wait_s: float, look_s: float = 0.0) -> Taken:
        """Everything that has come in, waiting at most *wait_s* for the first that can't wait.

        *look_s*: feeds that stay on line wake the loop so often, in the time of their samples.
        """
        self._look_s = look_s
        got: list[tuple[int, Item]] = []
        try:
            got.append(self._items.get(timeout=max(0.0, wait_s)))
            self._await_words(got[0][1])
            while len(got) < TAKE_MAX:
                got.append(self._items.get_nowait())
        except queue.Empty:
            pass
        woken = bool(got)
        got += [self._patient.popleft() for _ in range(min(TAKE_MAX, len(self._patient)))]
        got.sort(key=lambda numbered: numbered[0])
        items = [item for _, item in got]
        with self._lock:
            words, self._words = self._words, {}
            if not woken:  # a feed is silent, or isn't read any more: the others don't wait for it
                self._said = {feed: self._said[feed] for feed in self._heard}
            self._heard.clear()
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


def _on_line_as_before(before: Sample | None, now: Sample) -> bool:
    status = now.variables.get("ups.status", "")
    same = (
        before is not None and before.comm is now.comm is Comm.OK and before.variables.get("ups.status", "") == status
    )
    return same and "OL" in (tokens := status.split()) and not _ALARMING.intersection(tokens)
