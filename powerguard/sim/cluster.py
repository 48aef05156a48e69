"""A job over several nodes on one clock, seeded: a network that loses, repeats, reorders, delays and splits, daemons,
ranks and nodes that die and come back, mains that fail and return. The daemons decide with the real core, the ranks
obey with the real core; `laws.py` watches.

    cluster = Cluster(plan)     # plan: `sim/chances.py` draws one from a seed
    cluster.run()               # raises Breach where a law is broken

Each node has a disk that all share, and a UPS of its own that says what its `Outage` is. What happens is a `Run`
(`fates.py`); the network is `network.py`.
"""

from __future__ import annotations

from random import Random

from powerguard.core import gossip
from powerguard.core.between import Course, PeerReport
from powerguard.core.decide import decide
from powerguard.core.job import quiet
from powerguard.core.lawful import check
from powerguard.core.messages import Beat, Decide, Exit, FromRank, Held, Plan, ToRank
from powerguard.core.poll import poll_wait
from powerguard.core.state import Decision, State, memorable
from powerguard.core.types import Halt, Observation, PageReport, Phase, RankReport, Sample, Send
from powerguard.sim.fates import Fall, Mishap, Run
from powerguard.sim.laws import Laws
from powerguard.sim.network import Network
from powerguard.sim.ranks import NEVER, Rank, World
from powerguard.sim.sim_node import BEGIN, SimNode

JOB = "job"
OFF_S = 3.0
"""From the power-off order until the node is off."""

END_S = 150.0
"""With everything whole again, all must have ended within this: 60 s until a silent node counts as halted, a flush
given up after `flush_max_s` and tried again, and the halts that follow."""


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
        self.net = Network(plan, self.rng)
        self.ipc: list[tuple[float, Rank, int, ToRank]] = []  # to deaf ranks, later
        self.mishaps = sorted(plan.mishaps, key=lambda mishap: mishap.window.at)
        self.falls = list(plan.falls)
        self.reborn: list[tuple[float, int]] = []
        self.decides = 0
        self.begins_at = BEGIN
        self.ended_at: float | None = None
        self.plans: set[Plan] = set()
        self.paused = False  # training, in a silence

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
        elif mishap.kind == "hung":
            rank.step_done_at = max(rank.step_done_at, until)
        else:
            rank.stopped_until = rank.wake = until

    # ---- what arrives ------------------------------------------------------------------------------

    def deliver(self, now: float) -> None:
        """What has arrived."""
        for _, sender, to, word in self.net.arrived(now):
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
            samples = (node.sample(now),)
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

    def decide(self, node: SimNode, seen: Observation, now: float) -> None:
        """Decide, check, journal, act, tell the others: the daemon's loop."""
        before = node.state
        decision = decide(self.policy, before, seen, now)
        check(self.policy, before, decision, now)
        self.decides += 1
        self.paused = self.paused or decision.state.view.pause_at is not None
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
                self.net.post(node.number, send, now)
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
