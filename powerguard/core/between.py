"""What the daemons of one job's nodes tell each other, as frozen values. Pure.

One daemon leads a job: the one on the job's master address, or its successor. The others follow. There are two words:

    REPORT   node -> leader   all that the node knows of its own ranks and of their orders, and what its power wants
    COURSE   leader -> node   where the job's orders are: every node orders, asks and answers its own ranks by it

Rules:

1. A word is the whole of what its sender knows, and the next one replaces it. So there are no acknowledgements and no
   lists of what is in flight: what a rank did is acknowledged by its own daemon, once that is journalled, and stands in
   every REPORT from then on. Loss costs time, a repeat nothing.
2. *n* grows within a *boot* of the sender, over restarts of its daemon too; a word that isn't newer than the last one
   of that sender about that job is dropped, so reordering is loss. A word of another boot begins a new count.
3. Durations and step numbers cross nodes, instants never do (*n* is only ever compared with another *n* of its sender).
4. *term* numbers the claims to lead. A term is claimed once, by one node: it is congruent to the node's lowest rank
   modulo the world size, and so is every order's *seq* that the node gives to a job of several nodes. Nobody follows
   a lower term than it knows; a leader that hears of a higher one steps down.
5. An order whose DECIDE somebody knows is continued by a successor as it is: same seq, same step, same generation. One
   that nobody knows to be decided gets a new number and a new PREPARE. So a decision never moves, and two leaders
   (of two halves of a network) never speak of one generation.
6. The first leader is the daemon on the master address, term 0. A node that hears nothing of its leader for
   `LEAD_SILENT_S` reports to the next seat of the roster (ascending lowest rank, the silent one left out), and so on
   until it comes to itself: then it claims the lead. The roster came with COURSE, so it is the same everywhere.
7. A job stops when one node wants it to, trains on when none does, leaves when one must halt. `budget_s` of an order is
   the least over the nodes.

Limits: a REPORT is at most 1 MiB (1,024 ranks a node), a COURSE 16 MiB (65,536 ranks; it holds the roster only for a
node that hasn't got it, and shard records only for the node whose rank is to seal). The sender's name is the one that
its key was registered under: a word whose *node* is another is dropped by whoever takes it off the wire.

Fed in as `Observation.peers` (`PeerReport(node, at, message)`), got out by `gossip.words` after each decision and at
least every `GOSSIP_S` seconds.
"""

from __future__ import annotations

from msgspec import Struct

from powerguard.core.job import Part, Saved, Seat, Stage, Want
from powerguard.core.messages import Message, Pace, Plan, Purpose, ShardRecord

REPORT_BYTES = 1 << 20
COURSE_BYTES = 16 << 20
RANKS_PER_NODE = 1024
NODES = 4096
WORLD = 65536

SEQ_MAX = 2**40
"""No rank and no node makes a daemon count on from beyond: seconds since boot and a boot's orders stay far below."""

TERM_MAX = 2**32
"""The same of claims to lead."""

GOSSIP_S = 1.0
"""A word at least every so often, and at once when there is news; the silence of a peer is measured by it."""

GOSSIP_FAST_S = 0.5
"""The same while an order is under way."""

CLAIM_S = 2.0
"""So long a new leader listens what the others know of the order at hand, unless all have said it before."""

NODE_LOST_S = 20.0
"""A shard of a node silent for so long isn't waited for."""

NODE_GONE_S = 60.0
"""A node that had to stop and is silent for so long has halted: the job can't go on."""

SNAPSHOT_MERGE_S = 30.0
"""A snapshot so recent also serves a node that wants one now: an outage reaches its nodes within seconds."""

LEAD_SILENT_S = 4.0
"""Without a word of the leader for so long, a node turns to its successor: long enough for systemd to have started a
killed daemon anew, short enough that a rank's `hold_max_s` of 15 s isn't over after two successors."""


class Word(Message, frozen=True, kw_only=True):
    """Base of both: who says it, of which job, and how new it is."""

    node: str
    boot: str
    n: int
    job: str
    term: int  # the highest claim to lead that the sender knows; its own, if it leads
    claimer: str = ""  # who has claimed it; "" = the daemon on the master address
    claimer_address: str = ""
    world_size: int
    address: str = ""  # where the sender's daemon takes words from others
    seq: int = 0  # the newest order number that the sender knows


class RankState(Struct, frozen=True, omit_defaults=True):
    """A rank, as its own node's daemon knows it."""

    rank: int
    pid: int
    step: int = -1
    local_rank: int = 0
    pace: Pace = Pace()
    busy: str = ""
    gone: str = ""  # "" = alive
    staged: tuple[int, ...] = ()
    staged_write_s: float = 0.0
    deputy: bool = False
    quiet: bool = False  # it has answered the newest QUIESCE


class OrderState(Struct, frozen=True, omit_defaults=True):
    """An order without its parts and without instants."""

    seq: int
    event: str
    purpose: Purpose
    stage: Stage = Stage.PREPARE
    reason: str = ""
    budget_s: float | None = None
    plan: Plan = Plan.FRESH
    step: int = -1  # the stop step, or the staged step that is saved; -1 = not decided
    generation: str = ""
    age_s: float = 0.0  # since it was ordered
    stage_s: float = 0.0  # since it came to its stage
    sealer: int = -1
    sealed_by: int = -1
    why: str = ""
    settled: bool = False
    over: bool = False
    nth: int = 1
    weights: tuple[tuple[int, float], ...] = ()  # of the order, by runs: so many ranks in a row, what each weighs


class RankPart(Struct, frozen=True):
    """A rank's part in an order; *part* without its instants."""

    rank: int
    part: Part


class OrderReport(Struct, frozen=True):
    """An order as a follower knows it, with the parts of its own ranks."""

    order: OrderState
    parts: tuple[RankPart, ...] = ()


class Report(Word, frozen=True, kw_only=True):
    """A node to whoever leads the job."""

    directory: str = ""
    unit: str = "optimizer_step"
    ranks: tuple[RankState, ...] = ()
    want: Want = Want()
    order: OrderReport | None = None
    earlier: OrderReport | None = None
    saved: Saved | None = None  # its instant is 0
    roster_n: int = 0  # of the roster that it has
    astray: int = 0  # an order by which a rank of it waits parked, and which it doesn't know; 0 = none


class Farewell(Struct, frozen=True, omit_defaults=True):
    """QUIESCE, or EXIT with *code*."""

    seq: int
    reason: str
    code: int = 0


class Course(Word, frozen=True, kw_only=True):
    """The leader of a job to one of its nodes."""

    order: OrderState | None = None
    earlier: OrderState | None = None
    resumed: int = 0  # orders up to this number are over by RESUME
    resumed_why: str = ""
    retry: bool = False  # the order is lost, and another one will be given
    quiesce: Farewell | None = None
    leave: Farewell | None = None  # present only when every rank of every node may leave
    saved: Saved | None = None
    pace: Pace = Pace()  # of the slowest rank of the job, each number by itself
    stopping: tuple[str, ...] = ()  # nodes that want the job stopped, for a successor
    shards: tuple[ShardRecord, ...] = ()  # for the node of the rank that is to seal
    roster_n: int = 0
    roster: tuple[Seat, ...] = ()  # only for a node that reports another roster_n


FromPeer = Report | Course
BetweenNodes = FromPeer


class PeerReport(Struct, frozen=True):
    """A word of another node's daemon, with the name that its key stands for."""

    node: str
    at: float
    message: FromPeer


class SendPeer(Struct, frozen=True):
    """Give *message* to the daemon of *node*. *address* is where it is, for a first contact: a host, or host:port.

    *node* is "" where only the job's master address is known yet.
    """

    node: str
    address: str
    message: FromPeer
