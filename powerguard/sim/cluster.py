"""A job over several nodes on one clock, seeded: a network that loses, repeats, reorders, delays and splits, daemons,
ranks and nodes that die and come back, mains that fail and return. The daemons decide with the real core, the ranks
obey with the real core; `laws.py` watches.

    cluster = Cluster(plan)     # plan: `sim/chances.py` draws one from a seed
    cluster.run()               # raises Breach where a law is broken

Each node has a disk that all share, and a UPS of its own that says what its `Outage` is.
"""

from __future__ import annotations

from random import Random

import msgspec
from msgspec import Struct

from powerguard.core import gossip
from powerguard.core.between import BetweenNodes, Course, PeerReport, SendPeer
from powerguard.core.decide import decide
from powerguard.core.job import quiet
from powerguard.core.lawful import check
from powerguard.core.messages import Beat, Decide, Exit, FromRank, Held, Plan, ToRank
from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.poll import poll_wait
from powerguard.core.state import Decision, State, initial, memorable
from powerguard.core.types import Comm, Halt, Observation, PageReport, Phase, RankReport, Sample, Send
from powerguard.sim.laws import Laws
from powerguard.sim.ranks import NEVER, Rank, Spec, World

JOB = "job"
BEGIN = 100.0
OFF_S = 3.0
"""From the power-off order until the node is off."""

END_S = 150.0
"""With everything whole again, all must have ended within this: 60 s until a silent node counts as halted, a flush
given up after `flush_max_s` and tried again, and the halts that follow."""

POLICY = Policy(
    feeds=(FeedPolicy("ups"),),
    on_battery="park",
    snapshot_after_s=2.0,
    snapshot="always",
    resume_after_s=2.0,
    prepare_max_s=1.0,
    hold_max_s=6.0,
    seal_max_s=2.0,
    exit_wait_s=4.0,
    flush_max_s=15.0,
    park_max_s=8.0,
    flush_default_s=2.0,
    halt_s=2.0,
    margin_s=1.0,
)


class Outage(Struct, frozen=True):
    """The mains of one node fail at *at*, and are back at *back* (None: never)."""

    at: float = NEVER
    back: float | None = None
    low_at: float = NEVER  # the UPS says LB from here on
    fsd_at: float = NEVER  # the NUT primary orders the shutdown


class Window(Struct, frozen=True):
    """From *at* for *for_s*."""

    at: float
    for_s: float

    def holds(self, now: float) -> bool:
        """Whether it is on now."""
        return self.at <= now < self.at + self.for_s


class Split(Struct, frozen=True):
    """Nodes in *apart* hear nobody outside, and nobody outside hears them; *one_way*: they are still heard."""

    window: Window
    apart: frozenset[int]
    one_way: bool = False


class Fall(Struct, frozen=True):
    """The daemon that leads is lost at the moment at which its order comes to *stage* ("quiesce": at that)."""

    stage: str
    told: float = 0.0  # share of its words that still set out
    away_s: float = 1.0  # NEVER: it doesn't come back
    dark: bool = False  # the whole node is gone, for good


class Mishap(Struct, frozen=True):
    """Something that befalls a node, a daemon or a rank."""

    kind: str  # "daemon" (killed), "memory" (killed, its journal lost), "dark", "rank" (killed), "deaf", "stopped"
    which: int
    window: Window  # away, deaf or stopped for so long; a rank with for_s >= NEVER is not started anew


class Run(Struct, frozen=True):
    """One run, wholly: with the seed it says everything that will happen."""

    seed: int
    nodes: int = 2
    per_node: int = 1
    spec: Spec = Spec()
    policy: Policy = POLICY
    loss: float = 0.0
    twice: float = 0.0
    delay_s: float = 0.02
    late_s: float = 0.0  # some messages are so much later: they come out of order
    splits: tuple[Split, ...] = ()
    mishaps: tuple[Mishap, ...] = ()
    falls: tuple[Fall, ...] = ()
    outages: tuple[Outage, ...] = ()  # by node
    starts: tuple[float, ...] = ()  # when each rank starts
    coupled: bool = True  # a step has a collective in it
    dt: float = 0.3  # between two looks at the world
    calm_at: float = 20.0  # from here on (after the beginning) nothing fails any more
    on_wire: bool = False  # every word goes through its bytes

    @property
    def quiet(self) -> bool:
        """Nothing fails but the mains."""
        return not (self.loss or self.late_s or self.splits or self.mishaps or self.falls or self.spec.failing)


class SimNode:
    """One node: its daemon with what has come in and not been read yet."""

    def __init__(self, number: int, plan: Run) -> None:
        self.number, self.name = number, f"n{number}"
        self.boot = f"{plan.seed:06x}{number:02x}"
        self.state = self.fresh(BEGIN)
        self.journal = self.state
        self.said = gossip.Said()
        self.up_at = BEGIN
        self.next_at = BEGIN
        self.pages_at = self.polled_at = 0.0
        self.reports: list[RankReport] = []
        self.beats: list[RankReport] = []
        self.words: list[PeerReport] = []
        self.off_at: float | None = None
        self.powered = True
        self.outage_seen = False
        self.let_go = False  # its leader has said that all may leave

    def fresh(self, now: float) -> State:
        """A daemon that remembers nothing."""
        return initial(self.boot, now + 50.0 * self.number, node=self.name, addresses=(self.name,))

    def killed(self, until: float, *, forgets: bool, now: float) -> None:
        """What it had not read is lost; it begins with its journal, through its bytes."""
        self.up_at = self.next_at = until
        self.reports, self.beats, self.words = [], [], []
        self.said = gossip.Said()
        if forgets:
            self.journal = self.fresh(now)
        self.state = msgspec.json.decode(msgspec.json.encode(self.journal), type=State)


class Cluster:
    """See the module."""

    def __init__(self, plan: Run) -> None:
        self.plan, self.policy, self.rng = plan, plan.policy, Random(plan.seed)
        self.now = BEGIN
        self.laws = Laws(hold_max_s=plan.policy.hold_max_s)
        self.nodes = [SimNode(number, plan) for number in range(plan.nodes)]
        self.ranks: list[Rank] = []
        world = plan.nodes * plan.per_node
        for number in range(world):
            rank = Rank(number, World(JOB, world, plan.per_node, "n0"), plan.spec, self.laws, self.rng)
            rank.wake = BEGIN + (plan.starts[number] if plan.starts else 0.0)
            rank.beat_at = rank.step_done_at = rank.wake
            self.ranks.append(rank)
        self.net: list[tuple[float, int, int, BetweenNodes]] = []  # (at, from, to, word)
        self.ipc: list[tuple[float, Rank, int, ToRank]] = []  # to deaf ranks, later
        self.mishaps = sorted(plan.mishaps, key=lambda mishap: mishap.window.at)
        self.falls = list(plan.falls)
        self.reborn: list[tuple[float, int]] = []
        self.decides = self.sent = 0
        self.begins_at = BEGIN
        self.ended_at: float | None = None
        self.plans: set[Plan] = set()

    # ---- time --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until everything has ended, or a law is broken."""
        calm_at = BEGIN + self.plan.calm_at
        look_at = calm_at
        while True:
            self.tick()
            if self.now >= look_at:
                look_at = self.now + 1.0
                stuck = self.stuck()
                if not stuck:
                    self.ended_at = self.now
                    break
                if self.now >= calm_at + END_S:
                    self.laws.ended(stuck, END_S)
        self.last_words()

    def tick(self) -> None:
        """The next instant."""
        self.now = now = round(self.now + self.plan.dt, 3)
        while self.mishaps and self.mishaps[0].window.at + BEGIN <= now:
            self.befall(self.mishaps.pop(0))
        for item in [item for item in self.reborn if item[0] <= now]:
            self.reborn.remove(item)
            rank = self.ranks[item[1]]
            if self.node_of(rank).powered:
                rank.begin(now, max(-1, rank.step - self.rng.randrange(3)))
        self.deliver(now)
        together = self.together()
        for rank in self.ranks:
            if rank.deputy_writes:
                self.take(rank, rank.deputy(now))
            if rank.wake <= now:
                self.take(rank, rank.live(now, together))
        for node in self.nodes:
            self.live(node, now)

    def together(self) -> int:
        """The least step that every rank has begun."""
        if not self.plan.coupled:
            return 1 << 60
        least = 1 << 60
        for rank in self.ranks:
            if not rank.alive or rank.wake > 1e17:
                return -1
            begun = rank.begun
            least = min(least, begun)
        return least

    def node_of(self, rank: Rank) -> SimNode:
        """Where a rank lives."""
        return self.nodes[rank.number // self.plan.per_node]

    def take(self, rank: Rank, said: list[FromRank]) -> None:
        """What a rank says to its daemon."""
        node = self.node_of(rank)
        if self.now < node.up_at or not node.powered:
            return
        for message in said:
            report = RankReport(JOB, rank.number, self.now, message)
            (node.beats if isinstance(message, (Beat, Held)) else node.reports).append(report)

    # ---- what goes wrong ---------------------------------------------------------------------------

    def befall(self, mishap: Mishap) -> None:
        """A mishap begins."""
        until = self.now + mishap.window.for_s
        if mishap.kind == "dark":
            self.power_off(self.nodes[mishap.which])
            return
        if mishap.kind in {"daemon", "memory"}:
            node = self.nodes[mishap.which]
            if node.powered:
                node.killed(until, forgets=mishap.kind == "memory", now=self.now)
            return
        rank = self.ranks[mishap.which]
        if mishap.kind == "rank":
            if rank.alive:
                rank.alive, rank.wake = False, NEVER
                if mishap.window.for_s < NEVER:
                    self.reborn.append((until, rank.number))
        elif mishap.kind == "deaf":
            rank.deaf_until = until
        else:
            rank.stopped_until = rank.wake = until

    def cut(self, sender: int, to: int) -> bool:
        """Whether a split keeps a word from its way."""
        for split in self.plan.splits:
            if not split.window.holds(self.now - BEGIN) or (sender in split.apart) == (to in split.apart):
                continue
            if not (split.one_way and sender in split.apart):
                return True
        return False

    # ---- the network -------------------------------------------------------------------------------

    def post(self, sender: SimNode, send: SendPeer) -> None:
        """A word sets out."""
        name = send.node or send.address
        if not name.startswith("n"):
            return
        to = int(name[1:])
        self.sent += 1
        calm = self.now >= BEGIN + self.plan.calm_at
        message = send.message
        if self.plan.on_wire:
            message = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=BetweenNodes)
        rng, plan = self.rng, self.plan
        for _ in range(1 if calm or rng.random() >= plan.twice else 2):
            if not calm and (rng.random() < plan.loss or self.cut(sender.number, to)):
                continue
            late = plan.late_s * rng.random() if not calm and rng.random() < 0.2 else 0.0
            self.net.append((self.now + plan.delay_s * rng.random() + late, sender.number, to, message))

    def deliver(self, now: float) -> None:
        """What has arrived."""
        if self.net:
            ripe = [item for item in self.net if item[0] <= now]
            self.net = [item for item in self.net if item[0] > now]
            for _, sender, to, word in sorted(ripe, key=lambda item: item[0]):
                node = self.nodes[to]
                if node.powered and now >= node.up_at:
                    node.words.append(PeerReport(self.nodes[sender].name, now, word))
        if self.ipc:
            waiting, self.ipc = self.ipc, []
            for at, rank, pid, message in waiting:
                if at > now or rank.deaf(now):
                    self.ipc.append((at, rank, pid, message))
                elif rank.alive and rank.pid == pid:
                    self.take(rank, rank.hear(message, now))

    # ---- a node ------------------------------------------------------------------------------------

    def live(self, node: SimNode, now: float) -> None:
        """The power, and a turn of the daemon's loop if there is something to do."""
        if not node.powered:
            return
        if node.off_at is not None and now >= node.off_at:
            self.power_off(node)
            return
        if now < node.up_at:
            return
        if not (node.reports or node.words or now >= node.next_at):
            return
        samples: tuple[Sample, ...] = ()
        poll_s = self.policy.poll_online_s if node.state.phase is Phase.ONLINE else self.policy.poll_battery_s
        if now >= node.polled_at + poll_s:
            node.polled_at = now
            samples = (self.sample(node, now),)
        pages: tuple[PageReport, ...] = ()
        if now >= node.pages_at + 1.0:
            node.pages_at = now
            first = node.number * self.plan.per_node
            pages = tuple(
                PageReport(JOB, rank.number, now, rank.step, rank.alive, rank.pid)
                for rank in self.ranks[first : first + self.plan.per_node]
            )
        reports = (*node.reports, *node.beats)
        seen = Observation(samples, reports, pages, peers=tuple(node.words))
        node.let_go = node.let_go or any(
            isinstance(word.message, Course) and word.message.leave is not None for word in node.words
        )
        node.reports, node.beats, node.words = [], [], []
        self.decide(node, seen, now)

    def sample(self, node: SimNode, now: float) -> Sample:
        """What its UPS says."""
        outages = self.plan.outages
        outage = outages[node.number] if node.number < len(outages) else Outage()
        since = now - BEGIN
        out = since >= outage.at and (outage.back is None or since < outage.back)
        node.outage_seen = node.outage_seen or out
        status = ["OB", "DISCHRG"] if out else ["OL"]
        if out and since >= outage.low_at:
            status.append("LB")
        if out and since >= outage.fsd_at:
            status.insert(0, "FSD")
        left = max(20.0, 300.0 - max(0.0, since - outage.at)) if out else 300.0
        values = {"ups.status": " ".join(status), "battery.charge": f"{left / 3:.0f}", "battery.runtime": f"{left:.0f}"}
        return Sample("ups", now, Comm.OK, values)

    def decide(self, node: SimNode, seen: Observation, now: float) -> None:
        """Decide, check, journal, act, tell the others: the daemon's loop."""
        before = node.state
        decision = decide(self.policy, before, seen, now)
        check(self.policy, before, decision, now)
        self.decides += 1
        node.state = decision.state
        if memorable(before, decision.state) or decision.actions:
            node.journal = decision.state
        self.look(node, before, decision, now)
        share = 1.0
        fall = self.falls[0] if self.falls else None
        if fall is not None and now < BEGIN + self.plan.calm_at and self.reached(fall, before, decision.state):
            self.falls.pop(0)
            share = fall.told
        for action in decision.actions:
            if isinstance(action, Send):
                if share >= 1.0 or self.rng.random() < share:
                    self.tell(action, now)
            elif isinstance(action, Halt):
                self.laws.halted(node.name, powered=not node.outage_seen)
                node.off_at = now + OFF_S
        node.said, sends = gossip.words(self.policy, node.state, node.said, now)
        for send in sends:
            if share >= 1.0 or self.rng.random() < share:
                self.post(node, send)
        if fall is not None and share < 1.0:
            if fall.dark:
                self.power_off(node)
            else:
                node.killed(now + fall.away_s, forgets=False, now=now)
            return
        wait_s = poll_wait(self.policy, node.state, now)
        again = gossip.next_at(node.state, node.said)
        node.next_at = now + wait_s if again is None else max(now + self.plan.dt, min(now + wait_s, again))

    @staticmethod
    def reached(fall: Fall, before: State, after: State) -> bool:
        """Whether the leader has just come to the point at which it is to be lost."""
        job, old = after.jobs.get(JOB), before.jobs.get(JOB)
        if job is None or not job.leads:
            return False
        if fall.stage == "quiesce":
            return job.quiesce is not None and (old is None or old.quiesce is None)
        was = None if old is None or old.order is None else (old.order.seq, old.order.stage)
        order = job.order
        return order is not None and order.stage.value == fall.stage and was != (order.seq, order.stage)

    def tell(self, send: Send, now: float) -> None:
        """A word to a rank of the node, and to its deputy."""
        rank = self.ranks[send.rank]
        message = send.message
        if isinstance(message, Decide):
            self.plans.add(message.plan)
            if message.plan is Plan.STAGED and self.plan.spec.stage_every:
                rank.ask_deputy(message, now)
        if rank.alive:
            self.ipc.append((now + self.plan.dt / 2, rank, rank.pid, message))

    def power_off(self, node: SimNode) -> None:
        """The node is off, and everything on it."""
        node.powered = False
        first = node.number * self.plan.per_node
        for rank in self.ranks[first : first + self.plan.per_node]:
            rank.alive, rank.wake = False, NEVER

    # ---- what is looked at -------------------------------------------------------------------------

    def look(self, node: SimNode, before: State, decision: Decision, now: float) -> None:
        """The laws that a decision may break."""
        state = decision.state
        job, old = state.jobs.get(JOB), before.jobs.get(JOB)
        if job is None or job is old:
            return
        order = job.order
        if order is not None:
            if order.step >= 0:
                self.laws.decided(order.seq, order.step, order.generation, node.name)
            if job.outcome in {"snapshotted", "parked"} and job.leads:
                self.laws.whole(order.generation, order.step, len(self.ranks), node.name)
        left = {send.rank for send in decision.actions if isinstance(send, Send) and isinstance(send.message, Exit)}
        told = job.leads or not node.let_go  # not by its leader, which was looked at there
        if left and told and (old is None or old.leave is None or not old.leads or not quiet(old)):
            asked_at = now if job.quiesce is None else job.quiesce.asked_at
            known = {rank: member.pid for rank, member in job.members.items() if member.alive}
            moving = [
                rank.number
                for rank in self.ranks
                if rank.alive and not rank.f.quiesced and known.get(rank.number) == rank.pid and rank.f.exit is None
            ]
            wait_s = min(2.0, self.policy.exit_wait_s) if state.view.fsd_at is not None else self.policy.exit_wait_s
            self.laws.left(min(left), moving, now - asked_at, wait_s)

    @staticmethod
    def cared_for(node: SimNode) -> bool:
        """It has power, and a daemon or one to come."""
        return node.powered and node.up_at < NEVER

    def stuck(self) -> list[str]:
        """What hasn't ended: nodes in an event, ranks that are kept from training."""
        found = [
            f"{node.name} is {node.state.phase.value}"
            for node in self.nodes
            if self.cared_for(node) and (node.state.phase is not Phase.ONLINE or self.now < node.up_at)
        ]
        if self.reborn:
            found.append("a rank is still to be started")
        for rank in self.ranks:
            if not rank.alive or not self.cared_for(self.node_of(rank)):
                continue
            duty = rank.f.duty
            if rank.parked or rank.saving is not None or (rank.inside and rank.f.armed):
                found.append(f"rank {rank.number} waits at {rank.step} for {duty.seq if duty else 'nobody'}")
        for node in self.nodes:
            job = node.state.jobs.get(JOB) if self.cared_for(node) else None
            if job is not None and job.leads and job.order is not None and job.order.underway:
                found.append(f"{node.name} has order {job.order.seq} {job.order.stage.value}")
        return found

    def last_words(self) -> None:
        """What a run must have come to where nothing failed but the mains."""
        for generation, step in self.laws.seals.items():
            self.laws.whole(generation, step, len(self.ranks), "the seal")
