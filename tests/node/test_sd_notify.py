"""Words to the service manager."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from powerguard.node.sd_notify import Notifier


@contextlib.contextmanager
def manager(address: str) -> Iterator[socket.socket]:
    """The other end of $NOTIFY_SOCKET."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + address[1:] if address.startswith("@") else address)
        listener.settimeout(5)
        yield listener


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_words_reach_the_manager(kind, tmp_path):
    """READY, RELOADING, WATCHDOG and STOPPING arrive, each in one datagram, on both kinds of socket."""
    address = str(tmp_path / "notify") if kind == "path" else f"@powerguard-test-{os.getpid()}"
    with manager(address) as listener:
        notify = Notifier({"NOTIFY_SOCKET": address})
        notify.ready("on line\npower")
        notify.reloading()
        notify.watchdog("riding")
        notify.watchdog("riding")
        notify.stopping()
        said = [listener.recv(4096).decode() for _ in range(5)]
        notify.close()

    assert said[0] == "READY=1\nSTATUS=on line power"
    assert said[1].startswith("RELOADING=1\nMONOTONIC_USEC=")
    assert said[2:4] == ["WATCHDOG=1\nSTATUS=riding", "WATCHDOG=1"]
    assert said[4].startswith("STOPPING=1")


@pytest.mark.parametrize("address", ["", "/nowhere/notify", "relative", "@nobody-listens-here"])
def test_no_manager_costs_nothing(address):
    """Without a manager, or with one that is gone, words are lost and nothing is raised."""
    notify = Notifier({"NOTIFY_SOCKET": address})
    notify.watchdog("x")
    notify.close()
    notify.watchdog("y")


def test_a_manager_that_does_not_read_is_not_waited_for(tmp_path):
    """A full socket buffer drops words instead of holding the loop."""
    address = str(tmp_path / "notify")
    with manager(address):
        notify = Notifier({"NOTIFY_SOCKET": address})
        for n in range(5000):
            notify.watchdog(str(n))
        notify.close()


def test_a_manager_that_has_gone_is_noticed(tmp_path):
    """Nobody behind the socket, or no socket: systemd-shutdown has taken over. One that is only busy is still there."""
    address = str(tmp_path / "notify")
    notify = Notifier({"NOTIFY_SOCKET": address})
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(address)
    for n in range(1000):  # more than the socket holds
        notify.watchdog(str(n))
    assert not notify.manager_gone
    listener.close()
    notify.watchdog()
    assert notify.manager_gone
    os.unlink(address)
    notify.watchdog()
    assert notify.manager_gone
    notify.close()


@pytest.mark.parametrize(
    ("env", "watchdog_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "77"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "78"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
    ],
)
def test_watchdog_period_is_only_ours(env, watchdog_s):
    """The period counts only if it was given to this process."""
    assert Notifier(env, pid=77).watchdog_s == watchdog_s


def test_clock_and_boot_are_the_kernels():
    """Boottime grows and includes suspend; the boot id is the kernel's."""
    from powerguard.node import clock

    first = clock.now()
    uptime = float(Path("/proc/uptime").read_text().split()[0])

    assert first <= clock.now()
    assert abs(uptime - first) < 5
    assert len(clock.boot_id()) == 36
