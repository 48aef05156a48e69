"""What one rank knows of the order at hand, and what it may be asked to do; only values. `follow.py` changes them."""

from __future__ import annotations

from msgspec import Struct

from powerguard.core.messages import (
    Decide,
    Exit,
    Failed,
    Missed,
    Parked,
    Promise,
    Purpose,
    Quiesce,
    Quiesced,
    SealWritten,
    Shard,
    Staged,
)

Deed = Promise | Staged | Shard | SealWritten | Parked | Missed | Failed | Quiesced


class Place(Struct, frozen=True):
    """Where the training thread is: the last boundary it reached, and whether it still waits inside it."""

    step: int = -1
    inside: bool = False

    @property
    def edge(self) -> int:
        """The lowest boundary that it can still be kept from passing."""
        return self.step if self.inside else self.step + 1


class Duty(Struct, frozen=True):
    """One order, as this rank knows it."""

    seq: int
    purpose: Purpose
    hold_max_s: float = 15.0
    tag: str = ""
    reason: str = ""
    edge: int = -1  # promised and still binding; -1 = none
    held_at: float | None = None  # since when the training thread waits for it
    decide: Decide | None = None
    deeds: tuple[Deed, ...] = ()
    done: bool = False  # asks nothing more of the training thread

    def did(self, kind: type[Deed]) -> bool:
        """A deed of that kind was done for this order's own generation."""
        return any(isinstance(deed, kind) and self._counts(deed) for deed in self.deeds)

    def _counts(self, deed: Deed) -> bool:
        if self.decide is None or not isinstance(deed, (Staged, Shard, Failed)):
            return True
        return deed.step == self.decide.step  # a lone save at another step isn't what was decided


class Unheard(Struct, frozen=True):
    """A deed that the daemon hasn't acknowledged."""

    deed: Deed
    at: float  # when to say it again
    tries: int = 0


class Follower(Struct, frozen=True):
    """What this rank has been told and has done."""

    duty: Duty | None = None
    past: tuple[Duty, ...] = ()
    over: int = 0  # orders up to this number were ended by RESUME
    quiesce: Quiesce | None = None
    quiesced: bool = False
    exit: Exit | None = None
    unheard: tuple[Unheard, ...] = ()

    @property
    def seq(self) -> int:
        """The newest order, or word to leave, that this rank knows."""
        known = [*(duty.seq for duty in (self.duty, *self.past) if duty is not None)]
        return max(self.over, 0 if self.quiesce is None else self.quiesce.seq, *known)

    @property
    def armed(self) -> bool:
        """The training thread must look at its next boundary."""
        binding = self.duty is not None and not self.duty.done and (self.duty.edge >= 0 or self.duty.decide is not None)
        return binding or self.quiesce is not None or self.exit is not None


# ---- what the training thread may be told at a boundary ----------------------------------------------


class Go(Struct, frozen=True):
    """Train on."""


class Hold(Struct, frozen=True):
    """Wait here, until the order moves on or *until* has come."""

    until: float
    why: str


class Save(Struct, frozen=True):
    """Save the state at this boundary as *generation*; with *stop* train on only when it is durable."""

    seq: int
    step: int
    generation: str
    stop: bool
    budget_s: float | None = None
    lone: bool = False  # nobody decided: saved on this rank's own account
    weights: tuple[float, ...] = ()  # by rank: how much of what ranks hold alike it writes; () = all the same


class Park(Struct, frozen=True):
    """Wait with an idle device for RESUME, QUIESCE or a new order."""

    seq: int
    reason: str


class Rest(Struct, frozen=True):
    """Finish what moves data, say QUIESCED, wait for EXIT."""

    seq: int
    reason: str


class Leave(Struct, frozen=True):
    """Leave the training loop and exit with *code*."""

    code: int
    reason: str


Todo = Go | Hold | Save | Park | Rest | Leave
GO = Go()
