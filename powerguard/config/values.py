"""What a configuration is: frozen values, each a table of the file. Defaults need no tuning."""

from __future__ import annotations

import msgspec
from msgspec import Struct, field

from powerguard.core.policy import Policy

DEFAULT_PORT = 3493
"""upsd's registered port (IANA: nut)."""


class Secret:
    """A password that doesn't show itself in logs, reprs, journals or comparisons printed by tests."""

    __slots__ = ("_text",)

    def __init__(self, text: str = "") -> None:
        self._text = text

    def reveal(self) -> str:
        """The password itself, for the one place that sends it."""
        return self._text

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __repr__(self) -> str:
        return "Secret(***)" if self._text else "Secret()"


class NodeConfig(Struct, frozen=True):
    """`[node]`: this machine."""

    name: str = ""  # as seen by people and ranks; the host's name when absent
    min_supplies: int = 1  # UPSes that must be on mains for the node to count as on line
    run_dir: str = "/run/powerguard"  # sockets
    state_dir: str = "/var/lib/powerguard"  # journal, and what outages taught
    socket_group: str = ""  # group that may use the sockets; "" = the group of run_dir


class UpsConfig(Struct, frozen=True):
    """One `[[ups]]`: a feed of this node, and how it is reached."""

    name: str  # "ups@host" or "ups@host:port"
    user: str = ""  # in upsd.users, of type "secondary"; "" = no LOGIN, so that the primary doesn't wait for this node
    password: Secret = field(default_factory=Secret)  # better in a file: `password_file`
    tls: str = "off"  # "off" | "require"
    tls_ca: str = ""  # PEM file that the server's certificate must chain to; "" = the system's
    answer_max_s: float = 4.0  # one poll has this long, connecting and logging in included
    password_inline: bool = False  # the password stands in the file itself

    @property
    def ups(self) -> str:
        """The name that upsd knows."""
        return self.name.partition("@")[0]

    @property
    def host(self) -> str:
        """The server, without the brackets of an IPv6 address."""
        return self.name.partition("@")[2].rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The server's TCP port."""
        return int(self.name.rpartition(":")[2])


class HaltConfig(Struct, frozen=True):
    """`[halt]`: how the node is powered off."""

    method: str = "dry-run"  # "dry-run" | "logind" | "command" | "upsmon-fsd"
    command: tuple[str, ...] = ()  # of method "command": a program and its arguments, no shell
    delay_shutdown: bool = True  # whoever shuts the system down, ranks flush first (logind's delay lock)


class ShedConfig(Struct, frozen=True):
    """`[shed]`: what is given up on battery, so that it lasts longer."""

    gpu_power_pct: float = 0.0  # power limit of each GPU, of its default; 0 = GPUs are left alone
    method: str = "auto"  # "auto": "direct" for root, else "unit" | "unit": by powerguard-shed.service | "direct"


class MetricsConfig(Struct, frozen=True):
    """`[metrics]`: Prometheus endpoint; off when *listen* is empty."""

    listen: str = ""  # "host:port" or ":port", which means loopback

    @property
    def address(self) -> tuple[str, int]:
        """Host and port; only meaningful when *listen* isn't empty."""
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]") or "127.0.0.1", int(port)


class PeersConfig(Struct, frozen=True):
    """`[peers]`: the daemons of the other nodes that a job may span; off when *listen* is empty."""

    listen: str = ""  # "host:port" or ":port", which means every address of this node
    keys: str = "/etc/powerguard/keys"  # folder of this node's secret key and of the public keys of the others
    address: str = ""  # where the others reach this node; "" = the first address found

    @property
    def bind(self) -> tuple[str, int]:
        """Host and port; only meaningful when *listen* isn't empty."""
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)


class LogConfig(Struct, frozen=True):
    """`[log]`: what is written, and how."""

    level: str = "info"  # "debug" | "info" | "warning" | "error"
    format: str = "auto"  # "auto": JSON under systemd, coloured on a terminal | "json" | "console"


class NotifyConfig(Struct, frozen=True):
    """`[notify]`: a program that is told every announcement."""

    command: tuple[str, ...] = ()  # a program and its arguments, no shell; see docs/notifications.md


class Config(Struct, frozen=True):
    """The whole file, checked. `policy.feeds` and `ups` name the same feeds in the same order."""

    source: str
    node: NodeConfig
    ups: tuple[UpsConfig, ...]
    policy: Policy
    halt: HaltConfig = HaltConfig()
    shed: ShedConfig = ShedConfig()
    metrics: MetricsConfig = MetricsConfig()
    peers: PeersConfig = PeersConfig()
    log: LogConfig = LogConfig()
    notify: NotifyConfig = NotifyConfig()


def describe_change(old: Config, new: Config) -> list[str]:
    """One line for each value that differs, "key: old -> new"; a password is only said to have changed."""
    lines: list[str] = []
    for table in ("node", "peers", "halt", "shed", "metrics", "log", "notify"):
        lines += _differences(table, getattr(old, table), getattr(new, table))
    lines += _differences("policy", old.policy, new.policy, skip=("feeds", "outages"))
    before, after = {u.name: u for u in old.ups}, {u.name: u for u in new.ups}
    lines += [f"ups {name}: removed" for name in before if name not in after]
    lines += [f"ups {name}: added" for name in after if name not in before]
    for name in before.keys() & after.keys():
        lines += _differences(f"ups {name}", before[name], after[name])
    feeds_before, feeds_after = {f.name: f for f in old.policy.feeds}, {f.name: f for f in new.policy.feeds}
    for name in feeds_before.keys() & feeds_after.keys():
        lines += _differences(f"ups {name}", feeds_before[name], feeds_after[name])
    return sorted(lines)


def _differences(where: str, old: Struct, new: Struct, skip: tuple[str, ...] = ()) -> list[str]:
    lines: list[str] = []
    for item in msgspec.structs.fields(type(old)):
        was, now = getattr(old, item.name), getattr(new, item.name)
        if item.name in skip or was == now:
            continue
        shown = "changed" if isinstance(was, Secret) else f"{_shown(was)} -> {_shown(now)}"
        lines.append(f"{where}.{item.name}: {shown}")
    return lines


def _shown(value: object) -> str:
    return "unset" if value in (None, "", ()) else str(value)
