"""The words the core speaks: what is observed, what is believed of it, what is to be done.

All values are frozen. Instants (`_at`) are CLOCK_BOOTTIME seconds of this boot, durations end in `_s`,
percentages in `_pct`. `None` means unknown, which is neither zero nor healthy.
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct, field

from powerguard.core.between import PeerReport
from powerguard.core.messages import FromRank, ToRank


class Comm(str, Enum):
    """How a UPS could be read at one poll."""

    OK = "ok"
    WAIT = "wait"  # upsd has the driver but no data yet: nothing may be inferred
    STALE = "stale"  # ERR DATA-STALE
    DRIVER_GONE = "driver-gone"  # ERR DRIVER-NOT-CONNECTED
    UNREACHABLE = "unreachable"  # no connection, no answer in time, or an answer that makes no sense
    REFUSED = "refused"  # unknown UPS, wrong credentials: somebody must change the configuration
    NEVER = "never"  # not heard from since the daemon started


class Sample(Struct, frozen=True, omit_defaults=True):
    """One poll of one UPS, as it came: this is what is journalled, so that a replay can parse it anew."""

    feed: str
    at: float
    comm: Comm
    variables: dict[str, str] = field(default_factory=dict)
    detail: str = ""  # what went wrong, for people
    took_s: float = 0.0


class Reading(Struct, frozen=True, omit_defaults=True):
    """A sample, parsed and checked (`status.py`). Numbers are as reported and sane, or None."""

    feed: str
    at: float
    comm: Comm
    tokens: frozenset[str] = frozenset()  # upper case, unknown ones kept
    on_battery: bool | None = None  # None: neither OL nor OB, or not readable
    low_battery: bool = False
    fsd: bool = False
    testing: bool = False  # CAL or TEST
    off: bool = False
    bypass: bool = False
    overload: bool = False
    replace_battery: bool = False
    charge_pct: float | None = None
    charge_low_pct: float | None = None
    runtime_s: float | None = None
    runtime_low_s: float | None = None
    load_pct: float | None = None
    voltage: float | None = None  # of the battery, volts
    voltage_nominal: float | None = None
    input_voltage: float | None = None
    temperature_c: float | None = None
    chemistry: str = ""  # battery.type as reported, lower case
    pollfreq_s: float | None = None  # driver.parameter.pollfreq: the refresh of all but the status
    pollinterval_s: float | None = None
    test_failed: str = ""  # what the UPS says of its last self-test, if that is bad
    notes: tuple[str, ...] = ()  # what was reported and not believed, with the reason

    @property
    def doubt(self) -> str:
        """Why its own word makes this battery count for less, or ""."""
        if self.replace_battery:
            return "asks for a new battery (RB)"
        return f"calls its last self-test {self.test_failed!r}" if self.test_failed else ""


class RankReport(Struct, frozen=True):
    """A message from a rank, with who sent it."""

    job: str
    rank: int
    at: float
    message: FromRank


class PageReport(Struct, frozen=True, omit_defaults=True):
    """What the rank's shared page and process say, read by the daemon without the rank's help."""

    job: str
    rank: int
    at: float
    step: int  # optimizer step last completed; -1 = none yet
    alive: bool  # the process exists
    pid: int = 0  # of the process looked at, as it said in HELLO; 0 = whoever is registered
    staged: tuple[int, ...] = ()  # steps held in host memory, as the staging area itself says


class Command(Struct, frozen=True, omit_defaults=True):
    """A word from outside: an operator's "flush" (snapshot now), "park", "resume"; the system's "shutdown", which waits
    for at most *within_s*, and "shutdown-cancelled". "drill": stop and flush *job* ("" = all), stay parked for
    *within_s*, train on in place.
    """

    verb: str
    by: str = ""
    within_s: float | None = None
    job: str = ""


class LoadStep(Struct, frozen=True):
    """The shell has changed the node's load to *factor* of what it was, other than by an order to ranks."""

    factor: float


class Observation(Struct, frozen=True, omit_defaults=True):
    """Everything that came in since the last decision, in order of arrival within each kind."""

    samples: tuple[Sample, ...] = ()
    reports: tuple[RankReport, ...] = ()
    pages: tuple[PageReport, ...] = ()
    commands: tuple[Command, ...] = ()
    loads: tuple[LoadStep, ...] = ()
    peers: tuple[PeerReport, ...] = ()
    here: tuple[str, ...] = ()  # more addresses that turned out to be this node's own


class Phase(str, Enum):
    """Where the node is. HALTING is the only one without a way back."""

    ONLINE = "online"
    ON_BATTERY = "on_battery"
    FLUSHING = "flushing"
    PARKED = "parked"
    HALTING = "halting"


# ---- actions ---------------------------------------------------------------------------------------


class Action(Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of what the shell is told to do; the tag is the class name."""


class Send(Action, frozen=True):
    """Give *message* to a rank of this node."""

    job: str
    rank: int
    message: ToRank


class Halt(Action, frozen=True):
    """Power the node off. Ordered once in the life of a boot."""

    reason: str


class Announce(Action, frozen=True):
    """Tell people, once: a fact for the log, `notify_command` and metrics. *level*: info, warning, error."""

    level: str
    text: str
    facts: dict[str, str | int | float | bool | None] = field(default_factory=dict)


Actions = Send | Halt | Announce
