"""A blackout for somebody's own training command: what the pytest fixtures are made of.

The command trains with the hook in a private folder, the mains fail, the node halts, everything is killed, the same
command runs again. Then what it left is compared with what it leaves when nobody interrupts it.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from filecmp import cmp
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from powerguard.drill.daemon import DaemonProcess, environment, last_words
from powerguard.drill.plan import PLANS
from powerguard.drill.processes import Herd, adopt_orphans
from powerguard.drill.supply import Supply, boottime
from powerguard.errors import DaemonUnreachable, UsageError
from powerguard.generations import Generation, latest, scan
from powerguard.generations.resumes import read as resumes
from powerguard.node.ask import Ask, ask

_LOOK_S = 0.1
_BATTERY_S = 60.0
_STOP_S = 10.0
_POLICY = replace(PLANS["blackout"], on_battery="park", runtime_s=_BATTERY_S).policy()
"""As in drills, but ranks are stopped soon after the failure: the battery isn't what is tested here."""
_HURRIED = {**_POLICY, "park_max_s": 2.0}
"""And the node halts soon after."""


def wait_for(holds: Callable[[], bool], within_s: float, what: str) -> None:
    """Until *holds*; AssertionError after *within_s*."""
    end = boottime() + within_s
    while not holds():
        assert boottime() < end, f"waited {within_s:.0f} s for {what}, in vain"
        time.sleep(_LOOK_S)


class RunningDaemon:
    """A real daemon that watches a simulated UPS, and halts into a file."""

    def __init__(self, process: DaemonProcess, herd: Herd) -> None:
        self.process, self._herd = process, herd

    @property
    def env(self) -> dict[str, str]:
        """For training processes, beside os.environ: how they find this daemon."""
        return {key: value for key, value in environment(self.process.run_dir).items() if value is not None}

    @property
    def status(self) -> dict[str, object]:
        """What `powerguard status --json` tells; {} while it doesn't answer."""
        with suppress(DaemonUnreachable):
            return ask(self.process.run_dir / "control.sock", Ask("status", by="test")).data
        return {}

    @property
    def phase(self) -> str:
        """online, on_battery, flushing, parked or halting; "" while it doesn't answer."""
        return str(self.status.get("phase", ""))

    @property
    def halted(self) -> bool:
        """It has powered the node off (in a test: made a file)."""
        return self.process.marker.exists()

    def steps(self) -> list[int]:
        """The last step of each living rank."""
        jobs = self.status.get("jobs", ())
        assert isinstance(jobs, list | tuple)
        return [int(rank["step"] or 0) for job in jobs for rank in job["ranks"] if rank["alive"]]

    def wait_for(self, phase: str, within_s: float = 30.0) -> None:
        """Until the node is in *phase*."""
        wait_for(lambda: self.phase == phase, within_s, f"the phase {phase}, it is {self.phase}")

    def order(self, verb: str) -> str:
        """An operator's order: "flush", "park" or "resume"; what the daemon answered."""
        return ask(self.process.run_dir / "control.sock", Ask(verb, by="test")).text

    def start(self) -> None:
        """A new life of it, listening when this returns."""
        self.process.start()
        wait_for(lambda: bool(self.phase) or self._ended(), 30.0, f"the daemon to answer (its log: {self.process.log})")

    def _ended(self) -> bool:
        self.process.check()
        return False

    def cut(self) -> int:
        """The power is gone: every process of the node is killed at once."""
        return self._herd.cut()


@contextmanager
def running_daemon(folder: Path, feed: str) -> Iterator[RunningDaemon]:
    """A daemon of its own that watches *feed*, listening."""
    folder.mkdir(parents=True, exist_ok=True)
    adopt_orphans()
    herd = Herd()
    each = RunningDaemon(DaemonProcess(folder, feed, _POLICY, herd), herd)
    try:
        each.start()
        yield each
        each.process.stop(_STOP_S)
    finally:
        each.cut()
        each.process.close()


class Survival(Struct, frozen=True):
    """What became of a command that lost its power and ran again."""

    stop_step: int | None  # of the newest whole generation when the power was cut
    halted: bool  # before the cut
    finished: bool  # the first run came to its end by itself, before the cut
    resumed_step: int | None
    exit_code: int  # of the second run
    different: tuple[str, ...]  # files in {out} that the undisturbed run has otherwise; or lacks
    compared: tuple[str, ...]  # all files in {out}
    generations: tuple[str, ...]
    logs: str  # where its output is

    def assert_saved(self) -> None:
        """A whole checkpoint was durable and the node off before the power was cut."""
        assert not self.finished, f"the command was done before the node stopped it: give it more steps; {self.logs}"
        assert self.stop_step is not None, f"no whole checkpoint was there when the power was cut; {self.logs}"
        assert self.halted, f"the node was still running when the power was cut; {self.logs}"

    def assert_resumed(self) -> None:
        """And the second run went on from that checkpoint, to its end."""
        self.assert_saved()
        assert self.resumed_step == self.stop_step, (
            f"resumed at step {self.resumed_step}, stopped at {self.stop_step}; {self.logs}"
        )
        assert self.exit_code == 0, f"the second run ended with {self.exit_code}; {self.logs}"

    def assert_resumed_exactly(self) -> None:
        """And what it left in {out} equals, byte for byte, what an undisturbed run leaves there."""
        self.assert_resumed()
        assert self.compared, 'nothing to compare: let the command write its results into "{out}"'
        assert not self.different, f"not what an undisturbed run writes: {', '.join(self.different)}; {self.logs}"


class Blackout:
    """Runs a command through a power failure."""

    def __init__(self, folder: Path, supply: Supply, feed: str) -> None:
        self.folder, self._supply = folder, supply
        folder.mkdir(parents=True, exist_ok=True)
        self._herd = Herd()
        self.daemon = RunningDaemon(DaemonProcess(folder, feed, _HURRIED, self._herd), self._herd)

    def run(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        after_steps: int = 5,
        within_s: float = 90.0,
    ) -> Survival:
        """The mains fail once every rank has completed *after_steps* steps.

        In *command* "{checkpoints}" stands for the folder that the hook is given, and "{out}" for a folder whose files
        are compared with those of an undisturbed run.
        *within_s* bounds each part: start, save and halt, the rest of the run. AssertionError if a part takes longer.
        """
        words = [str(word) for word in command]
        if not any("{checkpoints}" in word for word in words):
            raise UsageError('the command has no "{checkpoints}"', todo="put it where the script takes that folder")
        adopt_orphans()
        self._undisturbed(words, env, within_s)
        self.daemon.start()
        first = self._start(words, env, "first")
        wait_for(lambda: self._trained(first, after_steps), within_s, self._words("first", "training"))
        self._supply.cut_mains()
        wait_for(lambda: self.daemon.halted, within_s, self._words("first", "the node to halt"))
        halted, finished = self.daemon.halted, first.poll() == 0
        self.daemon.cut()
        self._supply.restore_mains()
        newest = latest(self._place("checkpoints"), cap=None).generation
        self.daemon.start()
        second = self._start(words, env, "second")
        wait_for(lambda: second.poll() is not None, within_s, self._words("second", "the run to finish"))
        return self._survival(newest, second.returncode, halted=halted, finished=finished)

    def close(self) -> None:
        """Nothing is left running."""
        self._herd.cut()
        self.daemon.process.close()

    # ---- parts -----------------------------------------------------------------------------------

    def _place(self, what: str) -> Path:
        place = self.folder / what
        place.mkdir(parents=True, exist_ok=True)
        return place

    def _undisturbed(self, words: Sequence[str], env: Mapping[str, str] | None, within_s: float) -> None:
        if not any("{out}" in word for word in words):
            return
        filled = [self._fill(word, "undisturbed-") for word in words]
        away = environment(self.folder / "nobody-there") | dict(env or {})
        process = self._herd.start(filled, self.folder / "undisturbed.log", env=away)
        wait_for(lambda: process.poll() is not None, within_s, self._words("undisturbed", "the run to finish"))
        assert process.returncode == 0, (
            f"undisturbed, the command ends with {process.returncode}: {self._log('undisturbed')}"
        )

    def _start(self, words: Sequence[str], env: Mapping[str, str] | None, life: str) -> subprocess.Popen[bytes]:
        filled = [self._fill(word, "") for word in words]
        return self._herd.start(
            filled, self.folder / f"{life}.log", env=environment(self.daemon.process.run_dir) | dict(env or {})
        )

    def _trained(self, process: subprocess.Popen[bytes], steps: int) -> bool:
        """Every rank has completed *steps*. AssertionError if there are none left to wait for."""
        code = process.poll()
        assert code is None, f"the command ended with {code} before the mains failed: {self._log('first')}"
        return min(self.daemon.steps(), default=0) >= steps

    def _fill(self, word: str, prefix: str) -> str:
        for what in ("checkpoints", "out"):
            if f"{{{what}}}" in word:
                word = word.replace(f"{{{what}}}", str(self._place(prefix + what)))
        return word

    def _log(self, life: str) -> str:
        return last_words(self.folder / f"{life}.log")

    def _words(self, life: str, what: str) -> str:
        return f"{what} (its output is in {self.folder / f'{life}.log'})"

    def _survival(self, newest: Generation | None, exit_code: int, *, halted: bool, finished: bool) -> Survival:
        checkpoints = self._place("checkpoints")
        known = {generation.name: generation.step for generation in scan(checkpoints)}
        resumed = [known[name] for name in resumes(checkpoints) if name in known]
        files, different = self._compare()
        return Survival(
            stop_step=None if newest is None else newest.step,
            halted=halted,
            finished=finished,
            resumed_step=max(resumed, default=None),
            exit_code=exit_code,
            different=different,
            compared=files,
            generations=tuple(known),
            logs=f"logs are in {self.folder}; the last run's {self._log('second')}",
        )

    def _compare(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """All files of both runs, and those that aren't the same in both."""
        mine, right = self._place("out"), self._place("undisturbed-out")
        files = sorted({str(p.relative_to(root)) for root in (mine, right) for p in root.rglob("*") if p.is_file()})
        return tuple(files), tuple(name for name in files if not _same(mine / name, right / name))


def _same(one: Path, other: Path) -> bool:
    return one.is_file() and other.is_file() and cmp(one, other, shallow=False)
