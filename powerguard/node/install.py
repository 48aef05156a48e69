"""Installs powerguard as a service: what will be done is known, and shown, before any of it is done.

Files of an operator's are never overwritten. A file that we put there and nobody edited is brought up to date; one that
was edited stays, and ours goes beside it as `.new`. `MANIFEST` remembers what we put: it is how the two are told apart.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path

import msgspec
from msgspec import Struct

from powerguard.config import FILE
from powerguard.core.policy import Policy
from powerguard.errors import PowerguardError, UsageError
from powerguard.generations.disk import DISK
from powerguard.generations.durable import make_directory, write_file
from powerguard.node import units
from powerguard.node.program import ProgramFailed, run

PASSWORD = "/etc/powerguard/nut-password"
MANIFEST = "/etc/powerguard/.installed.json"
STATE = ("/var/lib/powerguard", "/var/lib/powerguard-shed")
UNITS = ("powerguard.service", "powerguard-halt.path", "powerguard-halt.service", "powerguard-shed.service")
LOGIND = "/etc/systemd/logind.conf.d/zz-powerguard.conf"
COMMAND_S = 90.0
HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")
"""Folders that the unit can't see (ProtectHome=, PrivateTmp=)."""
DELAY_LEAST_S = 300
"""A shutdown waits for training only as long as that needs, so the limit may be generous."""


class File(Struct, frozen=True):
    """A file to be there."""

    path: str
    content: bytes
    why: str
    mode: int = 0o644
    keep: bool = False  # never brought up to date: the operator's from the first day
    secret: bool = False


class Command(Struct, frozen=True):
    """A program to be run; without *needed* its failure is only said."""

    argv: tuple[str, ...]
    why: str
    needed: bool = True


class Fate(str, Enum):
    """What becomes of a file."""

    NEW = "new"
    SAME = "same"
    UPDATED = "updated"
    BESIDE = "beside"  # edited by somebody: ours goes beside it
    KEPT = "kept"
    REMOVED = "removed"
    GONE = "gone"


class Tools(Struct, frozen=True):
    """Where and how: *root* is / but for tests."""

    root: Path = Path("/")
    run: Callable[[Sequence[str]], str] = lambda argv: run(argv, COMMAND_S)

    def at(self, path: str) -> Path:
        """*path* under the root."""
        return self.root / path.lstrip("/")


def program() -> str:
    """The installed `powerguard`, where the unit will find it. Raises UsageError where it won't."""
    beside = Path(sys.executable).with_name("powerguard")
    found = str(beside) if beside.exists() else shutil.which("powerguard")
    if found is None:
        raise UsageError("the program powerguard isn't installed", todo="pip install 'powerguard[node]'")
    real = os.path.realpath(found)
    for path in (found, real, os.path.realpath(sys.executable)):
        hidden = next((folder for folder in HIDDEN if path.startswith(folder + "/")), "")
        if hidden:
            raise UsageError(
                f"{path} is in {hidden}, which the service can't see",
                todo="install it elsewhere: python3 -m venv /opt/powerguard && "
                "/opt/powerguard/bin/pip install 'powerguard[node]'",
            )
    return found


def delay_s(policy: Policy, save_s: float | None = None) -> int:
    """InhibitDelayMaxSec: twice a flush as measured, or as configured, and the margin; in whole minutes."""
    planned = policy.flush_default_s * policy.flush_factor if save_s is None else save_s
    return max(DELAY_LEAST_S, 60 * math.ceil((2.0 * planned + policy.margin_s) / 60.0))


def files(exe: str, config: str, *, password: str | None, delay: int) -> list[File]:
    """All files; *password* None: a new one is made up."""
    secret = (password or secrets.token_urlsafe(24)) + "\n"
    return [
        File("/etc/sysusers.d/powerguard.conf", _encoded("powerguard.sysusers"), "the user of the service"),
        File(
            "/etc/tmpfiles.d/powerguard.conf", _encoded("powerguard.tmpfiles"), "who may read what in /etc/powerguard"
        ),
        File(FILE, config.encode(), "the configuration, from the UPSes found", 0o640, keep=True),
        File(PASSWORD, secret.encode(), "the NUT password, for root and the service", 0o600, keep=True, secret=True),
        *(File(f"/etc/systemd/system/{name}", units.unit(name, exe).encode(), _UNIT_WHY[name]) for name in UNITS),
        File(
            "/etc/polkit-1/rules.d/50-powerguard.rules",
            _encoded("powerguard.rules"),
            "lets the service power this node off, and nothing else",
        ),
        File(LOGIND, units.logind(delay).encode(), f"a shutdown waits up to {delay} s for training to be saved"),
    ]


_UNIT_WHY = {
    "powerguard.service": "the service",
    "powerguard-halt.path": "powers off where D-Bus is dead",
    "powerguard-halt.service": "the same",
    "powerguard-shed.service": "lowers the GPUs' power, if [shed] says so",
}


def _encoded(name: str) -> bytes:
    return units.text(name).encode()


INSTALL = (
    Command(("systemd-sysusers", "/etc/sysusers.d/powerguard.conf"), "makes the user"),
    Command(("systemd-tmpfiles", "--create", "/etc/tmpfiles.d/powerguard.conf"), "gives it what it may read"),
    Command(("systemctl", "daemon-reload"), "reads the units"),
    Command(("systemctl", "kill", "-s", "HUP", "systemd-logind.service"), "reads the drop-in", needed=False),
    Command(("systemctl", "enable", "--now", "powerguard-halt.path"), "waits for the worst"),
    Command(("systemctl", "enable", "powerguard.service"), "starts it at boot"),
    Command(("systemctl", "restart", "powerguard.service"), "starts it now"),
)

UNINSTALL = (
    Command(("systemctl", "disable", "--now", "powerguard.service"), "ranks train on, unwatched", needed=False),
    Command(("systemctl", "disable", "--now", "powerguard-halt.path"), "", needed=False),
    Command(("systemctl", "stop", "powerguard-shed.service"), "GPUs get their power back", needed=False),
)

AFTER_UNINSTALL = (
    Command(("systemctl", "daemon-reload"), "forgets the units", needed=False),
    Command(("systemctl", "kill", "-s", "HUP", "systemd-logind.service"), "forgets the drop-in", needed=False),
)


class Installed:
    """What we put on this system, and how it differs from what is there."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        try:
            raw = tools.at(MANIFEST).read_bytes()
            self.digests: dict[str, str] = msgspec.json.decode(raw, type=dict[str, str])
        except (OSError, msgspec.MsgspecError, ValueError):
            self.digests = {}

    def fate(self, file: File) -> Fate:
        """What `put` will do with it."""
        there = _read(self._tools.at(file.path))
        if there is None:
            return Fate.NEW
        if there == file.content or file.secret:
            return Fate.SAME if there == file.content else Fate.KEPT
        if not file.keep and self.digests.get(file.path) == _digest(there):
            return Fate.UPDATED
        return Fate.BESIDE

    def put(self, file: File) -> Fate:
        """Puts it there; ours goes to `.new` where somebody else's is. Raises PowerguardError."""
        fate, path = self.fate(file), self._tools.at(file.path)
        if fate in (Fate.NEW, Fate.UPDATED):
            self._write(path, file)
            self.digests[file.path] = _digest(file.content)
        elif fate is Fate.BESIDE:
            self._write(path.with_name(path.name + ".new"), file)
        elif fate is Fate.SAME:
            self.digests[file.path] = _digest(file.content)
        return fate

    def leaving(self, path: str) -> Fate:
        """What `take` will do with it."""
        there = _read(self._tools.at(path))
        if there is None:
            return Fate.GONE
        return Fate.REMOVED if self.digests.get(path) == _digest(there) else Fate.KEPT

    def take(self, path: str, *, whatever: bool = False) -> Fate:
        """Takes it away, unless somebody has edited it; *whatever*: then as well."""
        fate = self.leaving(path)
        if fate is Fate.REMOVED or (fate is Fate.KEPT and whatever):
            try:
                self._tools.at(path).unlink()
            except OSError as err:
                raise PowerguardError(f"{path} can't be removed: {err.strerror}", todo="run it as root") from None
            fate = Fate.REMOVED
        self.digests.pop(path, None)
        return fate

    def save(self) -> None:
        """Remembers it all; forgets the manifest once nothing is left."""
        path = self._tools.at(MANIFEST)
        if self.digests:
            self._write(path, File(MANIFEST, msgspec.json.format(msgspec.json.encode(self.digests)), ""))
        else:
            path.unlink(missing_ok=True)

    def _write(self, path: Path, file: File) -> None:
        try:
            make_directory(DISK, path.parent)
            old_umask = os.umask(0o777 & ~file.mode)  # a secret is never readable to others, not for a moment
            try:
                write_file(DISK, path, file.content)
            finally:
                os.umask(old_umask)
            path.chmod(file.mode)
        except OSError as err:
            raise PowerguardError(f"{path} can't be written: {err.strerror}", todo="run it as root") from None


def do(tools: Tools, command: Command) -> str:
    """Runs it; "" or what went wrong, where that is no reason to stop. Raises PowerguardError where it is."""
    try:
        tools.run(command.argv)
    except ProgramFailed as err:
        if command.needed:
            raise PowerguardError(
                str(err), todo="mend it and run the same again: it goes on where it stopped"
            ) from None
        return str(err)
    return ""


def paths(contents: Mapping[str, str]) -> list[str]:
    """Paths of a manifest, those that hold what an operator wrote last."""
    return sorted(contents, key=lambda path: (path in (FILE, PASSWORD), path))


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as err:
        raise PowerguardError(f"{path} can't be read: {err.strerror}", todo="run it as root") from None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
