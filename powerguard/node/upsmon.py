"""NUT's own client on this node: does it run, for which UPSes, and how does it shut the node down?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from powerguard.errors import ConfigError
from powerguard.node.halt_ways import UPSMON_PIDS
from powerguard.node.ups_line import MalformedLine, UpsAddress, words

CONFIGS = (Path("/etc/nut/upsmon.conf"), Path("/etc/ups/upsmon.conf"), Path("/usr/local/etc/nut/upsmon.conf"))
HOSTSYNC_S = 15.0
"""NUT's default."""
BYTES_MAX = 1 << 20


class Monitor(Struct, frozen=True):
    """One MONITOR line."""

    address: UpsAddress
    primary: bool


class Upsmon(Struct, frozen=True):
    """upsmon.conf."""

    monitors: tuple[Monitor, ...] = ()
    hostsync_s: float = HOSTSYNC_S
    shutdown: str = ""

    def role(self, ups: str) -> str:
        """ "primary", "secondary", or "" where *ups* (`ups@host:port`) isn't watched by it."""
        for each in self.monitors:
            if _same(each.address, UpsAddress.parse(ups)):
                return "primary" if each.primary else "secondary"
        return ""


def runs(pids: Sequence[Path] = UPSMON_PIDS) -> bool:
    """Whether an upsmon runs here, whoever it belongs to."""
    for path in pids:
        try:
            os.kill(int(path.read_text()), 0)
        except PermissionError:
            return True
        except (OSError, ValueError):
            continue
        return True
    return False


def read(paths: Sequence[Path] = CONFIGS) -> Upsmon | None:
    """The first of *paths* that is there; None if none is, or this user may not read it."""
    for path in paths:
        try:
            with path.open("rb") as file:
                return parse(file.read(BYTES_MAX).decode("utf-8", "replace"))
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


def parse(text: str) -> Upsmon:
    """What *text* says; lines that make no sense are skipped, as upsmon does."""
    monitors: list[Monitor] = []
    hostsync_s, shutdown = HOSTSYNC_S, ""
    for line in text.splitlines():
        try:
            parts = words(line.partition(" #")[0].strip()) if not line.lstrip().startswith("#") else []
            if parts[:1] == ["MONITOR"] and len(parts) >= 6:
                monitors.append(Monitor(UpsAddress.parse(parts[1]), parts[5].lower() in ("primary", "master")))
            elif parts[:1] == ["HOSTSYNC"] and len(parts) >= 2 and parts[1].isascii() and parts[1].isdigit():
                hostsync_s = float(parts[1][:9])
            elif parts[:1] == ["SHUTDOWNCMD"] and len(parts) >= 2:
                shutdown = parts[1]
        except (MalformedLine, ConfigError):
            continue
    return Upsmon(tuple(monitors), hostsync_s, shutdown)


_HERE = ("localhost", "127.0.0.1", "::1")


def _same(one: UpsAddress, other: UpsAddress) -> bool:
    hosts = one.host.casefold() == other.host.casefold() or (one.host in _HERE and other.host in _HERE)
    return hosts and one.ups.casefold() == other.ups.casefold() and one.port == other.port
