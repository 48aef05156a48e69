"""What people are told: announcements, in the log and by the notify program; troubles, when they come and end."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping

import structlog

from powerguard.core.types import Announce
from powerguard.node.tell import Teller

ORDERS = ("flush", "park", "resume", "drill")
"""An operator's; somebody waits for the answer."""

_TROUBLES = {
    "journal": ("journal_failed", "the journal can't be written; decisions go on without it"),
    "shutdown lock": ("shutdown_lock_failed", "a shutdown of the system wouldn't wait for training"),
    "shutdown delay": ("shutdown_delay_short", "a shutdown of the system wouldn't wait for a whole flush"),
    "gpus": ("gpus_failed", "the GPUs' power isn't as it should be"),
    "learned": ("learned_failed", "what outages teach can't be written, and a restart won't know of it"),
    "peers": ("peers_failed", "a job spans nodes that this one can't speak with; each of them decides alone"),
}
"""Troubles of this process: the event that is counted, and what people are told."""

_NAMES = {"event": "event_id", "level": "level_", "message": "message_", "always": "always_"}
"""Facts whose names a log line already uses."""

log = structlog.get_logger()


class Voice:
    """Speaks through the log and *teller*; *count* is told each trouble that comes."""

    def __init__(self, teller: Teller, count: Callable[[str], object]) -> None:
        self._teller, self._count = teller, count
        self._troubles: dict[str, str] = {}  # as told
        self.replies: queue.SimpleQueue[Announce] = queue.SimpleQueue()  # to the operator's commands

    @property
    def standing(self) -> tuple[str, ...]:
        """The troubles that aren't over; from any thread."""
        return tuple(f"{subject}: {why}" for subject, why in self._troubles.copy().items() if why)

    def announce(self, news: Announce) -> None:
        """Tells everybody; an operator who waits for it gets it as the answer."""
        facts = {_NAMES.get(key, key): value for key, value in news.facts.items()}
        getattr(log, news.level)(news.text, always=True, **facts)
        if news.facts.get("command") in ORDERS:
            self.replies.put(news)
        self._teller.tell(news)

    def troubles(self, found: Mapping[str, str]) -> None:
        """What is wrong now by subject, "" = nothing."""
        for subject, why in found.items():
            was, self._troubles[subject] = self._troubles.get(subject, ""), why
            event, text = _TROUBLES[subject]
            if why and not was:
                self._count(event)
                self.announce(Announce("error", text, {"why": why}))
            elif was and not why:
                self.announce(Announce("info", f"over: {text}", {}))
