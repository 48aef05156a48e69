"""The lives of a run: each start of it until its end, what it trained, how it ended and what its end cost.

``.powerguard/lives/current.json`` is renewed while the run lives, so that a life that ended without a word can be told
by the next one. ``past.jsonl`` has one line for each life that is over. Rank 0 writes both; losing them costs numbers
and no checkpoint, so nothing here ever stops a run.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from powerguard.generations.disk import DISK, Disk
from powerguard.generations.durable import make_directory, write_file
from powerguard.generations.names import home

LIVES = "lives"
KEEP = 1000
"""So many lives are read back; a line has some 300 bytes."""

FINISHED = "finished"
ANNOUNCED = "announced"
"""Ends of a life that no work was lost by: training was over; or the node halted, and everything was saved before."""


class Life(Struct, frozen=True, omit_defaults=True):
    """One life. Instants are seconds since 1970, by the node's clock."""

    started_at: float
    seen_at: float  # when this was written
    first_step: int = 0
    step: int = -1  # the last step known
    trained_s: float = 0.0  # without waiting for an outage
    world_size: int = 1
    saves: int = 0  # periodic ones
    blocked_s: float = 0.0  # that training waited for them
    every: str = ""  # how often it saves, as it was told
    ended: str = ""  # "" = without a word, as far as is known
    # of the end, as the next life found it
    settled: bool = False
    resumed_step: int = -1  # the step of the generation that was gone on from; -1 = none
    lost_steps: int = 0
    lost_s: float = 0.0
    down_s: float = 0.0  # until the next life

    @property
    def steps(self) -> int:
        """Steps trained."""
        return max(0, self.step - self.first_step + 1)

    @property
    def step_s(self) -> float:
        """Mean seconds a step; 0 = not known."""
        return self.trained_s / self.steps if self.steps else 0.0

    @property
    def gpu_hours(self) -> float:
        """Lost by its end, one device a rank."""
        return self.lost_s * self.world_size / 3600.0

    @property
    def interrupted(self) -> bool:
        """It ended before training was over."""
        return self.ended != FINISHED

    @property
    def announced(self) -> bool:
        """Its end was known before, and the state saved for it."""
        return self.ended == ANNOUNCED


def settle(life: Life, resumed_step: int, now: float) -> Life:
    """*life*, which is over, with what its end cost: the steps after the one that was resumed from."""
    lost = max(0, life.step - max(resumed_step, life.first_step - 1)) if life.interrupted else 0
    return replace(
        life,
        settled=True,
        resumed_step=resumed_step,
        lost_steps=lost,
        lost_s=lost * life.step_s,
        down_s=max(0.0, now - life.seen_at),
    )


def current(directory: str | Path) -> Life | None:
    """The life that wrote last, over or not; None where there is none."""
    with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode((_home(directory) / "current.json").read_bytes(), type=Life)
    return None


def write_current(directory: str | Path, life: Life, *, disk: Disk = DISK) -> None:
    """Renews what is known of the life underway."""
    with contextlib.suppress(OSError):
        make_directory(disk, _home(directory))
        write_file(disk, _home(directory) / "current.json", msgspec.json.encode(life))


def past(directory: str | Path) -> tuple[Life, ...]:
    """The lives that are over, oldest first; a torn line is left out."""
    lives = []
    with contextlib.suppress(OSError):
        for line in (_home(directory) / "past.jsonl").read_bytes().splitlines()[-KEEP:]:
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                lives.append(msgspec.json.decode(line, type=Life))
    return tuple(lives)


def bury(directory: str | Path, life: Life) -> None:
    """Adds *life* to those that are over; durable on return."""
    with contextlib.suppress(OSError):
        make_directory(DISK, _home(directory))
        with open(_home(directory) / "past.jsonl", "ab") as file:
            file.write(b"\n" + msgspec.json.encode(life) + b"\n")  # a torn line before it stays a line of its own
            file.flush()
            os.fsync(file.fileno())


def _home(directory: str | Path) -> Path:
    return home(Path(directory)) / LIVES
