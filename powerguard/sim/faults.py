"""What can go wrong, as a closed list of frozen values.

A fault begins `at` an instant, or when rank `rank` of `job` has completed `step`, and holds `for_s` seconds (0 = for
ever). `parse` reads one from a line of a scenario: the name is the class's in kebab case, options are its fields::

    fault rank-stopped job=gpt rank=1 step=40 for_s=10
    fault data-stale rank=0 step=40

The pure world (`world.py`) knows all of them; which of them can be done to real processes, and how, says
`drill/inject.py`.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import msgspec
from msgspec import Struct


class Fault(Struct, frozen=True, tag=True, omit_defaults=True, kw_only=True):
    """Base: when it begins and for how long it holds. *step* >= 0: when that rank has completed it, not at `at`."""

    at: float = 0.0
    for_s: float = 0.0
    job: str = ""  # "" = any
    rank: int = 0
    step: int = -1
    where: ClassVar[str] = ""

    def active(self, now: float) -> bool:
        """It holds at *now*."""
        return self.step < 0 and self.at <= now and (self.for_s <= 0.0 or now < self.at + self.for_s)


# ---- of a UPS and of the way to it; *feed* "" = every one ------------------------------------------


class UpsFault(Fault, frozen=True, kw_only=True):
    """Base of what is wrong with a feed."""

    where: ClassVar[str] = "ups"
    feed: str = ""


class StaleServed(UpsFault, frozen=True, kw_only=True):
    """Old values are served as fresh ones; only the status is new."""


class StatusStale(UpsFault, frozen=True, kw_only=True):
    """Everything is frozen, the status too, and upsd says ok."""


class DataStale(UpsFault, frozen=True, kw_only=True):
    """ERR DATA-STALE."""


class DriverGone(UpsFault, frozen=True, kw_only=True):
    """ERR DRIVER-NOT-CONNECTED."""


class UpsdGone(UpsFault, frozen=True, kw_only=True):
    """Nobody answers."""


class HalfOpen(UpsFault, frozen=True, kw_only=True):
    """The connection stands and nobody is at its other end: nothing comes back, not even a reset."""


class Silent(UpsFault, frozen=True, kw_only=True):
    """upsd accepts, takes each question, and never answers."""


class UpsdRefuses(UpsFault, frozen=True, kw_only=True):
    """ERR UNKNOWN-UPS: the configuration is wrong, or upsd was restarted without this UPS."""


class Waits(UpsFault, frozen=True, kw_only=True):
    """`WAIT`: upsd has no data of its driver yet."""


class CommLostOnEdge(UpsFault, frozen=True, kw_only=True):
    """The link drops for `for_s` in the moment the UPS goes on battery; *seen*: one poll still says so."""

    seen: bool = True


class TokensReordered(UpsFault, frozen=True, kw_only=True):
    """The words of the status come in another order and case."""


class RuntimeSentinel(UpsFault, frozen=True, kw_only=True):
    """battery.runtime is *value*, whatever the battery does."""

    value: str = "65535"


class RuntimeScaled(UpsFault, frozen=True, kw_only=True):
    """The firmware is an optimist: battery.runtime times *factor*."""

    factor: float = 1.4


class RuntimeJumps(UpsFault, frozen=True, kw_only=True):
    """battery.runtime is *factor* times too high and too low by turns, every *period_s*."""

    factor: float = 4.0
    period_s: float = 5.0


class Missing(UpsFault, frozen=True, kw_only=True):
    """The variable *name* isn't reported."""

    name: str = "battery.runtime"


class LowBatteryEarly(UpsFault, frozen=True, kw_only=True):
    """LB as soon as the UPS is on battery."""


class LowBatteryNever(UpsFault, frozen=True, kw_only=True):
    """LB never comes."""


class LowBatteryFlash(UpsFault, frozen=True, kw_only=True):
    """On mains `LB RB` for 2 s in every *period_s* (APC BX report noise)."""

    period_s: float = 120.0


class ChargeCliff(UpsFault, frozen=True, kw_only=True):
    """At *below* percent the charge falls to *to* at once."""

    below: float = 80.0
    to: float = 30.0


class CalibrationStuck(UpsFault, frozen=True, kw_only=True):
    """CAL never goes away."""


class FsdSet(UpsFault, frozen=True, kw_only=True):
    """upsd puts FSD before the status, and keeps it there."""


class MainsFlap(UpsFault, frozen=True, kw_only=True):
    """Mains and battery change every *period_s*."""

    period_s: float = 4.0


# ---- of a rank -------------------------------------------------------------------------------------


class RankFault(Fault, frozen=True, kw_only=True):
    """Base of what is wrong with rank `rank` of `job`."""

    where: ClassVar[str] = "rank"


class RankDead(RankFault, frozen=True, kw_only=True):
    """The process is gone."""


class RankStopped(RankFault, frozen=True, kw_only=True):
    """SIGSTOP: neither the listener nor the training thread runs."""


class GilHeld(RankFault, frozen=True, kw_only=True):
    """The listener can't run; the training thread does."""


class StepSlow(RankFault, frozen=True, kw_only=True):
    """Steps take *factor* times as long (a straggler, a compilation)."""

    factor: float = 5.0


class InEval(RankFault, frozen=True, kw_only=True):
    """The training thread is away from its boundaries (evaluation, warm-up); the listener answers."""


class InCompile(RankFault, frozen=True, kw_only=True):
    """The training thread compiles: no boundary, and the listener runs only every other second."""


class LoaderWorkersDead(RankFault, frozen=True, kw_only=True):
    """The workers of its data loader are killed: its next step raises, and the process ends."""


class OtherUid(RankFault, frozen=True, kw_only=True):
    """It runs as another user: the daemon can't read its shared page."""


class LateJoiner(RankFault, frozen=True, kw_only=True):
    """The process starts only `at`."""


# ---- of a rank's storage ---------------------------------------------------------------------------


class WriteSlow(RankFault, frozen=True, kw_only=True):
    """Writes take *factor* times as long."""

    where: ClassVar[str] = "storage"
    factor: float = 5.0


class WriteFails(RankFault, frozen=True, kw_only=True):
    """EIO from the *nth* save on, for good or for `for_s`: the rank says FAILED."""

    where: ClassVar[str] = "storage"
    nth: int = 1
    why: ClassVar[str] = "input/output error"


class DiskFull(RankFault, frozen=True, kw_only=True):
    """ENOSPC."""

    where: ClassVar[str] = "storage"
    why: ClassVar[str] = "no space left on device"


class QuotaExceeded(RankFault, frozen=True, kw_only=True):
    """EDQUOT: the disk has room, this user hasn't."""

    where: ClassVar[str] = "storage"
    why: ClassVar[str] = "disk quota exceeded"


class VolatileCache(RankFault, frozen=True, kw_only=True):
    """The drive confirms a flush that it hasn't done: a power cut takes back what it confirmed in the last *lost_s*."""

    where: ClassVar[str] = "storage"
    lost_s: float = 5.0


# ---- of the daemon, the clock and the power --------------------------------------------------------


class DaemonDown(Fault, frozen=True, kw_only=True):
    """Base: the daemon dies; systemd starts it anew after *down_s*, from its journal unless *journal_lost*."""

    where: ClassVar[str] = "daemon"
    down_s: float = 1.0
    journal_lost: bool = False


class DaemonKilled(DaemonDown, frozen=True, kw_only=True):
    """SIGKILL by hand."""


class DaemonOom(DaemonDown, frozen=True, kw_only=True):
    """SIGKILL by the kernel, which was short of memory and is slow to be well again."""

    down_s: float = 6.0


class DaemonStopped(Fault, frozen=True, kw_only=True):
    """SIGSTOP for `for_s`: messages wait, nothing is lost."""

    where: ClassVar[str] = "daemon"


class Suspended(Fault, frozen=True, kw_only=True):
    """The machine sleeps for `for_s`: CLOCK_BOOTTIME goes on, nothing else does."""

    where: ClassVar[str] = "clock"


class WallJump(Fault, frozen=True, kw_only=True):
    """The wall clock is set by *by_s*. Every instant of powerguard is CLOCK_BOOTTIME's: nothing may come of it."""

    where: ClassVar[str] = "clock"
    by_s: float = 3600.0


class PowerCut(Fault, frozen=True, kw_only=True):
    """The power is gone at once, whatever the UPS said."""

    where: ClassVar[str] = "power"


def _all(base: type[Fault]) -> list[type[Fault]]:
    found = []
    for kind in base.__subclasses__():
        found += _all(kind) or [kind]
    return found


def kebab(kind: type[Fault]) -> str:
    """The name of a fault in scenarios."""
    return re.sub(r"(?<!^)([A-Z])", r"-\1", kind.__name__).lower()


KINDS: dict[str, type[Fault]] = {kebab(kind): kind for kind in _all(Fault)}
"""Every fault there is, by its name in scenarios."""


def parse(name: str, options: dict[str, str], at: float) -> Fault:
    """The fault *name* with *options* from *at* on. Raises ValueError in words."""
    kind = KINDS.get(name)
    if kind is None:
        raise ValueError(f"no such fault: {name}; there are {', '.join(sorted(KINDS))}")
    given: dict[str, Any] = {"at": at, **options}
    unknown = set(given) - set(kind.__struct_fields__)
    if unknown:
        raise ValueError(f"{name} has no option {', '.join(sorted(unknown))}")
    try:
        return msgspec.convert({"type": kind.__name__, **given}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}: {error}") from None


def spell(fault: Fault) -> str:
    """The fault as a scenario spells it, without its instant: `parse` reads it back."""
    fields = {name: getattr(fault, name) for name in fault.__struct_fields__ if name != "at"}
    defaults = type(fault)()
    words = [f"{name}={value}" for name, value in fields.items() if value != getattr(defaults, name)]
    return " ".join([kebab(type(fault)), *words])
