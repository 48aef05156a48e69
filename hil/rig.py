"""A rig's file: which UPS is watched, which outlets may be switched, and how long it may be dark."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
from msgspec import Struct

from hil.outlets import Outlet
from powerguard.errors import ConfigError, UsageError
from powerguard.node.ups_line import UpsAddress


class Plan(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One outage: *before_s* on mains, then dark until one of three: *dark_s* are over, the charge is below
    *charge_min_pct*, or nobody can read the UPS for *blind_s*. Then mains come back, and *after_s* are watched.
    """

    before_s: float = 30.0
    dark_s: float = 120.0
    charge_min_pct: float = 50.0
    blind_s: float = 30.0
    after_s: float = 60.0
    edge_s: float = 30.0  # the UPS must see that mains are gone, and back, within this
    retry_s: float = 5.0  # between tries to switch mains on again


class Rig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """*what* it is in words; *mains* is the name of the outlet that a run switches."""

    name: str
    what: str
    ups: str
    mains: str
    outlet: tuple[Outlet, ...]
    poll_s: float = 1.0
    plan: Plan = Plan()

    @property
    def address(self) -> UpsAddress:
        """Of the UPS."""
        return UpsAddress.parse(self.ups)

    def named(self, name: str) -> Outlet:
        """The outlet of that name. UsageError for one that isn't in the rig: nothing else is ever switched."""
        for outlet in self.outlet:
            if outlet.name == name:
                return outlet
        known = ", ".join(outlet.name for outlet in self.outlet)
        raise UsageError(f"rig {self.name} has no outlet {name!r}; nothing was switched", todo=f"it has: {known}")


def load(path: Path) -> Rig:
    """The rig of a TOML file. Raises ConfigError."""
    try:
        rig = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Rig)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}", todo="see hil/README.md and hil/rigs") from None
    names = [outlet.name for outlet in rig.outlet]
    if len(set(names)) < len(names):
        raise ConfigError(f"{path}: two outlets have one name")
    if rig.mains not in names:
        raise ConfigError(f"{path}: mains = {rig.mains!r} is none of its outlets ({', '.join(names)})")
    plan = rig.plan
    if min(rig.poll_s, plan.before_s, plan.dark_s, plan.after_s, plan.edge_s, plan.blind_s) <= 0:
        raise ConfigError(f"{path}: every time must be above 0")
    if not 10 <= plan.charge_min_pct <= 100:
        raise ConfigError(f"{path}: charge_min_pct = {plan.charge_min_pct} isn't from 10 to 100")
    rig.address  # noqa: B018  # a wrong one is said now
    return rig
