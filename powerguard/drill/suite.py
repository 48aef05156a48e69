"""`powerguard drill all`: every story in the pure world, and every drill on real processes, each with a line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from powerguard.drill import stories
from powerguard.drill.plan import PLANS, Plan
from powerguard.drill.run import run
from powerguard.drill.screen import Screen
from powerguard.drill.supply import boottime
from powerguard.errors import PowerguardError


class Line(Struct, frozen=True):
    """What came of one scenario; *ok*: what must hold of it holds."""

    scenario: str
    world: str  # "pure" or "processes"
    ok: bool
    verdict: str
    why: tuple[str, ...]
    took_s: float
    report: str = ""


class Summary(Struct, frozen=True):
    """The last line of `--json`."""

    scenarios: int
    ok: int
    broken: tuple[str, ...]
    took_s: float


def pure(names: dict[str, Path] | None = None) -> Iterator[Line]:
    """Every story that comes with powerguard, or those of *names*."""
    for name, path in (names or stories.paths()).items():
        try:
            told = stories.tell(path)
        except PowerguardError as err:
            yield Line(name, "pure", False, stories.BROKEN, (str(err),), 0.0)
        else:
            yield Line(name, "pure", told.verdict == stories.HELD, told.verdict, told.why, told.took_s)


def processes(out: Path, screen: Screen) -> Iterator[Line]:
    """Every drill on real processes, each in a folder of *out*. A run that two share is trained undisturbed once."""
    references: dict[tuple[int, int, int], Path] = {}
    for plan in PLANS.values():
        run_of = (plan.ranks, plan.total_steps, plan.seed)
        folder = out / plan.name
        line = one(plan, folder, screen, references.get(run_of))
        yield line
        if line.verdict:
            references.setdefault(run_of, (folder / "undisturbed").resolve())


def one(plan: Plan, folder: Path, screen: Screen, undisturbed: Path | None = None) -> Line:
    """One drill; one that can't be carried out is a line as well, with an empty verdict."""
    began = time.monotonic()
    try:
        outcome = run(plan, folder, screen, boottime, undisturbed=undisturbed)
    except PowerguardError as err:
        return Line(plan.name, "processes", False, "", (str(err),), round(time.monotonic() - began, 1))
    except Exception as err:  # one drill that fails in its own way doesn't take the others with it
        why = f"the drill failed: {type(err).__name__}: {err}"
        return Line(plan.name, "processes", False, "", (why,), round(time.monotonic() - began, 1))
    return Line(
        plan.name,
        "processes",
        outcome.as_it_must,
        outcome.verdict.word,
        outcome.verdict.why,
        round(time.monotonic() - began, 1),
        str(outcome.report),
    )


def everything(out: Path, screen: Screen, show: Callable[[Line], None]) -> Summary:
    """All of them, each shown when it is over."""
    began = time.monotonic()
    broken: list[str] = []
    count = 0
    for source in (pure(), processes(out, screen)):
        for line in source:
            show(line)
            count += 1
            if not line.ok:
                broken.append(line.scenario)
    return Summary(count, count - len(broken), tuple(broken), round(time.monotonic() - began, 1))


def as_json(value: Line | Summary) -> str:
    """One line of JSON."""
    return msgspec.json.encode(value).decode()


def in_words(line: Line) -> str:
    """One line for people."""
    mark = "ok    " if line.ok else "BROKEN"
    why = "" if line.ok and line.world == "pure" else f": {line.why[0]}" if line.why else ""
    return f"{mark}  {line.world:<9}  {line.took_s:6.1f} s  {line.scenario}  {line.verdict}{why}"
