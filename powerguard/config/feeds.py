"""`[[ups]]`: how each feed is reached (UpsConfig) and what is known of its battery (FeedPolicy)."""

from __future__ import annotations

import itertools
import math
import os
import re
from datetime import date, datetime
from typing import Any

from powerguard.config.reader import Reader, is_number
from powerguard.config.rules import DAY_S
from powerguard.config.values import DEFAULT_PORT, Secret, UpsConfig
from powerguard.core.policy import FeedPolicy

POINTS_MAX = 64

_NAME = re.compile(
    r"""(?P<ups>[^\s@:"\\\[\]]+)
        (?:@(?P<host>\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[^\s@:"\\\[\]]+)(?::(?P<port>\d{1,5}))?)?""",
    re.VERBOSE,
)
_KEYS = (
    "name",
    "user",
    "password",
    "password_file",
    "tls",
    "tls_ca",
    "answer_max_s",
    "battery_installed",
    "chemistry",
    "rated",
    "learned_phi",
)


def feeds(reader: Reader) -> tuple[tuple[UpsConfig, ...], tuple[FeedPolicy, ...]]:
    """Both views of every `[[ups]]`, in the order of the file."""
    tables = reader.raw.get("ups", [])
    if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        reader.bad("ups", "must be a list of tables", "[[ups]] with two brackets")
        return (), ()
    if not tables:
        reader.bad("ups", "no UPS is named", '[[ups]] and below it name = "myups@localhost"')
    ups: list[UpsConfig] = []
    known: list[FeedPolicy] = []
    for n, table in enumerate(tables):
        where = f"ups[{n}]"
        reader.unknown(where, table, _KEYS)
        one = _ups(reader, table, where)
        if any(one.name.lower() == other.name.lower() for other in ups) and one.name:
            reader.bad(f"{where}.name", f"{one.name} is named twice", "each UPS once")
        ups.append(one)
        known.append(_feed(reader, table, where, one.name))
    return tuple(ups), tuple(known)


def _ups(reader: Reader, table: dict[str, Any], where: str) -> UpsConfig:
    values = {k: reader.value(table, where, k, str, "") for k in ("name", "user", "password", "password_file")}
    tls_ca = reader.expand(f"{where}.tls_ca", reader.value(table, where, "tls_ca", str, ""))
    if tls_ca and reader.secrets and not os.access(tls_ca, os.R_OK):
        reader.bad(f"{where}.tls_ca", f"{tls_ca} can't be read", "the path of a PEM file")
    secret = values["password"]
    if secret and values["password_file"]:
        reader.bad(f"{where}.password", "given beside password_file", "one of the two")
    elif values["password_file"]:
        secret = reader.secret(f"{where}.password_file", values["password_file"])
    given = f"{where}.password" in reader.wrong or f"{where}.password_file" in reader.wrong or bool(secret)
    if values["user"] and not given:
        reader.bad(f"{where}.user", "has no password", "password_file as well")
    elif given and not values["user"]:
        reader.bad(f"{where}.user", "missing, with a password given", "the user's name in upsd.users")
    return UpsConfig(
        name=_name(reader, table, where, values["name"]),
        user=values["user"],
        password=Secret(secret),
        tls=reader.value(table, where, "tls", str, "off"),
        tls_ca=tls_ca,
        answer_max_s=reader.value(table, where, "answer_max_s", float, 4.0),
        password_inline=bool(values["password"]),
    )


def _name(reader: Reader, table: dict[str, Any], where: str, name: str) -> str:
    if "name" not in table:
        reader.bad(f"{where}.name", "missing", 'name = "myups@localhost:3493"')
    if "name" not in table or f"{where}.name" in reader.wrong:
        return ""
    match = _NAME.fullmatch(name)
    port = int(match["port"] or DEFAULT_PORT) if match else 0
    if match is None or not name.isascii() or not 0 < port < 65536:
        reader.bad(f"{where}.name", f"{name!r} isn't a UPS at a host", '"ups@host" or "ups@host:port"')
        return ""
    return f"{match['ups']}@{match['host'] or 'localhost'}:{port}"


def _feed(reader: Reader, table: dict[str, Any], where: str, name: str) -> FeedPolicy:
    installed, age_y = _installed(reader, table, where)
    learned = reader.value(table, where, "learned_phi", float, math.nan)
    if not math.isnan(learned) and not 0 < learned <= 1.5:
        reader.bad(f"{where}.learned_phi", f"{learned:g} is outside 0 to 1.5", "1.0 for a battery as rated")
    return FeedPolicy(
        name=name,
        battery_installed=installed,
        age_y=age_y,
        chemistry=reader.value(table, where, "chemistry", str, ""),
        rated=_rated(reader, table, where),
        learned_phi=None if math.isnan(learned) else learned,
    )


def _installed(reader: Reader, table: dict[str, Any], where: str) -> tuple[str, float | None]:
    value, key = table.get("battery_installed"), f"{where}.battery_installed"
    if value is None or value == "":
        return "", None
    if isinstance(value, str):
        try:
            value = date.fromisoformat(value if value.count("-") != 1 else f"{value}-01")
        except ValueError:
            reader.bad(key, f"{value!r} isn't a date", '"2023-05-17" or "2023-05"')
            return "", None
    if isinstance(value, datetime) or not isinstance(value, date):
        reader.bad(key, "must be a date", '"2023-05-17"')
        return "", None
    if value > reader.today:
        reader.bad(key, f"{value} is in the future", "the day the battery was put in")
        return "", None
    return value.isoformat(), round((reader.today - value).days / 365.25, 2)


def _rated(reader: Reader, table: dict[str, Any], where: str) -> tuple[tuple[float, float], ...]:
    raw, key = table.get("rated", []), f"{where}.rated"
    write = "[[load_pct, runtime_s], ...] from the vendor's table, as [[50, 1260], [100, 480]]"
    pairs: list[Any] = raw if isinstance(raw, list) and len(raw) <= POINTS_MAX else [None]
    points = sorted((float(p[0]), float(p[1])) for p in pairs if _is_pair(p))
    if len(points) < len(pairs):
        reader.bad(key, "must be a list of pairs of numbers", write)
        return ()
    if any(not (0 < load <= 150 and 0 < runtime <= DAY_S) for load, runtime in points):
        reader.bad(key, "a load outside 0 to 150 % or a runtime outside 0 to 86400 s", write)
    elif any(a[0] == b[0] or a[1] < b[1] for a, b in itertools.pairwise(points)):
        reader.bad(key, "runtime must fall as the load grows", write)
    else:
        return tuple(points)
    return ()


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(is_number(x) for x in value)
