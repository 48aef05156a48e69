"""Nodes on loopback addresses, each with its key and its line to the others; used by several tests and a benchmark."""

from __future__ import annotations

import contextlib
import random
import socket
import time

from powerguard.core.between import FromPeer, PeerReport, Report
from powerguard.node.dial import new_pair
from powerguard.node.keyring import Keyring, Own, Trusted
from powerguard.node.peers import Peers


def report(node: str, n: int = 1, job: str = "job") -> Report:
    """A word of *node*."""
    return Report(node=node, boot="boot", n=n, job=job, term=0, world_size=2)


def free_port() -> int:
    """A port below the ephemeral range that nobody has on any loopback address now."""
    while True:
        port = random.randint(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("0.0.0.0", port))
            return port


def ring(own: Own, *others: Own) -> Keyring:
    """The keys of a node that believes *others*."""
    return Keyring(own, {one.node: Trusted(one.node, one.public) for one in others})


class Node:
    """One end: what it has heard, and a way to speak."""

    def __init__(self, own: Own, *others: Own, address: str = "127.0.0.1", port: int = 0, **options: object) -> None:
        self.own, self.address, self.port = own, address, port or free_port()
        self.heard: list[PeerReport] = []
        self.peers = Peers(
            address, self.port, ring(own, *others), put=self.heard.append, clock=time.monotonic, **options
        )  # type: ignore[arg-type]

    @property
    def at(self) -> str:
        """Where it listens."""
        return f"{self.address}:{self.port}"

    def words(self) -> list[tuple[str, FromPeer]]:
        """Who said what so far."""
        return [(each.node, each.message) for each in self.heard]

    def close(self) -> None:
        self.peers.close(0.0)


def pairs(*names: str) -> list[Own]:
    """A new key for each name."""
    return [new_pair(name) for name in names]
