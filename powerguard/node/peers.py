"""The daemon's end of the network: CURVE over TCP to the daemons of the other nodes of its jobs.

Every daemon listens (ROUTER), and dials those that it is told to `reach` (one DEALER each); words for a node go by
whichever of the two is up. The thread here only puts values in and sends what it is told; it decides nothing and never
blocks. What can't be delivered is dropped: the core says it again.

Whose word it is follows from the key alone. A connection that came in carries the node's name as ZeroMQ's user id, by
the table of trusted keys; one that was dialled was proven by the other's key. What a peer calls itself isn't looked at:
routing ids are made here, and learned from a probe as soon as a line is up (PROBE_ROUTER). So no greeting is needed
after a restart, and no node can take the line of another, as it could with identities that it chooses (HANDOVER).
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Callable, Mapping

import zmq
from zmq.utils.monitor import recv_monitor_message

from powerguard import wire
from powerguard.core.between import FromPeer, PeerReport
from powerguard.errors import PowerguardError
from powerguard.node import zap
from powerguard.node.dial import Dialler, Line, belongs, bounded
from powerguard.node.door import Door, established
from powerguard.node.keyring import Keyring
from powerguard.node.limits import Rates, Refusals

TAKE_MAX = 1000
RATE_PER_S, BURST = 400.0, 8000.0
"""In messages; a long one counts for one more by each `RATE_BYTES`. A node says a few a second, more in an order."""
RATE_BYTES = 16 * 1024
CONNECTIONS_SPARE = 64
"""Connections beyond two for each trusted node: whoever hasn't proven a key yet."""
RECOUNT_S = 2.0
WORDS_KEPT = 3
"""Words that differ by who hears them: with the roster, with the shards to seal, and for everybody else."""


class Peers:
    """Listens on *host*:*port* from construction to `close`. *put* is called with every `PeerReport`, on its thread.

    Raises PowerguardError where it can't listen or the own key isn't one.
    """

    def __init__(
        self,
        host: str,
        port: int,
        ring: Keyring,
        *,
        put: Callable[[PeerReport], object],
        clock: Callable[[], float],
        connections_max: int | None = None,
    ) -> None:
        if not belongs(ring.own):
            raise PowerguardError("this node's keys don't belong together", todo="powerguard keys generate --replace")
        self.ring, self.port, self._put, self._clock = ring, port, put, clock
        self._names = ring.names
        self._connections_max = connections_max
        self.refusals = Refusals()
        self.heard_at: dict[str, float] = {}
        self._rates = Rates(RATE_PER_S, BURST, 2 * (len(ring.trusted) + 64))
        self._trouble = ""
        self._lock = threading.Lock()  # guards _wanted and _out
        self._wanted: dict[str, tuple[str, ...]] = {}
        self._out: dict[tuple[str, str, type], list[bytes]] = {}  # the newest word of a kind replaces the one before
        self._framed: tuple[tuple[FromPeer, list[bytes]], ...] = ()  # the last words, for the next node
        self._routes: dict[str, bytes] = {}  # node -> routing id of its newest connection
        self._connected, self._recount_at = 0, 0.0
        self._linger_ms = 0
        self._door = Door(host, port)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = threading.Event()
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 16384)
        try:
            self._zap: zmq.Socket[bytes] = self._context.socket(zmq.REP)
            self._zap.bind(zap.ENDPOINT)
            self._router, self._monitor = self._listen()
        except BaseException:
            self._context.destroy(linger=0)
            self._door.close()
            os.close(self._wake)
            raise
        self._poller = zmq.Poller()
        for source in (self._router, self._monitor, self._zap, self._wake):
            self._poller.register(source, zmq.POLLIN)
        self._dialler = Dialler(self._context, self._poller, port, ipv6=self._door.ipv6)
        self._thread = self._start()

    def _listen(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        bounded(router, ipv6=self._door.ipv6)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.CURVE_SERVER, 1),
            (zmq.USE_FD, self._door.handed()),
        ):
            router.setsockopt(option, value)
        router.setsockopt(zmq.CURVE_SECRETKEY, self.ring.own.secret.reveal().encode())
        router.setsockopt(zmq.ZAP_DOMAIN, zap.DOMAIN)
        monitor = router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPT_FAILED)
        router.bind(self._door.endpoint)
        return router, monitor

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="powerguard-peers", daemon=True)
        thread.start()
        return thread

    # ---- for the loop ------------------------------------------------------------------------------

    def send(self, node: str, message: FromPeer) -> None:
        """Hands *message* to a node; from any thread, never waits. Raises `WireError` for what can't be framed."""
        frames, key = self._frames(message), (node, message.job, type(message))
        with self._lock:
            idle = not self._out  # else the thread was rung already, and hasn't looked yet
            self._out.pop(key, None)
            self._out[key] = frames
        if idle:
            self._ring()

    def _frames(self, message: FromPeer) -> list[bytes]:
        """A leader hands one and the same word to a thousand nodes: it is checked and framed once."""
        for known, frames in self._framed:
            if known is message:
                return frames
        frames = wire.encode_peer(message)
        self._framed = ((message, frames), *self._framed)[:WORDS_KEPT]
        return frames

    def reach(self, wanted: Mapping[str, tuple[str, ...]]) -> None:
        """The nodes to keep a line to, each with its IP addresses; lines to others are given up."""
        new = {node: addresses for node, addresses in wanted.items() if addresses}
        with self._lock:
            if new == self._wanted:
                return
            self._wanted = new
        self._ring()

    def trust(self, ring: Keyring) -> None:
        """Other nodes are believed from now on; who isn't any more isn't heard any more."""
        self.ring, self._names = ring, ring.names
        self._ring()

    def care(self) -> str:
        """Starts the thread anew if it has ended; says what went wrong since the last look, or ""."""
        troubles = []
        if not self._thread.is_alive() and not self._closing.is_set():
            troubles.append(f"the line to other nodes had ended: {self._trouble or 'no reason known'}")
            self._thread = self._start()
        return "; ".join([*troubles, *self.refusals.news(self._clock())])

    def close(self, wait_s: float = 0.5) -> None:
        """Sends what is queued, for at most *wait_s*, and ends. A repeat is nothing."""
        if self._closing.is_set():
            return
        self._linger_ms = int(wait_s * 1000)
        self._closing.set()
        self._ring()
        self._thread.join(wait_s + 5.0)
        self._context.destroy(linger=self._linger_ms)
        self._door.close()
        os.close(self._wake)

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    # ---- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                ready = dict(self._poller.poll(1000))
                if self._wake in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                self._dial()
                self._admit()
                if self._monitor in ready or not self._door.open:
                    self._watch_connections()
                if self._router in ready:
                    self._take_in()
                for node, line in tuple(self._dialler.lines.items()):
                    if line.socket in ready:
                        self._take(node, line)
                self._give()
                if self._closing.is_set():
                    return
        except Exception as error:
            self._trouble = f"{type(error).__name__}: {error}"

    def _admit(self) -> None:
        """Answers who asks whether a key is trusted."""
        for _ in range(TAKE_MAX):
            try:
                frames = self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            reply, why = zap.answer(frames, self._names)
            if why:
                self.refusals.note(f"refused {why}")
            self._zap.send_multipart(reply)

    def _dial(self) -> None:
        with self._lock:
            wanted = dict(self._wanted)
        self._dialler.dial(self.ring, wanted, self._clock())

    def _take_in(self) -> None:
        for _ in range(TAKE_MAX):
            try:
                parts = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            node = _user(parts[-1])
            if node not in self.ring.trusted:
                self.refusals.note(f"refused a message of {node[:64] or 'nobody known'}, who isn't trusted any more")
                continue
            self._routes[node] = parts[0].bytes
            self._heard(node, [part.bytes for part in parts[1:]])
            if self._out:
                return  # a decision doesn't wait for what a thousand others have to say

    def _take(self, node: str, line: Line) -> None:
        line.heard_at = self._clock()
        for _ in range(TAKE_MAX):
            try:
                frames = line.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._heard(node, frames)

    def _heard(self, node: str, frames: list[bytes]) -> None:
        now = self._clock()
        self.heard_at[node] = now
        if frames == [b""]:
            return  # a probe: the line is up
        if not self._rates.within(node, now, 1.0 + sum(map(len, frames)) / RATE_BYTES):
            self.refusals.note(f"node {node} says too much: over {RATE_PER_S:.0f} messages a second")
            return
        try:
            message = wire.decode_peer(frames)
        except wire.WireError as error:
            self.refusals.note(f"refused a message of node {node}: {error}")
            return
        if message.node != node:
            self.refusals.note(f"node {node} speaks in the name of {message.node[:64]}")
            return
        self._put(PeerReport(node, now, message))

    def _give(self) -> None:
        with self._lock:
            out, self._out = self._out, {}
        for (node, _, _), frames in out.items():
            self._give_one(node, frames)

    def _give_one(self, node: str, frames: list[bytes]) -> None:
        """By the line that was dialled if it is up, else by the one that came in, else not at all."""
        route = self._routes.get(node)
        if self._dialler.send(node, frames) or route is None:
            return
        try:
            self._router.send_multipart([route, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                self._routes.pop(node, None)
            elif error.errno != zmq.EAGAIN:
                raise

    def _watch_connections(self) -> None:
        """Out of descriptors, libzmq burns a core in its accept loop: the door is shut before that happens."""
        while self._monitor.poll(0):
            kind = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            if kind == zmq.EVENT_ACCEPTED:
                self._connected += 1
            elif kind == zmq.EVENT_DISCONNECTED:
                self._connected = max(0, self._connected - 1)
            else:
                self.refusals.note("a connection couldn't be accepted")
        limit, now = self.connections_max, self._clock()
        if self._connected >= limit // 2 and now >= self._recount_at:
            self._recount_at, self._connected = now + RECOUNT_S, established(self._door.port)
        if self._door.open and self._connected >= limit:
            self._door.shut(door=True)
            self.refusals.note(f"no more connections of other nodes are taken: {limit} are open")
        elif not self._door.open and self._connected < limit:
            self._door.shut(door=False)

    @property
    def connections_max(self) -> int:
        """Beyond so many, nobody new is let in: a quarter of this process's descriptors at most (the bus has raised
        their limit as far as it goes)."""
        if self._connections_max is not None:
            return self._connections_max
        return min(2 * len(self.ring.trusted) + CONNECTIONS_SPARE, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)


def _user(frame: zmq.Frame) -> str:
    """The node whose key the connection has proven."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""
