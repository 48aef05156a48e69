"""Every policy through every outage of a seed, on all cores, the same whatever their number."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from policy.f5 import play_f5
from policy.ours import play_ours
from policy.outcome import Outcome, Sums
from policy.peers import PEERS, play_peer
from policy.world import Track, last_chance, run
from powerguard.sim.battery import SimUps
from powerguard.sim.population import FLAWS, Outage, models, outage

RIDES_FROM = 1_000_000
"""Numbers of outages for the rides; those below are for sustained ones."""

OURS = {"powerguard": (False, False), "powerguard, GPU cap 75 %": (False, True), "powerguard, learned": (True, False)}
"""name -> (capacity learned, capped)"""

F5 = {"f5 reference": (False, False)}
ORACLE = "oracle"

Key = tuple[str, float]


@dataclass(frozen=True, slots=True)
class Setting:
    """What is run. *sustained* and *rides* are outages drawn; those an oracle can't save, or ride, don't count."""

    seed: int
    sustained: int
    rides: int
    needs: tuple[float, ...] = (20.0, 60.0, 120.0, 300.0)
    flaw: str = "none"
    names: tuple[str, ...] = (*(peer.name for peer in PEERS), *OURS)


@dataclass(slots=True)
class Study:
    """The sums, by (policy, need)."""

    setting: Setting
    sums: dict[Key, Sums] = field(default_factory=dict)
    beyond: dict[float, int] = field(default_factory=dict)  # sustained outages that nobody can save, by need

    def merge(self, other: Study) -> None:
        """Adds another part of the same study."""
        for key, sums in other.sums.items():
            self.sums.setdefault(key, Sums()).merge(sums)
        for need, count in other.beyond.items():
            self.beyond[need] = self.beyond.get(need, 0) + count

    def rows(self) -> list[dict[str, Any]]:
        """One row for each need and policy, in the order of the setting, the oracle last."""
        found = []
        for need in self.setting.needs:
            for name in (*self.setting.names, ORACLE):
                sums = self.sums.get((name, need))
                if sums is not None:
                    found.append({"need_s": need, "policy": name, **sums.row()})
        return found


def _tracks(story: Outage, *, sustained: bool, capped: bool) -> tuple[Track, Track]:
    """The outage at full load, and with the GPUs capped if anybody asks for it; mains return at the same instant."""
    track = run(story, sustained=sustained)
    if not capped or (track.out_at is None and not sustained and track.mains_at < 10.0):
        return track, track
    return track, run(story, sustained=sustained, capped=True, mains_at=track.mains_at if sustained else None)


def _play(setting: Setting, track: Track, capped: Track, needs: list[float]) -> Iterator[tuple[str, float, Outcome]]:
    for peer in PEERS:
        if peer.name in setting.names:
            stop = None
            for i, need in enumerate(needs):
                if i == 0 or peer.revocable:
                    stop = peer.stop(track.polls, need)
                yield peer.name, need, play_peer(peer, track, need, stop)
    for name, (learned, cap) in F5.items():
        if name in setting.names:
            for need, outcome in play_f5(capped if cap else track, tuple(needs), learned=learned).items():
                yield name, need, outcome
    for name, (learned, cap) in OURS.items():
        if name in setting.names:
            for need, outcome in play_ours(capped if cap else track, tuple(needs), learned=learned).items():
                yield name, need, outcome


def _sustained(study: Study, story: Outage) -> None:
    setting = study.setting
    track, capped = _tracks(story, sustained=True, capped=_caps(setting))
    chances = {need: last_chance(track, need) for need in setting.needs}
    needs = [need for need, chance in chances.items() if chance >= 0]
    for need, chance in chances.items():
        study.beyond[need] = study.beyond.get(need, 0) + (chance < 0)
        if chance >= 0:
            best = track.polls[chance].t
            oracle = Outcome(trained_s=best, final=True, halted=True, saves=1)
            _sums(study, ORACLE, need).add_sustained(oracle, oracle_s=best, maintained=story.maintained, note={})
    firmware = story.spec.firmware
    note = {
        "outage": story.n,
        "firmware": firmware.kind,
        "chemistry": story.spec.chemistry,
        "weak": story.weak,
        "recent": story.recent,
        "phi": round(story.spec.phi, 2),
        "age_y": round(story.age_y, 1),
        "refresh_s": firmware.refresh_s,
        "battery_s": round(track.out_at or 0.0),
    }
    for name, need, outcome in _play(setting, track, capped, needs) if needs else ():
        sums = _sums(study, name, need)
        best = track.polls[chances[need]].t
        sums.add_sustained(outcome, oracle_s=best, maintained=story.maintained, note=note)


def _ride(study: Study, story: Outage) -> None:
    setting = study.setting
    truth = SimUps(story.spec, story.seed, load_pct=story.load.train_pct).truth_s(story.load.train_pct)
    if story.lasts_s > 0.98 * truth:
        return
    track, capped = _tracks(story, sustained=False, capped=_caps(setting))
    if track.out_at is not None:
        return
    for need in setting.needs:
        _sums(study, ORACLE, need).add_ride(Outcome(final=True))
    for name, need, outcome in _play(setting, track, capped, list(setting.needs)):
        _sums(study, name, need).add_ride(outcome)


def _caps(setting: Setting) -> bool:
    return any(cap and name in setting.names for name, (_, cap) in (OURS | F5).items())


def _sums(study: Study, name: str, need: float) -> Sums:
    return study.sums.setdefault((name, need), Sums())


def _part(job: tuple[Setting, range]) -> Study:
    """One part, in a process of its own."""
    setting, numbers = job
    study, market, flaws = Study(setting), models(setting.seed), FLAWS[setting.flaw]
    for n in numbers:
        story = outage(setting.seed, market, n, flaws)
        if n < RIDES_FROM:
            _sustained(study, story)
        else:
            _ride(study, story)
    return study


def study(setting: Setting, processes: int) -> Study:
    """Runs it all. Parts are merged in their order, so the sums don't depend on *processes*."""
    size = 60
    ranges = [range(at, min(at + size, setting.sustained)) for at in range(0, setting.sustained, size)]
    ends = RIDES_FROM + setting.rides
    ranges += [range(at, min(at + 4 * size, ends)) for at in range(RIDES_FROM, ends, 4 * size)]
    jobs = [(setting, numbers) for numbers in ranges]
    whole = Study(setting)
    if processes <= 1:
        parts: Iterator[Study] = map(_part, jobs)
        for part in parts:
            whole.merge(part)
        return whole
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for part in pool.imap(_part, jobs):
            whole.merge(part)
    return whole
