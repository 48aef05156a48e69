"""Messages between a node's daemon and its ranks, as frozen values (`wire.py` turns them into frames).

Rules that every message keeps:

1. Durations and step numbers cross a process boundary, instants never do.
2. Every order and every answer to one carries the order's sequence number *seq*, so that a repeat,
   a RESUME and a second outage can be told apart. Seq only grows, also over restarts of the daemon.
3. Receiving a message twice is the same as receiving it once.
4. A step is an *optimizer step just completed*, never a micro-batch.
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct


class Purpose(str, Enum):
    """Why ranks are asked to act at one step."""

    SNAPSHOT = "snapshot"  # stage at T, train on while the copy is written
    STOP = "stop"  # flush at T, park


class Plan(str, Enum):
    """What is saved, by budget."""

    FRESH = "fresh"  # A: the state at the stop step
    STAGED = "staged"  # B: the newest staged generation that all ranks hold
    DURABLE = "durable"  # C: only make durable what exists


class Message(Struct, frozen=True, tag=True, omit_defaults=True, forbid_unknown_fields=False):
    """Base of all messages; the tag is the class name."""


class Pace(Struct, frozen=True, omit_defaults=True):
    """What a rank has measured of itself; seconds, high quantiles; 0 = not measured yet."""

    step_s: float = 0.0
    stage_s: float = 0.0
    write_s: float = 0.0
    fsync_s: float = 0.0
    state_bytes: int = 0


class ShardRecord(Struct, frozen=True, omit_defaults=True):
    """One rank's durable part of a generation."""

    rank: int
    path: str  # of the rank's folder, relative to the generation
    bytes: int  # of all its files
    digest: str  # of the rank's record file, which holds the checksums of the rest


# ---- rank to daemon --------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """Registers a rank; sent at start and again whenever the daemon greets anew."""

    job: str
    rank: int
    local_rank: int
    world_size: int
    pid: int
    directory: str  # where generations go, absolute
    page: str = ""  # the rank's shared page, absolute; "" = none
    unit: str = "optimizer_step"
    version: str = ""
    master: str = ""  # the job's master address
    step: int = -1
    pace: Pace = Pace()
    local_world_size: int = 0  # ranks of the job on this node, as the launcher says; 0 = not known
    seq: int = 0  # the newest order that the rank knows: a daemon without its journal must count on from there


class Beat(Message, frozen=True):
    """Sent about once a second by the listener thread: liveness, step and pace."""

    step: int
    pace: Pace = Pace()
    busy: str = ""  # "", "held", "staging", "writing", "parked", "resuming"


class Promise(Message, frozen=True):
    """The word of a rank: I will not pass boundary *edge* undecided (for at most the hold_max of the PREPARE)."""

    seq: int
    edge: int
    pace: Pace = Pace()


class Ack(Message, frozen=True):
    """Either way: a message was understood and needn't be sent again; *of* is its class name.

    A rank acknowledges orders, the daemon acknowledges deeds (once they are journalled).
    """

    seq: int
    of: str


class Staged(Message, frozen=True):
    """The state at *step* is copied; training may go on if the purpose is SNAPSHOT."""

    seq: int
    step: int
    stage_s: float = 0.0


class Shard(Message, frozen=True):
    """This rank's part of *generation* is durable: data, its record and its folder are fsynced."""

    seq: int
    step: int
    generation: str
    record: ShardRecord
    write_s: float = 0.0
    fsync_s: float = 0.0


class SealWritten(Message, frozen=True):
    """The rank that was asked to seal has made the seal durable."""

    seq: int
    step: int
    generation: str


class Parked(Message, frozen=True):
    """The training thread waits at *step* with an idle device."""

    seq: int
    step: int


class Missed(Message, frozen=True):
    """The decision can't be carried out here (for one: *step* is already past it)."""

    seq: int
    step: int
    why: str


class Failed(Message, frozen=True):
    """Staging or writing failed for good (after retries); *why* is for people."""

    seq: int
    step: int
    why: str


class Quiesced(Message, frozen=True):
    """No data moves to or from this rank any more; it may leave when all are."""

    seq: int


class Held(Message, frozen=True):
    """From a rank's deputy, the process that keeps the rank's staged states: *steps*, ascending, can be made durable
    without the rank, whether it hangs or is dead (plan STAGED).

    Sent on every change, and about once a second. The deputy answers a DECIDE of plan STAGED with SHARD or FAILED, and
    keeps the step that it names until then; so it is sent to living and dead ranks alike.
    """

    pid: int
    steps: tuple[int, ...] = ()
    bytes: int = 0  # of one staged state
    write_s: float = 0.0  # what making one durable is expected to take; 0 = not measured yet


class Bye(Message, frozen=True):
    """A clean leave; *why* is "finished" when training is over."""

    why: str = ""


# ---- daemon to rank --------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """Answers HELLO, or asks for one."""

    node: str
    phase: str
    seq: int  # the newest order so far
    hello: bool = False  # this daemon doesn't know the rank: say HELLO (again)


class Notice(Message, frozen=True):
    """What is coming, for information: seconds of runway left (None = unknown) and the reason."""

    seq: int
    remaining_s: float | None
    reason: str


class Prepare(Message, frozen=True):
    """Asks for a PROMISE. *tag* names the generation of a lone save if the daemon falls silent."""

    seq: int
    event: str
    purpose: Purpose
    hold_max_s: float
    tag: str
    reason: str = ""


class Decide(Message, frozen=True):
    """Act at boundary *step*. Never moved or withdrawn."""

    seq: int
    purpose: Purpose
    plan: Plan
    step: int
    generation: str
    budget_s: float | None = None
    weights: tuple[float, ...] = ()  # by rank: how much of the replicated state it should write; () = all the same


class Seal(Message, frozen=True):
    """Asks one rank of the node to write the seal of *generation* over *shards*."""

    seq: int
    step: int
    generation: str
    world_size: int
    shards: tuple[ShardRecord, ...]


class Sealed(Message, frozen=True):
    """The generation is sealed; older ones may be retired by the retention rule."""

    seq: int
    step: int
    generation: str


class Resume(Message, frozen=True):
    """Order *seq* is over: go on training in place (also sent to release a hold)."""

    seq: int
    reason: str


class Quiesce(Message, frozen=True):
    """The node will halt: finish device work, answer QUIESCED, wait for EXIT."""

    seq: int
    reason: str


class Exit(Message, frozen=True):
    """Every peer is quiesced (or the wait for them is over): leave with *code*."""

    seq: int
    code: int
    reason: str


FromRank = (
    Hello | Beat | Promise | Ack | Staged | Shard | SealWritten | Parked | Missed | Failed | Quiesced | Held | Bye
)
ToRank = Welcome | Notice | Prepare | Decide | Seal | Sealed | Resume | Quiesce | Exit | Ack
