"""What a drill proved: the verdict and its reasons, from facts alone."""

from __future__ import annotations

from msgspec import Struct

from powerguard.drill.compare import Comparison
from powerguard.drill.plan import MainsBack
from powerguard.drill.story import Save

SURVIVED = "survived"
WITH_LOSS = "survived with loss"
NOT = "not survived"


class Facts(Struct, frozen=True):
    """What was measured. Instants are CLOCK_BOOTTIME; None = it did not happen."""

    mains_back: MainsBack
    compared: Comparison
    mains_cut_at: float
    snapshots: tuple[Save, ...] = ()
    flush: Save | None = None
    stops: int = 0  # STOP orders
    halted_at: float | None = None  # the halt command was carried out
    power_cut_at: float | None = None
    newest_step: int | None = None  # of the newest whole generation that the power cut left
    killed: int | None = None  # the rank that the drill killed
    same_processes: bool = False  # every rank trained on in the process that it began in
    online_again: bool = False
    spare_s: float | None = None  # what the battery still had when it was no longer needed


class Verdict(Struct, frozen=True):
    """One of SURVIVED, WITH_LOSS, NOT; and why, the worst first."""

    word: str
    why: tuple[str, ...]


def judge(facts: Facts) -> Verdict:
    """The verdict. Survived means that nothing at all was lost and everything happened in time."""
    wrong = [*_order_of_events(facts), *_run(facts)]
    if not wrong:
        return Verdict(SURVIVED, tuple(_right(facts)))
    resumed = facts.compared.bit_exact and facts.compared.resumed_step is not None
    if resumed and facts.compared.lost_steps and facts.mains_back is MainsBack.NEVER and not _too_late(facts):
        return Verdict(WITH_LOSS, (*wrong, "every loss and parameter after that equals the uninterrupted run's"))
    return Verdict(NOT, tuple(wrong))


def _too_late(facts: Facts) -> bool:
    return facts.halted_at is None or facts.power_cut_at is None or facts.halted_at >= facts.power_cut_at


def _order_of_events(facts: Facts) -> list[str]:
    """What did not happen as it must, of the power's side."""
    wrong: list[str] = []
    cut_at = facts.power_cut_at
    if facts.killed is not None:
        wrong.append(f"rank {facts.killed} was killed by the drill")
    if facts.mains_back is MainsBack.NEVER:
        if cut_at is None:
            wrong.append("the power was never cut: the battery outlasted the drill")
        elif facts.halted_at is None or facts.halted_at >= cut_at:
            wrong.append("the node was still running when the battery was flat")
        if facts.flush is None or (cut_at is not None and facts.flush.sealed_at >= cut_at):
            wrong.append("no flush was sealed before the power was cut")
        return wrong
    if facts.halted_at is not None:
        wrong.append("the node halted although the mains came back")
    if not facts.online_again:
        wrong.append("the node never went back to on line")
    if not facts.same_processes:
        wrong.append("a rank was started anew")
    if facts.mains_back is MainsBack.AFTER_SNAPSHOT:
        if len(facts.snapshots) != 1:
            wrong.append(f"{len(facts.snapshots)} snapshots were sealed, not one")
        if facts.stops:
            wrong.append(f"training was stopped {facts.stops} times")
    elif facts.flush is None:
        wrong.append("no flush was sealed")
    return wrong


def _run(facts: Facts) -> list[str]:
    """What isn't right with the training run."""
    got, wrong = facts.compared, []
    if facts.mains_back is MainsBack.NEVER:
        if got.resumed_step is None:
            wrong.append("training never resumed")
        elif facts.newest_step is not None and got.resumed_step != facts.newest_step:
            wrong.append(f"resumed at step {got.resumed_step}, not at {facts.newest_step}, the newest whole generation")
        elif got.lost_steps:
            wrong.append(f"resumed at step {got.resumed_step}: {got.lost_steps} steps were lost")
        elif facts.flush is not None and got.resumed_step != facts.flush.step:
            wrong.append(f"resumed at step {got.resumed_step}, stopped at {facts.flush.step}")
    elif got.lost_steps:
        wrong.append(f"{got.lost_steps} steps were lost")
    if not got.bit_exact:
        wrong.append(f"not the same run: {got.difference}")
    return wrong


def _right(facts: Facts) -> list[str]:
    """Why it is a survival, in sentences with numbers."""
    right: list[str] = []
    if facts.mains_back is MainsBack.AFTER_SNAPSHOT:
        right.append(f"one snapshot, at step {facts.snapshots[0].step}, and training never stopped")
    elif facts.flush is not None:
        if facts.power_cut_at is not None:
            early = facts.power_cut_at - facts.flush.sealed_at
            right.append(
                f"all ranks stopped after step {facts.flush.step}; sealed {early:.1f} s before the power was cut"
            )
        else:
            right.append(f"all ranks stopped after step {facts.flush.step}, parked, and went on in the same processes")
    if facts.halted_at is not None and facts.spare_s is not None:
        right.append(f"the node was off with {facts.spare_s:.1f} s left in the battery")
    if facts.mains_back is MainsBack.NEVER:
        right.append(f"resumed at step {facts.compared.resumed_step}: no step was lost")
    compared = facts.compared.losses_compared
    right.append(f"bit-exact: {compared} losses and all parameters equal the uninterrupted run's")
    return right
