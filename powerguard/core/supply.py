"""What one feed is worth to the node right now: mains, battery, absent or unknown.

1. Unknown isn't healthy: a feed never heard from, or unheard for `SILENT_S`, doesn't count as mains. It doesn't mean
   an outage either; a feed last seen on battery stays on battery until it says otherwise (or others do: `together.py`).
2. CAL and TEST excuse OB for `cal_max_s`, never in an outage that is under way, and never below the floor: a bound that
   is nearly used up, a strong signal, a park or silence end the excuse (nut#2168: a stuck CAL blocked a real shutdown;
   nut#3026: CAL and one stale poll halted).
3. OFF for `off_s` is absent (APC self-tests show it for seconds: nut#2104); less than that it says nothing.
4. FSD is a command if it is new, or if it comes with OB; FSD at first sight on line is a latch that upsd kept from
   before (hassio-addons/app-nut#368): it is reported, and never halts.
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from powerguard.core.bound import Bound
from powerguard.core.draw import EMPTY, Runway
from powerguard.core.policy import Policy
from powerguard.core.runway import absorb as absorb_runway
from powerguard.core.types import Comm, Reading

SILENT_S = 15.0
"""Unheard for so long, a feed on line is unknown (NUT: DEADTIME and MAXAGE)."""

FLAPS, FLAPS_S = 4, 300.0
"""So many transfers within so long are flapping mains."""


class Supply(str, Enum):
    """What one feed gives."""

    MAINS = "mains"
    BATTERY = "battery"
    ABSENT = "absent"
    UNKNOWN = "unknown"


class Feed(Struct, frozen=True, omit_defaults=True):
    """What is kept of one UPS. Instants of things that have not happened are None."""

    name: str
    since: float = 0.0  # known to the daemon since
    comm: Comm = Comm.NEVER
    comm_since: float = 0.0  # readable, or not, since
    last_good_at: float | None = None
    reading: Reading | None = None  # the last readable one
    detail: str = ""  # what went wrong last, for people
    on_battery: bool | None = None  # last known
    on_battery_since: float | None = None  # OB, a test or not
    on_line_since: float | None = None
    test_since: float | None = None  # OB with CAL or TEST
    outage_since: float | None = None  # OB without them
    off_since: float | None = None
    fsd_at: float | None = None  # commanded
    fsd_stale: bool = False  # a latch from before our time
    transfers: tuple[float, ...] = ()  # the last ones
    runway: Runway = EMPTY


def hear(policy: Policy, feed: Feed, reading: Reading, detail: str, now: float) -> Feed:
    """One reading of *feed*, of any comm state."""
    readable = reading.comm is Comm.OK
    config = next(each for each in policy.feeds if each.name == feed.name)
    runway = absorb_runway(policy, config, feed.runway, reading, now)
    comm_since = feed.comm_since if feed.comm is reading.comm else now
    if not readable:
        return Feed(
            feed.name, feed.since, reading.comm, comm_since, feed.last_good_at, feed.reading, detail, feed.on_battery,
            feed.on_battery_since, feed.on_line_since, feed.test_since, feed.outage_since, feed.off_since,
            feed.fsd_at, feed.fsd_stale, feed.transfers, runway,
        )  # fmt: skip
    on = feed.on_battery if reading.on_battery is None else reading.on_battery
    turned = on is not None and feed.on_battery is not None and on != feed.on_battery
    testing = on is True and reading.testing
    return Feed(
        name=feed.name,
        since=feed.since,
        comm=reading.comm,
        comm_since=comm_since,
        last_good_at=now,
        reading=reading,
        detail="",
        on_battery=on,
        on_battery_since=_since(feed.on_battery_since, on is True, now),
        on_line_since=_since(feed.on_line_since, on is False, now),
        test_since=_since(feed.test_since, testing, now),
        outage_since=_since(feed.outage_since, on is True and not testing, now),
        off_since=_since(feed.off_since, reading.off, now),
        fsd_at=_fsd_at(feed, reading, on, now),
        fsd_stale=reading.fsd and on is not True and (feed.reading is None or feed.fsd_stale),
        transfers=(*feed.transfers[1 - FLAPS :], now) if turned else feed.transfers,
        runway=runway,
    )


def _since(was: float | None, true: bool, now: float) -> float | None:
    """When what is *true* now became so."""
    if not true:
        return None
    return now if was is None else was


def _fsd_at(feed: Feed, reading: Reading, on_battery: bool | None, now: float) -> float | None:
    """Rule 4."""
    if not reading.fsd:
        return None
    if feed.fsd_at is not None:
        return feed.fsd_at
    new = feed.reading is not None and not feed.reading.fsd
    return now if new or on_battery is True else None


class Verdict(Struct, frozen=True):
    """One feed at one instant."""

    supply: Supply
    why: str  # in words, with the feed's name
    lost_at: float | None = None  # when it stopped being mains; None = it is mains, or nobody knows


def judge(policy: Policy, feed: Feed, bound: Bound, now: float, *, save_s: float, outage: bool = False) -> Verdict:
    """Rules 1-3. *outage*: one is under way."""
    reading = feed.reading
    if reading is None or feed.last_good_at is None:
        return Verdict(Supply.UNKNOWN, f"{feed.name} was never heard from ({_comm_text(feed)})")
    if feed.off_since is not None and now - feed.off_since >= policy.off_s:
        return Verdict(Supply.ABSENT, f"{feed.name} says its output is off", feed.off_since + policy.off_s)
    if feed.on_battery is True:
        return _on_battery(policy, feed, bound, now, save_s=save_s, outage=outage)
    if feed.on_battery is None:
        return Verdict(Supply.UNKNOWN, f"{feed.name} says neither on line nor on battery", feed.last_good_at)
    if now - feed.last_good_at > SILENT_S:
        return Verdict(
            Supply.UNKNOWN, f"{feed.name} was on line when last heard ({_comm_text(feed)})", feed.last_good_at
        )
    return Verdict(Supply.MAINS, f"{feed.name} is on line")


def _on_battery(policy: Policy, feed: Feed, bound: Bound, now: float, *, save_s: float, outage: bool) -> Verdict:
    """On battery, unless a test excuses it (rule 2)."""
    since, tested = feed.outage_since, feed.test_since
    if tested is None:
        return Verdict(Supply.BATTERY, f"{feed.name} is on battery", since)
    if now - tested >= policy.cal_max_s:
        return Verdict(Supply.BATTERY, f"{feed.name} is on battery in a test without end", tested + policy.cal_max_s)
    if outage:  # a flush lightens the load, and the longer runway would excuse it again
        return Verdict(Supply.BATTERY, f"{feed.name} is on battery in a test, in an outage", tested)
    draw = feed.runway.draw
    if draw is not None and draw.idle:  # the excuse ended when it made us park: the longer runway is the park's doing
        return Verdict(Supply.BATTERY, f"{feed.name} is on battery in a test that ranks are parked for", tested)
    if bound.save_now:
        return Verdict(Supply.BATTERY, f"{feed.name} is on battery in a test: {bound.save_now}", tested)
    if bound.runway_s is not None and bound.runway_s <= save_s:
        return Verdict(Supply.BATTERY, f"{feed.name} is on battery in a test that leaves too little", tested)
    return Verdict(Supply.MAINS, f"{feed.name} tests its battery")


_COMM = {
    Comm.OK: "silent",
    Comm.WAIT: "upsd waits for the driver's first data",
    Comm.STALE: "the driver gives no fresh data",
    Comm.DRIVER_GONE: "the driver isn't connected",
    Comm.UNREACHABLE: "upsd can't be reached",
    Comm.REFUSED: "upsd refuses us",
    Comm.NEVER: "no answer yet",
}


def _comm_text(feed: Feed) -> str:
    return _COMM[feed.comm]


def troubles(feed: Feed, verdict: Verdict, now: float) -> list[str]:
    """What somebody should look at, in texts that don't change while it lasts."""
    reading, found = feed.reading, []
    if feed.comm is not Comm.OK and (feed.comm is Comm.REFUSED or now - feed.comm_since > SILENT_S):
        found.append(f"{feed.name}: {_comm_text(feed)}" + (f" ({feed.detail})" if feed.detail else ""))
    elif feed.last_good_at is not None and now - feed.last_good_at > SILENT_S:
        found.append(f"{feed.name}: no reading comes in")
    if verdict.supply is not Supply.MAINS:
        found.append(verdict.why)
    if reading is None:
        return found
    if feed.test_since is not None or reading.testing:
        found.append(f"{feed.name}: a test or calibration is running")
    if reading.low_battery and feed.on_battery is not True:
        found.append(f"{feed.name}: low battery (LB) on line: it recharges, or its threshold is wrong")
    if feed.fsd_stale:
        found.append(f"{feed.name}: a forced shutdown (FSD) from before our start is latched; restart upsd to clear it")
    if feed.fsd_at is not None:
        found.append(f"{feed.name}: forced shutdown (FSD)")
    if reading.bypass:
        found.append(f"{feed.name}: on bypass, there is no battery behind the output")
    if reading.off:
        found.append(f"{feed.name}: says OFF although the node runs")
    if reading.overload:
        found.append(f"{feed.name}: overload")
    if reading.doubt:
        found.append(f"{feed.name}: {reading.doubt}; its runtime is trusted less")
    if "ALARM" in reading.tokens:
        found.append(f"{feed.name}: raises an alarm")
    if len(feed.transfers) >= FLAPS and now - feed.transfers[0] <= FLAPS_S:
        found.append(f"{feed.name}: the mains flap")
    return found
