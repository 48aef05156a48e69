"""Hosts of their own on this machine: a network namespace each, joined by a switch, with cables that can be pulled.

Needs root and `ip` (iproute2). Nothing outside the namespaces is touched, and `close` takes everything away.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
import uuid
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

CLONE_NEWNET = 0x40000000


def missing() -> str:
    """Why there can be no such hosts here; "" if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "ip isn't installed (apt-get install iproute2)"
    name = f"pgx{uuid.uuid4().hex[:6]}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"ip netns add: {tried.stderr.strip()}"
    veth = ["ip", "-n", name, "link", "add", "va", "type", "veth", "peer", "name", "vb"]
    tried = subprocess.run(veth, capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], check=False)
    return f"no veth here: {tried.stderr.strip()}" if tried.returncode else ""


class Hosts:
    """*count* hosts, numbered from 0, with the addresses 10.77.0.1, .2, ..."""

    def __init__(self, count: int) -> None:
        tag = uuid.uuid4().hex[:5]
        self.names = [f"pg{tag}h{n}" for n in range(count)]
        self._switch = f"pg{tag}sw"
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        for number, name in enumerate(self.names):
            _ip("netns", "add", name)
            port = f"p{number}"
            _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", self._switch, "link", "set", port, "master", "br0")
            _ip("-n", self._switch, "link", "set", port, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")

    @staticmethod
    def address(number: int) -> str:
        """Of a host."""
        return f"10.77.0.{number + 1}"

    def cable(self, number: int, *, plugged: bool) -> None:
        """Pulls the network cable of a host, or puts it back."""
        _ip("-n", self._switch, "link", "set", f"p{number}", "up" if plugged else "down")

    def command(self, number: int, words: list[str]) -> list[str]:
        """*words* as a command that runs on a host."""
        return ["ip", "netns", "exec", self.names[number], *words]

    def inside(self, number: int, deed: Callable[[], T]) -> T:
        """Does something of this process on a host; sockets and threads that it makes stay there."""
        found: list[T] = []
        fault: list[BaseException] = []

        def run() -> None:
            try:
                with open(f"/var/run/netns/{self.names[number]}") as there:
                    if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                found.append(deed())
            except BaseException as err:
                fault.append(err)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if fault:
            raise fault[0]
        return found[0]

    def close(self) -> None:
        """Takes the hosts away; processes on them must have ended."""
        for name in (*self.names, self._switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
