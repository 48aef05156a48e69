"""Scenarios: stories of a node, told in NUT's words, with the answer that is expected after each act.

A file is prose, a set-up, and acts. An act is lines of what happens, `----`, and the answer up to the next blank line::

    # Mains are back after 40 s: one snapshot, no stop.

    policy poll_online_s=2
    feed ups age_y=2
    job gpt ranks=2 step_s=1 write_s=8

    t=10 ups status="OB DISCHRG"
    t=10..60 ups charge=100..94 runtime=1200..1050
    t=30
    ----
    t=10.0 on_battery: on battery: ups is on battery
    ...

What must hold of it whatever the words (`musts.py`) stands in the set-up: `must halt before=500`, `must never stop`.

Set-up: `policy KEY=VALUE`, `feed NAME [KEY=VALUE of its policy] [battery=vrla|lfp KEY=VALUE of the simulated UPS]`,
`job NAME [ranks=N] [slowest=FACTOR] [KEY=VALUE of RankSpec]`, `world [seed=N] [dry_run=true]`.
What happens, at an instant `t=`: `ups [feed=NAME] VARIABLE=VALUE` (`SHORT` names or NUT's, "" takes a variable away),
`ups comm=stale|... [detail=...]`, `ups mains=on|off` for a simulated battery, `fault NAME KEY=VALUE` (`faults.KINDS`),
`job NAME ...` that starts now, `operator flush|park|resume|drill [job=NAME] [within_s=SECONDS]`,
`system shutdown|shutdown-cancelled [within_s=SECONDS]`,
or nothing but time. `t=A..B ups VARIABLE=X..Y [every=S]` moves a variable evenly.

    python -m powerguard.sim.scenario tests/scenarios            # play, and show what differs
    python -m powerguard.sim.scenario --rewrite tests/scenarios  # rewrite the answers
    python -m powerguard.sim.scenario --seq ups FILE             # what dummy-ups is to be fed with

Only commit a rewritten answer if you understand what changed it and if that is desired.
"""

from __future__ import annotations

import shlex
from itertools import pairwise
from pathlib import Path

from msgspec import Struct

SHORT = {
    "status": "ups.status",
    "alarm": "ups.alarm",
    "load": "ups.load",
    "charge": "battery.charge",
    "runtime": "battery.runtime",
    "voltage": "battery.voltage",
    "nominal": "battery.voltage.nominal",
    "charge_low": "battery.charge.low",
    "runtime_low": "battery.runtime.low",
    "input": "input.voltage",
    "temperature": "battery.temperature",
    "pollfreq": "driver.parameter.pollfreq",
}
"""Short names of NUT variables; the full ones may be used as well."""

RULE = "----"


class ScenarioError(ValueError):
    """A scenario that can't be read; the message has the line's number."""


class Line(Struct, frozen=True):
    """One line of a set-up or an act: `t=A..B WORDS KEY=VALUE`."""

    number: int
    words: tuple[str, ...]
    options: dict[str, str]
    begin: float | None = None  # None = set-up
    end: float | None = None

    def fail(self, why: str) -> ScenarioError:
        """An error about this line."""
        return ScenarioError(f"line {self.number}: {why}")


class Act(Struct, frozen=True):
    """What happens, and the answer to it."""

    source: tuple[str, ...]  # the lines as written, comments included
    lines: tuple[Line, ...]
    answer: tuple[str, ...]

    @property
    def until(self) -> float:
        """The instant up to which the act is played."""
        return max((line.begin for line in self.lines if line.begin is not None), default=0.0)


class Scenario(Struct, frozen=True):
    """A whole story."""

    name: str
    source: tuple[str, ...]  # prose and set-up as written
    setup: tuple[Line, ...]
    acts: tuple[Act, ...]

    @property
    def title(self) -> str:
        """The first sentence of its prose."""
        prose = []
        for text in self.source:
            if not text.startswith("#"):
                break
            prose.append(text[1:].strip())
        first, end, _ = " ".join(prose).partition(". ")
        return (first + end).strip() or self.name

    @property
    def musts(self) -> tuple[Line, ...]:
        """What must hold of it."""
        return tuple(line for line in self.setup if line.words[0] == "must")


def read(text: str, name: str = "scenario") -> Scenario:
    """The scenario that *text* tells. Raises ScenarioError."""
    head: list[str] = []
    setup: list[Line] = []
    acts: list[Act] = []
    source: list[str] = []
    lines: list[Line] = []
    answer: list[str] | None = None
    for number, raw in enumerate([*text.splitlines(), ""], 1):
        stripped = raw.strip()
        if answer is not None:
            if stripped:
                answer.append(raw.rstrip())
                continue
            acts.append(Act(tuple(source), tuple(lines), tuple(answer)))
            source, lines, answer = [], [], None
        elif stripped == RULE:
            if not lines:
                raise ScenarioError(f"line {number}: an answer to nothing")
            answer = []
        elif not stripped or stripped.startswith("#"):
            (source if lines or acts else head).append(raw.rstrip())
        else:
            line = _line(stripped, number)
            if line.begin is None:
                if acts or lines:
                    raise line.fail("the set-up comes before the first act")
                setup.append(line)
                head.append(raw.rstrip())
            else:
                source.append(raw.rstrip())
                lines.append(line)
    if lines:
        raise ScenarioError(f"line {lines[-1].number}: an act without {RULE} and an answer")
    acts = [_trimmed(act) for act in acts]
    for before, after in pairwise(acts):
        begin = min(line.begin or 0.0 for line in after.lines)
        if begin < before.until:
            raise after.lines[0].fail(f"goes back to {begin:g} s after {before.until:g} s")
    return Scenario(name, tuple(head), tuple(setup), tuple(acts))


def _trimmed(act: Act) -> Act:
    """The act without the blank lines before it."""
    source = list(act.source)
    while source and not source[0]:
        source.pop(0)
    return Act(tuple(source), act.lines, act.answer)


def _line(text: str, number: int) -> Line:
    try:
        parts = shlex.split(text, comments=True)
    except ValueError as error:
        raise ScenarioError(f"line {number}: {error}") from None
    begin = end = None
    if parts[0].startswith("t="):
        begin, end = _span(parts.pop(0)[2:], number)
    words = tuple(part for part in parts if "=" not in part)
    options = dict(part.split("=", 1) for part in parts if "=" in part)
    if begin is None and not words:
        raise ScenarioError(f"line {number}: neither a set-up nor an instant")
    return Line(number, words, options, begin, end)


def _span(text: str, number: int) -> tuple[float, float | None]:
    begin, _, end = text.partition("..")
    try:
        return float(begin), float(end) if end else None
    except ValueError:
        raise ScenarioError(f"line {number}: t={text} isn't an instant in seconds") from None


def render(scenario: Scenario, answers: list[list[str]]) -> str:
    """The file's text with other answers."""
    head = "\n".join(scenario.source).rstrip()
    acts = ["\n".join([*act.source, RULE, *answer]) for act, answer in zip(scenario.acts, answers, strict=True)]
    return "\n\n".join([head, *acts]) + "\n"


def load(path: Path) -> Scenario:
    """The scenario in a file. Raises ScenarioError and OSError."""
    return read(path.read_text(encoding="utf-8"), path.stem)


def files(paths: list[Path]) -> list[Path]:
    """The scenario files among *paths*; a folder stands for all `*.txt` in it."""
    found: list[Path] = []
    for path in paths:
        found += sorted(path.glob("*.txt")) if path.is_dir() else [path]
    return found


if __name__ == "__main__":
    import sys

    from powerguard.sim.play import main

    sys.exit(main(sys.argv[1:]))
