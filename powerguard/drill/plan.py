"""What a drill will do, as one frozen value: decided before anything starts, printed in the report."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct
from msgspec.structs import replace

from powerguard.errors import UsageError
from powerguard.sim import faults as f

RANKS_MAX = 16
STEPS_MAX = 100_000


class MainsBack(str, Enum):
    """When the mains come back."""

    NEVER = "never"  # not before the battery is flat
    AFTER_SNAPSHOT = "after the snapshot"
    WHILE_PARKED = "while parked"


class After(str, Enum):
    """The moment from which the instant of a fault counts."""

    MAINS_CUT = "mains cut"
    SNAPSHOT = "snapshot"  # sealed
    STOP = "stop"  # ordered
    PARKED = "parked"


class Due(Struct, frozen=True):
    """A fault in a drill: `fault.at` seconds *after* a moment, or when a rank has completed `fault.step`."""

    fault: f.Fault
    after: After = After.MAINS_CUT


class Loads(Struct, frozen=True):
    """Load of the UPS in percent of its rating: a GPU node that trains, writes, idles; and what is left without it.

    Idle is half of training here, where a third is usual: a parked node should not outlast the patience for a drill.
    """

    training: float = 70.0
    flushing: float = 45.0
    parked: float = 35.0
    halted: float = 12.0  # the switch and the storage on the same UPS go on


class Waits(Struct, frozen=True):
    """Longest waits, seconds. Whatever takes longer ends the drill with a word about it."""

    daemon_s: float = 30.0
    start_s: float = 150.0  # ranks: imports, rendezvous, first steps
    outage_s: float = 150.0
    finish_s: float = 150.0
    stop_s: float = 20.0


class Plan(Struct, frozen=True):
    """One drill."""

    name: str
    says: str  # what it shows, one line
    mains_back: MainsBack = MainsBack.NEVER
    mains_back_after_s: float = 0.0
    ranks: int = 2
    steps: int = 0  # of the whole run; 0 = as many as the outage needs
    seed: int = 1
    nut: bool = False  # a real upsd and dummy-ups between the simulated UPS and the daemon
    kill_rank: int | None = None
    kill_after_s: float = 1.5  # after the snapshot is sealed
    faults: tuple[Due, ...] = ()
    must_be: tuple[str, ...] = ("survived",)  # the verdicts that are right for it
    cut_at_step: int = 15  # the mains fail once all ranks have completed this step
    pace_s: float = 0.2  # a step lasts at least so long, so that a step is a step on any machine
    runtime_s: float = 20.0  # of the battery at the training load
    on_battery: str = "ride"  # or "park": for a UPS that can't carry training
    loads: Loads = Loads()
    waits: Waits = Waits()
    settle_s: float = 2.0  # watched after the outage, to see that nothing else happens

    @property
    def total_steps(self) -> int:
        """Steps of the whole run: a battery spent wholly on training doesn't reach the end of it."""
        return self.steps or self.cut_at_step + int(1.2 * self.runtime_s / self.pace_s) + 10

    def policy(self) -> dict[str, float | str]:
        """`[policy]` of the drill's daemon: the rules are the real ones, the seconds are those of a small UPS."""
        return {
            "on_battery": self.on_battery,
            "snapshot": "always",
            "snapshot_after_s": 2.0,
            "poll_online_s": 0.5,
            "poll_battery_s": 0.3,
            "resume_after_s": 1.5,
            "margin_s": 1.5,
            "flush_default_s": 3.0,
            "flush_max_s": 30.0,
            "prepare_max_s": 1.0,
            "hold_max_s": 4.0,
            "seal_max_s": 2.0,
            "halt_s": 3.0,
            "exit_wait_s": 1.5,
            "blind_save_s": 6.0,
            "blind_halt_s": 4.0,
            "time_scale": 0.1,
        }


PLANS = {
    plan.name: plan
    for plan in (
        Plan("blackout", "the mains stay away: snapshot, stop, flush, park, halt, power cut, resume"),
        Plan(
            "dip",
            "the mains are back soon: one snapshot, training never stops",
            mains_back=MainsBack.AFTER_SNAPSHOT,
            mains_back_after_s=1.0,
            runtime_s=60.0,
            steps=100,
        ),
        Plan(
            "blip",
            "the mains are back while ranks are parked: they go on in place",
            mains_back=MainsBack.WHILE_PARKED,
            mains_back_after_s=2.0,
            on_battery="park",
            runtime_s=60.0,
            steps=100,
        ),
        Plan(
            "hung-rank",
            "rank 1 hangs (SIGSTOP) after the snapshot: the node halts in time all the same, the snapshot resumes",
            faults=(Due(f.RankStopped(at=1.0, rank=1), After.SNAPSHOT),),
            must_be=("survived with loss",),
        ),
        Plan(
            "full-disk",
            "rank 0 can't write any more after the snapshot: the node says what isn't durable, the snapshot resumes",
            faults=(Due(f.DiskFull(at=0.5, rank=0), After.SNAPSHOT),),
            must_be=("survived with loss",),
        ),
        Plan(
            "killed-daemon",
            "the daemon is killed in the flush and started again, as systemd does: the same stop, and on in place",
            faults=(Due(f.DaemonKilled(at=0.0, down_s=0.5), After.STOP),),
            mains_back=MainsBack.WHILE_PARKED,
            mains_back_after_s=2.0,
            on_battery="park",
            runtime_s=60.0,
            steps=100,
        ),
        Plan(
            "silent-upsd",
            "upsd falls silent on battery: blind, ranks stop, all is saved and the node halts",
            faults=(Due(f.Silent(at=0.5), After.SNAPSHOT),),
            runtime_s=24.0,
            steps=145,  # as a blackout's: both are compared with one undisturbed run
        ),
    )
}
"""By name."""


def choose(
    name: str,
    *,
    ranks: int = 2,
    steps: int = 0,
    seed: int = 1,
    nut: bool = False,
    kill_rank: int | None = None,
) -> Plan:
    """The plan *name* with the operator's choices in it. UsageError says what is wrong with them."""
    if name not in PLANS:
        raise UsageError(f"no drill is called {name!r}", todo=f"choose one of {', '.join(PLANS)}")
    plan = PLANS[name]
    if not 1 <= ranks <= RANKS_MAX:
        raise UsageError(f"--ranks {ranks} is outside 1 to {RANKS_MAX}", todo="2 is enough to show an agreement")
    if kill_rank is not None and not 0 <= kill_rank < ranks:
        raise UsageError(f"--kill-rank {kill_rank}: ranks are 0 to {ranks - 1}", todo="name one of them")
    if kill_rank is not None and plan.mains_back is not MainsBack.NEVER:
        raise UsageError(
            f"--kill-rank goes with blackout, not with {name}", todo="powerguard drill blackout --kill-rank 0"
        )
    plan = replace(plan, ranks=ranks, seed=seed, nut=nut, kill_rank=kill_rank, steps=steps or plan.steps)
    fewest = plan.cut_at_step + 20
    if not fewest <= plan.total_steps <= STEPS_MAX:
        raise UsageError(
            f"--steps {steps} is outside {fewest} to {STEPS_MAX}", todo="leave it out: the drill knows how many"
        )
    return plan
