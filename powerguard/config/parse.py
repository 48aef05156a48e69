"""TOML → Config. Every problem is found in one pass: file, line, key, what is wrong, what to write."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from datetime import UTC, date, datetime
from pathlib import Path

import msgspec

from powerguard.config.feeds import feeds
from powerguard.config.reader import Reader
from powerguard.config.rules import broken
from powerguard.config.values import (
    Config,
    HaltConfig,
    LogConfig,
    MetricsConfig,
    NodeConfig,
    NotifyConfig,
    PeersConfig,
    ShedConfig,
)
from powerguard.core.policy import Policy
from powerguard.errors import ConfigError

FILE = "/etc/powerguard/powerguard.toml"
"""Where the daemon's is, unless it is told otherwise."""

FILE_MAX_BYTES = 1 << 20
SHED_LEAST_PCT = 20.0
NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Of a node that other nodes know: it names a file."""
RUN_DIR_MAX_BYTES = 107 - len("/control.sock")
"""A Unix socket's path has at most 107 bytes (unix(7))."""

PEERS_PORT_MAX = 32767
"""Ports above are handed out to outgoing connections (Linux: 32768 to 60999): a restart could find its own taken."""

_TABLES = ("node", "ups", "policy", "peers", "halt", "shed", "metrics", "log", "notify")


def load(
    path: str | Path, *, env: Mapping[str, str] | None = None, today: date | None = None, secrets: bool = True
) -> Config:
    """The configuration in the file *path*; ConfigError lists everything that is wrong with it.

    Without *secrets* files of passwords and certificates are neither read nor missed: enough to weigh a policy.
    """
    try:
        with Path(path).open("rb") as file:
            raw = file.read(FILE_MAX_BYTES + 1)
    except (OSError, ValueError) as err:
        raise _unreadable(path, err) from None
    if len(raw) > FILE_MAX_BYTES:
        raise ConfigError(f"{path}: longer than {FILE_MAX_BYTES} bytes", todo="name the right file with -c")
    try:
        text = raw.decode()
    except UnicodeDecodeError as err:
        raise ConfigError(f"{path}: byte {err.start} isn't UTF-8", todo="save the file as UTF-8") from None
    return loads(text, source=str(path), env=env, today=today, secrets=secrets)


def _unreadable(path: str | Path, err: OSError | ValueError) -> ConfigError:
    if isinstance(err, PermissionError):
        todo = "run this with sudo, or as a user of the group that may read it"
        return ConfigError(f"{path}: can't be read by this user: {err.strerror}", todo=todo)
    todo = "name an existing file with -c; powerguard service install writes one"
    why = err.strerror if isinstance(err, OSError) else str(err)
    return ConfigError(f"{path}: can't be read: {why}", todo=todo)


def loads(
    text: str,
    *,
    source: str = "<text>",
    env: Mapping[str, str] | None = None,
    today: date | None = None,
    secrets: bool = True,
) -> Config:
    """The configuration in *text*; *env* (CREDENTIALS_DIRECTORY) and *today* (ages) default to the process's."""
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"{source}: not TOML: {err or 'nested too deeply'}", todo="mend the line named") from None
    reader = Reader(
        raw, source, text, os.environ if env is None else env, today or datetime.now(tz=UTC).date(), secrets=secrets
    )
    config = _config(reader)
    if reader.problems:
        problems = reader.problems
        count = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(f"{source}: {count}\n  " + "\n  ".join(problems), problems=problems)
    return config


def _config(reader: Reader) -> Config:
    reader.unknown("", reader.raw, _TABLES)
    node = _node(reader)
    ups, known = feeds(reader)
    policy = reader.struct(Policy, "policy", without=("feeds", "min_supplies", "outages"))
    policy = msgspec.structs.replace(policy, feeds=known, min_supplies=node.min_supplies)
    for key, wrong, write in broken(policy, {key.removeprefix("policy.") for key in reader.wrong}):
        reader.bad(f"policy.{key}", f"{getattr(policy, key):g}: {wrong}", write)
    if ups and "node.min_supplies" not in reader.wrong and node.min_supplies > len(ups):
        reader.bad("node.min_supplies", f"{node.min_supplies}, with {len(ups)} [[ups]]", f"1 to {len(ups)}")
    notify = reader.struct(NotifyConfig, "notify")
    _program(reader, "notify.command", notify.command)
    return Config(
        source=reader.source,
        node=msgspec.structs.replace(node, name=node.name or os.uname().nodename),
        ups=ups,
        policy=policy,
        halt=_halt(reader),
        shed=_shed(reader),
        metrics=_metrics(reader),
        peers=_peers(reader, node),
        log=reader.struct(LogConfig, "log"),
        notify=notify,
    )


def _node(reader: Reader) -> NodeConfig:
    node = reader.struct(NodeConfig, "node")
    for key in ("run_dir", "state_dir"):
        path = getattr(node, key)
        if not path.startswith("/"):
            reader.bad(f"node.{key}", f"{path!r} isn't an absolute path", f'"{getattr(NodeConfig(), key)}"')
    if len(node.run_dir.encode(errors="replace")) > RUN_DIR_MAX_BYTES:
        reader.bad("node.run_dir", "too long for the path of a socket", f"at most {RUN_DIR_MAX_BYTES} bytes")
    return node


def _halt(reader: Reader) -> HaltConfig:
    halt = reader.struct(HaltConfig, "halt")
    _program(reader, "halt.command", halt.command)
    if {"halt.command", "halt.method"} & reader.wrong:
        return halt
    if halt.method == "command" and not halt.command:
        reader.bad("halt.command", 'missing, with method = "command"', 'command = ["/usr/sbin/poweroff"]')
    if halt.method in ("dry-run", "logind") and halt.command:
        reader.bad("halt.command", f'isn\'t used by method = "{halt.method}"', 'method = "command", or no command')
    return halt


def _shed(reader: Reader) -> ShedConfig:
    shed = reader.struct(ShedConfig, "shed")
    if 0.0 < shed.gpu_power_pct < SHED_LEAST_PCT:
        reader.bad(
            "shed.gpu_power_pct",
            f"{shed.gpu_power_pct:g}: training would all but stop",
            f"{SHED_LEAST_PCT:g} to 100, or 0",
        )
    return shed


def _program(reader: Reader, path: str, command: tuple[str, ...]) -> None:
    if command and not command[0].startswith("/"):
        reader.bad(path, f"{command[0]!r} isn't an absolute path", "the program's full path")


def _metrics(reader: Reader) -> MetricsConfig:
    metrics = reader.struct(MetricsConfig, "metrics")
    host, colon, port = metrics.listen.rpartition(":")
    good = bool(colon) and port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536
    if metrics.listen and (not good or (":" in host and not host.startswith("["))):
        reader.bad("metrics.listen", f"{metrics.listen!r} isn't an address", '"127.0.0.1:9811" or "[::1]:9811"')
    return metrics


def _peers(reader: Reader, node: NodeConfig) -> PeersConfig:
    peers = reader.struct(PeersConfig, "peers")
    host, colon, port = peers.listen.rpartition(":")
    good = bool(colon) and port.isascii() and port.isdigit() and 0 < int(port[:6]) <= PEERS_PORT_MAX
    if peers.listen and (not good or (":" in host and not host.startswith("["))):
        reader.bad("peers.listen", f"{peers.listen!r} isn't an address with a port to {PEERS_PORT_MAX}", '":9812"')
    if not peers.keys.startswith("/"):
        reader.bad("peers.keys", f"{peers.keys!r} isn't an absolute path", f'"{PeersConfig().keys}"')
    if peers.listen and node.name and not NODE_NAME.fullmatch(node.name):
        reader.bad("node.name", f"{node.name!r} can't be the name of a key", "letters, digits, '.', '-' and '_'")
    return peers
