"""This node's lines to the other nodes of its jobs: which to keep, by what address, and the core's words on them.

The core names a node, or only the job's master address. Here that becomes a node whose key is trusted, its IP
addresses, and a word handed to `Peers`. Without `[peers]` in the configuration there is no socket, and nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import structlog

from powerguard.config import Config
from powerguard.core import gossip
from powerguard.core.between import FromPeer, PeerReport, Report, SendPeer
from powerguard.core.policy import Policy
from powerguard.core.state import State
from powerguard.errors import ConfigError, PowerguardError
from powerguard.node import keyring
from powerguard.node.addresses import Resolver, is_here, joined, own_addresses, split
from powerguard.node.keyring import Keyring
from powerguard.node.peers import Peers
from powerguard.wire import WireError

KEEP_S = 30.0
"""A line that was dialled is kept for so long after the last word for it."""
FOLLOWERS_S = 2.0
"""A leader lets its followers dial for so long (they do within a second of its start) before it dials them itself."""
ADDRESSES_MAX = 6

log = structlog.get_logger()


class Sender(Protocol):
    """What is needed of `peers.Peers`."""

    ring: Keyring
    port: int
    heard_at: dict[str, float]

    def send(self, node: str, message: FromPeer) -> None:
        """Hands a word to a node."""

    def reach(self, wanted: dict[str, tuple[str, ...]]) -> None:
        """The nodes to keep a line to."""

    def trust(self, ring: Keyring) -> None:
        """The keys from now on."""

    def care(self) -> str:
        """What went wrong since the last look."""

    def close(self, wait_s: float = 0.5) -> None:
        """Ends."""


def opened(config: Config, *, put: Callable[[PeerReport], object], clock: Callable[[], float]) -> Lines:
    """The lines by `[peers]`; that they can't be had is said, and no reason not to watch the power."""
    if not config.peers.listen:
        return Lines()
    host, port = config.peers.bind
    try:
        ring = keyring.load(config.peers.keys, config.node.name)
        peers = Peers(host, port, ring, put=put, clock=clock)
    except PowerguardError as err:
        log.error("no line to other nodes", why=err.message, todo=err.todo)
        return Lines(trouble=str(err))
    for problem in ring.problems:
        log.warning("a key isn't believed", why=problem)
    listed = own_addresses()
    said = split(config.peers.address or (host or next(iter(listed), config.node.name)), port)
    log.info("open to other nodes", port=port, trusted=sorted(ring.trusted), address=joined(*said))
    own = tuple(dict.fromkeys((joined(*said), said[0], *listed, config.node.name)))
    return Lines(peers, keys=lambda: keyring.load(config.peers.keys, config.node.name), own=own)


class Lines:
    """Says the core's words through *peers*; *keys* reads the folder of keys anew. All None: this node stands alone."""

    def __init__(
        self,
        peers: Sender | None = None,
        *,
        keys: Callable[[], Keyring] | None = None,
        own: tuple[str, ...] = (),
        trouble: str = "",
    ) -> None:
        self._peers, self._keys = peers, keys
        self._resolver = Resolver()
        self._said = gossip.Said()
        self._wanted: dict[str, tuple[float, float, str]] = {}  # node -> (since, until, address)
        self._dialled: set[str] = set()
        self._unknown: dict[str, str] = {}  # master addresses that no key was found for
        self._new_here: list[str] = []
        self._own = {*own}
        self._why = trouble
        self.addresses = own

    @property
    def open(self) -> bool:
        """Others can be spoken with."""
        return self._peers is not None

    @property
    def heard_at(self) -> dict[str, float]:
        """When each node was last heard; from any thread."""
        return self._peers.heard_at.copy() if self._peers is not None else {}

    def here(self) -> tuple[str, ...]:
        """Addresses that turned out to be this node's own since the last look."""
        found, self._new_here = tuple(self._new_here), []
        return found

    def say(self, policy: Policy, state: State, now: float) -> None:
        """After a decision: what the other nodes of the jobs are to hear now."""
        self._said, words = gossip.words(policy, state, self._said, now)
        if self._peers is None:
            return
        self._unknown = {address: why for address, why in self._unknown.items() if _leaderless(state, address)}
        for word in words:
            node = word.node or self._located(word.address)
            if node in self._peers.ring.trusted:
                self._want(node, word, now)
                try:
                    self._peers.send(node, word.message)
                except WireError as err:  # the others' words go out all the same
                    log.error("a word can't be sent", node=node, why=str(err))
            elif node:
                self._unknown[word.address] = f"node {node} isn't trusted here (powerguard keys trust)"
        self._peers.reach(self._reached(now))

    def wait_s(self, state: State, now: float) -> float:
        """Until the next word is due."""
        at = gossip.next_at(state, self._said) if self._peers is not None else None
        return 3600.0 if at is None else max(0.0, at - now)

    def trouble(self, state: State) -> str:
        """Why a job's other nodes can't be spoken with, or ""."""
        spanning = [name for name, job in sorted(state.jobs.items()) if job.spans and job.alive]
        if not spanning:
            return ""
        if self._peers is None:
            return f"job {', '.join(spanning)}: {self._why or 'no [peers] in the configuration'}"
        return "; ".join(self._unknown.values())

    def care(self) -> str:
        """What went wrong since the last look."""
        return self._peers.care() if self._peers is not None else ""

    def reload(self) -> str:
        """Reads the keys anew; what is wrong with them."""
        if self._peers is None or self._keys is None:
            return ""
        try:
            ring = self._keys()
        except ConfigError as err:
            return str(err)
        self._peers.trust(ring)
        self._unknown.clear()
        return "; ".join(ring.problems)

    def close(self) -> None:
        """Ends."""
        self._resolver.close()
        if self._peers is not None:
            self._peers.close()

    # ---- who is where ------------------------------------------------------------------------------

    def _located(self, address: str) -> str:
        """The node on a master address; "" where it isn't known (yet), or is this one."""
        assert self._peers is not None
        host, _ = split(address)
        ips = self._resolver.addresses(host)
        if host in self._own or any(is_here(ip) for ip in ips):
            if address not in self._own:
                self._own.add(address)
                self._new_here.append(address)
            self._unknown.pop(address, None)
            return ""
        node = keyring.find(self._peers.ring.trusted, address, ips)
        if node:
            self._unknown.pop(address, None)
        else:
            self._unknown[address] = f"no trusted key is of {host}, a job's master address (powerguard keys trust)"
        return node

    def _want(self, node: str, word: SendPeer, now: float) -> None:
        since, _, address = self._wanted.get(node, (now, 0.0, ""))
        if isinstance(word.message, Report):
            since = min(since, now - FOLLOWERS_S)  # a follower dials its leader at once
        self._wanted[node] = (since, now + KEEP_S, word.address or address)

    def _reached(self, now: float) -> dict[str, tuple[str, ...]]:
        """The nodes to dial, each with its addresses: those that haven't dialled us, or aren't heard any more."""
        assert self._peers is not None
        self._wanted = {node: want for node, want in self._wanted.items() if now < want[1]}
        found: dict[str, tuple[str, ...]] = {}
        for node, (since, _, address) in self._wanted.items():
            if now - since < FOLLOWERS_S:
                continue
            heard_at = self._peers.heard_at.get(node)
            if node in self._dialled or heard_at is None or now - heard_at >= FOLLOWERS_S:
                found[node] = self._addresses(node, address)
        self._dialled = set(found)
        return found

    def _addresses(self, node: str, said: str) -> tuple[str, ...]:
        """Where a node may be: as the core says, as its key file says, or under its own name."""
        assert self._peers is not None
        one = self._peers.ring.trusted.get(node)
        listed = one.addresses if one is not None else ()
        found: list[str] = []
        for address in (said, *(listed or (node,))):
            host, port = split(address, self._peers.port)
            found += [joined(ip, port) for ip in self._resolver.addresses(host)] if host else []
        return tuple(dict.fromkeys(found))[:ADDRESSES_MAX]


def _leaderless(state: State, address: str) -> bool:
    return any(job.master == address and job.spans for job in state.jobs.values())
