"""Processes that registered as ranks, looked at from outside: do they live, and which step does their page show?

Where the kernel has a word it counts: pid and user come with the connection (SO_PEERCRED), and a process is watched
through a pidfd, which a reuse of its number can't deceive.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat

from powerguard.core import page
from powerguard.core.messages import Hello
from powerguard.core.types import PageReport


class Credentials:
    """What the kernel says of a connection's other end; -1 = nothing."""

    __slots__ = ("pid", "uid")

    def __init__(self, address: str = "") -> None:
        """From ZeroMQ's "Peer-Address" of an ipc connection: `localhost:uid:gid:pid`."""
        parts = address.rsplit(":", 3)
        known = len(parts) == 4 and parts[1].isdecimal() and parts[3].isdecimal()
        self.uid = int(parts[1]) if known else -1
        self.pid = int(parts[3]) if known else -1


class Peer:
    """One registered process."""

    def __init__(self, hello: Hello, owner: Credentials) -> None:
        self.job, self.rank, self.said_pid, self.uid = hello.job, hello.rank, hello.pid, owner.uid
        self._pid = owner.pid
        self._page_fd = _open_page(hello.page)
        self._pid_fd = -1
        self._dead_at: float | None = None
        if self._pid > 0:
            with contextlib.suppress(OSError):  # gone already, or a kernel without it
                self._pid_fd = os.pidfd_open(self._pid)

    def report(self, now: float) -> PageReport:
        """What can be seen of it now."""
        return PageReport(self.job, self.rank, now, self.step(), self.alive(), self.said_pid)

    def alive(self) -> bool:
        """It runs. Where it can't be seen (another pid namespace), it is believed to."""
        if self._pid_fd >= 0:
            poll = select.poll()
            poll.register(self._pid_fd, select.POLLIN)
            return not poll.poll(0)
        if self._pid <= 0:
            return True
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            pass  # not ours to signal, but there
        return True

    def dead_since(self, now: float) -> float:
        """When this was first asked of it, which has ended: *now*, or earlier."""
        if self._dead_at is None:
            self._dead_at = now
        return self._dead_at

    def step(self) -> int:
        """The step on its page; -1 = none that can be read."""
        if self._page_fd < 0:
            return -1
        try:
            found = page.read(os.pread(self._page_fd, page.BYTES, 0))
        except OSError:
            return -1
        return found.step if found is not None and found.pid == self.said_pid else -1

    def close(self) -> None:
        """Gives the descriptors back."""
        for fd in (self._page_fd, self._pid_fd):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._page_fd = self._pid_fd = -1


def _open_page(path: str) -> int:
    """The page's descriptor, or -1. It is somebody else's file: no link, no device, nothing that could block."""
    if not path.startswith("/"):
        return -1
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError):
        return -1
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return -1
    return fd
