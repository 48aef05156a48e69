"""One job as its coordinator knows it: members, the order underway, and what may be read from them.

Only values and questions; everything that changes them is in `agree.py` (orders and time) and `answers.py`
(what ranks say). A job may span nodes: a member carries its node, everything else goes by rank.
Instants (`_at`) are the `now` of the caller. The value survives a round trip through JSON, so that a daemon
that was restarted goes on with the same order.
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct, field

from powerguard.core.messages import Pace, Plan, Purpose, ShardRecord


class Member(Struct, frozen=True, omit_defaults=True):
    """A process that registered as a rank."""

    rank: int
    world_size: int
    pid: int
    local_rank: int = 0
    node: str = ""  # whose daemon speaks with it; "" = this node's
    directory: str = ""
    page: str = ""
    unit: str = "optimizer_step"
    version: str = ""
    master: str = ""
    registered_at: float = 0.0
    heard_at: float = 0.0
    step: int = -1  # optimizer step last completed, as far as is known
    pace: Pace = Pace()
    busy: str = ""
    seq: int = 0  # the newest order that it knew when it registered here
    staged: tuple[int, ...] = ()  # steps that its deputy can make durable without it, ascending
    staged_write_s: float = 0.0  # what that is expected to take
    deputy_at: float | None = None  # when the deputy was last heard; None = it has none
    gone: str = ""  # "" = alive; else what became of it: "died", "left (finished)"

    @property
    def alive(self) -> bool:
        """The process exists and hasn't taken its leave."""
        return not self.gone


class Due(Struct, frozen=True, omit_defaults=True):
    """When to say it again to one rank that hasn't acknowledged it."""

    tries: int = 0
    at: float = 0.0


class Call(Struct, frozen=True, omit_defaults=True):
    """RESUME, QUIESCE or EXIT on its way to the ranks in *waiting*; the others have answered or are gone."""

    seq: int
    reason: str
    asked_at: float
    code: int = 0
    waiting: dict[int, Due] = field(default_factory=dict)


class Part(Struct, frozen=True, omit_defaults=True):
    """One rank's part in one order."""

    edge: int = -1  # the boundary it promised not to pass undecided; -1 = no promise
    by_page: bool = False  # promised for it, from its shared page: it isn't held
    decided: bool = False  # the decision has arrived there
    staged_at: float | None = None
    shard: ShardRecord | None = None  # durable
    parked: bool = False
    sealed: bool = False  # it knows that the generation is sealed
    anew: bool = False  # its process came after the decision: it is only asked to park
    missed: bool = False  # it was past the stop step
    failed: bool = False  # it tried and couldn't
    trouble: str = ""  # why its shard will not come, in words
    asked: str = ""  # the message it was last sent, by class name
    due: Due = Due()


class Stage(str, Enum):
    """How far an order is."""

    PREPARE = "prepare"  # promises are being collected
    DECIDED = "decided"  # the stop step is known, shards are being written
    SEALING = "sealing"  # every shard is durable, the seal is being written
    SEALED = "sealed"
    LOST = "lost"  # no whole generation comes of it


class Order(Struct, frozen=True, omit_defaults=True):
    """One SNAPSHOT or STOP, from PREPARE to its end."""

    seq: int
    event: str
    purpose: Purpose
    ordered_at: float
    parts: dict[int, Part]  # every rank of the world, registered or not
    reason: str = ""
    budget_s: float | None = None
    stage: Stage = Stage.PREPARE
    stage_at: float = 0.0  # since when it is at that stage
    plan: Plan = Plan.FRESH
    step: int = -1  # the stop step T, once decided; never moved
    generation: str = ""
    sealer: int = -1  # the rank asked to seal
    sealed_by: int = -1  # the rank that wrote the seal; a late answer of one asked earlier counts as well
    sealer_at: float = 0.0
    seal_tries: int = 0
    why: str = ""  # what was lost, or what is odd, in words
    settled: bool = False  # STOP: all living ranks are parked, or waited for long enough
    over: bool = False  # RESUME ended it
    nth: int = 1  # of the STOPs in a row, the first ones lost
    stuck: bool = False  # STOP: lost for want of a rank, or the one before was; what is staged is taken
    weights: tuple[float, ...] = ()  # by rank: how much of the replicated state it should write; () = all the same

    @property
    def tag(self) -> str:
        """Names this attempt in its generation's name; unique as *seq* only grows."""
        return f"{self.event}-{self.seq}"

    @property
    def underway(self) -> bool:
        """A generation may still come of it."""
        return not self.over and self.stage in (Stage.PREPARE, Stage.DECIDED, Stage.SEALING)


class Saved(Struct, frozen=True):
    """The newest generation that this job has sealed."""

    seq: int
    event: str
    step: int
    generation: str
    at: float


class Seat(Struct, frozen=True):
    """One node's place in the succession."""

    node: str
    address: str
    ranks: tuple[int, ...]

    @property
    def lowest(self) -> int:
        """The rank that orders the seats."""
        return self.ranks[0] if self.ranks else 1 << 30


class Want(Struct, frozen=True, omit_defaults=True):
    """What a node's power asks of the job."""

    phase: str = "online"
    stop: bool = False
    halt: bool = False  # the node is halting: its ranks leave, so the job can't go on
    snapshot_s: float | None = None  # seconds since it last wanted a snapshot; None = it wants none
    budget_s: float | None = None  # what a stop may take until it is durable; None = no bound known
    runway_s: float | None = None
    event: str = ""
    reason: str = ""


class Node(Struct, frozen=True, omit_defaults=True):
    """Another node of the job, by its last word."""

    name: str
    address: str = ""
    boot: str = ""
    n: int = -1  # of that word
    heard_at: float | None = None  # None = known from a roster only
    want: Want = Want()
    roster_n: int = 0  # of the roster that it has
    behind: bool = False  # it follows a lower term, or nobody: it is told of ours
    beyond: int = 0  # an order that its ranks obey or wait by, not over, that its leader has not given; 0 = none


NO_LEADER = "?"
"""The leader is the daemon on the job's master address, whose name isn't known yet."""


class Job(Struct, frozen=True, omit_defaults=True):
    """A training job."""

    name: str
    world_size: int
    master: str = ""
    lead: str = ""  # whose word counts, and who is reported to; "" = this node leads
    claimer: str = ""  # who has claimed the lead as *term*, "" = the daemon on the master address
    term: int = 0
    lead_at: float = 0.0  # the leader was last heard then, or turned to
    claimed_at: float | None = None  # this node has claimed the lead and still listens what others know
    passed: tuple[str, ...] = ()  # leaders given up since one was heard
    nodes: dict[str, Node] = field(default_factory=dict)  # the others
    roster: tuple[Seat, ...] = ()
    roster_n: int = 0
    resumed: int = 0  # orders up to this number are over by RESUME
    let_go: bool = False  # a follower's: its leader has said that all may leave
    retry: bool = False  # the order is lost by its leader's loss, or (a follower's) its leader will give another one
    resumed_why: str = ""
    wanted_at: float | None = None  # this node's power last wanted a snapshot
    pace: Pace = Pace()  # a follower's: of the slowest rank of the job
    shards: tuple[ShardRecord, ...] = ()  # a follower's whose rank is to seal
    stopping: tuple[str, ...] = ()  # a follower's: nodes that want the job stopped
    directory: str = ""
    unit: str = "optimizer_step"
    members: dict[int, Member] = field(default_factory=dict)
    order: Order | None = None  # the newest
    earlier: Order | None = None  # a snapshot that a STOP overtook while it was being written
    saved: Saved | None = None
    resume: Call | None = None
    quiesce: Call | None = None
    leave: Call | None = None

    @property
    def outcome(self) -> str:
        """What came of the newest order: "idle" (none, or it is over), "underway", "snapshotted", "parked", "lost"."""
        order = self.order
        if order is None or order.over:
            return "idle"
        if order.stage is Stage.LOST:
            return "lost"
        if order.stage is not Stage.SEALED:
            return "underway"
        if order.purpose is Purpose.SNAPSHOT:
            return "snapshotted"
        return "parked" if order.settled else "underway"

    @property
    def why(self) -> str:
        """The words behind the outcome; "" when there is nothing to say."""
        return self.order.why if self.order is not None else ""

    @property
    def again(self) -> bool:
        """The order is lost because a rank came late to it, and a new one may succeed: all live, none failed to write.
        Or it is lost as a fresh save, and there are staged copies."""
        order = self.order
        if order is None or order.stage is not Stage.LOST or order.over:
            return False
        if self.retry or not self.leads:
            return self.retry
        if order.stuck and order.plan is Plan.FRESH:
            return True
        parts = order.parts.values()
        return complete(self) and any(p.trouble for p in parts) and not any(p.failed for p in parts)

    @property
    def alive(self) -> bool:
        """At least one of its processes lives."""
        return any(member.alive for member in self.members.values())

    @property
    def leads(self) -> bool:
        """This node gives the job's orders."""
        return not self.lead

    @property
    def spans(self) -> bool:
        """Other nodes have a part in it, or should have: a claim was made where none of them was ever heard."""
        return bool(self.lead or self.nodes or self.term)

    @property
    def rankless(self) -> bool:
        """This node leads it, and none of its ranks was ever here, or all have moved away: it can give no order, since
        it has no number that is its own, so it is silent, and a node that has ranks takes over."""
        return self.leads and bool(self.members) and all(member.node for member in self.members.values())


def complete(job: Job) -> bool:
    """Every rank of the world is registered and alive."""
    return all(rank in job.members and job.members[rank].alive for rank in range(job.world_size))


def living(job: Job) -> tuple[int, ...]:
    """Ranks whose process lives, ascending."""
    return tuple(rank for rank in sorted(job.members) if job.members[rank].alive)


def here(job: Job) -> tuple[int, ...]:
    """Ranks of this node whose process lives, ascending."""
    return tuple(rank for rank in living(job) if not job.members[rank].node)


def astray(job: Job) -> int:
    """The newest order by which a rank of this node waits parked, and which this node doesn't know; 0 = none.

    Its daemon has lost its journal since, or another leader gave it while this one was away.
    """
    known = max(job.resumed, 0 if job.order is None else job.order.seq)
    waiting = (member.seq for member in job.members.values() if member.busy == "parked" and member.alive)
    return max((seq for seq in waiting if seq > known), default=0)


def unparked(job: Job) -> tuple[int, ...]:
    """Living ranks of the STOP underway that don't yet wait with an idle device."""
    order = job.order
    if order is None or order.purpose is not Purpose.STOP:
        return ()
    return tuple(rank for rank in living(job) if rank in order.parts and not order.parts[rank].parked)


def not_durable(job: Job) -> tuple[int, ...]:
    """Ranks whose part of the newest order isn't on disk."""
    if job.order is None:
        return ()
    return tuple(rank for rank, part in sorted(job.order.parts.items()) if part.shard is None)


def quiet(job: Job) -> bool:
    """Every living member has said QUIESCED to the newest QUIESCE (True as well when none lives)."""
    if not job.leads:
        return job.let_go or not living(job)  # the leader has seen that all of them are
    if job.quiesce is None:
        return not living(job)
    return not any(rank in job.quiesce.waiting for rank in living(job))


def fresh_s(job: Job, order: Order, step: int) -> float | None:
    """Measured seconds from now to a durable generation at *step*, by the slowest rank; None: one hasn't measured."""
    worst = 0.0
    for rank in order.parts:
        member = job.members.get(rank)
        if member is None or member.pace.write_s <= 0.0:
            return None
        pace = member.pace
        steps = max(0, step - member.step)
        worst = max(worst, steps * pace.step_s + pace.stage_s + pace.write_s + pace.fsync_s)
    return worst


def writing_s(job: Job, now: float) -> float:
    """Seconds that the snapshots being written still need, by the slowest rank's own measure; 0 = none is."""
    worst = 0.0
    for order in (job.order, job.earlier):
        if order is None or order.stage is Stage.SEALED:
            continue
        for rank, part in order.parts.items():
            member = job.members.get(rank)
            if member is None or not member.alive or part.staged_at is None or part.shard is not None or part.failed:
                continue
            worst = max(worst, part.staged_at + member.pace.write_s + member.pace.fsync_s - now)
    return worst
