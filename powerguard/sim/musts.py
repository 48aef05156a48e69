"""What must hold of a story, said in it and judged from the world that it left, not from the words it was told in.

Lines of a scenario's set-up::

    must halt [before=S] [after=S]        must never halt
    must stop [times=N] [before=S] [after=S]   must never stop       (STOP orders, each job's counted)
    must snapshot [times=N] [before=S] [after=S]   must never snapshot
    must save JOB [step=N]                the newest whole generation is of that step or a later one
    must lose at_most=STEPS [job=JOB]     steps that a restart from the newest whole generation would train again
    must end PHASE                        the daemon's phase at the end
    must train                            every rank lives and isn't parked
    must park                             every living rank is parked
    must say "words"                      must never say "words"     (in any reason or announcement, case ignored)

S are seconds of the story. What a claim means is one function here; a claim that doesn't hold is answered in words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from powerguard.core.messages import Prepare, Purpose
from powerguard.core.types import Announce, Phase, Send
from powerguard.sim.scenario import Line, Scenario
from powerguard.sim.world import World


def broken(scenario: Scenario, world: World) -> list[str]:
    """Every claim of *scenario* that *world* doesn't keep, in words. ScenarioError: a claim that makes no sense."""
    found = []
    for line in scenario.musts:
        why = _check(line, world)
        if why:
            found.append(f"must {' '.join(line.words[1:])}: {why}")
    return found


def check_words(scenario: Scenario) -> None:
    """ScenarioError for the first claim that nobody could judge."""
    for line in scenario.musts:
        _known(line)


def _known(line: Line) -> tuple[str, bool, str]:
    """(what, never, its one word more) of a claim."""
    words = list(line.words[1:])
    never = words[:1] == ["never"]
    what, *rest = words[never:] or [""]
    options, argument, may_never = _CLAIMS.get(what, ((), False, False))
    if what not in _CLAIMS or (never and not may_never):
        raise line.fail(f"nobody knows how to judge {' '.join(line.words)!r}; there are {', '.join(_CLAIMS)}")
    if bool(rest) is not argument or len(rest) > 1 or (never and line.options):
        raise line.fail(f"must {what} takes {'one word more' if argument else 'no other word'}")
    unknown = set(line.options) - set(options)
    if unknown:
        raise line.fail(f"must {what} has no option {', '.join(sorted(unknown))}")
    if what == "lose" and "at_most" not in line.options:
        raise line.fail("must lose needs at_most=STEPS")
    for name, value in line.options.items():
        if name != "job":
            try:
                float(value)
            except ValueError:
                raise line.fail(f"{name}={value} isn't a number") from None
    if what == "end" and rest[0] not in [phase.value for phase in Phase]:
        raise line.fail(f"{rest[0]} is no phase")
    return what, never, rest[0] if rest else ""


_TIMES = ("times", "before", "after")
_CLAIMS: dict[str, tuple[tuple[str, ...], bool, bool]] = {  # options, one word more, may be "never"
    "halt": (("before", "after"), False, True),
    "stop": (_TIMES, False, True),
    "snapshot": (_TIMES, False, True),
    "save": (("step",), True, False),
    "lose": (("at_most", "job"), False, False),
    "end": ((), True, False),
    "train": ((), False, False),
    "park": ((), False, False),
    "say": ((), True, True),
}


def _check(line: Line, world: World) -> str:
    what, never, word = _known(line)
    if what == "halt":
        return _happened(line, "halt", [] if world.halted_at is None else [world.halted_at], never=never)
    if what in ("stop", "snapshot"):
        purpose = Purpose.STOP if what == "stop" else Purpose.SNAPSHOT
        return _happened(line, what, list(_ordered(world, purpose)), never=never)
    if what == "say":
        said = any(word.lower() in text.lower() for text in _said(world))
        return f"{word!r} was said" if said and never else "" if said or never else f"nobody said {word!r}"
    return _ENDS[what](line, world, word)


def _happened(line: Line, what: str, at: list[float], *, never: bool) -> str:
    """Whether it happened as often and when it must have."""
    times = ", ".join(f"{instant:.1f} s" for instant in at)
    if never:
        return f"{what} at {times}" if at else ""
    if not at:
        return f"there was no {what}"
    if "times" in line.options and len(at) != int(line.options["times"]):
        return f"{len(at)} times, at {times}"
    if "before" in line.options and max(at) >= float(line.options["before"]):
        return f"at {times}, not before {line.options['before']} s"
    if "after" in line.options and min(at) < float(line.options["after"]):
        return f"at {times}, not after {line.options['after']} s"
    return ""


def _ordered(world: World, purpose: Purpose) -> Iterator[float]:
    """When each order of that kind was given first."""
    known: set[tuple[str, int]] = set()
    for entry in world.entries:
        for action in entry.decision.actions:
            message = action.message if isinstance(action, Send) else None
            if isinstance(action, Send) and isinstance(message, Prepare) and message.purpose is purpose:
                if (action.job, message.seq) not in known:
                    yield entry.at
                known.add((action.job, message.seq))


def _said(world: World) -> Iterator[str]:
    for entry in world.entries:
        yield entry.decision.reason
        yield from (action.text for action in entry.decision.actions if isinstance(action, Announce))


def _save(line: Line, world: World, job: str) -> str:
    if job not in world.disks:
        raise line.fail(f"there is no job {job}")
    newest = world.newest(job)
    if newest is None:
        return f"no generation of {job} is whole"
    least = int(line.options.get("step", "0"))
    return "" if newest >= least else f"the newest whole generation of {job} is of step {newest}, not {least}"


def _lose(line: Line, world: World, _word: str) -> str:
    wanted = line.options.get("job", "")
    if wanted and wanted not in world.disks:
        raise line.fail(f"there is no job {wanted}")
    for job in [wanted] if wanted else world.disks:
        reached = max(rank.step for (of, _), rank in world.ranks.items() if of == job)
        newest = world.newest(job)
        lost = reached - (-1 if newest is None else newest)
        if lost > int(line.options["at_most"]):
            return f"{job} reached step {reached}, and {'nothing' if newest is None else f'step {newest}'} is whole"
    return ""


def _end(_line: Line, world: World, phase: str) -> str:
    return "" if world.phase.value == phase else f"it ends {world.phase.value}"


def _train(_line: Line, world: World, _word: str) -> str:
    idle = [f"{job} {rank}" for (job, rank), sim in world.ranks.items() if not sim.alive or sim.parked]
    return f"{', '.join(idle)} is gone or parked" if idle else ""


def _park(_line: Line, world: World, _word: str) -> str:
    busy = [f"{job} {rank}" for (job, rank), sim in world.ranks.items() if sim.alive and not sim.parked]
    return f"{', '.join(busy)} isn't parked" if busy else ""


_ENDS: dict[str, Callable[[Line, World, str], str]] = {
    "save": _save,
    "lose": _lose,
    "end": _end,
    "train": _train,
    "park": _park,
}
