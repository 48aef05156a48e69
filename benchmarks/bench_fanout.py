"""How soon the last rank of a large job has its stop step: real CURVE sockets, beside torch's TCPStore in the same run.

    python benchmarks/bench_fanout.py           a table
    python benchmarks/bench_fanout.py --json    one JSON line
    python benchmarks/bench_fanout.py --quick   up to 256 ranks, fewer rounds

One machine is the whole cluster. The leader is a process with the daemon's own line (`Peers`) and core (`decide`,
`gossip`), and 8 ranks of its own beside those behind the lines. The followers' lines are real sockets with a key each,
in two more processes, and answer for 8 ranks each from memory: no rank runs, no step is waited for. A round begins when
one follower says that its power wants a stop and ends when the last follower has read the stop step. The last hop, from
a daemon to its 8 ranks over ipc and back, is measured apart with a real `Bus` and real sockets (`ipc_ms`).

TCPStore: as many waiters as there are followers, each blocked in `wait` for a key that the server's process sets; the
round ends when the last has it. It has no key and no encryption, and asks nobody for a step: half of the way.

Memory: of the leader's process (VmRSS), before the lines came up and after all rounds, by line; with one line that is
mostly what the first one costs. `open_files`: of the leader at the end. A size that this process may not open enough
files for isn't run, and the line says so.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import random
import resource
import socket
import statistics
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import zmq
from msgspec.structs import replace

from powerguard import wire
from powerguard.core import gossip
from powerguard.core.between import GOSSIP_S, Course, FromPeer, OrderReport, RankPart, RankState, Report
from powerguard.core.decide import decide
from powerguard.core.job import Job, Part, Stage, Want
from powerguard.core.messages import Decide, Hello, Pace, Plan, Prepare, Promise, Purpose
from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.state import initial
from powerguard.core.types import Comm, Observation, RankReport, Sample, Send
from powerguard.node.bus import Bus
from powerguard.node.dial import bounded, new_pair
from powerguard.node.inbox import Inbox
from powerguard.node.keyring import Keyring, Own, Trusted
from powerguard.node.peers import Peers

RANKS = 8
SIZES = (1, 32, 256, 1024)
"""Followers: 8, 256, 2,048 and 8,192 ranks."""
PACE = Pace(1.0, 0.1, 5.0, 0.5, 1 << 30)
UPS = "u@h:1"
POLICY = Policy(feeds=(FeedPolicy(UPS),), prepare_max_s=60.0, hold_max_s=120.0)
WAIT_S = 600.0
FILES = 4
"""Open files a follower: a leader takes a connection for each quarter of what it may open."""
TURNS = 20
"""Parts of a second in which the followers' regular words are spread."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FromPeer).decode


def name(number: int) -> str:
    """Of a follower."""
    return f"n{number:05d}"


# ---- the leader ------------------------------------------------------------------------------------


def lead(own: Own, keys: dict[str, str], port: int, pipe: Connection) -> None:
    """The daemon's line and core, without its UPS, its ranks and its journal."""
    inbox = Inbox()
    empty_kib = rss_kib()
    ring = Keyring(own, {node: Trusted(node, key) for node, key in keys.items()})
    peers = Peers("127.0.0.1", port, ring, put=inbox.put, clock=time.monotonic)
    state, said = initial("boot", time.monotonic(), node=own.node), gossip.Said()
    known, name_of_job, world = False, "", 0
    pipe.send("up")
    while True:
        seen = inbox.drain(0.05).seen
        seen = replace(seen, samples=(Sample(UPS, time.monotonic(), Comm.OK, {"ups.status": "OL"}),))
        if pipe.poll():
            word = pipe.recv()
            if word is None:
                open_files = len(os.listdir("/proc/self/fd"))
                pipe.send((rss_kib() - empty_kib, open_files, dict(peers.refusals.counts)))
                break
            (name_of_job, world), known = word, False
            state, said = initial("boot", time.monotonic(), node=own.node), gossip.Said()
            seen = registering(seen, name_of_job, world)
            pipe.send("anew")
        now = time.monotonic()
        decision = decide(POLICY, state, seen, now)
        state = decision.state
        for action in decision.actions:  # its own ranks promise at once
            if isinstance(action, Send) and isinstance(action.message, Prepare):
                inbox.put(RankReport(action.job, action.rank, now, Promise(action.message.seq, 41)))
        said, words = gossip.words(POLICY, state, said, now)
        for each in words:
            peers.send(each.node, each.message)
        job = state.jobs.get(name_of_job)
        if not known and job is not None and len(job.members) == world and settled(job):
            known = True
            pipe.send("complete")
    peers.close(0.0)


def settled(job: Job) -> bool:
    """Every node has the roster: the job has been running for a while."""
    return all(node.roster_n == job.roster_n for node in job.nodes.values())


def registering(seen: Observation, job: str, world: int) -> Observation:
    """*seen*, and the leader's own ranks say HELLO: without one of its own it has no number that is its own."""
    hellos = tuple(
        RankReport(job, n, time.monotonic(), Hello(job, n, n, world, 100 + n, "/c", step=40, local_world_size=RANKS))
        for n in range(RANKS)
    )
    return replace(seen, reports=hellos, peers=())


# ---- the followers ---------------------------------------------------------------------------------


class Follower:
    """One node's line, and what it would say for its ranks."""

    def __init__(self, number: int, context: zmq.Context, own: Own, server: str, port: int) -> None:
        self.number, self.count = number, 0
        self.socket = context.socket(zmq.DEALER)
        bounded(self.socket, ipv6=False)
        for option in (zmq.PROBE_ROUTER, zmq.IMMEDIATE):
            self.socket.setsockopt(option, 1)
        self.socket.setsockopt(zmq.CURVE_SERVERKEY, server.encode())
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public.encode())
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret.reveal().encode())
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.ranks = tuple(
            RankState(RANKS * (number + 1) + n, 100 + n, step=40 + number % 3, local_rank=n, pace=PACE)
            for n in range(RANKS)
        )
        self.begin("", 0)

    def begin(self, job: str, world: int) -> None:
        """A new round: a job of its own."""
        self.job, self.world, self.promised, self.decided_at = job, world, -1, 0.0
        self.want, self.roster_n = Want(), 0
        self.order: OrderReport | None = None

    def report(self) -> None:
        """Says what it knows."""
        self.count += 1
        word = Report(
            node=name(self.number), boot="b", n=self.count, job=self.job, term=0, world_size=self.world,
            directory="/c", ranks=self.ranks, want=self.want, order=self.order, roster_n=self.roster_n,
        )  # fmt: skip
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart([wire.VERSION, _encode(word)], zmq.NOBLOCK)

    def hear(self, frames: list[bytes]) -> None:
        """A course of the leader."""
        course = decoded(frames[1])
        if not isinstance(course, Course) or course.job != self.job:
            return
        if course.roster:  # which the leader says until it is told that it has come
            self.roster_n = course.roster_n
            self.report()
        if course.order is None:
            return
        order = course.order
        if order.step >= 0 and not self.decided_at:
            self.decided_at = time.monotonic()
        elif order.stage is Stage.PREPARE and order.seq > self.promised:
            self.promised = order.seq
            parts = tuple(RankPart(rank.rank, Part(edge=rank.step + 1)) for rank in self.ranks)
            self.order = OrderReport(order, parts)
            self.report()


@functools.lru_cache(maxsize=8)
def decoded(body: bytes) -> FromPeer:
    """The leader's word is the same for all: one process that plays hundreds of nodes reads it once, as each would."""
    return _decode(body)


def follow(numbers: range, pairs: list[Own], server: str, port: int, pipe: Connection) -> None:
    """The lines of some followers, in one process."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4096)
    mine = [Follower(number, context, pairs[number], server, port) for number in numbers]
    poller = zmq.Poller()
    by_socket = {each.socket: each for each in mine}
    for socket_ in by_socket:
        poller.register(socket_, zmq.POLLIN)
    poller.register(pipe.fileno(), zmq.POLLIN)
    told, turn, again_at = True, 0, 0.0
    while True:
        if time.monotonic() >= again_at:  # as daemons do, each at its own time
            again_at = time.monotonic() + GOSSIP_S / TURNS
            for each in mine[turn::TURNS] if mine[0].job else ():
                each.report()
            turn = (turn + 1) % TURNS
        for source, _ in poller.poll(20):
            if source == pipe.fileno():
                word = pipe.recv()
                if word is None:
                    context.destroy(linger=0)
                    return
                if word == "stop":
                    first = mine[0]
                    first.want = Want(phase="flushing", stop=True, budget_s=600.0, event="e-1", reason="bench")
                    pipe.send(time.monotonic())
                    first.report()
                    continue
                told = False
                for each in mine:
                    each.begin(*word)
                    each.report()
            else:
                by_socket[source].hear(source.recv_multipart())
        if not told and all(each.decided_at for each in mine):
            told = True
            pipe.send([each.decided_at for each in mine])


def fan_out(nodes: int, rounds: int) -> dict[str, object]:
    """Seconds from the notice to each follower's decision, over *rounds*; memory by line."""
    context = multiprocessing.get_context("spawn")
    leader, pairs, port = new_pair("lead"), [new_pair(name(number)) for number in range(nodes)], free_port()
    pipe, theirs = context.Pipe()
    keys = {own.node: own.public for own in pairs}
    processes = [context.Process(target=lead, args=(leader, keys, port, theirs))]
    processes[0].start()
    wait(pipe, "up")
    pipes = []
    half = max(1, (nodes + 1) // 2)
    for begin in range(0, nodes, half):
        ours, other = context.Pipe()
        numbers = range(begin, min(nodes, begin + half))
        processes.append(context.Process(target=follow, args=(numbers, pairs, leader.public, port, other)))
        processes[-1].start()
        pipes.append(ours)
    first, last, all_of_them = [], [], []
    for round_number in range(rounds + 1):
        job = (f"job{round_number}", (nodes + 1) * RANKS)
        pipe.send(job)
        wait(pipe, "anew")
        for each in pipes:
            each.send(job)
        wait(pipe, "complete")
        time.sleep(0.3)
        pipes[0].send("stop")
        began = receive(pipes[0])
        at = [instant - began for each in pipes for instant in receive(each)]
        if round_number:  # the first warms up
            first.append(min(at))
            last.append(max(at))
            all_of_them += at
    pipe.send(None)
    grown_kib, open_files, refused = receive(pipe)
    for each in pipes:
        each.send(None)
    for process in processes:
        process.join(20)
        if process.is_alive():
            process.kill()
            process.join()
    return {
        "ranks": nodes * RANKS,
        "nodes": nodes,
        "open_files": open_files,
        "last_p50_ms": round(1000 * statistics.median(last), 1),
        "last_max_ms": round(1000 * max(last), 1),
        "rank_p50_ms": round(1000 * statistics.median(all_of_them), 1),
        "kib_per_line": round(grown_kib / nodes, 1),
        "refused": sum(refused.values()),
    }


# ---- what it is compared with ----------------------------------------------------------------------


def tcp_store(waiters: int, rounds: int) -> dict[str, float | None]:
    """Seconds from set to the last waiter's return, with torch's TCPStore."""
    from datetime import timedelta

    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # it asks for the name of some of its clients
    from torch.distributed import TCPStore

    options = {"wait_for_workers": False, "timeout": timedelta(seconds=WAIT_S)}
    port = free_port()
    server = TCPStore("127.0.0.1", port, None, True, **options)
    clients = [TCPStore("127.0.0.1", port, None, False, **options) for _ in range(waiters)]
    last = []
    for round_number in range(rounds + 1):
        key, at = f"k{round_number}", []

        def one(client: TCPStore, key: str = key, at: list[float] = at) -> None:
            client.wait([key])
            at.append(time.monotonic())

        threads = [threading.Thread(target=one, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        began = time.monotonic()
        server.set(key, "1")
        for thread in threads:
            thread.join()
        if round_number:
            last.append(max(at) - began)
    return {
        "store_p50_ms": round(1000 * statistics.median(last), 1),
        "store_max_ms": round(1000 * max(last), 1),
    }


def ipc(rounds: int) -> dict[str, float]:
    """Seconds from PREPARE in the daemon's bus to the decision read by the last of 8 ranks."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        inbox = Inbox()
        bus = Bus(Path(folder, "b.sock"), put=inbox.put, clock=time.monotonic)
        context = zmq.Context()
        ranks = []
        for rank in range(RANKS):
            ranks.append(context.socket(zmq.DEALER))
            ranks[-1].setsockopt(zmq.IDENTITY, wire.identity("job", rank))
            ranks[-1].connect(f"ipc://{folder}/b.sock")
            ranks[-1].send_multipart(wire.encode(Hello("job", rank, rank, RANKS, os.getpid(), "/c")))
        while len(inbox.drain(0.1).seen.reports) == 0:
            pass
        time.sleep(0.3)
        inbox.drain(0.0)
        for number in range(rounds):
            began = time.monotonic()
            for rank in range(RANKS):
                bus.send("job", rank, Prepare(number, "e", Purpose.STOP, 15.0, "t"))
            for one in ranks:
                one.recv_multipart()
                one.send_multipart(wire.encode(Promise(number, 7)))
            heard = 0
            while heard < RANKS:
                heard += len(inbox.drain(1.0).seen.reports)
            for rank in range(RANKS):
                bus.send("job", rank, Decide(number, Purpose.STOP, Plan.FRESH, 7, "g"))
            for one in ranks:
                one.recv_multipart()
            found.append(time.monotonic() - began)
        context.destroy(linger=0)
        bus.close(0.0)
    return {"ipc_p50_ms": round(1000 * statistics.median(found), 2), "ipc_max_ms": round(1000 * max(found), 2)}


# ---- small things ----------------------------------------------------------------------------------


def wait(pipe: Connection, word: str) -> None:
    """Until the other side says *word*."""
    while receive(pipe) != word:
        pass


def receive(pipe: Connection):
    """What comes next, within a bound."""
    if not pipe.poll(WAIT_S):
        raise SystemExit(f"bench_fanout: nothing came within {WAIT_S:.0f} s")
    return pipe.recv()


def may_open() -> int:
    """Files that this process and its children may have open, once raised as far as it goes."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def rss_kib() -> int:
    """Memory of this process now."""
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])


def free_port() -> int:
    """One below the ephemeral range."""
    while True:
        port = random.randint(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON line")
    parser.add_argument("--quick", action="store_true", help="up to 256 ranks, fewer rounds")
    parser.add_argument("--rounds", type=int, default=0, help="of each size; default: 7, 3 with --quick")
    options = parser.parse_args()
    sizes, rounds = (SIZES[:2], 3) if options.quick else (SIZES, 7)
    rounds = options.rounds or rounds
    hop, rows = ipc(50), []
    for nodes in sizes:
        began, files, limit = time.monotonic(), FILES * nodes + 256, may_open()
        if files > limit:
            why = f"{files} open files are needed, {limit} allowed (ulimit -n)"
            rows.append({"ranks": nodes * RANKS, "nodes": nodes, "not_run": why})
        else:
            ours = fan_out(nodes, rounds)
            took_s = time.monotonic() - began
            theirs = tcp_store(nodes, rounds)
            ratio = ours["last_p50_ms"] / theirs["store_p50_ms"]
            rows.append({**ours, "took_s": round(took_s, 1), **theirs, "ratio": round(ratio, 2)})
        print(f"{rows[-1]['ranks']} ranks: {rows[-1]}", file=sys.stderr)
    if not options.json:
        print(f"a daemon and its 8 ranks over ipc: {hop['ipc_p50_ms']} ms (max {hop['ipc_max_ms']})")
        print(f"{'ranks':>7} {'nodes':>6} {'last, ms':>9} {'max':>8} {'TCPStore':>9} {'max':>8} {'KiB a line':>11}")
        for row in rows:
            if "not_run" in row:
                print(f"{row['ranks']:>7} {row['nodes']:>6} not run: {row['not_run']}")
                continue
            print(
                f"{row['ranks']:>7} {row['nodes']:>6} {row['last_p50_ms']:>9} {row['last_max_ms']:>8} "
                f"{row['store_p50_ms']:>9} {row['store_max_ms']:>8} {row['kib_per_line']:>11}"
            )
    print(
        json.dumps({"bench": "fanout", "curve": True, "rounds": rounds, "cores": os.cpu_count(), **hop, "sizes": rows})
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
