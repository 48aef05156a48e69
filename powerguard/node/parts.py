"""What the loop works with: its collaborators, as the few words that it needs of each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from powerguard.config import Config
from powerguard.core.messages import ToRank
from powerguard.core.types import PageReport
from powerguard.journal import Journal
from powerguard.node.halt_ways import Way
from powerguard.node.inbox import Inbox
from powerguard.node.learned import Learned
from powerguard.node.lines import Lines
from powerguard.node.poweroff import Poweroff
from powerguard.node.readers import Readers
from powerguard.node.sd_notify import Notifier
from powerguard.node.system import System
from powerguard.node.tell import Teller


class Bus(Protocol):
    """What is needed of `bus.Bus`."""

    def send(self, job: str, rank: int, message: ToRank) -> None:
        """Hands *message* to a rank."""

    def pages(self, now: float) -> tuple[PageReport, ...]:
        """What the ranks' shared pages and processes show."""

    def care(self) -> str:
        """Starts anew what has ended; says what went wrong since the last time, or ""."""

    def close(self, wait_s: float = 0.5) -> None:
        """Sends what is queued and ends."""


class Parts:
    """The daemon's collaborators. *reload* reads the configuration anew, *way* chooses how to halt by it."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        inbox: Inbox,
        readers: Readers,
        bus: Bus,
        journal: Journal,
        notify: Notifier,
        teller: Teller,
        power: Poweroff,
        reload: Callable[[], Config],
        way: Callable[[Config], Way],
        count: Callable[[str], object] = lambda _event: None,
        system: System | None = None,
        learned: Learned | None = None,
        lines: Lines | None = None,
        pid1: Callable[[], str] = lambda: Path("/proc/1/comm").read_text().strip(),
    ) -> None:
        self.clock, self.inbox, self.readers, self.bus, self.journal = clock, inbox, readers, bus, journal
        self.notify, self.teller, self.power, self.system = notify, teller, power, system or System()
        self.reload, self.way, self.count, self.pid1 = reload, way, count, pid1
        self.learned, self.lines = learned or Learned(), lines or Lines()
