"""A node, its ranks and its UPSes on one clock, seeded, driving the pure core: a night in milliseconds.

    world = World(Policy(feeds=(FeedPolicy("ups"),)), jobs=(JobSpec("gpt", ranks=2),))
    world.at(30.0, lambda: world.feeds["ups"].say({"ups.status": "OB DISCHRG"}))
    world.run(600.0)
    world.phase, world.halted_at, world.newest("gpt")

Everything but the outside world is the real thing: `decide`, `lawful.check`, the ranks' half of the agreement, and
the state that survives a restart of the daemon as JSON.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import Struct

from powerguard.core.decide import DRY_RUN, decide
from powerguard.core.lawful import check
from powerguard.core.policy import Policy
from powerguard.core.poll import poll_wait
from powerguard.core.state import Decision, State, initial
from powerguard.core.types import Command, Halt, Observation, PageReport, Phase, RankReport, Sample, Send
from powerguard.sim import faults as f
from powerguard.sim.clock import FakeClock
from powerguard.sim.feed import SimFeed
from powerguard.sim.rank import Disk, RankSpec, SimRank

DT = 0.1
OFF_S = 20.0
"""From the power-off order until the node is really off."""

CRASH_S = 1.0
PAGE_S = 1.0
TRAINING_PCT, FLUSHING_PCT, IDLE_PCT = 60.0, 30.0, 16.0
"""Load of the node on its UPS; the ratios are those of GPU nodes (32-55 % while it writes, 22-32 % idle)."""


class JobSpec(Struct, frozen=True):
    """A training job."""

    name: str
    ranks: int = 2
    speed: RankSpec = RankSpec()
    speeds: tuple[RankSpec, ...] = ()  # of the first ranks, where they differ


class Entry(Struct, frozen=True):
    """One decision, with the phase that it was made in."""

    at: float
    before: Phase
    decision: Decision
    seen: Observation


class World:
    """See the module. `run` may be called again and again; everything is to be looked at in between."""

    def __init__(
        self,
        policy: Policy,
        *,
        jobs: tuple[JobSpec, ...] = (),
        feeds: tuple[SimFeed, ...] = (),
        faults: tuple[f.Fault, ...] = (),
        seed: int = 1,
        begin_at: float = 100.0,
        dry_run: bool = False,
        through_json: bool = False,
        crash_at: int = 0,
    ) -> None:
        self.policy = policy
        self.clock = FakeClock(begin_at)
        self.dry_run = dry_run
        self.through_json = through_json  # the state goes through JSON after every decision, as after a crash
        self.crash_at = (
            crash_at  # the n-th decision with actions is journalled, and then the daemon is killed; 0 = none
        )
        ups_faults = tuple(fault for fault in faults if isinstance(fault, f.UpsFault))
        self.feeds = {feed.name: feed for feed in feeds} or {
            each.name: SimFeed(each.name, faults=ups_faults) for each in policy.feeds
        }
        self.disks: dict[str, Disk] = {}
        self.ranks: dict[tuple[str, int], SimRank] = {}
        self.seed = seed
        self.faults = faults
        for job in jobs:
            self.add_job(job)
        self.boot = f"{seed:08x}-boot"
        self.state: State = initial(self.boot, begin_at, node="node")
        self.entries: list[Entry] = []
        self.acted = 0  # decisions with actions
        self.halted_at: float | None = None
        self.dark_at: float | None = None  # the power is gone, or the node is off
        self._journal = msgspec.json.encode(self.state)
        self._restarted: set[f.Fault] = set()
        self._up_at = begin_at
        self._planned: list[tuple[float, int, Callable[[], None]]] = []
        self._polled: dict[str, float] = {}
        self._pages_at = begin_at
        self._next_at = begin_at
        self._samples: list[Sample] = []
        self._reports: list[RankReport] = []
        self._commands: list[Command] = []

    # ---- what may be done to it --------------------------------------------------------------------

    def add_job(self, job: JobSpec) -> None:
        """A job whose processes start now."""
        disk = self.disks[job.name] = Disk()
        for rank in range(job.ranks):
            speed = job.speeds[rank] if rank < len(job.speeds) else job.speed
            own = tuple(
                fault
                for fault in self.faults
                if isinstance(fault, f.RankFault) and fault.job in ("", job.name) and fault.rank == rank
            )
            self.ranks[job.name, rank] = SimRank(
                job.name, rank, job.ranks, speed, disk, own, self.seed * 997 + rank + 31 * len(self.disks)
            )

    def at(self, instant: float, do: Callable[[], None]) -> None:
        """Do something when *instant* comes; what is planned for the same one is done in order."""
        self._planned.append((instant, len(self._planned), do))

    def command(self, verb: str, by: str = "operator", within_s: float | None = None, job: str = "") -> None:
        """The operator, or the system, says *verb* now."""
        self._commands.append(Command(verb, by, within_s, job))

    def ail(self, fault: f.Fault) -> None:
        """A fault more, from its own instant on."""
        self.faults = (*self.faults, fault)
        if isinstance(fault, f.UpsFault):
            for feed in self.feeds.values():
                if fault.feed in ("", feed.name):
                    feed.faults = (*feed.faults, fault)
        for (job, rank), sim in self.ranks.items():
            if isinstance(fault, f.RankFault) and fault.job in ("", job) and fault.rank == rank:
                sim.faults = (*sim.faults, fault)

    # ---- what may be asked -------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """The instant."""
        return self.clock()

    @property
    def phase(self) -> Phase:
        """The phase of the node, as its daemon sees it."""
        return self.state.phase

    def newest(self, job: str) -> int | None:
        """The step of the newest whole generation of a job."""
        world_size = sum(name == job for name, _ in self.ranks)
        return self.disks[job].newest(world_size)

    @property
    def load_pct(self) -> float:
        """The load that the node puts on its UPSes, all together."""
        living = [rank for rank in self.ranks.values() if rank.alive and rank.started]
        if not living:
            return IDLE_PCT
        busy = sum(
            FLUSHING_PCT if rank.inside and not rank.parked else TRAINING_PCT for rank in living if not rank.parked
        )
        idle = sum(IDLE_PCT for rank in living if rank.parked)
        return (busy + idle) / len(living)

    # ---- time --------------------------------------------------------------------------------------

    def run(self, until: float) -> None:
        """Let the world live until *until*, or until it is dark."""
        while self.dark_at is None and self.now < until - DT / 2:
            self._tick()

    def _tick(self) -> None:
        self.clock.jump(round(self.now + DT, 6))
        self._begin_at_steps()
        for fault in self.faults:
            if isinstance(fault, f.Suspended) and fault.for_s > 0.0 and fault.active(self.now):
                asleep_s = fault.at + fault.for_s - self.now
                self.clock.jump(fault.at + fault.for_s)
                for feed in self.feeds.values():
                    feed.step(asleep_s, self.now, IDLE_PCT / len(self.feeds))
            elif isinstance(fault, f.PowerCut) and fault.active(self.now):
                self._go_dark()
                return
        now = self.now
        for item in sorted(self._planned, key=lambda item: item[:2]):
            if item[0] <= now + DT / 10:
                self._planned.remove(item)
                item[2]()
        self._supply(now)
        if self.dark_at is not None:
            return
        for (job, number), rank in self.ranks.items():
            peers = [other for (name, peer), other in self.ranks.items() if name == job and peer != number]
            self._reports += [RankReport(job, number, now, said) for said in rank.tick(now, peers)]
        self._daemon(now)
        if self.halted_at is not None and not self.dry_run and now >= self.halted_at + OFF_S:
            self._go_dark()

    def _begin_at_steps(self) -> None:
        """Faults of others than ranks that wait for a rank's step begin once it is completed."""
        for fault in self.faults:
            if isinstance(fault, f.RankFault) or fault.step < 0:
                continue
            waited_for = (rank for (job, n), rank in self.ranks.items() if fault.job in ("", job) and n == fault.rank)
            if any(rank.step >= fault.step for rank in waited_for):
                begun = msgspec.structs.replace(fault, at=self.now, step=-1)
                self.faults = tuple(begun if each is fault else each for each in self.faults)
                for feed in self.feeds.values():
                    feed.faults = tuple(begun if each is fault else each for each in feed.faults)  # type: ignore[misc]

    def _supply(self, now: float) -> None:
        """The batteries drain; when all that have one are flat, it is dark."""
        live = [feed for feed in self.feeds.values() if feed.ups is None or feed.ups.alive]
        for feed in live:
            feed.step(DT, now, self.load_pct / len(live))
        modelled = [feed.ups for feed in self.feeds.values() if feed.ups is not None]
        if modelled and sum(ups.alive for ups in modelled) < self.policy.min_supplies:
            self._go_dark()

    def _go_dark(self) -> None:
        self.dark_at = self.now
        for rank in self.ranks.values():
            rank.go_dark(self.now)

    # ---- the daemon --------------------------------------------------------------------------------

    def _daemon(self, now: float) -> None:
        if self._away(now):
            return
        poll_s = self.policy.poll_online_s if self.phase is Phase.ONLINE else self.policy.poll_battery_s
        for name, feed in self.feeds.items():
            if now >= self._polled.get(name, -1e9) + poll_s - DT / 2:
                self._polled[name] = now
                self._samples.append(feed.sample(now))
        if not (self._samples or self._reports or self._commands or now >= self._next_at - DT / 10):
            return
        pages: list[PageReport] = []
        if now >= self._pages_at:
            self._pages_at = now + PAGE_S
            pages = [
                PageReport(job, number, now, rank.step, rank.alive, rank.pid)
                for (job, number), rank in self.ranks.items()
                if rank.started and not rank.unreadable(now)
            ]
        seen = Observation(tuple(self._samples), tuple(self._reports), tuple(pages), tuple(self._commands))
        self._samples, self._reports, self._commands = [], [], []
        self.decide(seen, now)

    def decide(self, seen: Observation, now: float) -> Decision:
        """One turn of the daemon's loop: decide, check, journal, act."""
        decision = decide(self.policy, self.state, seen, now)
        check(self.policy, self.state, decision, now)
        self.entries.append(Entry(now, self.state.phase, decision, seen))
        self.state = decision.state
        if decision.actions or self.through_json:
            self._journal = msgspec.json.encode(self.state)
        if self.through_json:
            self.state = msgspec.json.decode(self._journal, type=State)
        self._next_at = now + poll_wait(self.policy, self.state, now)
        self.acted += bool(decision.actions)
        if decision.actions and self.acted == self.crash_at:
            self._killed(now, CRASH_S, journal_lost=False)
        else:
            self._act(decision, now)
        return decision

    def _act(self, decision: Decision, now: float) -> None:
        for action in decision.actions:
            if isinstance(action, Send):
                rank = self.ranks.get((action.job, action.rank))
                if rank is not None and rank.deputy is not None:
                    rank.deputy.hear(action.message, now)
                if rank is not None and not rank.deaf(now):
                    answers = rank.hear(action.message, now)
                    self._reports += [RankReport(action.job, action.rank, now, answer) for answer in answers]
            elif isinstance(action, Halt):
                self._halt(now)

    def _halt(self, now: float) -> None:
        self.halted_at = now
        if self.dry_run:
            self._commands.append(Command(DRY_RUN))

    def _killed(self, now: float, down_s: float, *, journal_lost: bool) -> None:
        """The daemon is gone, and what it had not yet read with it; its journal is what it begins with anew."""
        self._up_at = now + down_s
        self._samples, self._reports, self._commands = [], [], []
        lost = initial(self.boot, self._up_at, node="node")
        self.state = lost if journal_lost else msgspec.json.decode(self._journal, type=State)

    def _away(self, now: float) -> bool:
        """The daemon isn't running; when it was killed it comes back with what its journal says."""
        for fault in self.faults:
            if isinstance(fault, f.DaemonStopped) and fault.active(now):
                return True
            if isinstance(fault, f.DaemonDown) and fault.step < 0 and fault.at <= now and fault not in self._restarted:
                self._restarted.add(fault)
                self._killed(now, fault.down_s, journal_lost=fault.journal_lost)
        if now < self._up_at:
            return True
        if self.state.halted_at is not None and self.halted_at is None:
            self._halt(
                now
            )  # the journal says that it was ordered, nothing says that it was done: a shell does it again
        return False
