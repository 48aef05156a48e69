"""Plays a scenario against the pure core and writes down what happened, in few words."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from powerguard.core.messages import Ack, Decide, Exit, Notice, Prepare, Resume, Seal, Welcome
from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.types import Announce, Comm, Halt, Send
from powerguard.sim import faults
from powerguard.sim.battery import SimUps, UpsSpec
from powerguard.sim.feed import Ramp, SimFeed
from powerguard.sim.rank import RankSpec
from powerguard.sim.scenario import SHORT, Line, Scenario, ScenarioError, files, load, render
from powerguard.sim.seq import to_seq
from powerguard.sim.world import Entry, JobSpec, World

T = TypeVar("T", bound=Struct)


def _build(line: Line, kind: type[T], options: dict[str, str], **given: Any) -> T:
    """A value of *kind* from text options; ScenarioError in words where they don't fit."""
    unknown = set(options) - set(kind.__struct_fields__)
    if unknown:
        raise line.fail(f"{' '.join(line.words)} has no option {', '.join(sorted(unknown))}")
    try:
        return msgspec.convert({**given, **options}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise line.fail(str(error)) from None


class _Every(Struct, frozen=True):
    every: float


class _Word(Struct, frozen=True):
    within_s: float | None = None
    job: str = ""


class _Ranks(Struct, frozen=True):
    ranks: int
    slowest: float  # the last rank writes so many times as long


class _WorldOptions(Struct, frozen=True):
    seed: int = 1
    dry_run: bool = False


def build(scenario: Scenario, *, through_json: bool = False) -> World:
    """The world that a scenario's set-up describes, at second 0."""
    policy: dict[str, str] = {}
    feeds: list[FeedPolicy] = []
    sims: list[SimFeed] = []
    jobs: list[JobSpec] = []
    options = _WorldOptions()
    for line in scenario.setup:
        kind = line.words[0]
        if kind == "policy":
            policy |= line.options
        elif kind == "feed":
            feed, sim = _feed(line)
            feeds.append(feed)
            sims.append(sim)
        elif kind == "job":
            jobs.append(_job(line))
        elif kind == "world":
            options = _build(line, _WorldOptions, line.options)
        elif kind != "must":
            raise line.fail(f"{kind} is no set-up; there are policy, feed, job, world and must")
    if not feeds:
        feeds, sims = [FeedPolicy("ups")], [SimFeed("ups")]
    line = next((line for line in scenario.setup if line.words[0] == "policy"), Line(0, ("policy",), {}))
    rules = replace(_build(line, Policy, policy), feeds=tuple(feeds))
    return World(
        rules,
        jobs=tuple(jobs),
        feeds=tuple(sims),
        seed=options.seed,
        begin_at=0.0,
        dry_run=options.dry_run,
        through_json=through_json,
    )


def _feed(line: Line) -> tuple[FeedPolicy, SimFeed]:
    name = line.words[1] if len(line.words) > 1 else "ups"
    options = dict(line.options)
    chemistry = options.pop("battery", None)
    if chemistry is None:
        return _build(line, FeedPolicy, options, name=name), SimFeed(name)
    of_feed = {key: options.pop(key) for key in list(options) if key in ("learned_phi", "proven_phi")}
    if "age_y" in options:
        of_feed["age_y"] = options["age_y"]
    spec = _build(line, UpsSpec, options, chemistry=chemistry)
    return _build(line, FeedPolicy, of_feed, name=name), SimFeed(name, ups=SimUps(spec, seed=1))


def _job(line: Line) -> JobSpec:
    if len(line.words) < 2:
        raise line.fail("a job needs a name")
    options = dict(line.options)
    shape = _build(line, _Ranks, {"ranks": options.pop("ranks", "2"), "slowest": options.pop("slowest", "1")})
    speed = _build(line, RankSpec, options)
    speeds = (*[speed] * (shape.ranks - 1), replace(speed, write_s=speed.write_s * shape.slowest))
    return JobSpec(line.words[1], shape.ranks, speed, speeds)


# ---- what happens ----------------------------------------------------------------------------------


def happen(world: World, line: Line) -> None:
    """Plan one line of an act."""
    at = line.begin or 0.0
    if not line.words:
        return
    kind = line.words[0]
    if kind == "ups":
        _ups(world, line, at)
    elif kind == "fault":
        try:
            world.ail(faults.parse(line.words[1] if len(line.words) > 1 else "", line.options, at))
        except ValueError as error:
            raise line.fail(str(error)) from None
    elif kind == "job":
        job = _job(line)
        world.at(at, lambda: world.add_job(job))
    elif kind in ("operator", "system"):
        verb = " ".join(line.words[1:])
        given = _build(line, _Word, line.options)
        world.at(at, lambda: world.command(verb, by=kind, within_s=given.within_s, job=given.job))
    else:
        raise line.fail(f"{kind} can't happen; there are ups, fault, job, operator and system")


def _ups(world: World, line: Line, at: float) -> None:
    options = dict(line.options)
    name = options.pop("feed", "")
    feeds = [feed for feed in world.feeds.values() if name in ("", feed.name)]
    if not feeds:
        raise line.fail(f"there is no feed {name}")
    every = _build(line, _Every, {"every": options.pop("every", "10")}).every
    for feed in feeds:
        _plan(world, feed, line, at, dict(options), every)


def _plan(world: World, feed: SimFeed, line: Line, at: float, options: dict[str, str], every: float) -> None:  # noqa: PLR0917
    if "mains" in options:
        mains = options.pop("mains") == "on"
        world.at(at, lambda: setattr(feed, "mains", mains))
    if "comm" in options:
        try:
            comm = Comm(options.pop("comm"))
        except ValueError as error:
            raise line.fail(str(error)) from None
        detail = options.pop("detail", "")
        world.at(at, lambda: feed.link(comm, detail))
    named = {SHORT.get(key, key): value for key, value in options.items()}
    if line.end is None:
        if named:
            world.at(at, lambda: feed.say(named))
        return
    for variable, value in named.items():
        begin, _, end = value.partition("..")
        try:
            ramp = Ramp(variable, at, line.end, float(begin), float(end), every)
        except ValueError:
            raise line.fail(f"{variable}={value} doesn't move from one number to another") from None
        world.at(at, lambda ramp=ramp: feed.ramp(ramp))  # type: ignore[misc]


# ---- what is answered ------------------------------------------------------------------------------


def play(scenario: Scenario, *, through_json: bool = False) -> tuple[World, list[list[str]]]:
    """The world after the story, and the answer to each act."""
    world = build(scenario, through_json=through_json)
    answers: list[list[str]] = []
    told: set[tuple[object, ...]] = set()
    for act in scenario.acts:
        for line in act.lines:
            happen(world, line)
        begun, dark_before = len(world.entries), world.dark_at
        world.run(act.until)
        answer = [text for entry in world.entries[begun:] for text in _entry(entry, told)]
        if world.dark_at is not None and dark_before is None:
            answer.append(f"t={world.dark_at:.1f} dark")
        answers.append([*answer, *_standing(world)])
    return world, answers


def _entry(entry: Entry, told: set[tuple[object, ...]]) -> Iterator[str]:
    """One decision, if anybody would care."""
    decision = entry.decision
    lines = [*_announced(decision.actions, decision.reason), *_sent(decision.actions, told)]
    lines += ["  POWER OFF" for action in decision.actions if isinstance(action, Halt)]
    phase = decision.state.phase
    said = any(isinstance(action, Announce) and action.text == decision.reason for action in decision.actions)
    if said or phase is not entry.before:
        yield f"t={entry.at:.1f} {phase.value}: {decision.reason}"
    elif lines:
        yield f"t={entry.at:.1f}"
    yield from lines


def _announced(actions: tuple[object, ...], reason: str) -> Iterator[str]:
    for action in actions:
        if isinstance(action, Announce) and action.text != reason:
            facts = {key: action.facts[key] for key in ("job", "step") if key in action.facts}
            words = "".join(f" {key}={value}" for key, value in facts.items())
            yield f"  {action.level}: {action.text}{words}"


def _sent(actions: tuple[object, ...], told: set[tuple[object, ...]]) -> Iterator[str]:
    """Each message to a rank the first time it is sent, ranks together."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for action in actions:
        if not isinstance(action, Send) or isinstance(action.message, (Ack, Welcome, Notice)):
            continue
        text = _message(action.message)
        if (action.job, action.rank, text) not in told:
            told.add((action.job, action.rank, text))
            ranks.setdefault((action.job, text), []).append(action.rank)
    for (job, text), numbers in ranks.items():
        yield f"  {job} {','.join(map(str, sorted(numbers)))} <- {text}"


def _message(message: object) -> str:
    name = type(message).__name__
    if isinstance(message, Prepare):
        return f"{name} #{message.seq} {message.purpose.value}"
    if isinstance(message, Decide):
        plan = "" if message.plan.value == "fresh" else f" plan={message.plan.value}"
        return f"{name} #{message.seq} {message.purpose.value} at step {message.step}{plan}"
    if isinstance(message, Exit):
        return f"{name} #{message.seq} code={message.code}"
    if isinstance(message, (Resume, Seal)):
        return f"{name} #{message.seq}"
    return f"{name} #{getattr(message, 'seq', '')}"


def _standing(world: World) -> Iterator[str]:
    """Where everything stands at the end of an act, but the runway: it is tuned more often than decisions change."""
    words = [world.phase.value]
    for name in world.disks:
        ranks = [rank for (of, _), rank in world.ranks.items() if of == name]
        living = [rank for rank in ranks if rank.alive and rank.started]
        steps = sorted({rank.step for rank in living})
        where = "gone" if not living else "parked at" if all(rank.parked for rank in living) else "at"
        at = "-".join(map(str, (steps[0], steps[-1]) if len(steps) > 1 else steps))
        few = f" ({len(living)} of {len(ranks)} ranks)" if 0 < len(living) < len(ranks) else ""
        newest = world.newest(name)
        words.append(f"{name} {where} {at}".rstrip() + f"{few}, durable {'nothing' if newest is None else newest}")
    yield "= " + "; ".join(words)


# ---- the command -----------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Play scenario files; 0 = every answer is as written (or was rewritten), 1 = some differ, 2 = unreadable."""
    parser = argparse.ArgumentParser(prog="python -m powerguard.sim.scenario", description="Play scenarios.")
    parser.add_argument("paths", nargs="+", type=Path, help="files, or folders of *.txt")
    parser.add_argument("--rewrite", action="store_true", help="write the answers into the files")
    parser.add_argument("--seq", metavar="FEED", help="print the dummy-ups sequence of one feed instead")
    options = parser.parse_args(argv)
    changed = 0
    for path in files(options.paths):
        try:
            scenario = load(path)
            if options.seq is not None:
                sys.stdout.write(to_seq(scenario, options.seq))
                continue
            _, answers = play(scenario)
        except (ScenarioError, OSError) as error:
            sys.stderr.write(f"{path}: {error}\n")
            return 2
        before, after = path.read_text(encoding="utf-8"), render(scenario, answers)
        if before == after:
            continue
        changed += 1
        if options.rewrite:
            path.write_text(after, encoding="utf-8")
            sys.stdout.write(f"{path}: rewritten\n")
        else:
            sys.stdout.writelines(
                difflib.unified_diff(before.splitlines(True), after.splitlines(True), str(path), "played")
            )
    return 1 if changed and not options.rewrite else 0
