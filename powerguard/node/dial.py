"""Lines that this node dials to others: CURVE over TCP, each proven by the key of the node that it is to.

Belongs to the thread of `peers.py`, which owns every socket made here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import zmq

from powerguard.config import Secret
from powerguard.core.between import COURSE_BYTES
from powerguard.node.addresses import joined, split
from powerguard.node.keyring import Keyring, Own

HIGH_WATER = 32
"""Words that wait in one connection, each way; beyond, they are dropped: the next one says it all again."""
HANDSHAKE_MS = 5000
"""Who hasn't proven a key by then is dropped."""
HEARTBEAT_MS, SILENT_MS = 1000, 4000
"""A cut is noticed within this, and the connection made anew."""
DIAL_MS = 2000
RECONNECT_FIRST_MS, RECONNECT_MAX_MS = 100, 1000
REDIAL_S = 10.0
"""A line on which nothing was heard for so long is dialled anew: ZeroMQ gives up for good where another key answers."""


def new_pair(node: str) -> Own:
    """A new pair of keys for *node*."""
    public, secret = zmq.curve_keypair()
    return Own(node, public.decode(), Secret(secret.decode()))


def belongs(own: Own) -> bool:
    """Whether the public key is that of the secret one."""
    try:
        return bool(zmq.curve_public(own.secret.reveal().encode()) == own.public.encode())
    except (zmq.ZMQError, ValueError):
        return False


def bounded(socket: zmq.Socket[bytes], *, ipv6: bool) -> None:
    """Sets the limits that every socket to other nodes has."""
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.IPV6, int(ipv6)),
        (zmq.MAXMSGSIZE, COURSE_BYTES),
        (zmq.RCVHWM, HIGH_WATER),
        (zmq.SNDHWM, HIGH_WATER),
        (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
        (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, SILENT_MS),
    ):
        socket.setsockopt(option, value)


class Line:
    """A connection that was dialled."""

    __slots__ = ("addresses", "heard_at", "key", "socket")

    def __init__(self, addresses: tuple[str, ...], key: str, socket: zmq.Socket[bytes], now: float) -> None:
        self.addresses, self.key, self.socket, self.heard_at = addresses, key, socket, now


class Dialler:
    """The lines to the nodes that are wanted; *port* is where a node listens whose address doesn't say."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], poller: zmq.Poller, port: int, *, ipv6: bool) -> None:
        self._context, self._poller, self._port, self._ipv6 = context, poller, port, ipv6
        self.lines: dict[str, Line] = {}

    def dial(self, ring: Keyring, wanted: Mapping[str, tuple[str, ...]], now: float) -> None:
        """Opens the lines that are wanted to nodes that are believed, closes the others, and the mute ones for anew."""
        for node, line in tuple(self.lines.items()):
            one = ring.trusted.get(node)
            unwanted = wanted.get(node) != line.addresses or one is None or one.public != line.key
            if unwanted or now - line.heard_at >= REDIAL_S:
                del self.lines[node]
                self._poller.unregister(line.socket)
                line.socket.close(linger=0)
        for node, addresses in wanted.items():
            one = ring.trusted.get(node)
            if node not in self.lines and one is not None:
                line = Line(addresses, one.public, self._open(ring.own, one.public, addresses), now)
                self._poller.register(line.socket, zmq.POLLIN)
                self.lines[node] = line

    def send(self, node: str, frames: list[bytes]) -> bool:
        """Whether it could be handed to a line that is up."""
        line = self.lines.get(node)
        if line is None:
            return False
        try:
            line.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _open(self, own: Own, key: str, addresses: tuple[str, ...]) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        bounded(socket, ipv6=self._ipv6)
        for option, value in (
            (zmq.PROBE_ROUTER, 1),
            (zmq.IMMEDIATE, 1),  # what can't be sent now is said again later, and not twice
            (zmq.RECONNECT_IVL, RECONNECT_FIRST_MS),
            (zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS),
            (zmq.CONNECT_TIMEOUT, DIAL_MS),
        ):
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.CURVE_SERVERKEY, key.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret.reveal().encode())
        for address in addresses:
            with contextlib.suppress(zmq.ZMQError):
                socket.connect(f"tcp://{joined(*split(address, self._port))}")
        return socket
