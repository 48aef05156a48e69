"""A simulated rank: a listener that answers and a training thread that steps, waits, stages and writes.

The agreement is the real one (`core.follow`); time, the training and the disk are made up.
"""

from __future__ import annotations

from random import Random

from msgspec import Struct

from powerguard.core import follow
from powerguard.core.messages import (
    Beat,
    Decide,
    Failed,
    FromRank,
    Hello,
    Pace,
    Quiesced,
    Seal,
    SealWritten,
    Shard,
    ShardRecord,
    Staged,
    ToRank,
    Welcome,
)
from powerguard.sim.deputy import SimDeputy
from powerguard.sim.faults import (
    DiskFull,
    GilHeld,
    InCompile,
    InEval,
    LateJoiner,
    LoaderWorkersDead,
    OtherUid,
    QuotaExceeded,
    RankDead,
    RankFault,
    RankStopped,
    StepSlow,
    VolatileCache,
    WriteFails,
    WriteSlow,
)

BEAT_S = 1.0


class RankSpec(Struct, frozen=True):
    """How fast one rank is."""

    step_s: float = 1.0
    stage_s: float = 0.5
    write_s: float = 8.0
    fsync_s: float = 0.5
    measured: bool = True  # it knows its own pace from the start
    jitter: float = 0.05  # of a step
    stage_every: int = 0  # so many steps apart the state is copied for the deputy; 0 = there is none


class Disk:
    """Shards and seals of one job, as far as they are durable."""

    def __init__(self) -> None:
        self.shards: dict[str, dict[int, int]] = {}  # generation -> rank -> step
        self.seals: dict[str, int] = {}  # generation -> step
        self._written: list[tuple[float, int, str]] = []  # (when, rank, generation), as confirmed

    def wrote(self, rank: int, generation: str, step: int, now: float) -> None:
        """The drive confirms a shard."""
        self.shards.setdefault(generation, {})[rank] = step
        self._written.append((now, rank, generation))

    def forget(self, rank: int, since: float) -> None:
        """The power is gone, and with it what the drive confirmed of *rank* from *since* on and hadn't written."""
        for at, of, generation in self._written:
            if of == rank and at >= since:
                self.shards[generation].pop(rank, None)

    def whole(self, world_size: int) -> dict[str, int]:
        """Generations whose shards are all there and of one step, sealed or not."""
        return {
            name: next(iter(parts.values()))
            for name, parts in self.shards.items()
            if len(parts) == world_size and len(set(parts.values())) == 1
        }

    def newest(self, world_size: int) -> int | None:
        """The step of the newest whole generation."""
        return max(self.whole(world_size).values(), default=None)


class SimRank:
    """One process. `tick` lets it live for an instant; what it says is returned, what it is told is `hear`d."""

    def __init__(  # noqa: PLR0917
        self, job: str, rank: int, world_size: int, spec: RankSpec, disk: Disk, faults: tuple[RankFault, ...], seed: int
    ) -> None:
        self.job, self.rank, self.world_size, self.spec, self.disk = job, rank, world_size, spec, disk
        self.faults = faults
        self.rng = Random(seed)
        self.follower = follow.Follower()
        self.pid = 1000 * (1 + seed % 1000) + rank
        self.alive = True
        self.started = False
        self.left_with: int | None = None
        self.step = -1
        self.inside = False
        self.parked = False
        self.lone_saves = 0
        self._ends_at = 0.0  # of the step underway
        self._greeted = False
        self._beat_at = 0.0
        self._saving: follow.Save | None = None
        self._staged_at: float | None = None
        self._durable_at = 0.0
        self._writing: list[tuple[float, follow.Save]] = []  # snapshots on their way to the disk
        self._sealing: list[tuple[float, Seal]] = []
        self._begun: dict[RankFault, float] = {}
        self._saves = 0  # shards that it tried to make durable
        self.deputy = SimDeputy(spec.write_s + spec.fsync_s, self._from_deputy) if spec.stage_every else None

    # ---- what is wrong with it ---------------------------------------------------------------------

    def _ill(self, kind: type[RankFault], now: float) -> RankFault | None:
        """The fault of that kind which holds now; one with a step begins when the rank gets there."""
        for fault in self.faults:
            if not isinstance(fault, kind):
                continue
            if fault.step >= 0:
                if self.step < fault.step:
                    continue
                begun = self._begun.setdefault(fault, now)
            else:
                begun = fault.at
            if begun <= now and (fault.for_s <= 0.0 or now < begun + fault.for_s):
                return fault
        return None

    @property
    def training(self) -> bool:
        """Its device works."""
        return self.alive and self.started and not self.parked and not self.inside

    @property
    def begun(self) -> int:
        """The last step that its training thread has begun: peers can't finish a later one (a collective)."""
        return self.step if self.inside else self.step + 1

    # ---- its listener ------------------------------------------------------------------------------

    def deaf(self, now: float) -> bool:
        """Nothing reaches its listener now."""
        return not self.alive or not self.started or bool(self._ill(RankStopped, now)) or self._mute(now)

    def _mute(self, now: float) -> bool:
        """The listener doesn't get to run."""
        return bool(self._ill(GilHeld, now)) or (bool(self._ill(InCompile, now)) and int(now) % 2 == 0)

    def unreadable(self, now: float) -> bool:
        """The daemon can't read its shared page."""
        return self._ill(OtherUid, now) is not None

    def go_dark(self, now: float) -> None:
        """The power is gone."""
        cache = self._ill(VolatileCache, now)
        if isinstance(cache, VolatileCache):
            self.disk.forget(self.rank, now - cache.lost_s)
        self.alive = False
        if self.deputy is not None:
            self.deputy.alive = False

    def hear(self, message: ToRank, now: float) -> list[FromRank]:
        """Take a message in and answer it."""
        if isinstance(message, Welcome):
            self._greeted = not message.hello
            return [self._hello()] if message.hello else []
        if isinstance(message, Seal) and message.generation not in {seal.generation for _, seal in self._sealing}:
            self._sealing.append((now + self.spec.fsync_s, message))
        place = follow.Place(self.step, self.inside)
        self.follower, answers = follow.hear(self.follower, message, place, self._pace(), now)
        return list(answers)

    def _pace(self) -> Pace:
        spec = self.spec
        return Pace(spec.step_s, spec.stage_s, spec.write_s, spec.fsync_s, 1 << 30) if spec.measured else Pace()

    @property
    def _busy(self) -> str:
        if self.parked:
            return "parked"
        if self._saving is not None:
            return "staging" if self._staged_at is None else "writing"
        return "held" if self.inside else ""

    def _hello(self) -> Hello:
        return Hello(
            self.job,
            self.rank,
            self.rank,
            self.world_size,
            self.pid,
            f"/checkpoints/{self.job}",
            step=self.step,
            pace=self._pace(),
        )

    # ---- its life ----------------------------------------------------------------------------------

    def tick(self, now: float, peers: list[SimRank]) -> list[FromRank]:
        """Live until *now*: what it says unasked, and what its deputy says for it."""
        said = self.deputy.tick(now) if self.deputy is not None and self.started else []
        return said + self._live(now, peers)

    def _live(self, now: float, peers: list[SimRank]) -> list[FromRank]:
        if not self.started:
            late = [fault.at for fault in self.faults if isinstance(fault, LateJoiner)]
            if late and now < max(late):
                return []
            self.started, self._ends_at = True, now + self.spec.step_s
        if self.alive and self._ill(RankDead, now):
            self.alive = False
        if not self.alive or self._ill(RankStopped, now):
            return []
        self._disk_work(now)
        said: list[FromRank] = []
        if not self._mute(now):
            self.follower, ripe = follow.due(self.follower, now)
            said += ripe
            if now >= self._beat_at:
                self._beat_at = now + BEAT_S
                said += [] if self._greeted else [self._hello()]
                said.append(Beat(self.step, self._pace(), self._busy))
        if not self._ill(InEval, now) and not self._ill(InCompile, now):
            self._train(now, peers)
        return said

    def _disk_work(self, now: float) -> None:
        for done_at, save in [item for item in self._writing if item[0] <= now]:
            self._writing.remove((done_at, save))
            self._durable(save, now)
        for done_at, seal in [item for item in self._sealing if item[0] <= now]:
            self._sealing.remove((done_at, seal))
            self.disk.seals[seal.generation] = seal.step
            self.follower = follow.say(self.follower, SealWritten(seal.seq, seal.step, seal.generation), now)

    def _durable(self, save: follow.Save, now: float) -> None:
        self._saves += 1
        why = self._refused(now)
        if why:
            self.follower = follow.say(self.follower, Failed(save.seq, save.step, why), now)
            return
        self.follower = follow.say(self.follower, self._shard(save.seq, save.step, save.generation, now), now)

    def _shard(self, seq: int, step: int, generation: str, now: float) -> Shard:
        """Its part of a generation, durable now."""
        self.disk.wrote(self.rank, generation, step, now)
        record = ShardRecord(self.rank, f"rank-{self.rank:05d}", 1 << 30, f"{step:032x}")
        return Shard(seq, step, generation, record, self.spec.write_s, self.spec.fsync_s)

    def _from_deputy(self, order: Decide, now: float) -> Shard:
        return self._shard(order.seq, order.step, order.generation, now)

    def _refused(self, now: float) -> str:
        """Why this save can't be written, or ""."""
        fails = self._ill(WriteFails, now)
        if isinstance(fails, WriteFails) and self._saves >= fails.nth:
            return fails.why
        return DiskFull.why if self._ill(DiskFull, now) else QuotaExceeded.why if self._ill(QuotaExceeded, now) else ""

    def _train(self, now: float, peers: list[SimRank]) -> None:
        if self._saving is not None and not self._saved(self._saving, now):
            return
        if not self.inside:
            together = all(peer.alive and peer.started and peer.begun > self.step for peer in peers)
            if now < self._ends_at or not together:
                return
            if self._ill(LoaderWorkersDead, now):
                self.alive = False  # the loader raises, nothing catches it
                return
            self.step += 1
            self.inside = True
        self.follower, todo = follow.arrive(self.follower, self.step, now)
        self.parked = isinstance(todo, (follow.Park, follow.Rest))
        if isinstance(todo, follow.Go):
            self.inside = False
            slow = self._ill(StepSlow, now)
            factor = slow.factor if isinstance(slow, StepSlow) else 1.0
            self._ends_at = now + factor * self.spec.step_s * (1.0 + self.spec.jitter * self.rng.random())
            if self.deputy is not None and self.step % self.spec.stage_every == 0:
                self.deputy.stage(self.step)
                self._ends_at += self.spec.stage_s
        elif isinstance(todo, follow.Save):
            self._saving, self._staged_at = todo, None
            self._durable_at = now + self.spec.stage_s
            self.lone_saves += todo.lone
        elif isinstance(todo, follow.Rest):
            if not self._writing and not self.follower.quiesced:
                self.follower = follow.say(self.follower, Quiesced(todo.seq), now)
        elif isinstance(todo, follow.Leave):
            self.alive, self.left_with = False, todo.code

    def _saved(self, save: follow.Save, now: float) -> bool:
        """The training thread is done with a save: staged, and durable if it is a stop (that it says all at once)."""
        if self._staged_at is None:
            if now < self._durable_at:
                return False
            self._staged_at = now
            slow = self._ill(WriteSlow, now)
            factor = slow.factor if isinstance(slow, WriteSlow) else 1.0
            free_at = max([now, *(done_at for done_at, _ in self._writing)])
            self._durable_at = free_at + factor * self.spec.write_s + self.spec.fsync_s
            if not save.stop:
                self.follower = follow.say(self.follower, Staged(save.seq, save.step, self.spec.stage_s), now)
                self._writing.append((self._durable_at, save))
        if save.stop:
            if now < self._durable_at:
                return False
            self.follower = follow.say(self.follower, Staged(save.seq, save.step, self.spec.stage_s), now)
            self._durable(save, now)
        self._saving = None
        return True
