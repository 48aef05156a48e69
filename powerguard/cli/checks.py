"""The single checks of `powerguard check`: each gives findings, one line each, and changes nothing that lasts."""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from powerguard.config import Config, UpsConfig
from powerguard.core.types import Comm, Sample
from powerguard.errors import DirectoryError, HaltNotPermitted, PowerguardError, UpsError
from powerguard.generations import storage
from powerguard.node import clock, halt_ways, tls

IN_MEMORY = ("tmpfs", "ramfs", "overlay-on-tmpfs")


SECONDARY = "the primary waits for this node up to its HOSTSYNC"


class Finding(Struct, frozen=True):
    """One line: what was looked at, what was found, what to do, and the exit code if it is a failure."""

    level: str  # "ok" | "warn" | "fail"
    topic: str
    text: str
    todo: str = ""
    code: int = 0


def ok(topic: str, text: str) -> Finding:
    """All is well."""
    return Finding("ok", topic, text)


def warn(topic: str, text: str, todo: str = "") -> Finding:
    """Works, and may surprise."""
    return Finding("warn", topic, text, todo)


def fail(topic: str, err: PowerguardError) -> Finding:
    """Doesn't work."""
    return Finding("fail", topic, err.message, err.todo, err.exit_code)


def configuration(path: Path, config: Config) -> Iterator[Finding]:
    """Of the file itself, once it is valid."""
    yield ok("config", f"{path}: {len(config.ups)} UPS, {config.node.min_supplies} needed on mains")
    if any(ups.password_inline for ups in config.ups) and path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        yield warn("config", f"{path} holds a password and others may read it", "chmod 600, or use password_file")
    if len(config.ups) > 1:
        lost = len(config.ups) - config.node.min_supplies
        yield ok("config", f"on line while at most {lost} of {len(config.ups)} UPS are on battery, silent or off")
    with contextlib.suppress(KeyError):
        if os.geteuid() == 0 and pwd.getpwnam("powerguard"):
            yield warn(
                "config", "checked as root, the service runs as powerguard", "sudo -u powerguard powerguard check"
            )


def feed(ups: UpsConfig) -> Iterator[Finding | Sample]:
    """Of one UPS: reached, logged in, and what it says (the sample comes as well)."""
    from powerguard.node.ups_line import UpsAddress
    from powerguard.node.ups_probe import probe

    topic = f"ups {ups.name}"
    try:
        answer = probe(
            UpsAddress.parse(ups.name),
            user=ups.user or None,
            password=ups.password.reveal() or None,
            tls=tls.context(ups),
        )
    except UpsError as err:
        yield fail(topic, _without_name(err, ups.name))
        return
    except PowerguardError as err:
        yield fail(topic, err)
        return
    values = answer.variables
    yield Sample(ups.name, clock.now(), Comm.OK, values, "", answer.took_s)
    known = [
        f"{label} {values[name]}{unit}"
        for name, label, unit in (
            ("battery.charge", "charge", " %"),
            ("battery.runtime", "runtime", " s"),
            ("ups.load", "load", " %"),
        )
        if name in values
    ]
    yield ok(
        topic, f"{values.get('ups.status', 'no status')}, {', '.join(known) or 'no figures'}, in {answer.took_s:.2f} s"
    )
    if not answer.logged_in:
        yield warn(topic, "no user is given, so the NUT primary doesn't wait for this node", "user and password_file")
    elif answer.primary:
        yield ok(topic, f"user {ups.user} is logged in, and is a primary: [halt] method may be upsmon-fsd")
    else:
        yield ok(topic, f"user {ups.user} may log in: {SECONDARY}")
    yield from _missing(topic, values)


def _missing(topic: str, values: dict[str, str]) -> Iterator[Finding]:
    if "battery.voltage" not in values:
        yield warn(topic, "reports no battery.voltage: the runway is judged more cautiously")
    if "battery.runtime" not in values and "battery.charge" not in values:
        yield warn(topic, "reports neither runtime nor charge", "battery_installed and rated in the configuration help")


def _without_name(err: UpsError, name: str) -> UpsError:
    """The topic names the UPS already."""
    err.message = err.message.removeprefix(f"{name}: ")
    return err


def own_directory(topic: str, path: str, todo: str) -> Finding:
    """Of a directory of the daemon: it is there and can be written, or can be made."""
    try:
        where = Path(path)
        if os.path.exists(where):
            _try_writing(where)
            return ok(topic, f"{path} can be written")
        _try_writing(next(parent for parent in where.parents if os.path.exists(parent)))
    except DirectoryError as err:
        return fail(topic, DirectoryError(err.message, todo=todo))
    return ok(topic, f"{path} will be made")


def checkpoint_directory(path: Path, needed_bytes: float | None) -> Iterator[Finding]:
    """Of the directory that generations go to: on a real disk, writable, with room for two more."""
    topic = "dir"
    try:
        if not os.path.isdir(path):
            raise DirectoryError(f"{path} isn't a directory", todo="make it, or name the one given to attach(dir=...)")
        kind = filesystem(path)
        if kind in IN_MEMORY:
            raise DirectoryError(f"{path} is a {kind}: nothing in it survives a power cut", todo="use a disk")
        _try_writing(path)
        room = os.statvfs(path)
        free = room.f_bavail * room.f_frsize
        if needed_bytes is not None and free < 2 * needed_bytes:
            raise DirectoryError(
                f"{path} has {free / 1e9:.1f} GB free, two generations need {2 * needed_bytes / 1e9:.1f} GB",
                todo="make room: the old generation is kept until the new one is sealed",
            )
    except DirectoryError as err:
        yield fail(topic, err)
        return
    yield ok(topic, f"{path} can be written and synced ({kind or 'unknown file system'}, {free / 1e9:.1f} GB free)")
    yield from (warn(topic, advice) for advice in storage.advise(path))


def _try_writing(path: Path) -> None:
    """Writes, syncs and removes a small file; DirectoryError says why it can't."""
    try:
        with tempfile.NamedTemporaryFile(dir=path, prefix=".powerguard-check-") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as err:
        raise DirectoryError(
            f"{path} can't be written by user {os.geteuid()}: {err.strerror}", todo="change its owner or its mode"
        ) from None


def filesystem(path: Path) -> str:
    """The kind of file system that *path* lies on, or ""."""
    best = ("", "")
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        full = str(path.resolve())
    except OSError:
        return ""
    for line in mounts:
        _, mount, kind, *_ = line.split(" ")
        mount = mount.replace("\\040", " ")
        inside = full == mount or full.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best[0]):
            best = (mount, kind)
    return best[1]


def halt(config: Config) -> Finding:
    """Of the way to power off: allowed, without doing it."""
    way = halt_ways.choose(
        config.halt.method, config.halt.command, really=True, run_dir=config.node.run_dir, feeds=config.ups
    )
    if not way.real:
        return warn("halt", "a dry run: this node will never be powered off", 'set [halt] method = "logind"')
    try:
        return ok("halt", way.prove())
    except HaltNotPermitted as err:
        return fail("halt", err)
