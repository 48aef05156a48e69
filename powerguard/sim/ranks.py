"""Ranks of a job of several nodes, made for many runs: the real half of the agreement, and a life that wakes only when
there is something to do.

`sim/rank.py` has the richer rank, for stories of one node.
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
    Held,
    Hello,
    Pace,
    Prepare,
    Promise,
    Quiesced,
    Resume,
    Seal,
    SealWritten,
    Shard,
    ShardRecord,
    Staged,
    ToRank,
    Welcome,
)
from powerguard.sim.laws import Laws

NEVER = 1e18
BEAT_S = 1.0
STAGE_S = 0.1
FSYNC_S = 0.1


class Spec(Struct, frozen=True):
    """How a rank lives."""

    step_s: float = 0.5
    write_s: float = 0.6
    stage_every: int = 0  # steps between staged states; 0 = none, and no deputy
    failing: float = 0.0  # chance that a write fails for good


class World(Struct, frozen=True):
    """The job that a rank belongs to."""

    job: str
    size: int
    per_node: int
    master: str


class Rank:
    """One process, and beside it the deputy that keeps what it has staged."""

    def __init__(self, number: int, world: World, spec: Spec, laws: Laws, rng: Random) -> None:
        self.number, self.world, self.spec, self.laws, self.rng = number, world, spec, laws, rng
        self.life = 0
        self.held: tuple[int, ...] = ()  # what the deputy keeps: it outlives the rank
        self.deputy_writes: list[tuple[float, Decide]] = []
        self.begin(0.0, -1)

    def begin(self, now: float, step: int) -> None:
        """A new process."""
        self.life += 1
        self.f = follow.Follower()
        self.step, self.inside, self.alive, self.exited = step, False, True, False
        self.welcome = False
        self.deaf_until = self.stopped_until = 0.0
        self.step_done_at = now + self.spec.step_s
        self.saving: follow.Save | None = None
        self.saving_until = 0.0
        self.writing: list[tuple[float, follow.Save]] = []
        self.sealing: list[tuple[float, Seal]] = []
        self.beat_at = now
        self.parked = False
        self.promised: dict[int, int] = {}
        self.wake = now
        self.hold_until = NEVER
        self.heard = False

    @property
    def pid(self) -> int:
        """Of this process."""
        return 1000 + self.number + 10000 * self.life

    @property
    def begun(self) -> int:
        """The last step that its training thread has begun: peers can't finish a later one."""
        return self.step if self.inside else self.step + 1

    @property
    def free(self) -> bool:
        """It trains, or waits for peers that don't: nobody keeps it from training."""
        return not self.inside and self.saving is None

    # ---- its listener ------------------------------------------------------------------------------

    def deaf(self, now: float) -> bool:
        """Nothing reaches it now."""
        return now < self.deaf_until or now < self.stopped_until

    def hear(self, message: ToRank, now: float) -> list[FromRank]:
        """A message of the daemon, and the answers."""
        self.heard, self.wake = True, now
        if isinstance(message, Welcome):
            self.welcome = not message.hello
            return [self.hello()] if message.hello else []
        if not self.welcome:
            return []  # meant for another process
        if isinstance(message, Seal):
            if all(message.generation != seal.generation for _, seal in self.sealing):
                self.sealing.append((now + FSYNC_S, message))
        elif isinstance(message, Decide):
            self.laws.decided(message.seq, message.step, message.generation, f"rank {self.number}")
            self.promised = {seq: edge for seq, edge in self.promised.items() if seq > message.seq}
        elif isinstance(message, Resume):
            self.promised = {seq: edge for seq, edge in self.promised.items() if seq > message.seq}
        self.f, answers = follow.hear(self.f, message, follow.Place(self.step, self.inside), self.pace(), now)
        for answer in answers:
            if isinstance(answer, Promise) and isinstance(message, Prepare):
                self.promised = {answer.seq: answer.edge}
        return list(answers)

    def ask_deputy(self, message: Decide, now: float) -> None:
        """A DECIDE of plan STAGED also goes to the deputy."""
        if all(message.generation != other.generation for _, other in self.deputy_writes):
            self.deputy_writes.append((now + self.spec.write_s, message))

    def pace(self) -> Pace:
        """What it has measured."""
        return Pace(self.spec.step_s, STAGE_S, self.spec.write_s, FSYNC_S, 1 << 30)

    def beat(self) -> Beat:
        """A sign of life."""
        return Beat(self.step, self.pace(), "parked" if self.parked else "")

    def hello(self) -> Hello:
        """Registers it."""
        return Hello(
            self.world.job,
            self.number,
            self.number % self.world.per_node,
            self.world.size,
            self.pid,
            "/checkpoints",
            master=self.world.master,
            step=self.step,
            pace=self.pace(),
            local_world_size=self.world.per_node,
            seq=self.f.seq,
        )

    # ---- its life ----------------------------------------------------------------------------------

    def deputy(self, now: float) -> list[FromRank]:
        """What its deputy says."""
        said: list[FromRank] = []
        for item in [item for item in self.deputy_writes if item[0] <= now]:
            self.deputy_writes.remove(item)
            order = item[1]
            if order.step not in self.held:
                said.append(Failed(order.seq, order.step, "not held any more"))
            else:
                said.append(self.shard(order.seq, order.step, order.generation))
        return said

    def live(self, now: float, together: int) -> list[FromRank]:
        """Live until *now*: what it says unasked. *together*: the least step that every rank has begun."""
        if not self.alive or now < self.stopped_until:
            self.wake = self.stopped_until if self.alive else NEVER
            return []
        said: list[FromRank] = []
        if self.writing or self.sealing:
            self.disk(now)
        if now >= self.deaf_until:
            self.f, ripe = follow.due(self.f, now)
            said += ripe
            if now >= self.beat_at:
                self.beat_at = now + BEAT_S
                said.append(
                    Beat(self.step, self.pace(), "parked" if self.parked else "") if self.welcome else self.hello()
                )
                if self.spec.stage_every:
                    said.append(Held(1, self.held, 1 << 30, self.spec.write_s))
        self.train(now, together)
        self.heard = False
        self.wake = min(self.beat_at, self.step_done_at if self.free else NEVER, follow.next_due(self.f) or NEVER)
        if self.saving is not None:
            self.wake = min(self.wake, self.saving_until)
        elif self.inside:
            self.wake = min(self.wake, self.hold_until)
        for until, _ in (*self.writing, *self.sealing):
            self.wake = min(self.wake, until)
        return said

    def disk(self, now: float) -> None:
        """What becomes durable."""
        for item in [item for item in self.writing if item[0] <= now]:
            self.writing.remove(item)
            self.durable(item[1], now)
        for until, seal in [item for item in self.sealing if item[0] <= now]:
            self.sealing.remove((until, seal))
            self.laws.sealed(seal, self.world.size)
            self.f = follow.say(self.f, SealWritten(seal.seq, seal.step, seal.generation), now)

    def durable(self, save: follow.Save, now: float) -> None:
        """One shard, or why not."""
        if self.spec.failing and self.rng.random() < self.spec.failing:
            self.f = follow.say(self.f, Failed(save.seq, save.step, "no space left on device"), now)
        else:
            self.f = follow.say(self.f, self.shard(save.seq, save.step, save.generation), now)

    def shard(self, seq: int, step: int, generation: str) -> Shard:
        """The state at *step*, written."""
        self.laws.written(generation, self.number, step)
        return Shard(seq, step, generation, ShardRecord(self.number, f"rank-{self.number:05d}", 1 << 30, f"{step:x}"))

    def train(self, now: float, together: int) -> None:
        """The training thread: a step, a boundary, what it is told to do there."""
        if self.saving is not None:
            if now < self.saving_until:
                return
            save, self.saving = self.saving, None
            self.saved(save, now)
        if not self.inside:
            if now < self.step_done_at or together <= self.step:
                self.step_done_at = max(self.step_done_at, now if together > self.step else now + 0.1)
                return
            self.step += 1
            self.inside = True
            if self.spec.stage_every and not self.f.armed and self.step % self.spec.stage_every == 0:
                self.held = (*self.held, self.step)[-2:]
        elif not self.heard and now < self.hold_until:
            return
        held_at = self.f.duty.held_at if self.f.duty is not None else None
        self.f, todo = follow.arrive(self.f, self.step, now)
        self.hold_until = NEVER
        self.parked = isinstance(todo, (follow.Park, follow.Rest))
        if isinstance(todo, follow.Go):
            self.passed(now, held_at)
            self.inside = False
            self.step_done_at = now + self.spec.step_s
        elif isinstance(todo, follow.Hold):
            self.hold_until = todo.until
        elif isinstance(todo, follow.Save):
            self.saving, self.saving_until = todo, now + STAGE_S + (self.spec.write_s if todo.stop else 0.0)
        elif isinstance(todo, follow.Rest):
            if self.writing:
                self.hold_until = now + 0.1
            elif not self.f.quiesced:
                self.f = follow.say(self.f, Quiesced(todo.seq), now)
        elif isinstance(todo, follow.Leave):
            self.alive, self.exited = False, True

    def passed(self, now: float, held_at: float | None) -> None:
        """Nobody passes a promised boundary undecided before its hold is over."""
        for seq, edge in list(self.promised.items()):
            if self.step >= edge and self.f.over < seq:
                self.laws.passed(self.number, self.step, edge, 0.0 if held_at is None else now - held_at)
                del self.promised[seq]

    def saved(self, save: follow.Save, now: float) -> None:
        """Staged, and durable if it is a stop."""
        self.f = follow.say(self.f, Staged(save.seq, save.step, STAGE_S), now)
        self.heard = True
        if save.stop:
            self.durable(save, now)
        else:
            self.writing.append((now + self.spec.write_s * self.rng.uniform(0.5, 3.0), save))
