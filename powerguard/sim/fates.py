"""What befalls a job of several nodes in one run of `cluster.py`: values only; `chances.py` draws them from a seed."""

from __future__ import annotations

from msgspec import Struct

from powerguard.core.policy import FeedPolicy, Policy
from powerguard.sim.ranks import NEVER, Spec

POLICY = Policy(
    feeds=(FeedPolicy("ups"),),
    on_battery="park",
    snapshot_after_s=2.0,
    snapshot="always",
    resume_after_s=2.0,
    prepare_max_s=1.0,
    hold_max_s=6.0,
    seal_max_s=2.0,
    exit_wait_s=4.0,
    flush_max_s=15.0,
    park_max_s=8.0,
    flush_default_s=2.0,
    halt_s=2.0,
    margin_s=1.0,
)


class Outage(Struct, frozen=True):
    """The mains of one node fail at *at*, and are back at *back* (None: never)."""

    at: float = NEVER
    back: float | None = None
    low_at: float = NEVER  # the UPS says LB from here on
    fsd_at: float = NEVER  # the NUT primary orders the shutdown
    silent_at: float = NEVER  # nobody speaks for the UPS from here on ...
    heard_at: float = NEVER  # ... to here
    promises_s: float = 300.0  # the runtime that the UPS shows on line


class Window(Struct, frozen=True):
    """From *at* for *for_s*."""

    at: float
    for_s: float

    def holds(self, now: float) -> bool:
        """Whether it is on now."""
        return self.at <= now < self.at + self.for_s


class Split(Struct, frozen=True):
    """Nodes in *apart* hear nobody outside, and nobody outside hears them; *one_way*: they are still heard."""

    window: Window
    apart: frozenset[int]
    one_way: bool = False


class Fall(Struct, frozen=True):
    """The daemon that leads is lost at the moment at which its order comes to *stage* ("quiesce": at that)."""

    stage: str
    told: float = 0.0  # share of its words that still set out
    away_s: float = 1.0  # NEVER: it doesn't come back
    dark: bool = False  # the whole node is gone, for good


class Mishap(Struct, frozen=True):
    """Something that befalls a node, a daemon or a rank."""

    kind: str  # "daemon" (killed), "memory" (and its journal lost), "dark", "rank" (killed), "deaf", "stopped", "hung"
    which: int
    window: Window  # away, deaf, stopped or in one step for so long; a rank with for_s >= NEVER is not started anew


class Run(Struct, frozen=True):
    """One run, wholly: with the seed it says everything that will happen."""

    seed: int
    nodes: int = 2
    per_node: int = 1
    spec: Spec = Spec()
    policy: Policy = POLICY
    loss: float = 0.0
    twice: float = 0.0
    delay_s: float = 0.02
    late_s: float = 0.0  # some messages are so much later: they come out of order
    splits: tuple[Split, ...] = ()
    mishaps: tuple[Mishap, ...] = ()
    falls: tuple[Fall, ...] = ()
    outages: tuple[Outage, ...] = ()  # by node
    starts: tuple[float, ...] = ()  # when each rank starts
    coupled: bool = True  # a step has a collective in it
    dt: float = 0.3  # between two looks at the world
    calm_at: float = 20.0  # from here on (after the beginning) nothing fails any more
    on_wire: bool = False  # every word goes through its bytes

    @property
    def quiet(self) -> bool:
        """Nothing fails but the mains."""
        return not (self.loss or self.late_s or self.splits or self.mishaps or self.falls or self.spec.failing)
