"""A journal turned into a scenario: what the UPSes said, who commanded what, and what came of it, as a story to keep.

The ranks of the story train, stage and write as fast as those of the journal said of themselves. What the core answers
is written by the core that retells it: beside what was done then it shows at once what is decided otherwise now.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from powerguard.core.messages import Pace
from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.types import Comm, Halt, Phase, Sample
from powerguard.drill.moments import Moment, moments, turns
from powerguard.drill.outages import Outage
from powerguard.errors import JournalError
from powerguard.journal import Recording, Rules
from powerguard.sim.musts import broken
from powerguard.sim.play import play
from powerguard.sim.scenario import SHORT, read, render

LEAD_S = 20.0
"""Told before it begins, as far as the journal goes back, and after it is over."""
_TAIL_S = 5.0
"""Polls of a story fall on other instants than those of the night; what was decided then is decided by now."""
_VARIABLES = (*SHORT.values(), "battery.type", "driver.parameter.pollinterval")
"""Of a UPS, what the core reads."""
_NAMES = {name: short for short, name in SHORT.items()}


def scenario(outage: Outage, *, every_s: float = 2.0) -> str:
    """The text of the scenario of *outage*.

    Numbers are told at most once in *every_s*, a status at once. JournalError: nothing is known of the state that it
    began in.
    """
    recording, first, last = outage.recording, outage.first, outage.last
    told = moments(recording)
    begin_at = told[first].tick.at - LEAD_S
    shown = [m for m in told if begin_at <= m.tick.at <= told[last - 1].tick.at + LEAD_S]
    zero = min(shown[0].tick.at, *(sample.at for m in shown for sample in m.tick.seen.samples))
    state = told[first].state
    if state is None:
        raise JournalError(f"{recording.path}: nobody knows the state that it began in", todo="choose another outage")
    policy = _policy(recording, told[first].tick.n)
    node = recording.head.node if recording.head else "a node"
    text = "\n".join(
        [
            f"# Retold from the journal of {node}: {_end(told[first:last])}.",
            "",
            *_setup(policy, told[first]),
            *_musts(told[first:last], told[last - 1]),
            "",
            *sorted(_happens(shown, zero, every_s, alone=len(policy.feeds) == 1), key=_instant),
            f"t={max(m.tick.at for m in shown) - zero + _TAIL_S:.1f}",
            "----",
            "",
        ]
    )
    story = read(text)
    world, answers = play(story)
    wrong = {why.partition(":")[0] for why in broken(story, world)}
    lines = [line for line in render(story, answers).split("\n") if not _claims(line, wrong)]
    return "\n".join(lines)


def _claims(line: str, wrong: set[str]) -> bool:
    """The line is a claim that the story doesn't keep: what was so in the night isn't so in the retelling."""
    words = shlex.split(line) if line.startswith("must ") else []
    return " ".join(word for word in words if "=" not in word) in wrong


def _instant(line: str) -> float:
    return float(line.partition(" ")[0].removeprefix("t="))


def _policy(recording: Recording, n: int) -> Policy:
    rules = [record for record in recording.records if isinstance(record, Rules) and record.n <= n]
    return rules[-1].policy if rules else Policy()


def _setup(policy: Policy, moment: Moment) -> Iterator[str]:
    """The rules where they aren't the defaults, the feeds, and the jobs with their pace."""
    given = {
        name: getattr(policy, name)
        for name in policy.__struct_fields__
        if name != "feeds" and isinstance(getattr(policy, name), (int, float, str))
    }
    changed = [f"{name}={value}" for name, value in given.items() if value != getattr(Policy(), name)]
    if changed:
        yield f"policy {' '.join(changed)}"
    for feed in policy.feeds:
        plain = FeedPolicy(feed.name)
        words = [
            f"{name}={getattr(feed, name)}"
            for name in feed.__struct_fields__
            if name != "name" and isinstance(getattr(feed, name), (int, float, str))
            if getattr(feed, name) != getattr(plain, name)
        ]
        yield " ".join(["feed", shlex.quote(feed.name), *words])
    for name, job in sorted(moment.state.jobs.items()) if moment.state is not None else ():
        pace = _slowest([member.pace for member in job.members.values()])
        yield f"job {shlex.quote(name)} ranks={job.world_size} {pace}"


def _slowest(paces: Iterable[Pace]) -> str:
    """What the slowest rank needs; what nobody has measured is left to the story's own defaults."""
    known = list(paces)
    words = []
    for name in ("step_s", "stage_s", "write_s", "fsync_s"):
        value = max((getattr(pace, name) for pace in known), default=0.0)
        if value > 0.0:
            words.append(f"{name}={max(value, 0.01):.3g}")
    return " ".join(words)


def _musts(told: list[Moment], end: Moment) -> Iterator[str]:
    halted = any(isinstance(action, Halt) for m in told for action in m.tick.actions)
    yield "must halt" if halted else "must never halt"
    if not any(m.tick.phase in (Phase.FLUSHING, Phase.PARKED) for m in told):
        yield "must never stop"
    for name, job in sorted(end.state.jobs.items()) if end.state is not None else ():
        if job.saved is not None:
            yield f"must save {shlex.quote(name)}"


def _end(told: list[Moment]) -> str:
    reason = turns(told)[-1].tick.reason or told[-1].tick.phase.value
    return " ".join(reason.split())[:90]


def _happens(shown: list[Moment], zero: float, every_s: float, *, alone: bool) -> Iterator[str]:
    """Every change of what a UPS says, every command, every rank that leaves."""
    feeds: dict[str, _Feed] = {}
    gone: set[tuple[str, int]] = set()
    for moment in shown:
        for sample in moment.tick.seen.samples:
            feed = feeds.setdefault(sample.feed, _Feed("" if alone else f" feed={shlex.quote(sample.feed)}", every_s))
            yield from feed.lines(sample, max(0.0, sample.at - zero))
        at = max(0.0, moment.tick.at - zero)
        for command in moment.tick.seen.commands:
            who = "system" if command.by in ("system", "logind") else "operator"
            more = "" if command.within_s is None else f" within_s={command.within_s:g}"
            yield f"t={at:.1f} {who} {command.verb}{more}{f' job={shlex.quote(command.job)}' if command.job else ''}"
        for page in moment.tick.seen.pages:
            died = not page.alive and moment.tick.phase is not Phase.HALTING
            if died and (page.job, page.rank) not in gone:
                gone.add((page.job, page.rank))
                yield f"t={at:.1f} fault rank-dead job={shlex.quote(page.job)} rank={page.rank}"


class _Feed:
    """What of a UPS was told last."""

    def __init__(self, option: str, every_s: float) -> None:
        self._option, self._every_s = option, every_s
        self._said: dict[str, str] = {"ups.status": "OL", "battery.charge": "100", "battery.runtime": "1200"}
        self._said["ups.load"] = "40"
        self._comm = Comm.OK
        self._at = float("-inf")

    def lines(self, sample: Sample, at: float) -> Iterator[str]:
        if sample.comm is not self._comm:
            self._comm = sample.comm
            detail = f" detail={shlex.quote(sample.detail)}" if sample.detail and sample.comm is not Comm.OK else ""
            yield f"t={at:.1f} ups{self._option} comm={sample.comm.value}{detail}"
        if sample.comm is not Comm.OK:
            return
        now = {name: sample.variables.get(name, "") for name in _VARIABLES}
        changed = {name: value for name, value in now.items() if value != self._said.get(name, "")}
        if not changed or ("ups.status" not in changed and at - self._at < self._every_s):
            return
        self._at = at
        self._said |= now
        words = " ".join(f"{_NAMES.get(name, name)}={shlex.quote(value)}" for name, value in changed.items())
        yield f"t={at:.1f} ups{self._option} {words}"
