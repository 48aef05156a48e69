"""The daemon's end of the bus: a ROUTER on ipc:// for the ranks of this node.

The thread here only puts values in and sends what it is told; it decides nothing and never blocks. What can't be
delivered is dropped: the core says it again until it is acknowledged.

A rank is known by the fixed identity of its socket (`wire.identity`), so that a restarted daemon can speak to it as
soon as it has reconnected. The user who registers a job owns it while one of its processes lives: nobody else is heard.
A rank that stages has a deputy beside it, a process that can make staged states durable: what it says counts as said
for its rank, and it is told what concerns that.
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from powerguard import wire
from powerguard.core.messages import (
    Ack,
    Decide,
    Exit,
    Failed,
    Held,
    Hello,
    Plan,
    Resume,
    Seal,
    Sealed,
    SealWritten,
    Shard,
    ToRank,
)
from powerguard.core.types import PageReport, RankReport
from powerguard.node.ask import Control
from powerguard.node.peers_seen import Credentials, Peer
from powerguard.node.socket_file import SocketFile

RANKS_SOCKET = "ranks.sock"
BACKLOG = 4096
"""The default of 100 makes mass connects three times slower (measured: 5,000 clients, 3.0 against 0.9 s)."""
PEERS_MAX = 4096
FDS_SPARE = 128
"""Descriptors that connections may not use: the journal, the UPS sockets, what an emergency opens."""
FDS_PEER = 3
"""A connection, a page and a pidfd."""
RATE_PER_S = 100.0
BURST = 1000.0
"""A rank says about one message a second, a few dozen during an order; beyond this it is not listened to."""
QUEUED_MAX = 65536
TAKE_MAX = 1000
"""Messages taken in a row before the thread looks at what is to be sent."""
DEAD_S = 120.0
"""A rank that has ended is shown for so long, which is longer than its job is remembered: none is forgotten unheard."""
LOOK_AGAIN_MS = 60_000
"""Messages, `send` and `close` wake the thread; this is only the bound."""
FROM_DEPUTY = (Held, Shard, Failed, SealWritten, Ack)
TO_DEPUTY = (Ack, Seal, Sealed, Resume, Exit)


class Bus:
    """Serves *path* from construction to `close`. *put* is called with every `RankReport`, on the bus's own thread.

    *control*, if given, is cared for and closed with it.
    Raises DirectoryError where the socket can't be made or another daemon serves it.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        put: Callable[[RankReport], object],
        clock: Callable[[], float],
        mode: int = 0o666,
        group: str = "",
        peers_max: int = PEERS_MAX,
        control: Control | None = None,
    ) -> None:
        self._put, self._clock, self._control = put, clock, control
        self._file = SocketFile(path, mode=mode, group=group)
        self.peers_max = min(peers_max, _peers_by_descriptors())
        self.refused: dict[str, int] = {}
        self._told: dict[str, int] = {}
        self._trouble = ""
        self._lock = threading.Lock()  # guards _peers and _out
        self._owners: dict[str, int] = {}  # job -> user
        self._peers: dict[tuple[str, int], Peer] = {}
        self._deputies: set[tuple[str, int]] = set()  # ranks that have one
        self._rates: dict[bytes, tuple[float, float]] = {}
        self._out: deque[tuple[bytes, list[bytes]]] = deque(maxlen=QUEUED_MAX)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = threading.Event()
        self._context = zmq.Context()
        self._linger_ms = 0
        self._connected, self._open_door = 0, True
        try:
            self._router, self._monitor = self._open()
        except BaseException:
            self._context.destroy(linger=0)
            self._file.close()
            os.close(self._wake)
            raise
        self._thread = self._start()

    def _open(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 1),
            (zmq.BACKLOG, BACKLOG),
            (zmq.MAXMSGSIZE, wire.FROM_RANK_BYTES),
            (zmq.RCVHWM, 1000),
            (zmq.SNDHWM, 1000),
        ):
            router.setsockopt(option, value)
        monitor = router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPT_FAILED)
        router.bind(self._file.endpoint)
        self._file.open_up()
        return router, monitor

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="powerguard-bus", daemon=True)
        thread.start()
        return thread

    # ---- for the loop ------------------------------------------------------------------------------

    def send(self, job: str, rank: int, message: ToRank) -> None:
        """Hands *message* to a rank; from any thread, never waits. Raises `WireError` for what can't be framed."""
        frames = wire.encode(message)
        with self._lock:
            self._out.append((wire.identity(job, rank), frames))
            if (job, rank) in self._deputies and _concerns_deputy(message):
                self._out.append((wire.identity(job, rank, deputy=True), frames))
        self._ring()

    def pages(self, now: float) -> tuple[PageReport, ...]:
        """What the shared pages and the processes of the registered ranks show; the dead for `DEAD_S` longer."""
        with self._lock:
            reports = tuple(peer.report(now) for peer in self._peers.values())
            dead = [(page.job, page.rank) for page in reports if not page.alive]
            self._forget([key for key in dead if now - self._peers[key].dead_since(now) > DEAD_S])
        return reports

    def care(self) -> str:
        """Starts the thread anew if it has ended; says what went wrong since the last look, or ""."""
        troubles = []
        if not self._thread.is_alive() and not self._closing.is_set():
            troubles.append(f"the bus had ended: {self._trouble or 'no reason known'}")
            self._thread = self._start()
        for why, times in dict(self.refused).items():
            if times > self._told.get(why, 0):
                troubles.append(f"{why} ({times} times)")
                self._told[why] = times
        if self._control is not None:
            troubles += filter(None, [self._control.care()])
        return "; ".join(troubles)

    def close(self, wait_s: float = 0.5) -> None:
        """Sends what is queued, for at most *wait_s*, and ends. A repeat is nothing."""
        if self._closing.is_set():
            return
        if self._control is not None:
            self._control.close()
        self._linger_ms = int(wait_s * 1000)
        self._closing.set()
        self._ring()
        self._thread.join(wait_s + 5.0)
        with self._lock:
            for peer in self._peers.values():
                peer.close()
            self._peers.clear()
        self._context.destroy(linger=self._linger_ms)
        self._file.close()
        os.close(self._wake)

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    # ---- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            for source in (self._router, self._monitor, self._wake):
                poller.register(source, zmq.POLLIN)
            while True:
                ready = dict(poller.poll(LOOK_AGAIN_MS))
                if self._wake in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                if self._monitor in ready:
                    self._watch_connections()
                self._take()
                self._give()
                if self._closing.is_set():
                    return
        except Exception as error:
            self._trouble = f"{type(error).__name__}: {error}"

    def _take(self) -> None:
        for _ in range(TAKE_MAX):
            try:
                parts = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                self._heard(parts)
            except wire.WireError as error:
                self._refuse(f"refused a message: {error}")

    def _heard(self, parts: list[zmq.Frame]) -> None:
        """One message in; raises `WireError` for what isn't one."""
        name = parts[0].bytes
        job, rank = wire.parse_identity(name)
        now = self._clock()
        if not self._within_rate(name, now):
            self._refuse(f"rank {rank} of {job} says too much: over {RATE_PER_S:.0f} messages a second")
            return
        message = wire.decode_from_rank([part.bytes for part in parts[1:]])
        owner = Credentials(_address(parts[-1]))
        if not self._may_speak(job, owner):
            self._refuse(f"user {owner.uid} speaks for rank {rank} of {job}, which isn't theirs")
            return
        if wire.is_deputy(name):
            if not isinstance(message, FROM_DEPUTY):
                self._refuse(f"the deputy of rank {rank} of {job} says {type(message).__name__}, which it may not")
                return
            self._note_deputy(job, rank)
        elif isinstance(message, Hello) and not self._register(message, (job, rank), owner):
            return
        self._put(RankReport(job, rank, now, message))

    def _may_speak(self, job: str, owner: Credentials) -> bool:
        """A job belongs to the user who registered it first, as long as one of its processes lives."""
        if owner.uid < 0 or self._owners.get(job, owner.uid) == owner.uid:
            return True
        with self._lock:
            return not any(peer.alive() for (name, _), peer in self._peers.items() if name == job)

    def _register(self, hello: Hello, key: tuple[str, int], owner: Credentials) -> bool:
        if (hello.job, hello.rank) != key:
            self._refuse(f"rank {key[1]} of {key[0]} says HELLO for somebody else")
            return False
        with self._lock:
            old = self._peers.get(key)
            if old is None and len(self._peers) >= self.peers_max and not self._drop_dead():
                self._refuse(f"too many ranks: {self.peers_max} are registered")
                return False
            self._peers[key] = Peer(hello, owner)
            self._owners[hello.job] = owner.uid
            if old is not None:
                old.close()
        return True

    def _note_deputy(self, job: str, rank: int) -> None:
        """Bounded: those of jobs that nobody lives of are forgotten first, and come back when they speak."""
        with self._lock:
            if len(self._deputies) >= 2 * PEERS_MAX and (job, rank) not in self._deputies:
                self._deputies.intersection_update(self._peers)
            if len(self._deputies) < 2 * PEERS_MAX:
                self._deputies.add((job, rank))

    def _drop_dead(self) -> bool:
        """Makes room; called with the lock held."""
        dead = [key for key, peer in self._peers.items() if not peer.alive()]
        self._forget(dead)
        return bool(dead)

    def _forget(self, keys: list[tuple[str, int]]) -> None:
        for key in keys:
            self._peers.pop(key).close()
        if keys:
            jobs = {job for job, _ in self._peers}
            self._owners = {job: uid for job, uid in self._owners.items() if job in jobs}

    def _within_rate(self, name: bytes, now: float) -> bool:
        tokens, at = self._rates.get(name, (BURST, now))
        tokens = min(BURST, tokens + (now - at) * RATE_PER_S) - 1.0
        if len(self._rates) >= 2 * PEERS_MAX and name not in self._rates:
            self._rates.clear()
        self._rates[name] = (max(tokens, -1.0), now)
        return tokens >= 0.0

    def _give(self) -> None:
        while True:
            with self._lock:
                if not self._out:
                    return
                name, frames = self._out.popleft()
            try:
                self._router.send_multipart([name, *frames], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                    raise

    def _watch_connections(self) -> None:
        """Out of descriptors, libzmq burns a core in its accept loop: the door is shut before that happens."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            kind = event["event"]
            if kind == zmq.EVENT_ACCEPTED:
                self._connected += 1
            elif kind == zmq.EVENT_DISCONNECTED:
                self._connected = max(0, self._connected - 1)
            elif kind == zmq.EVENT_ACCEPT_FAILED:
                self._refuse("a connection couldn't be accepted")
        if self._open_door and self._connected >= self.peers_max:
            self._file.shut(door=True)
            self._open_door = False
            self._refuse(f"no more connections are taken: {self._connected} are open")
        elif not self._open_door and self._connected < self.peers_max:
            self._file.shut(door=False)
            self._open_door = True

    def _refuse(self, why: str) -> None:
        if why in self.refused or len(self.refused) < 100:
            self.refused[why] = self.refused.get(why, 0) + 1


def _concerns_deputy(message: ToRank) -> bool:
    if isinstance(message, Decide):
        return message.plan is Plan.STAGED
    return isinstance(message, TO_DEPUTY)


def _address(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return ""


def _peers_by_descriptors() -> int:
    """How many ranks the limit on open files allows, after raising it as far as this user may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft == resource.RLIM_INFINITY:
        return PEERS_MAX
    return max(1, (soft - FDS_SPARE) // FDS_PEER)
