"""What this node has learned of its batteries and of its outages, kept in `state_dir/learned.json`.

1. The loop teaches after it has acted, and a thread of its own writes: a slow or failing disk costs the memory of a
   restart, never a decision.
2. The file is replaced whole (temporary file, fsync, rename, fsync of the folder). One that can't be understood is set
   aside, said, and stops nothing.
3. What was learned reaches decisions through the policy alone, and the operator's word wins: `learned_phi` over what
   discharges taught, and a later date of installation over the record of the battery before it.

Flaps are one discharge, so it is taught once the mains have been back for a minute (`runway.FLAP_S`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from time import time

import msgspec
import structlog
from msgspec import Struct
from msgspec.structs import replace

from powerguard.config import Config
from powerguard.core import learn, outages
from powerguard.core.capacity import rated_s
from powerguard.core.discharge import Discharge
from powerguard.core.learn import Lesson, Record
from powerguard.core.outages import Outages
from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.state import State
from powerguard.core.types import Phase
from powerguard.node.learned_file import NOTHING, Book, Writer, read, set_aside, write

LEARNED_FILE = "learned.json"
AGAIN_DAYS = 30.0
"""What was learned decays; the policy follows this often."""
SAME_TABLE = 0.01
"""Rated runtimes that differ by less are the same table."""

log = structlog.get_logger()


class Taught(Struct, frozen=True):
    """One discharge: what was promised, what happened, what it taught."""

    feed: str
    lesson: Lesson
    phi: float | None  # measured and proven shares, after it
    proven: float | None

    def facts(self) -> dict[str, str | int | float | bool | None]:
        """For the log and for whoever is told."""
        seen = self.lesson.discharge
        return {
            "ups": self.feed,
            "lasted_s": round(seen.lasted_s, 1),
            "promised_bound_s": _tenths(seen.bound_s),
            "firmware_runtime_s": seen.promised_s,
            "firmware_runtime_end_s": seen.reported_s,
            "charge_from_pct": seen.charge_from_pct,
            "charge_to_pct": seen.charge_to_pct,
            "load_pct": _tenths(seen.load_pct),
            "low_battery": seen.low_battery,
            "learned": self.lesson.what,
            "why": self.lesson.why,
            "capacity": self.phi,
            "proven": self.proven,
        }


class Learned:
    """The memory. Without *path* it lasts as long as the process. *day*: days since 1970, UTC, fractions too."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        boot: str = "",
        day: Callable[[], float] = lambda: time() / 86400.0,
        put: Callable[[Path, bytes], None] = write,
        book: Book | None = None,
    ) -> None:
        self.day, self._lock = day, threading.Lock()
        self._book = book or (_load(path) if path is not None else NOTHING)
        if self._book.boot != boot:  # instants of another boot mean nothing
            self._book = replace(self._book, boot=boot, taught={})
        self._writer = Writer(path, put) if path is not None else None
        self._feeds: tuple[FeedPolicy, ...] = ()  # as configured
        self._applied_day, self._stale = self.day(), False

    @property
    def trouble(self) -> str:
        """ "" or what is wrong with the disk now."""
        return self._writer.trouble if self._writer is not None else ""

    @property
    def stale(self) -> bool:
        """Whether the policy in force lacks something: it is `policy` that gives it."""
        return self._stale or self.day() - self._applied_day >= AGAIN_DAYS

    @property
    def by_operator(self) -> set[str]:
        """Feeds whose capacity the configuration says."""
        return {feed.name for feed in self._feeds if feed.learned_phi is not None}

    @property
    def outages(self) -> Outages:
        """How long outages last here."""
        return self._book.outages

    def close(self, wait_s: float = 2.0) -> None:
        """Writes what isn't written, for at most *wait_s*."""
        if self._writer is not None:
            self._writer.close(wait_s)

    # ---- into the policy ---------------------------------------------------------------------------

    def applied(self, config: Config) -> Config:
        """*config*, fresh from its file, with what was learned."""
        self._feeds = config.policy.feeds
        return replace(config, policy=self.policy(config.policy))

    def policy(self, policy: Policy) -> Policy:
        """*policy* with its feeds as configured and as learned up to now."""
        with self._lock:
            self._stale, self._applied_day = False, self.day()
            own = () if self.outages == outages.DEFAULT else self.outages.counts
            return replace(policy, feeds=tuple(self._trusted(feed) for feed in self._feeds), outages=own)

    def records(self) -> list[tuple[FeedPolicy, Record | None]]:
        """Each configured feed as it is in force, and what its discharges taught."""
        with self._lock:
            return [(self._trusted(feed), self._record(self._dated(feed))) for feed in self._feeds]

    def _dated(self, feed: FeedPolicy) -> FeedPolicy:
        """With the battery that the operator said was put in, if the configuration doesn't know of a later one."""
        day = self._book.replaced.get(feed.name, "")
        if day <= feed.battery_installed:
            return feed
        age_y = max(0.0, (self.today() - date.fromisoformat(day)).days / learn.YEAR_DAYS)
        return replace(feed, battery_installed=day, age_y=round(age_y, 2))

    def _record(self, feed: FeedPolicy) -> Record | None:
        """What is known of the battery that is in there now, in the units that are in force."""
        record = self._book.batteries.get(feed.name)
        if record is None or record.installed != feed.battery_installed:
            return None
        if feed.rated and record.basis_s > 0.0:
            half_s = rated_s(feed.rated, 0.5)
            if record.basis != "rated" or abs(half_s - record.basis_s) > SAME_TABLE * half_s:
                return None  # shares of something else
        return record

    def _trusted(self, feed: FeedPolicy) -> FeedPolicy:
        dated = self._dated(feed)
        record = self._record(dated)
        if record is None or feed.learned_phi is not None:
            return dated
        return learn.trusted(record, dated, self.day())

    def today(self) -> date:
        """The calendar day."""
        return date(1970, 1, 1) + timedelta(days=int(self.day()))

    # ---- what teaches ------------------------------------------------------------------------------

    def watch(self, before: State, after: State, now: float, *, real: bool) -> list[Taught]:
        """Learns from what has ended between two states. *real*: a halt powers this node off."""
        self._outage(before, after, now, real=real)
        if after.phase is not Phase.ONLINE:
            return []
        taught = []
        for feed in self._feeds:
            known = after.feeds.get(feed.name)
            runway = known.runway if known is not None else None
            if runway is None or runway.last is None or runway.draw is not None or runway.ended is not None:
                continue
            if runway.ended_at != self._book.taught.get(feed.name):
                taught.append(self._teach(feed, runway.last, runway.ended_at))
        return taught

    def _teach(self, feed: FeedPolicy, discharge: Discharge, ended_at: float) -> Taught:
        with self._lock:
            feed = self._dated(feed)
            record = self._record(feed) or Record(feed.name, feed.battery_installed)
            record = learn.learn(record, discharge, day=self.day(), age_y=feed.age_y)
            book = self._book
            self._keep(
                replace(
                    book,
                    batteries={**book.batteries, feed.name: record},
                    taught={**book.taught, feed.name: ended_at},
                )
            )
        return Taught(feed.name, record.lessons[-1], record.phi, record.proven)

    def _outage(self, before: State, after: State, now: float, *, real: bool) -> None:
        """An outage that is over, or one whose end this node won't see."""
        was, view = before.view, after.view
        if was.event_at is None or was.fsd_at is not None:
            return
        if view.event_at is None:
            back = after.power.online_since if after.power is not None else None
            lasted_s = max(0.0, (now if back is None else min(back, now)) - was.event_at)
            self._count(outages.learn(self.outages, (lasted_s,)))
        elif real and was.halted_at is None and view.halted_at is not None and view.fsd_at is None:
            self._count(outages.learn(self.outages, (), (max(0.0, view.halted_at - was.event_at),)))

    def _count(self, learned: Outages) -> None:
        with self._lock:
            self._keep(replace(self._book, outages=learned))

    def replaced(self, feed: str, day: date) -> None:
        """The operator's word: *feed* has had another battery since *day*, of which nothing is known yet."""
        with self._lock:
            book = self._book
            others = {name: record for name, record in book.batteries.items() if name != feed}
            self._keep(replace(book, batteries=others, replaced={**book.replaced, feed: day.isoformat()}))

    def _keep(self, book: Book) -> None:
        self._book, self._stale = book, True
        if self._writer is not None:
            self._writer.put(msgspec.json.encode(book))


def looked_at(path: Path) -> tuple[Learned, str]:
    """What *path* holds, to be shown and never written, and why it can't be had or ""."""
    learned, why = Learned(), ""
    try:
        learned = Learned(book=read(path))
    except ValueError as err:
        why = str(err)
    except OSError as err:
        why = f"{path}: {err.strerror or err}"
    return learned, why


def _load(path: Path) -> Book:
    try:
        return read(path)
    except ValueError as err:
        with contextlib.suppress(OSError):
            log.error("what was learned can't be understood, learning anew", why=str(err), kept_as=set_aside(path))
    except OSError as err:
        log.error("what was learned can't be read, learning anew", path=str(path), why=err.strerror or str(err))
    return NOTHING


def _tenths(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
