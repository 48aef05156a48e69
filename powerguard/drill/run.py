"""Runs a drill: starts everything, cuts the mains, watches, cuts the power, resumes, and says what came of it.

Every wait is bounded, and whatever happens nothing is left running.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from msgspec import Struct

from powerguard.drill import compare, tale
from powerguard.drill.daemon import last_words
from powerguard.drill.inject import Injector, refuse
from powerguard.drill.node import Node
from powerguard.drill.plan import MainsBack, Plan
from powerguard.drill.power import power
from powerguard.drill.processes import adopt_orphans
from powerguard.drill.screen import Screen
from powerguard.drill.supply import Supply
from powerguard.drill.verdict import SURVIVED, Facts, Verdict, judge
from powerguard.drill.watch import Watch
from powerguard.errors import DrillFailed, MissingDependency, UsageError
from powerguard.generations import latest

_OFF_S = 1.0
"""The node is without power for this long before it starts again."""
_NEEDS = (("matplotlib", "drill"), ("torch", "train"), ("zmq", "node"), ("pynut2", "node"))


class Outcome(Struct, frozen=True):
    """What a drill ends with; `result` is its last line."""

    plan: Plan
    verdict: Verdict
    facts: Facts
    report: Path

    @property
    def survived(self) -> bool:
        """Nothing was lost."""
        return self.verdict.word == SURVIVED

    @property
    def as_it_must(self) -> bool:
        """The verdict is one that is right for this drill."""
        return self.verdict.word in self.plan.must_be

    def result(self) -> dict[str, str | int | float | bool | None]:
        """The line of `--json`."""
        facts, compared = self.facts, self.facts.compared
        save = facts.flush or (facts.snapshots[-1] if facts.snapshots else None)
        stop_step = facts.flush.step if facts.flush else None
        in_place = stop_step if facts.same_processes else None
        return {
            "scenario": self.plan.name,
            "verdict": self.verdict.word,
            "ranks": self.plan.ranks,
            "stop_step": stop_step,
            "resumed_step": in_place if compared.resumed_step is None else compared.resumed_step,
            "lost_steps": compared.lost_steps,
            "bit_exact": compared.bit_exact,
            "flush_s": None if save is None else round(save.took_s, 3),
            "spare_s": None if facts.spare_s is None else round(facts.spare_s, 1),
            "report": str(self.report),
        }


def run(
    plan: Plan, out: Path, screen: Screen, clock: Callable[[], float], *, undisturbed: Path | None = None
) -> Outcome:
    """The whole drill in the folder *out*. DrillFailed: it could not be carried out (a bad verdict is no failure).

    *undisturbed*: the trace that an earlier drill of the same run left of the run that nobody interrupts.
    """
    for module, extra in _NEEDS:
        if find_spec(module) is None:
            todo = f"pip install 'powerguard[{extra}]'"
            raise MissingDependency(f"a drill needs {module}, which isn't installed", todo=todo)
    refuse(tuple(due.fault for due in plan.faults))
    if (out / "checkpoints").exists() or (out / "trace").exists():
        raise UsageError(f"{out} holds a drill already", todo="name another folder, or remove it")
    adopt_orphans()
    out.mkdir(parents=True, exist_ok=True)
    with power(plan, clock) as (supply, feed, said):
        node = Node(out.resolve(), plan, feed, undisturbed)
        try:
            drill = _Drill(Watch(plan, node, supply, Injector(node, said, clock), screen=screen, clock=clock))
            drill.start()
            drill.outage()
            drill.afterwards()
            return drill.conclude()
        finally:
            node.close()


class _Drill:
    """One run of a plan, in four acts."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.plan: Plan = watch.plan
        self.node: Node = watch.node
        self.supply: Supply = watch.supply
        self.screen: Screen = watch.screen
        self._newest_step: int | None = None

    def start(self) -> None:
        """Daemon, ranks and the undisturbed run; until every rank has trained for a while."""
        self.screen.say("the daemon starts")
        self.watch.boot()
        self.node.train()
        self.node.train_undisturbed()
        self.screen.say(f"torchrun starts {self.plan.ranks} ranks")
        self.watch.wait(self._under_way, self.plan.waits.start_s, "the ranks to train")

    def outage(self) -> None:
        """From the failure of the mains until they are back and all is calm, or the battery is flat."""
        times, longest = self.watch.times, self.plan.waits.outage_s
        times.mains_cut_at = self.supply.cut_mains()
        self.screen.say("THE MAINS FAIL", "bad")
        if self.plan.mains_back is MainsBack.NEVER:
            self.watch.wait(lambda: self.supply.flat, longest, "the battery to be flat")
            self.watch.off()
            newest = latest(self.node.checkpoints, cap=None).generation
            self._newest_step = None if newest is None else newest.step
            return
        self.watch.wait(self._mains_due, longest, f"the mains' return {self.plan.mains_back.value}")
        times.mains_back_at = self.supply.restore_mains()
        self.screen.say("the mains are back", "good")
        self.watch.wait(lambda: times.online_at is not None, longest, "the node to be on line again")
        self.watch.linger(self.plan.settle_s)

    def afterwards(self) -> None:
        """After a power cut the node starts again; then the run goes to its end."""
        if self.plan.mains_back is MainsBack.NEVER:
            self.watch.linger(_OFF_S)
            self.supply.restore_mains()
            self.watch.injector.mend_ups()
            self.screen.say("the power is back, the node starts", "good")
            self.watch.times.boot_at = self.watch.clock()
            self.watch.boot()
            self.node.train()
            self.watch.wait(self._resumed, self.plan.waits.start_s, "training to go on")
            self.screen.say(f"training goes on after step {self._first_step() - 1}", "good")
        self.watch.wait(self._trained, self.plan.waits.finish_s, "the run to finish")
        self.screen.say("the run is at its end; now the undisturbed one")
        self.watch.wait(self._undisturbed_done, self.plan.waits.finish_s, "the undisturbed run to finish")
        self.node.daemon.stop(self.plan.waits.stop_s)

    def conclude(self) -> Outcome:
        """Compare, judge, and write the report."""
        reference = compare.read(self.node.reference)
        drilled = compare.read(self.node.trace)
        steps = self.plan.total_steps
        compared = compare.compare(reference, drilled, ranks=self.plan.ranks, steps=steps)
        told = tale.Told(self.plan, self.node, self.watch.times, tuple(self.supply.truths), drilled)
        facts = tale.gather(told, compared, self._newest_step)
        verdict = judge(facts)
        report = tale.write(told, facts, verdict)
        self.screen.say(f"verdict: {verdict.word}", "good" if verdict.word == SURVIVED else "bad")
        for reason in verdict.why:
            self.screen.say(f"  {reason}")
        return Outcome(self.plan, verdict, facts, report)

    # ---- conditions ------------------------------------------------------------------------------

    def _under_way(self) -> bool:
        self._no_failure(self.node.ranks, self.node.ranks_log, "the ranks")
        return min(self.node.steps()) >= self.plan.cut_at_step

    def _mains_due(self) -> bool:
        times = self.watch.times
        since = times.snapshot_at if self.plan.mains_back is MainsBack.AFTER_SNAPSHOT else times.parked_at
        return since is not None and self.watch.clock() >= since + self.plan.mains_back_after_s

    def _resumed(self) -> bool:
        self._no_failure(self.node.ranks, self.node.ranks_log, "the ranks")
        lives = compare.read(self.node.trace)
        return all(len(lives.get(rank, ())) > 1 for rank in range(self.plan.ranks))

    def _first_step(self) -> int:
        return compare.read(self.node.trace)[0][-1].first

    def _trained(self) -> bool:
        self._no_failure(self.node.ranks, self.node.ranks_log, "the ranks")
        return self.node.ranks is not None and self.node.ranks.poll() == 0

    def _undisturbed_done(self) -> bool:
        self._no_failure(self.node.undisturbed, self.node.undisturbed_log, "the undisturbed run")
        return self.node.undisturbed_done

    @staticmethod
    def _no_failure(process: subprocess.Popen[bytes] | None, log: Path, what: str) -> None:
        code = process.poll() if process is not None else None
        if code not in (None, 0):
            raise DrillFailed(f"{what} ended with {code}", todo=last_words(log))
