"""Host names and addresses: which are this node's own, and what a name resolves to, without ever waiting for it."""

from __future__ import annotations

import contextlib
import ipaddress
import queue
import re
import socket
import threading
import time
from pathlib import Path

LASTS_S = 60.0
"""A resolved name is believed for so long, then looked up again while the old answer is in use."""
NAMES_MAX = 4096
FIB_TRIE, IF_INET6 = Path("/proc/self/net/fib_trie"), Path("/proc/self/net/if_inet6")

_LOCAL = re.compile(r"\|-- ([\d.]+)\n\s*/32 host LOCAL")
_BRACKETED = re.compile(r"\[([0-9A-Fa-f:.%\w-]+)\](?::(\d{1,5}))?")


def split(address: str, port: int = 0) -> tuple[str, int]:
    """Host and port of "host", "host:port", "[v6]:port" or a bare IPv6 address; *port* where none is said."""
    if match := _BRACKETED.fullmatch(address):
        return match[1], int(match[2] or port)
    host, colon, number = address.rpartition(":")
    if colon and ":" not in host and number.isascii() and number.isdigit():
        return host, int(number[:6])
    return address, port


def joined(host: str, port: int) -> str:
    """The opposite of `split`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_ip(text: str) -> bool:
    """Whether *text* is an IP address, a zone allowed."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_here(address: str) -> bool:
    """Whether an IP address is one of this node's own: it can be bound to."""
    with contextlib.suppress(OSError, ValueError, OverflowError):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
            return True
    return False


def own_addresses() -> tuple[str, ...]:
    """This node's addresses that others may reach: no loopback, no link-local ones."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        found += _LOCAL.findall(FIB_TRIE.read_text())
    with contextlib.suppress(OSError):
        for line in IF_INET6.read_text().splitlines():
            found.append(str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))))
    usable = []
    for text in dict.fromkeys(found):
        address = ipaddress.ip_address(text)
        if not (address.is_loopback or address.is_link_local or address.is_multicast or address.is_unspecified):
            usable.append(text)
    return tuple(usable)


class Resolver:
    """Names to addresses. `addresses` answers at once with what is known; a thread finds out the rest."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, tuple[str, ...]]] = {}
        self._asked: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._pending: set[str] = set()
        self._thread: threading.Thread | None = None

    def addresses(self, name: str) -> tuple[str, ...]:
        """The IP addresses of *name*; none while they aren't known. An IP address is its own."""
        if is_ip(name):
            return (name,)
        at, found = self._known.get(name, (-LASTS_S, ()))
        if time.monotonic() - at >= LASTS_S and name not in self._pending and len(self._pending) < NAMES_MAX:
            self._pending.add(name)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="powerguard-names", daemon=True)
                self._thread.start()
            self._asked.put(name)
        return found

    def close(self) -> None:
        """Ends the thread, unless it is stuck in a look-up: then it ends with the process."""
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join(1.0)

    def _run(self) -> None:
        while (name := self._asked.get()) is not None:
            found = self._known.get(name, (0.0, ()))[1]
            with contextlib.suppress(OSError, UnicodeError):
                answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
                found = tuple(dict.fromkeys(str(answer[4][0]) for answer in answers))
            self._known[name] = (time.monotonic(), found)
            if len(self._known) > NAMES_MAX:
                del self._known[next(iter(self._known))]  # the one known for longest: it may be asked again
            self._pending.discard(name)
