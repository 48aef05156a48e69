"""The scenarios that come with powerguard: found, told, and judged. They are played in the pure world, in seconds."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from msgspec import Struct

from powerguard.errors import InvariantError, PowerguardError, UsageError
from powerguard.sim.musts import broken, check_words
from powerguard.sim.play import play
from powerguard.sim.scenario import Scenario, ScenarioError, load, render

STORY_MAX_S = 120.0
"""A story that takes longer hangs: the longest needs about three seconds on one free core."""
HELD, BROKEN = "held", "broken"


class Told(Struct, frozen=True):
    """What came of a story; *why* says what doesn't hold, the worst first."""

    scenario: str
    verdict: str
    why: tuple[str, ...]
    took_s: float
    world: str = "pure"


def folder() -> Path:
    """Where the stories are: in the installed package, or in the checkout that it runs from."""
    package = Path(__file__).resolve().parents[1]
    places = (package / "scenarios", package.parent / "tests" / "scenarios")
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        raise PowerguardError("the scenarios aren't installed", todo="install powerguard again")
    return found


def paths() -> dict[str, Path]:
    """Every story by its name."""
    return {path.stem: path for path in sorted(folder().glob("*.txt"))}


def find(name: str) -> Path:
    """The file of a story, by its name (in words of either kind) or as a path. UsageError: there is none."""
    known = paths()
    plain = name.replace("-", "_")
    if plain in known:
        return known[plain]
    path = Path(name)
    if path.is_file():
        return path
    raise UsageError(f"no drill is called {name!r}", todo="see: powerguard drill --list")


def read(path: Path) -> Scenario:
    """The story in *path*. UsageError says what is wrong with it."""
    try:
        scenario = load(path)
        check_words(scenario)
    except (ScenarioError, UnicodeDecodeError) as err:
        raise UsageError(f"{path}: {err}", todo="docs/scenarios.md has the grammar") from None
    except OSError as err:
        raise UsageError(f"{path}: {err.strerror or err}", todo="name a scenario's file") from None
    return scenario


def tell(path: Path) -> Told:
    """Play the story and judge it. UsageError for one that can't be read or played."""
    scenario, began = read(path), time.monotonic()
    try:
        with _at_most(STORY_MAX_S):
            world, answers = play(scenario)
        if not scenario.acts:
            raise ScenarioError("the story has no line that begins with t=, so nothing happens in it")
    except ScenarioError as err:
        raise UsageError(f"{path}: {err}", todo="docs/scenarios.md has the grammar") from None
    except InvariantError as err:
        return _told(scenario, [f"a law was broken: {err}"], began)
    except _Hung:
        return _told(scenario, [f"it hangs: not told within {STORY_MAX_S:.0f} s"], began)
    except Exception as err:
        return _told(scenario, [f"the core failed: {type(err).__name__}: {err}"], began)
    return _told(scenario, [*broken(scenario, world), *_otherwise(scenario, answers)], began)


def _told(scenario: Scenario, why: list[str], began: float) -> Told:
    return Told(scenario.name, BROKEN if why else HELD, tuple(why), round(time.monotonic() - began, 2))


def _otherwise(scenario: Scenario, answers: list[list[str]]) -> Iterator[str]:
    """The first line that is told otherwise than written; acts without a written answer are free."""
    for act, answer in zip(scenario.acts, answers, strict=True):
        written = list(act.answer)
        if not written or written == answer:
            continue
        pairs = zip([*written, ""], [*answer, ""], strict=False)
        was, now = next(((was, now) for was, now in pairs if was != now), ("", ""))
        yield f"told otherwise: {now.strip() or 'nothing'!r}, written is {was.strip() or 'nothing'!r}"
        return


def retold(path: Path) -> str:
    """The story's text with the answers that it gets now."""
    scenario = read(path)
    try:
        return render(scenario, play(scenario)[1])
    except ScenarioError as err:
        raise UsageError(f"{path}: {err}", todo="docs/scenarios.md has the grammar") from None


class _Hung(Exception):
    """The time is over."""


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raises _Hung in the main thread after *seconds*; the process's alarm is used for it."""

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise _Hung

    try:
        was = signal.signal(signal.SIGALRM, ring)
    except ValueError:  # not the main thread: nobody can be woken
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, was)
