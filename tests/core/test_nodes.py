"""A job of several nodes: who leads it, what words change, what is never changed by any."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from powerguard.core import agree, demand, follow, gossip, hearsay, reported, seats, serve
from powerguard.core.between import (
    COURSE_BYTES,
    GOSSIP_S,
    LEAD_SILENT_S,
    NODE_GONE_S,
    REPORT_BYTES,
    WORLD,
    BetweenNodes,
    Course,
    Farewell,
    OrderReport,
    OrderState,
    PeerReport,
    RankPart,
    RankState,
    Report,
)
from powerguard.core.decide import decide
from powerguard.core.job import NO_LEADER, Job, Member, Node, Order, Part, Saved, Seat, Stage, Want
from powerguard.core.messages import (
    Ack,
    Beat,
    Decide,
    Hello,
    Pace,
    Parked,
    Plan,
    Prepare,
    Purpose,
    Quiesce,
    Resume,
    Shard,
    ShardRecord,
)
from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.state import State, initial
from powerguard.core.types import Comm, Observation, Phase, RankReport, Sample, Send

POLICY = Policy(feeds=(FeedPolicy("ups"),), prepare_max_s=1.0)
NOW = 1000.0
JOB = "gpt"
NUMBER = int(NOW) + 2002
"""Of an order of another node, which is up for longer."""


def node(name: str, *, job: Job | None = None) -> State:
    """A daemon's state on node *name*, ONLINE."""
    state = initial("b" + name, NOW, node=name, addresses=(f"{name}:7000",))
    return state if job is None else replace(state, jobs={JOB: job})


def member(rank: int, on: str = "", **more) -> Member:
    """A living rank, on another node or on this one."""
    return Member(rank=rank, world_size=4, pid=10 + rank, node=on, registered_at=NOW, heard_at=NOW, **more)


def led(**more) -> Job:
    """A job of 4 ranks, two here and two on node b, led here."""
    members = {rank: member(rank, "" if rank < 2 else "b") for rank in range(4)}
    nodes = {"b": Node("b", "b:7000", "bb", 1, NOW)}
    return replace(Job(JOB, 4, members=members, nodes=nodes, master="a"), **more)


def followed(**more) -> Job:
    """The same on node b, which follows a."""
    return replace(
        Job(JOB, 4, members={rank: member(rank) for rank in (2, 3)}, master="a", lead="a", lead_at=NOW), **more
    )


def order(seq: int = 4, purpose: Purpose = Purpose.STOP, **more) -> Order:
    """An order for all four ranks."""
    made = Order(seq, "ev", purpose, NOW, {rank: Part() for rank in range(4)}, stage_at=NOW)
    return replace(made, **more)


def report(n: int = 2, **more) -> Report:
    """What node b says of its ranks 2 and 3."""
    ranks = (RankState(2, 12, step=7), RankState(3, 13, step=7))
    plain = Report(node="b", boot="bb", n=n, job=JOB, term=0, world_size=4, address="b:7000", ranks=ranks)
    return replace(plain, **more)


def course(n: int = 2, **more) -> Course:
    """What leader a says."""
    return replace(Course(node="a", boot="ba", n=n, job=JOB, term=0, world_size=4, address="a:7000"), **more)


def heard(state: State, *words: Report | Course, at: float = NOW) -> State:
    """The state after these words, each under its own sender's name."""
    return hearsay.absorb(state, [PeerReport(word.node, at, word) for word in words], at)


def shard(rank: int) -> ShardRecord:
    """A durable part."""
    return ShardRecord(rank, f"rank-{rank:05d}", 100, "d")


# ---- who leads ---------------------------------------------------------------------------------------


def hello(rank: int = 0, *, master: str, local: int = 2, world: int = 4) -> Observation:
    """A rank registers."""
    message = Hello(JOB, rank, rank, world, 100 + rank, "/c", master=master, local_world_size=local)
    return Observation(reports=(RankReport(JOB, rank, NOW, message),))


@pytest.mark.parametrize(
    ("master", "local", "lead"),
    [
        ("", 2, ""),
        ("a", 2, ""),
        ("a:29500", 2, ""),
        ("localhost", 2, ""),
        ("127.0.0.1:29500", 2, ""),
        ("elsewhere", 2, NO_LEADER),
        ("elsewhere", 4, ""),
    ],
)
def test_the_daemon_on_the_master_address_leads(master, local, lead):
    """No configuration: the address names the leader; a job that is wholly here needs no other."""
    state = decide(POLICY, node("a"), hello(master=master, local=local), NOW).state

    assert lead == state.jobs[JOB].lead


def test_another_name_of_this_node_is_found_out():
    """Its own word that comes back, or the shell's, tells that the master address is this node's."""
    state = decide(POLICY, node("a"), hello(master="alias"), NOW).state
    (send,) = gossip.words(POLICY, state, gossip.Said(), NOW)[1]

    assert ("", "alias") == (send.node, send.address)
    assert heard(state, send.message).jobs[JOB].leads
    known = decide(POLICY, node("a"), replace(hello(master="alias"), here=("alias",)), NOW).state
    assert known.jobs[JOB].leads
    later = decide(POLICY, state, Observation(here=("alias",)), NOW + 1.0).state  # names take their time
    assert later.jobs[JOB].leads


def test_a_node_that_never_heard_of_another_saves_its_own_part():
    """Without links, or with nobody at the other end: it claims the lead, and soon orders its own ranks."""
    state, at, told = node("a"), NOW, []
    seen = replace(hello(2, master="elsewhere"), samples=(battery(at),))
    for _ in range(240):
        decision = decide(POLICY, state, seen, at)
        state = decision.state
        told += [type(each.message).__name__ for each in decision.actions if isinstance(each, Send)]
        at += 0.5
        seen = Observation(samples=(battery(at),))

    assert state.jobs[JOB].leads
    assert state.jobs[JOB].claimed_at is None
    assert {"Prepare", "Decide"} <= set(told)


def battery(at: float) -> Sample:
    """The mains are out, and less is left each second."""
    left = max(1.0, 200.0 - (at - NOW))
    said = {"ups.status": "OB DISCHRG", "battery.charge": f"{left / 2:.0f}", "battery.runtime": f"{left:.0f}"}
    return Sample("ups", at, Comm.OK, said)


def test_a_leader_without_a_rank_is_silent():
    """All of its ranks have moved to other nodes: it has no number to order by, so those turn to one that has ranks."""
    job = led()
    moved = replace(job, members={rank: member(rank, "b") for rank in range(4)})
    state = node("a", job=moved)

    assert gossip.words(POLICY, node("a", job=job), gossip.Said(), NOW)[1]
    assert () == gossip.words(POLICY, state, gossip.Said(), NOW)[1]
    assert "none" == serve.flush_view(state).state.value
    gone = {rank: replace(member(rank, "" if rank < 2 else "b"), gone="died") for rank in range(4)}
    assert gossip.words(POLICY, node("a", job=replace(job, members=gone)), gossip.Said(), NOW)[1]


def test_a_rank_that_has_ended_is_nobody_who_lives_elsewhere():
    """Ranks 2 and 3 were on b, and are started anew on c: what b remembers of them changes nothing there."""
    members = {rank: member(rank, "" if rank < 2 else "c") for rank in range(4)}
    nodes = {"b": Node("b", "b:1", "bb", 1, NOW), "c": Node("c", "c:1", "bc", 1, NOW)}
    job = led(members=members, nodes=nodes, order=order())
    dead = tuple(RankState(rank, 900 + rank, step=7, gone="died") for rank in (2, 3))
    parts = tuple(RankPart(rank, Part(trouble=f"rank {rank} died")) for rank in (2, 3))
    told = OrderReport(OrderState(4, "ev", Purpose.STOP), parts)
    state = heard(node("a", job=job), report(ranks=dead, order=told))

    assert members == state.jobs[JOB].members
    assert not any(part.trouble for part in state.jobs[JOB].order.parts.values())
    back = heard(state, report(n=3))  # one that lives is believed
    assert {"", "b"} == {each.node for each in back.jobs[JOB].members.values()}


@pytest.mark.parametrize(
    "word",
    [
        report(seq=2**50),
        report(term=2**40),
        report(astray=2**50),
        report(order=OrderReport(OrderState(2**50, "ev", Purpose.STOP))),
        course(resumed=2**50),
        course(order=OrderState(2**50, "ev", Purpose.STOP)),
        course(quiesce=Farewell(2**50, "r")),
    ],
)
def test_no_word_makes_a_node_count_on_from_the_end(word):
    """An order's number must be one that the wire takes: beyond, nobody could be ordered anything any more."""
    job = followed(lead=NO_LEADER) if isinstance(word, Course) else led()
    state = node("b" if isinstance(word, Course) else "a", job=job)

    assert state == heard(state, word)


def test_another_run_under_the_same_name_has_saved_nothing():
    """Plain torchrun names every job by its port: what the run before has saved, elsewhere, is none of this one's."""
    saved = Saved(3, "ev", 5001, "step-0000005001.ev-3", NOW)
    dead = {0: replace(member(0), gone="left (0)")}
    state = node("a", job=Job(JOB, 4, members=dead, directory="/runs/A", saved=saved))
    alive = node("a", job=Job(JOB, 4, members={1: member(1)}, directory="/runs/A", saved=saved))

    assert decide(POLICY, state, hello(master="a"), NOW).state.jobs[JOB].saved is None
    assert saved == decide(POLICY, alive, hello(master="a"), NOW).state.jobs[JOB].saved


def test_a_course_names_the_leader():
    """Who follows the daemon on the master address learns its name from its word."""
    state = heard(node("b", job=followed(lead=NO_LEADER)), course())

    assert "a" == state.jobs[JOB].lead


def test_the_next_seat_takes_over_and_the_others_turn_to_it():
    """By lowest rank, the silent one left out; who comes to itself claims a term of its own."""
    roster = (Seat("a", "a:1", (0,)), Seat("b", "b:1", (2, 3)), Seat("c", "c:1", (1,)))
    job = followed(roster=tuple(sorted(roster, key=lambda seat: seat.lowest)))
    late = NOW + LEAD_SILENT_S

    turned, _ = seats.care(node("b"), job, late)
    assert "c" == turned.lead
    assert job == seats.care(node("b"), job, late - 0.1)[0]
    claimed, (said,) = seats.care(node("b"), turned, late + LEAD_SILENT_S)
    assert claimed.leads
    assert 2 == claimed.term % 4
    assert "no word from a, c" in said.text


def test_who_has_never_heard_of_a_leader_claims_only_in_need():
    """At start-up daemons come one after another; in an outage a node can't wait for that."""
    job = followed(lead=NO_LEADER)
    calm = node("b", job=job)
    need = replace(calm, view=replace(calm.view, phase=Phase.FLUSHING))
    late = NOW + LEAD_SILENT_S

    assert not seats.care(calm, job, late)[0].leads
    assert seats.care(need, job, late)[0].leads


def test_a_leader_that_hears_of_a_higher_claim_steps_down():
    """Its own ranks' parts stay, everybody else's go."""
    parts = {rank: Part(shard=shard(rank)) for rank in range(4)}
    state = heard(
        node("a", job=led(order=order(step=8, parts=parts))), course(node="b", boot="bb", term=2, claimer="b")
    )
    job = state.jobs[JOB]

    assert ("b", 2, {0, 1}) == (job.lead, job.term, set(job.members))
    assert {0, 1} == set(job.order.parts)


@given(
    world=st.integers(1, 64),
    lowest=st.lists(st.integers(0, 63), min_size=2, max_size=2, unique=True),
    after=st.integers(0, 10**9),
)
def test_two_nodes_never_give_one_number(world, lowest, after):
    """Numbers grow, and are congruent to the node's lowest rank, so that nobody else gives the same."""
    jobs = [Job(JOB, world, members={rank % world: member(rank % world)}) for rank in lowest]
    numbers = [seats.number(after, job) for job in jobs]

    assert all(after < number <= after + world for number in numbers)
    assert (lowest[0] % world == lowest[1] % world) == (numbers[0] == numbers[1])


@given(term=st.integers(0, 9), other=st.integers(0, 9), claimer=st.sampled_from(["", "a", "c"]))
def test_nobody_follows_a_lower_claim(term, other, claimer):
    """Whatever comes in, the term of a job only grows, and the orders of a lower one are nobody's."""
    job = followed(term=term, claimer="c", lead="c")
    told = OrderState(4, "ev", Purpose.STOP)
    word = course(node=claimer or "a", boot="bx", term=other, claimer=claimer, order=told)
    after = heard(node("b", job=job), word).jobs[JOB]

    assert max(term, other) == after.term
    assert "c" == after.lead or other > term
    assert after.order is None or other >= term


def test_an_order_that_nobody_knows_to_be_decided_gets_a_new_number():
    """A successor listens first; then a promise that was being collected is lost, and a new PREPARE follows."""
    roster = (Seat("a", "a:1", (0, 1)), Seat("b", "b:1", (2, 3)))
    parts = {rank: Part() for rank in (2, 3)}
    job = followed(roster=roster, order=order(seq=4, parts=parts))
    state = node("b", job=job)
    state = replace(state, seq=4, view=replace(state.view, phase=Phase.FLUSHING, event_at=NOW), event="e")
    claimed = decide(POLICY, state, Observation(), NOW + LEAD_SILENT_S).state
    assert claimed.jobs[JOB].leads
    assert 4 == claimed.jobs[JOB].order.seq
    later = decide(POLICY, claimed, Observation(), NOW + 2 * LEAD_SILENT_S).state.jobs[JOB].order

    assert later.seq > 4
    assert 2 == later.seq % 4


def test_a_decided_order_is_continued_as_it_is():
    """What one node knows to be decided, a successor takes over: same number, step and generation."""
    told = OrderState(4, "ev", Purpose.STOP, stage=Stage.SEALING, step=9, generation="step-9.ev-4")
    job = led(claimed_at=NOW, order=order(seq=4))

    word = report(order=OrderReport(told, (RankPart(2, Part(shard=shard(2))),)))
    after = heard(node("a", job=job), word).jobs[JOB].order

    assert (9, "step-9.ev-4", Stage.DECIDED) == (after.step, after.generation, after.stage)
    assert shard(2) == after.parts[2].shard
    assert after.parts[0].shard is None


# ---- words ------------------------------------------------------------------------------------------


def test_a_word_of_another_name_is_nothing():
    """The key says who speaks; what contradicts it is dropped."""
    state = node("a", job=led())

    assert state == hearsay.absorb(state, [PeerReport("c", NOW, report())], NOW)


def test_a_word_of_another_world_is_nothing():
    """A job of another size is another job."""
    state = node("a", job=led())

    assert state == heard(state, report(world_size=5))


def test_old_and_repeated_words_are_nothing():
    """Reordering is loss, and a repeat changes nothing."""
    once = heard(node("a", job=led()), report(5))

    assert once == heard(once, report(5, want=Want(stop=True)))
    assert once == heard(once, report(4, want=Want(stop=True)))
    assert once != heard(once, report(6, want=Want(stop=True)))


def test_strangers_jobs_are_bounded():
    """Others can make a node know of so many jobs, not more."""
    state = node("a")
    for number in range(hearsay.JOBS + 5):
        state = heard(state, report(number + 1, job=f"job{number}"))

    assert hearsay.JOBS == len(state.jobs)


def test_nobody_speaks_for_a_living_rank_of_this_node():
    """A report can't take a rank away from the daemon that it is registered with."""
    state = heard(node("a", job=led()), report(ranks=(RankState(0, 666), RankState(2, 12))))

    assert ("", 10) == (state.jobs[JOB].members[0].node, state.jobs[JOB].members[0].pid)


PARTS = st.builds(
    Part,
    edge=st.integers(-1, 9),
    decided=st.booleans(),
    shard=st.sampled_from([None, shard(2)]),
    parked=st.booleans(),
    sealed=st.booleans(),
    anew=st.booleans(),
    trouble=st.sampled_from(["", "rank 2 died"]),
)


@given(known=PARTS, told=PARTS, stage=st.sampled_from(list(Stage)))
def test_what_is_durable_is_never_taken_back(known, told, stage):
    """Deeds only add up, a repeat adds nothing, and the shard of another process doesn't count."""
    once = reported.merged(order(stage=stage), known, told, NOW)

    assert known.shard is None or once.shard == known.shard
    assert once == reported.merged(order(stage=stage), once, told, NOW)
    assert not (once.anew and known.shard is None and once.shard is not None)
    assert once.edge >= known.edge


ORDERS = st.builds(
    OrderState,
    seq=st.integers(1, 6),
    event=st.just("ev"),
    purpose=st.sampled_from(list(Purpose)),
    stage=st.sampled_from(list(Stage)),
    step=st.integers(-1, 9),
    generation=st.sampled_from(["", "x", "y"]),
    over=st.booleans(),
)


@given(words=st.lists(ORDERS, min_size=1, max_size=8), resumed=st.integers(0, 6))
def test_a_decision_never_moves_whatever_is_told(words, resumed):
    """One number keeps its step and its generation, and an order that is over stays so; numbers only grow."""
    state = node("b", job=followed())
    seen: dict[int, tuple[int, str]] = {}
    newest = 0
    for n, told in enumerate(words):
        state = heard(state, course(n + 1, order=told, resumed=resumed if n % 2 else 0))
        now = state.jobs[JOB].order
        assert now.seq >= newest
        newest = now.seq
        if now.step >= 0:
            assert seen.setdefault(now.seq, (now.step, now.generation)) == (now.step, now.generation)


@settings(max_examples=60)
@given(
    quiet=st.lists(st.booleans(), min_size=2, max_size=2),
    waited_s=st.floats(0.0, 2.0 * POLICY.exit_wait_s),
    own=st.booleans(),
)
def test_leave_is_told_only_when_all_may(quiet, waited_s, own):
    """Until every rank of every node is quiet, or the wait is over, no course says that they may leave."""
    job, _ = agree.leave(POLICY, led(), 75, "halt", NOW)
    told = report(ranks=tuple(RankState(2 + i, 12 + i, quiet=each) for i, each in enumerate(quiet)))
    job = heard(node("a", job=job), told).jobs[JOB]
    if own:
        job = replace(
            job, quiesce=replace(job.quiesce, waiting={r: d for r, d in job.quiesce.waiting.items() if r > 1})
        )
    _, sends = gossip.words(POLICY, node("a", job=job), gossip.Said(), NOW + waited_s)
    may = (all(quiet) and own) or waited_s >= POLICY.exit_wait_s

    assert [may] == [send.message.leave is not None for send in sends]


def test_news_go_at_once_and_the_rest_by_the_second():
    """What only ages isn't news; what was ordered is."""
    state = node("a", job=led())
    said, first = gossip.words(POLICY, state, gossip.Said(), NOW)
    said, second = gossip.words(POLICY, state, said, NOW + 0.1)
    _, third = gossip.words(POLICY, state, said, NOW + GOSSIP_S)
    _, news = gossip.words(POLICY, node("a", job=led(order=order())), said, NOW + 0.2)

    assert [1, 0, 1, 1] == [len(first), len(second), len(third), len(news)]


def test_a_leader_says_one_word_to_all():
    """A thousand nodes cost no thousand words: those that have the roster share one, those that haven't another."""
    names = [f"n{number}" for number in range(40)]
    nodes = {name: Node(name, name, "b", 1, NOW, roster_n=9 if number % 2 else 0) for number, name in enumerate(names)}
    job = led(order=order(), nodes=nodes, roster=(Seat("a", "a:1", (0,)),), roster_n=9)
    _, sends = gossip.words(POLICY, node("a", job=job), gossip.Said(), NOW)

    assert 40 == len(sends)
    assert 2 == len({id(send.message) for send in sends})
    assert {(False, "n1"), (True, "n0")} <= {(bool(send.message.roster), send.node) for send in sends}


def test_a_roster_waits_for_the_next_word():
    """It changes with each node that comes, and holds every rank: nobody is told of it more than once a second."""
    seat = Seat("a", "a:1", (0, 1))
    first = led(roster=(seat,), roster_n=1)
    more = led(roster=(seat, Seat("b", "b:1", (2, 3))), roster_n=2)
    said, _ = gossip.words(POLICY, node("a", job=first), gossip.Said(), NOW)
    said, early = gossip.words(POLICY, node("a", job=more), said, NOW + 0.1)
    _, late = gossip.words(POLICY, node("a", job=more), said, NOW + GOSSIP_S)

    assert () == early
    assert [(2, more.roster)] == [(send.message.roster_n, send.message.roster) for send in late]


@given(weights=st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=40).map(tuple))
def test_weights_are_the_same_on_every_node(weights):
    """In a word they are runs, in an order one by one: every rank must know the same of who writes what."""
    told = gossip._order(order(weights=weights), NOW)
    state = heard(node("b", job=followed()), course(order=told))

    assert weights == state.jobs[JOB].order.weights
    assert len(told.weights) <= len(weights)


def test_no_run_of_weights_is_longer_than_a_world():
    """What another node says can't fill this one's memory."""
    told = OrderState(4, "ev", Purpose.STOP, weights=((-3, 1.0), (2**52, 1.0), (2**52, 0.0)))
    state = heard(node("b", job=followed()), course(order=told))

    assert WORLD == len(state.jobs[JOB].order.weights)


def test_words_survive_their_bytes():
    """MessagePack there and back, of both kinds, with all there is in them."""
    parts = {rank: Part(edge=3, shard=shard(rank)) for rank in range(4)}
    job = led(
        order=order(step=8, parts=parts, stage=Stage.SEALING, sealer=2), roster=(Seat("a", "a:1", (0,)),), roster_n=3
    )
    for job_, name in ((job, "a"), (followed(order=order(parts={2: parts[2]}), earlier=order(3)), "b")):
        (send,) = gossip.words(POLICY, node(name, job=job_), gossip.Said(), NOW)[1]
        raw = msgspec.msgpack.encode(send.message)
        assert send.message == msgspec.msgpack.decode(raw, type=BetweenNodes)
    state = node("a", job=job)
    assert state == msgspec.json.decode(msgspec.json.encode(state), type=State)


def test_the_largest_words_fit():
    """1,024 ranks on a node; 65,536 ranks on 4,096 nodes, their roster and their shards."""
    members = {rank: replace(member(rank), step=10**6, pace=Pace(1.5, 1.5, 1.5, 1.5, 1 << 36)) for rank in range(1024)}
    parts = {
        rank: Part(edge=10**6, shard=ShardRecord(rank, f"rank-{rank:05d}", 1 << 36, "d" * 32)) for rank in range(1024)
    }
    big = Job(JOB, 65536, members=members, lead="a", lead_at=NOW, order=order(parts=parts))
    (send,) = gossip.words(POLICY, node("b", job=big), gossip.Said(), NOW)[1]
    roster = tuple(
        Seat(f"node-{i:05d}", f"node-{i:05d}.example.org:7070", tuple(range(16 * i, 16 * i + 16))) for i in range(4096)
    )
    shards = tuple(ShardRecord(rank, f"rank-{rank:05d}", 1 << 36, "d" * 32) for rank in range(65536))

    assert len(msgspec.msgpack.encode(send.message)) < REPORT_BYTES
    assert len(msgspec.msgpack.encode(course(roster=roster, shards=shards))) < COURSE_BYTES


# ---- who stops --------------------------------------------------------------------------------------


def online(state: State, now: float) -> State:
    """The node with mains."""
    values = {"ups.status": "OL", "battery.charge": "100", "battery.runtime": "900"}
    return decide(POLICY, state, Observation(samples=(Sample("ups", now, Comm.OK, values),)), now).state


def test_another_nodes_want_stops_the_job_and_not_this_node():
    """STOP goes to all, in the words and under the event of the node that wants it; this one stays on line."""
    state = online(node("a", job=led()), NOW)
    word = report(want=Want(phase="flushing", stop=True, budget_s=30.0, event="eb-1", reason="low battery"))
    seen = Observation(peers=(PeerReport("b", NOW, word),))
    state = decide(POLICY, state, seen, NOW).state
    given = state.jobs[JOB].order

    assert Phase.ONLINE is state.phase
    assert (Purpose.STOP, "eb-1", "b: low battery", 30.0) == (given.purpose, given.event, given.reason, given.budget_s)


def test_the_budget_is_the_least_over_the_nodes():
    """Less what has passed since each said it."""
    nodes = {
        "b": Node("b", heard_at=NOW - 5.0, want=Want(budget_s=30.0)),
        "c": Node("c", heard_at=NOW, want=Want(budget_s=28.0)),
    }
    state = replace(node("a"), deadline_at=NOW + 60.0)

    assert 25.0 == serve.budget(state, led(nodes=nodes), NOW)
    assert 60.0 == serve.budget(state, led(nodes={}), NOW)
    assert serve.budget(node("a"), led(), NOW) is None


def test_the_job_trains_on_only_when_no_node_wants_it_stopped():
    """RESUME waits for the last want; a node whose want isn't known yet is waited for."""
    parked = order(stage=Stage.SEALED, step=8, settled=True, sealed_by=0)
    wanting = led(order=parked, nodes={"b": Node("b", "", "bb", 1, NOW, Want(stop=True))})
    state = online(node("a", job=wanting), NOW)
    assert not state.jobs[JOB].order.over
    state = decide(POLICY, state, Observation(peers=(PeerReport("b", NOW, report()),)), NOW).state

    assert state.jobs[JOB].order.over
    assert 4 == state.jobs[JOB].resumed


@pytest.mark.parametrize(
    ("want", "silent_s", "leaves"),
    [
        (Want(stop=True, halt=True), 0.0, True),
        (Want(stop=True), NODE_GONE_S, True),
        (Want(stop=True), NODE_GONE_S - 1.0, False),
        (Want(), NODE_GONE_S, False),
    ],
)
def test_a_job_that_cannot_go_on_is_dismissed(want, silent_s, leaves):
    """A node that halts, or had to stop and is silent for long, takes the job with it; this node doesn't halt."""
    parked = order(stage=Stage.SEALED, step=8, settled=True, sealed_by=0)
    job = led(order=parked, nodes={"b": Node("b", "", "bb", 1, NOW - silent_s, want)})
    state = online(node("a", job=job), NOW)

    assert leaves == (state.jobs[JOB].quiesce is not None)
    assert Phase.ONLINE is state.phase


def test_who_lives_longest_writes_what_all_hold():
    """Weights by rank where nodes differ in runway, none where they don't."""
    out = replace(node("a"), view=replace(node("a").view, phase=Phase.ON_BATTERY))

    assert (0.0, 0.0, 1.0, 1.0) == serve._weights(out, led())
    assert () == serve._weights(node("a"), led())


# ---- plans ------------------------------------------------------------------------------------------


def planned(*, promised=(0, 1, 2, 3), staged=(), budget_s=None, dead=(), saved=None) -> Order:
    """The order after `prepare_max_s`, with who has promised and what deputies hold."""
    pace = Pace(step_s=1.0, stage_s=1.0, write_s=20.0)
    members = {
        rank: member(
            rank,
            pace=pace,
            step=7,
            staged=tuple(staged),
            staged_write_s=5.0,
            deputy_at=NOW if staged else None,
            gone="died" if rank in dead else "",
        )
        for rank in range(4)
    }
    job = Job(JOB, 4, members=members, saved=saved)
    job, _ = agree.order(POLICY, job, seq=4, event="ev", purpose=Purpose.STOP, budget_s=budget_s, reason="r", now=NOW)
    parts = {rank: replace(part, edge=8) if rank in promised else part for rank, part in job.order.parts.items()}
    job = replace(job, order=replace(job.order, parts=parts))
    return agree.tick(POLICY, job, NOW + POLICY.prepare_max_s, budget_s=budget_s)[0].order


@pytest.mark.parametrize(
    ("case", "plan", "step"),
    [
        ({}, Plan.FRESH, 8),
        ({"budget_s": 60.0, "staged": (4, 6)}, Plan.FRESH, 8),
        ({"budget_s": 10.0, "staged": (4, 6)}, Plan.STAGED, 6),
        ({"budget_s": 2.0, "staged": (4, 6)}, Plan.FRESH, 8),
        ({"budget_s": 10.0}, Plan.FRESH, 8),
        ({"promised": (0, 1, 2), "staged": (4, 6)}, Plan.STAGED, 6),
        ({"promised": (0, 1, 2)}, Plan.FRESH, 9),
        ({"promised": (0, 1, 2), "dead": (3,), "staged": (4, 6)}, Plan.STAGED, 6),
        ({"promised": (0, 1, 2), "dead": (3,)}, Plan.DURABLE, 8),
    ],
)
def test_the_plan_follows_from_the_budget_and_who_answers(case, plan, step):
    """A where it fits, B where a rank doesn't answer or A doesn't fit and B does, else C or the attempt at A."""
    order = planned(**case)

    assert (plan, step) == (order.plan, order.step)


def test_copies_that_are_not_told_of_in_step_are_waited_for_a_moment():
    """Deputies tell of a copy within half a second: what they said at different times may have no step in common."""
    told = {0: (15, 20), 1: (5, 10)}
    members = {
        rank: replace(member(rank, staged=steps, deputy_at=NOW, gone="died" if rank else ""), world_size=2)
        for rank, steps in told.items()
    }
    job = Job(JOB, 2, members=members)
    job, _ = agree.order(POLICY, job, seq=4, event="ev", purpose=Purpose.STOP, budget_s=None, reason="r", now=NOW)
    parts = {0: replace(job.order.parts[0], edge=21), 1: job.order.parts[1]}
    job = replace(job, order=replace(job.order, parts=parts))
    waiting, _ = agree.tick(POLICY, job, NOW + 0.2, budget_s=None)
    assert Stage.PREPARE is waiting.order.stage
    ends_at = NOW + POLICY.prepare_max_s + demand.held_s(POLICY, waiting.order)
    assert agree.next_at(POLICY, waiting, NOW + 0.2) <= ends_at

    later = replace(waiting, members={**members, 1: replace(members[1], staged=(10, 15))})
    told_at_last, _ = agree.tick(POLICY, later, NOW + 0.7, budget_s=None)
    assert (Plan.STAGED, 15) == (told_at_last.order.plan, told_at_last.order.step)
    still, _ = agree.tick(POLICY, waiting, ends_at - 0.1, budget_s=None)
    assert Stage.PREPARE is still.order.stage
    in_vain, _ = agree.tick(POLICY, waiting, ends_at, budget_s=None)
    assert (Stage.LOST, Plan.DURABLE) == (in_vain.order.stage, in_vain.order.plan)


@pytest.mark.parametrize(("budget_s", "hold_max_s", "wait_s"), [
    (None, 15.0, 5.0),
    (100.0, 15.0, 5.0),
    (8.0, 15.0, 2.0),  # a quarter of what there is
    (None, 3.0, 1.5),  # nobody who promised gives up meanwhile
    (None, 0.5, 0.0),
])  # fmt: skip
def test_copies_are_not_waited_for_at_the_cost_of_the_save(budget_s: float | None, hold_max_s: float, wait_s: float):
    """The wait is a part of the budget and of the hold."""
    policy = replace(POLICY, prepare_max_s=1.0, hold_max_s=hold_max_s)

    assert demand.held_s(policy, order(budget_s=budget_s)) == wait_s


def _promised(**more) -> Job:
    """A stop of two ranks of which both have promised step 21 with a step of 1 s, and both have staged 15 and 20."""
    pace = Pace(step_s=1.0, stage_s=0.5, write_s=4.0)
    given = {"staged": (15, 20), "deputy_at": NOW, "step": 20, "pace": pace} | more
    members = {rank: replace(member(rank, **given), world_size=2) for rank in range(2)}
    job, _ = agree.order(
        POLICY,
        Job(JOB, 2, members=members),
        seq=4,
        event="ev",
        purpose=Purpose.STOP,
        budget_s=None,
        reason="r",
        now=NOW,
    )
    parts = {rank: replace(part, edge=21) for rank, part in job.order.parts.items()}
    job, _ = agree.tick(POLICY, replace(job, order=replace(job.order, parts=parts)), NOW, budget_s=None)
    assert (Stage.DECIDED, Plan.FRESH, 21) == (job.order.stage, job.order.plan, job.order.step)
    return job


def _after(job: Job, after_s: float, *, come: tuple[int, ...] = (), failed: bool = False) -> Job:
    """The job so long after the decision; ranks that have *come* to the stop step write."""
    members = {rank: replace(each, step=21 if rank in come else each.step) for rank, each in job.members.items()}
    parts = {rank: replace(part, failed=failed) for rank, part in job.order.parts.items()}
    job = replace(job, members=members, order=replace(job.order, parts=parts))
    return agree.tick(POLICY, job, NOW + after_s, budget_s=None)[0]


def test_a_rank_that_promised_and_hangs_is_not_waited_for_where_a_copy_is_staged():
    """Its listener answers, its training thread doesn't come: the stop is lost, and the next takes what is staged."""
    job, due_s = _promised(), 3 * 1.0 + 10.0
    assert Stage.DECIDED is _after(job, due_s).order.stage
    lost = _after(job, due_s + 0.1)
    assert (Stage.LOST, True, True) == (lost.order.stage, lost.order.stuck, lost.again)
    assert "rank 0, 1 didn't come to step 21 in 13 s" in lost.order.why

    again, _ = agree.order(
        POLICY, lost, seq=5, event="ev", purpose=Purpose.STOP, budget_s=None, reason="r", now=NOW + 16.0
    )
    parts = {rank: replace(part, edge=21) for rank, part in again.order.parts.items()}
    again, _ = agree.tick(POLICY, replace(again, order=replace(again.order, parts=parts)), NOW + 16.1, budget_s=None)
    assert (Stage.DECIDED, Plan.STAGED, 20) == (again.order.stage, again.order.plan, again.order.step)


@pytest.mark.parametrize(("more", "then", "stage"), [
    ({}, {"come": (0,)}, Stage.LOST),  # rank 1 hasn't
    ({}, {"come": (0, 1)}, Stage.DECIDED),  # all write, however long it takes
    ({"staged": ()}, {}, Stage.DECIDED),  # there is nothing else to take
    ({"pace": Pace(step_s=30.0, stage_s=0.5, write_s=4.0)}, {}, Stage.DECIDED),  # steps are long
    ({}, {"failed": True}, Stage.DECIDED),  # the disk won't take the copy either
])  # fmt: skip
def test_nobody_hangs_without_reason(more: dict, then: dict, stage: Stage):
    """A fresh save is given up only for a copy, and only when the stop step is overdue."""
    assert stage is _after(_promised(**more), 60.0, **then).order.stage


@pytest.mark.parametrize(("after_s", "budget_s", "stage"), [
    (30.0, 60.0, Stage.DECIDED),  # steps of 20 s: late, and there is time
    (30.0, 29.0, Stage.LOST),  # the last moment: 1.25 x 20 s + 5 s
    (22.0, 29.0, Stage.DECIDED),  # it may come yet
    (30.0, 19.0, Stage.DECIDED),  # too late for the copy as well
    (70.0, None, Stage.DECIDED),
    (70.1, None, Stage.LOST),  # three times 20 s + 10 s
])  # fmt: skip
def test_a_late_rank_is_waited_for_up_to_the_last_moment_for_the_copy(after_s, budget_s, stage):
    """Where steps are long, three times as long may be too late to take what is staged."""
    job = _promised(pace=Pace(step_s=20.0, stage_s=0.5, write_s=20.0), staged_write_s=20.0)
    job, _ = agree.tick(POLICY, job, NOW + after_s, budget_s=budget_s)

    assert stage is job.order.stage


def test_a_straggler_is_given_its_own_time():
    """Others are through with a step in a second; who takes ten times as long isn't given up for theirs."""
    job = _promised()
    slow = replace(job.members[1], pace=replace(job.members[1].pace, step_s=10.0))
    job = replace(job, members={**job.members, 1: slow})

    assert Stage.DECIDED is _after(job, 3 * 10.0 + 10.0).order.stage
    assert Stage.LOST is _after(job, 3 * 10.0 + 10.1).order.stage


def test_a_rank_that_dies_in_its_write_leaves_the_stop_to_the_staged_copies():
    """The fresh save is lost; what the deputies hold is taken by a second stop, though not all live."""
    job = _promised()
    members = {**job.members, 1: replace(job.members[1], gone="died")}
    lost, _ = agree.tick(POLICY, replace(job, members=members), NOW + 1.0, budget_s=None)

    assert (Stage.LOST, True) == (lost.order.stage, lost.again)
    unstaged = {rank: replace(each, staged=()) for rank, each in members.items()}
    lost, _ = agree.tick(POLICY, replace(job, members=unstaged), NOW + 1.0, budget_s=None)
    assert (Stage.LOST, False) == (lost.order.stage, lost.again)


def test_a_dead_ranks_deputy_is_asked_and_its_shard_counts():
    """Plan B: DECIDE goes to dead ranks too, and what the deputy says is durable makes the generation whole."""
    members = {rank: member(rank, staged=(6,), deputy_at=NOW, gone="died" if rank == 1 else "") for rank in range(2)}
    job = Job(JOB, 2, members={rank: replace(each, world_size=2) for rank, each in members.items()})
    job, _ = agree.order(POLICY, job, seq=4, event="ev", purpose=Purpose.STOP, budget_s=None, reason="r", now=NOW)
    parts = {0: replace(job.order.parts[0], edge=8), 1: job.order.parts[1]}
    job, told = agree.tick(POLICY, replace(job, order=replace(job.order, parts=parts)), NOW + 1.0, budget_s=None)
    assert {0, 1} == {send.rank for send in told if isinstance(send, Send) and isinstance(send.message, Decide)}
    generation = job.order.generation
    said = [RankReport(JOB, rank, NOW + 2.0, Shard(4, 6, generation, shard(rank))) for rank in range(2)]
    jobs, _ = agree.absorb(POLICY, {JOB: job}, said, (), NOW + 2.0)
    job, _ = agree.tick(POLICY, jobs[JOB], NOW + 2.0, budget_s=None)

    assert Stage.SEALING is job.order.stage


def test_a_rank_parks_where_it_is_when_its_staged_state_is_saved():
    """Plan B: the decided step lies behind, and that is no miss; the rank writes nothing, and stops at its boundary."""
    f, place = follow.Follower(), follow.Place(7)
    f, (promise,) = follow.hear(f, Prepare(4, "ev", Purpose.STOP, 15.0, "ev-4"), place, Pace(), NOW)
    decided = Decide(4, Purpose.STOP, Plan.STAGED, 6, "step-0000000006.ev-4")
    f, answers = follow.hear(f, decided, place, Pace(), NOW)
    f, todo = follow.arrive(f, promise.edge, NOW)
    f, said = follow.due(f, NOW)

    assert 8 == promise.edge
    assert [Ack(4, "Decide")] == list(answers)
    assert isinstance(todo, follow.Park)
    assert [Parked(4, 8)] == list(said)


def test_the_ranks_of_other_nodes_are_asked_there():
    """A leader sends nothing to ranks of other nodes; a follower gives none of the leader's orders to its own twice."""
    job, told = agree.order(POLICY, led(), seq=4, event="ev", purpose=Purpose.STOP, budget_s=None, reason="r", now=NOW)
    (send,) = gossip.words(POLICY, node("a", job=job), gossip.Said(), NOW)[1]
    state = heard(node("b", job=followed()), replace(send.message, n=9))
    _, asked = agree.tick(POLICY, state.jobs[JOB], NOW, budget_s=None)

    assert {0, 1} == {each.rank for each in told}
    assert {2, 3} == {each.rank for each in asked}
    assert {"Prepare"} == {type(each.message).__name__ for each in (*told, *asked)}


def test_a_job_that_was_told_to_leave_is_forgotten_soon():
    """A requeued job of the same name begins anew, with no want of a node that is gone."""
    job, _ = agree.leave(POLICY, led(), 75, "b halts", NOW)
    gone = {rank: replace(each, gone="left (75)") for rank, each in job.members.items()}
    jobs, _ = agree.absorb(POLICY, {JOB: replace(job, members=gone)}, (), (), NOW + agree.LEFT_S + 0.1)
    kept, _ = agree.absorb(POLICY, {JOB: replace(job, members=gone)}, (), (), NOW + 1.0)

    assert {} == jobs
    assert {JOB} == set(kept)


def test_a_daemon_without_its_journal_counts_on_from_what_its_ranks_know():
    """Numbers of another node's order may be beyond this boot's seconds: a RESUME below them would free nobody."""
    word = Hello(JOB, 0, 0, 1, 100, "/c", local_world_size=1, seq=int(NOW) + 500)
    beat = Beat(8, Pace(), "parked")
    reports = (RankReport(JOB, 0, NOW, word), RankReport(JOB, 0, NOW, beat))
    mains = Sample("ups", NOW, Comm.OK, {"ups.status": "OL", "battery.charge": "100", "battery.runtime": "900"})
    decision = decide(POLICY, node("a"), Observation(samples=(mains,), reports=reports), NOW)
    later = decide(POLICY, decision.state, Observation(), NOW + 1.0)
    told = [send.message for send in (*decision.actions, *later.actions) if isinstance(send, Send)]
    wild = replace(reports[0], message=replace(word, seq=2**52))

    assert [int(NOW) + 500] == [message.seq for message in told if isinstance(message, Resume)]
    assert int(NOW) == decide(POLICY, node("a"), Observation(reports=(wild,)), NOW).state.seq


# ---- ranks that wait by an order that nobody remembers --------------------------------------------------


def waiting_by(seq: int, job: Job, *, rank: int) -> State:
    """A node whose daemon has lost its journal: a rank of it registers, and waits parked by order *seq*."""
    state = node("a" if job.leads else "b", job=job)
    word = Hello(JOB, rank, rank, 4, 10 + rank, "/c", master="a", step=8, local_world_size=2, seq=seq)
    reports = (RankReport(JOB, rank, NOW, word), RankReport(JOB, rank, NOW, Beat(8, Pace(), "parked")))
    return decide(POLICY, state, Observation(reports=reports), NOW).state


ASKED = {rank: Part(edge=6, asked="Decide") for rank in range(4)}
OVER = order(4, step=6, generation="step-6.ev-4", parts=ASKED, stage=Stage.SEALED, sealed_by=0, over=True)
SNAPPED = replace(OVER, purpose=Purpose.SNAPSHOT, over=False)


@pytest.mark.parametrize("known", [None, OVER, SNAPPED], ids=["no-order", "an-older-stop", "an-older-snapshot"])
def test_the_leader_ends_an_order_that_only_a_rank_of_another_node_knows(known):
    """Its daemon has forgotten it, who gave it is gone: the leader's RESUME carries that order's number, or a later."""
    b = waiting_by(NUMBER, followed(order=known, resumed=4 if known else 0), rank=2)
    (send,) = gossip.words(POLICY, b, gossip.Said(), NOW)[1]
    a = online(node("a", job=led(order=known, resumed=4 if known else 0)), NOW)
    a = decide(POLICY, a, Observation(peers=(PeerReport("b", NOW, send.message),)), NOW).state
    (course_,) = gossip.words(POLICY, a, gossip.Said(), NOW)[1]
    told = decide(POLICY, b, Observation(peers=(PeerReport("a", NOW, course_.message),)), NOW).actions
    freed = [each.message.seq for each in told if isinstance(each, Send) and isinstance(each.message, Resume)]

    assert NUMBER <= a.jobs[JOB].resumed
    assert freed
    assert all(seq >= NUMBER for seq in freed)


@pytest.mark.parametrize("known", [OVER, SNAPPED], ids=["an-older-stop", "an-older-snapshot"])
def test_the_leader_ends_an_order_beyond_its_own_for_its_own_rank(known):
    """What it knows to be over is an older one: its own rank waits by an order of another leader."""
    a = online(waiting_by(NUMBER, led(order=known, resumed=4), rank=0), NOW)
    told = decide(POLICY, a, Observation(), NOW + 5.0).actions
    freed = [each.message.seq for each in told if isinstance(each, Send) and isinstance(each.message, Resume)]

    assert freed
    assert all(seq >= NUMBER for seq in freed)


@pytest.mark.parametrize("rank", [0, 2], ids=["its-own", "another-nodes"])
def test_a_stop_below_what_a_rank_waits_by_is_given_anew(rank):
    """No rank obeys a number below the one that it knows: a stop given before that was heard is given once more."""
    wanting = Node("b", "b:7000", "bb", 1, NOW, Want(stop=True, event="e"))
    job = led(order=order(8, parts=ASKED), nodes={"b": wanting})
    if rank:
        b = waiting_by(NUMBER, followed(order=order(8, parts=ASKED)), rank=rank)
        (send,) = gossip.words(POLICY, b, gossip.Said(), NOW)[1]
        word = replace(send.message, want=wanting.want)
        a = decide(POLICY, node("a", job=job), Observation(peers=(PeerReport("b", NOW, word),)), NOW).state
    else:
        a = waiting_by(NUMBER, job, rank=rank)
    given = a.jobs[JOB].order

    assert Purpose.STOP is given.purpose
    assert given.seq > NUMBER


def test_a_rank_that_is_told_to_leave_counts_the_number_of_that_word():
    """QUIESCE may be beyond every order: a RESUME below it would free nobody."""
    f, _ = follow.hear(follow.Follower(), Quiesce(77, "halt"), follow.Place(7), Pace(), NOW)

    assert 77 == f.seq
