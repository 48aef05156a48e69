"""What became of one run in one outage under one policy, and the sums that the table prints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Outcome:
    """One policy, one need, one outage."""

    trained_s: float = 0.0  # on battery before the stop, weighted by speed
    final: bool = False  # the flush at the stop became durable (or there was no stop)
    early: bool = False  # a snapshot before that became durable
    halted: bool = False  # the node powered off by itself
    saves: int = 0  # flushes and snapshots begun
    out: bool = False  # the output went off under it
    why: str = ""  # what made it stop, then what made it halt

    @property
    def lost(self) -> bool:
        """Power went and nothing of this outage is durable."""
        return self.out and not self.final and not self.early


@dataclass(slots=True)
class Sums:
    """Counts over sustained outages (S) and outages that the oracle rides through (P)."""

    sustained: int = 0
    lost: int = 0
    early_only: int = 0
    not_halted: int = 0
    trained_s: float = 0.0
    oracle_s: float = 0.0
    kept_sum: float = 0.0  # of the shares of single outages, for their mean
    maintained: int = 0
    maintained_lost: int = 0
    maintained_trained_s: float = 0.0
    maintained_oracle_s: float = 0.0
    rides: int = 0
    needless_halts: int = 0
    needless_saves: int = 0
    losses: list[dict[str, Any]] = field(default_factory=list)

    def add_sustained(self, outcome: Outcome, *, oracle_s: float, maintained: bool, note: dict[str, Any]) -> None:
        """An outage in which the oracle saves and halts. A lost run trained for nothing."""
        trained = 0.0 if outcome.lost else outcome.trained_s
        self.sustained += 1
        self.lost += outcome.lost
        self.early_only += outcome.out and not outcome.final and outcome.early
        self.not_halted += outcome.out and outcome.final
        self.trained_s += trained
        self.oracle_s += oracle_s
        self.kept_sum += min(2.0, trained / max(oracle_s, 1.0))
        if maintained:
            self.maintained += 1
            self.maintained_lost += outcome.lost
            self.maintained_trained_s += trained
            self.maintained_oracle_s += oracle_s
        if outcome.lost:
            self.losses.append(note | {"why": outcome.why})

    def add_ride(self, outcome: Outcome) -> None:
        """An outage that the oracle rides through."""
        self.rides += 1
        self.needless_halts += outcome.halted or outcome.out
        self.needless_saves += outcome.saves > 0

    def merge(self, other: Sums) -> None:
        """Adds what another process counted."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def row(self) -> dict[str, float]:
        """The columns of the table."""
        n, rides = max(1, self.sustained), max(1, self.rides)
        saved = self.sustained - self.lost
        return {
            "sustained": self.sustained,
            "lost": self.lost,
            "lost_pct": 100.0 * self.lost / n,
            "early_only": self.early_only,
            "saved_not_halted": self.not_halted,
            "saved_and_halted_pct": 100.0 * (saved - self.not_halted - self.early_only) / n,
            "kept_pct": 100.0 * self.trained_s / max(1.0, self.oracle_s),
            "kept_mean_pct": 100.0 * self.kept_sum / n,
            "maintained": self.maintained,
            "maintained_lost": self.maintained_lost,
            "maintained_kept_pct": 100.0 * self.maintained_trained_s / max(1.0, self.maintained_oracle_s),
            "rides": self.rides,
            "needless_halts_per_1000": 1000.0 * self.needless_halts / rides,
            "needless_saves_per_1000": 1000.0 * self.needless_saves / rides,
        }
