"""What a simulated upsd knows: its users, its UPSes, and each connection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

HEALTHY: Mapping[str, str] = {
    "battery.charge": "100",
    "battery.charge.low": "20",
    "battery.runtime": "1200",
    "battery.runtime.low": "120",
    "battery.type": "PbAc",
    "driver.name": "simulated",
    "driver.parameter.pollfreq": "1",
    "driver.parameter.pollinterval": "1",
    "input.voltage": "230.0",
    "ups.load": "35",
    "ups.mfr": "Powerguard",
    "ups.model": "Simulated 3000",
    "ups.status": "OL",
}


@dataclass(frozen=True)
class User:
    """An entry of upsd.users. *upsmon*: "primary", "secondary" or "" (may not LOGIN)."""

    password: str
    upsmon: str = "secondary"
    may_set: bool = False
    may_fsd: bool = False
    instcmds: bool = False


USERS: Mapping[str, User] = {
    "admin": User("adminpw", upsmon="", may_set=True, may_fsd=True, instcmds=True),
    "primary": User("primarypw", upsmon="primary"),
    "secondary": User("secondarypw", upsmon="secondary"),
}


@dataclass
class Ups:
    """One simulated UPS; *state* is "ok", "wait", "stale" or "driver-gone"."""

    name: str
    description: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    commands: tuple[str, ...] = ("load.off", "load.on", "shutdown.return", "test.battery.start")
    fsd: bool = False
    state: str = "ok"

    def seen(self) -> dict[str, str]:
        """The variables as a client sees them."""
        if self.state == "wait":
            return {"ups.status": "WAIT"}
        seen = dict(sorted(self.variables.items()))
        if self.fsd:
            seen["ups.status"] = f"FSD {seen.get('ups.status', '')}".rstrip()
        return seen


@dataclass
class Session:
    """What upsd knows of one connection."""

    peer: str
    user: str = ""
    password: str | None = None
    login: str = ""  # name of the UPS
    tls: bool = False
    tracking: bool = False
    ended: bool = False


class Err(Exception):
    """Answered as `ERR code`."""
