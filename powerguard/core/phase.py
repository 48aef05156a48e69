"""The words of the phase machine: what it remembers, what it sees of the jobs, what it answers.

The machine itself is `transition.py`.
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from powerguard.core.types import Phase


class PhaseView(Struct, frozen=True, omit_defaults=True):
    """Where the node is in an event: all that the phase machine remembers."""

    phase: Phase = Phase.ONLINE
    phase_since: float = 0.0
    why: str = ""  # why this phase was entered
    event_at: float | None = None  # the outage began; None = no outage (ONLINE, or parked by the operator only)
    ended_at: float | None = None  # the last outage ended
    snapshot_at: float | None = None  # the last SNAPSHOT was ordered in this event
    unknown_at: float | None = None  # ONLINE: nobody has known since then whether mains are there
    pause_at: float | None = None  # in that silence training was stopped, for the snapshot alone
    fsd_at: float | None = None  # a new FSD was seen in this event
    held: bool = False  # parked by the operator: only their "resume" ends it
    drill_s: float | None = None  # a drill: parked ranks train on after so long; None = no drill
    only: str = ""  # the one job that is drilled; "" = all
    leave_at: float | None = None  # the system is shutting down, and waits for the flush until then
    exit_at: float | None = None  # HALTING: ranks were told to leave
    halted_at: float | None = None  # HALTING: the power-off was ordered
    dry: bool = False  # HALTING: the power-off was a dry run


class Do(str, Enum):
    """What is to be done once; everything else follows from the phase itself."""

    SNAPSHOT = "snapshot"  # all ranks stage at one step and train on
    HALT = "halt"  # power the node off


class Flush(str, Enum):
    """Where the jobs of the node are, all together: the least advanced one."""

    NONE = "none"  # no job with a living rank
    IDLE = "idle"  # training: no stop was ordered
    UNDERWAY = "underway"  # a stop is being carried out
    PARKED = "parked"  # every rank is durable and waits
    LOST = "lost"  # as far as it goes: not everything is durable


class FlushView(Struct, frozen=True):
    """All that the phases need to know of the jobs."""

    state: Flush = Flush.NONE
    why: str = ""  # what is missing, for people
    underway: bool = False  # some order is still being carried out, or a snapshot that a stop overtook
    failed: bool = False  # the last snapshot of some job isn't whole
    strays: bool = False  # ranks are parked by an order that this daemon doesn't know (its journal is lost)
    quiet: bool = True  # every rank is quiesced or gone
    gone: bool = True  # every rank has left

    @property
    def final(self) -> bool:
        """Nothing more can be made durable by waiting."""
        return self.state in (Flush.NONE, Flush.PARKED, Flush.LOST)


class Next(Struct, frozen=True):
    """What comes next, and why, in one sentence for operators."""

    view: PhaseView
    orders: tuple[Do, ...]
    reason: str
    refused: bool = False  # a command that can't be carried out; *reason* says why

    @property
    def phase(self) -> Phase:
        """The phase from now on."""
        return self.view.phase
