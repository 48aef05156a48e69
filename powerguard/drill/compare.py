"""Was it the same run? Compares what interrupted ranks wrote with what ranks wrote that nobody interrupted.

Both write a JSON line for every step, with the loss as a hex float, and a fingerprint of all parameters at the end
(`tiny_gpt.py --trace`). Equal means equal in every bit. A life is one start of a rank's process.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

LINES_MAX = 1_000_000
"""Of one rank's file; more are not read."""


class Life(Struct):
    """What one process of a rank wrote, from its start to its end or its death."""

    rank: int
    pid: int
    at: float  # of its start, CLOCK_BOOTTIME
    first: int  # the first step that it was to run; 0 = from scratch
    losses: dict[int, str] = msgspec.field(default_factory=dict)
    times: dict[int, float] = msgspec.field(default_factory=dict)
    parameters: str = ""  # fingerprint after the last step; "" = did not get there
    end_at: float = 0.0

    @property
    def last(self) -> int:
        """The last step that it completed; -1 = none."""
        return max(self.losses, default=self.first - 1)


class _Line(Struct):
    event: str
    at: float
    rank: int
    pid: int
    step: int
    loss: str = ""
    parameters: str = ""


Trace = dict[int, tuple[Life, ...]]
"""The lives of each rank, in order."""


def read(folder: Path) -> Trace:
    """Every rank's lives in *folder*; a line torn by the power cut is left out. No folder: no ranks."""
    trace: Trace = {}
    decoder = msgspec.json.Decoder(_Line)
    for path in sorted(folder.glob("rank-*.jsonl")):
        lives: list[Life] = []
        with path.open("rb") as file:
            for _, raw in zip(range(LINES_MAX), file, strict=False):
                try:
                    line = decoder.decode(raw)
                except msgspec.DecodeError:
                    continue
                _absorb(lives, line)
        if lives:
            trace[lives[0].rank] = tuple(lives)
    return trace


def _absorb(lives: list[Life], line: _Line) -> None:
    if line.event == "start":
        lives.append(Life(rank=line.rank, pid=line.pid, at=line.at, first=line.step))
    elif lives and line.event == "step":
        lives[-1].losses[line.step] = line.loss
        lives[-1].times[line.step] = line.at
    elif lives and line.event == "end":
        lives[-1].parameters = line.parameters
        lives[-1].end_at = line.at


class Comparison(Struct, frozen=True):
    """What came of the interrupted run."""

    reached: int  # the last step that all ranks completed before they were cut
    resumed_step: int | None  # the step whose state was loaded, -1 = none was; None: never started again
    lost_steps: int  # completed, and trained again because no checkpoint had them
    bit_exact: bool
    difference: str  # the first thing that isn't the same, in words; "" = none
    losses_compared: int


def compare(reference: Trace, drilled: Trace, *, ranks: int, steps: int) -> Comparison:
    """*drilled* beside *reference*; both should have trained *ranks* ranks for *steps* steps."""
    reached = min((drilled[r][0].last for r in range(ranks) if r in drilled), default=-1)
    second = [drilled[r][1] for r in range(ranks) if len(drilled.get(r, ())) > 1]
    resumed = min((life.first - 1 for life in second), default=None)
    difference, compared = _difference(reference, drilled, ranks, steps)
    if not difference and len({life.first for life in second}) > 1:
        difference = "ranks resumed at different steps: " + ", ".join(str(life.first - 1) for life in second)
    return Comparison(
        reached=reached,
        resumed_step=resumed,
        lost_steps=0 if resumed is None else max(0, reached - resumed),
        bit_exact=not difference,
        difference=difference,
        losses_compared=compared,
    )


def _difference(reference: Trace, drilled: Trace, ranks: int, steps: int) -> tuple[str, int]:
    """The first difference in words ("" = none), and how many losses were compared."""
    compared = 0
    for rank in range(ranks):
        if rank not in reference or not reference[rank][-1].parameters:
            return f"the reference run of rank {rank} did not finish", compared
        right = reference[rank][-1]
        lives = drilled.get(rank, ())
        for life in lives:
            for step, loss in sorted(life.losses.items()):
                compared += 1
                if loss != right.losses.get(step):
                    return f"rank {rank}, step {step}: loss {loss}, not {right.losses.get(step, 'known')}", compared
        missing = sorted(set(range(steps)) - {step for life in lives for step in life.losses})
        if missing:
            return f"rank {rank} never completed step {missing[0]}", compared
        if lives[-1].parameters != right.parameters:
            return f"rank {rank}: other parameters after step {steps - 1}", compared
    return "", compared
