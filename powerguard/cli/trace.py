"""A discharge that somebody recorded, as CSV: what the estimator would have said of it.

One row is one poll. A column is a NUT variable (`battery.charge`, `ups.status`) or one of the names that public traces
use for it, with its unit as suffix: `charge_pct`, `remaining_pct`, `soc_pct`, `timeleft_min`, `battery_runtime_s`,
`batt_V`, `volts_mV`, `load_pct`, `status`, `line_V`. Time is `t_s` (seconds), `epoch`, or `time` as a clock or a date.
Lines that begin with # are comments, columns of other names are left alone, empty fields are values that are missing.
Without a status column the whole trace is on battery.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from powerguard.core.feeds import Power, absorb, view
from powerguard.core.need import Need
from powerguard.core.phase import Do, Flush, FlushView, PhaseView
from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.status import parse
from powerguard.core.supply import Feed
from powerguard.core.transition import transition
from powerguard.core.types import Comm, Phase, Sample
from powerguard.errors import JournalError, UsageError

FEED = "trace"
DAY_S = 86400.0
T0 = 100_000.0
"""Boot-time seconds of the first row: the rules know no negative ones."""

_SET_TODO = "give what a UPS could say, each variable once, as --set battery.type=li-ion"

TIMES = ("t_s", "t_wall_s", "t_on_batt_s", "t", "epoch", "seconds", "time", "timestamp")
UNITS = {"pct": 1.0, "s": 1.0, "min": 60.0, "v": 1.0, "mv": 0.001}
NAMES = {
    "charge": "battery.charge",
    "battery_charge": "battery.charge",
    "remaining": "battery.charge",
    "soc": "battery.charge",
    "timeleft": "battery.runtime",
    "runtime": "battery.runtime",
    "battery_runtime": "battery.runtime",
    "battery_runtime_low": "battery.runtime.low",
    "batt": "battery.voltage",
    "battery": "battery.voltage",
    "volts": "battery.voltage",
    "load": "ups.load",
    "ups_load": "ups.load",
    "line": "input.voltage",
    "input": "input.voltage",
    "status": "ups.status",
    "ups_status": "ups.status",
    "ac": "ups.status",
}
WORDS = {"ONLINE": "OL", "ONBATT": "OB", "ON_BATTERY": "OB", "ON_MAINS": "OL", "ON_AC": "OL", "COMMLOST": ""}


class Row(Struct, frozen=True):
    """One poll of a trace."""

    at: float  # seconds since the first row
    variables: dict[str, str]


class Said(Struct, omit_defaults=True):
    """What the estimator and the phases say at one row."""

    at: float
    status: str
    runway_s: float | None
    idle_runway_s: float | None
    by: str
    phase: str
    reason: str
    truth_s: float | None = None  # seconds that were left, if the trace ends in the dark
    event: str = ""  # what happens here: "snapshot", "stop"


def read(path: Path, fixed: dict[str, str]) -> list[Row]:
    """The rows of *path*, each with the *fixed* variables where it has none of its own. JournalError if it has none."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it isn't text"
        raise JournalError(f"{path} can't be read: {why}", todo="name a CSV file of a discharge") from None
    table = csv.DictReader(line for line in lines if line and not line.startswith("#"))
    heads = [head for head in table.fieldnames or () if head]
    columns = {head: found for head in heads if (found := _column(head)) is not None}
    clock = next((head for name in TIMES for head in heads if head.strip().lower() == name), None)
    if clock is None or not columns:
        raise JournalError(
            f"{path} is no trace: {_lacks(clock, columns)}", todo="see powerguard replay --help for the columns"
        )
    rows: list[Row] = []
    before, days = -1.0, 0.0
    for number, each in enumerate(table, 2):
        at = _instant(each.get(clock) or "")
        if at is None:
            raise JournalError(f"{path}, row {number}: {each.get(clock)!r} is no time", todo="give seconds, or a clock")
        if at + days < before and before - at - days > DAY_S / 2 and at < DAY_S:  # a clock past midnight
            days += DAY_S
        before = max(before, at + days)
        named = {name: _value(each.get(head) or "", factor) for head, (name, factor) in columns.items()}
        rows.append(Row(before, _whole(named, fixed, has_status="ups.status" in named)))
    if not rows:
        raise JournalError(f"{path} has no rows", todo="name another file")
    return [Row(row.at - rows[0].at, row.variables) for row in rows]


def lacking(texts: list[str]) -> dict[str, str]:
    """The variables of `--set VAR=VALUE`; UsageError for what the estimator would pass over without a word."""
    found: dict[str, str] = {}
    for text in texts:
        name, _, value = (part.strip() for part in text.partition("="))
        why = f"{name} is set already" if name in found else _unfit(name, value)
        if why:
            raise UsageError(f"--set {text}: {why}", todo=_SET_TODO)
        found[name] = value
    return found


def _unfit(name: str, value: str) -> str:
    """Why this can't be a variable of a UPS, or ""; a value is one that is believed of a UPS at its end on battery."""
    if not re.fullmatch(r"[a-z]+(\.[\w-]+)+", name):
        return f"{name!r} isn't a NUT variable"
    if not value:
        return "it has no value"
    if name == "ups.status":  # any word is one, and of none of them anything is known
        return ""
    said = {"ups.status": "OB", "battery.charge": "0", name: value}
    notes = parse(Sample(FEED, T0, Comm.OK, said)).notes
    return next((note for note in notes if note.startswith(f"{name} ")), "")


def _lacks(clock: str | None, columns: dict[str, tuple[str, float]]) -> str:
    return "no column is a time" if clock is None else "no column is a value of a UPS" if not columns else ""


def _column(head: str) -> tuple[str, float] | None:
    """(NUT variable, factor) of a column."""
    name = head.strip()
    if re.fullmatch(r"(battery|ups|input|output|device|driver)(\.[a-z0-9]+)+", name):
        return name, 1.0
    stem, _, unit = name.lower().rpartition("_")
    if stem in NAMES and unit in UNITS:
        return NAMES[stem], UNITS[unit]
    plain = NAMES.get(name.lower())
    return None if plain is None else (plain, 1.0)


def _value(text: str, factor: float) -> str:
    text = text.strip()
    if factor == 1.0 or not text:
        return text
    try:
        return f"{float(text) * factor:g}"
    except ValueError:
        return text


def _whole(named: dict[str, str], fixed: dict[str, str], *, has_status: bool) -> dict[str, str]:
    variables = fixed | {name: value for name, value in named.items() if value}
    words = variables.get("ups.status", "" if has_status else "OB")
    variables["ups.status"] = " ".join(WORDS.get(word.upper(), word) for word in words.split())
    return variables


def _instant(text: str) -> float | None:
    """Seconds: a number, a clock, or a date with one."""
    text = text.strip()
    try:
        return float(text)
    except ValueError:
        pass
    clock = re.fullmatch(r"(\d{1,2}):(\d\d)(?::(\d\d(?:\.\d+)?))?", text)
    if clock is not None:
        return int(clock[1]) * 3600.0 + int(clock[2]) * 60.0 + float(clock[3] or 0.0)
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def play(rows: list[Row], policy: Policy, *, flush_s: float, dark: bool) -> list[Said]:
    """What would have been said at each row, of a node whose flush takes *flush_s*; *dark*: power ended with the trace.

    The battery of a trace goes on as it did: after the stop it carries what it carried then, and the bound is told on.
    """
    feed = policy.feeds[0] if policy.feeds else FeedPolicy(FEED)
    policy = replace(policy, feeds=(feed,), min_supplies=1)
    need = need_of(policy, flush_s)
    known: dict[str, Feed] = {}
    phase = PhaseView()
    said: list[Said] = []
    for row in rows:
        now = T0 + row.at
        known = absorb(policy, known, [Sample(feed.name, now, Comm.OK, row.variables)], now)
        power = view(policy, known, now, save_s=need.used_s + policy.margin_s, halt_s=need.halt_s)
        phase, reason, event = _step(policy, phase, power, need, now)
        said.append(
            Said(
                row.at,
                row.variables["ups.status"],
                power.runway_s,
                power.idle_runway_s,
                power.by,
                phase.phase.value,
                reason,
                rows[-1].at - row.at if dark and power.on_battery else None,
                event,
            )
        )
    return said


def need_of(policy: Policy, flush_s: float) -> Need:
    """What is planned for a flush that was measured to take *flush_s*."""
    save_s = policy.flush_factor * flush_s
    return Need(
        flush_s=save_s, write_s=save_s, halt_s=policy.halt_s, save_s=save_s, total_s=save_s + policy.halt_s, by=FEED
    )


def _step(policy: Policy, phase: PhaseView, power: Power, need: Need, now: float) -> tuple[PhaseView, str, str]:
    """(phase, reason, event) at one row. The stop is the last decision until mains are back."""
    if phase.phase is Phase.FLUSHING:
        if power.on_battery is False:
            return PhaseView(ended_at=now), "mains are back", ""
        left = "unknown" if power.runway_s is None else f"{power.runway_s:.0f} s left by the {power.by}"
        return phase, f"stopped already, {left}", ""
    event, reason = "", ""
    for _ in range(2 if phase.phase is Phase.ONLINE else 1):  # the daemon looks again at once
        nxt = transition(policy, phase, power, need, FlushView(Flush.IDLE, quiet=False, gone=False), now)
        event = "snapshot" if Do.SNAPSHOT in nxt.orders else event
        event = "stop" if nxt.phase is Phase.FLUSHING else event
        phase, reason = nxt.view, nxt.reason
        if phase.phase is Phase.FLUSHING:
            break
    return phase, reason, event


def kept(said: Iterable[Said]) -> tuple[int, int, float | None]:
    """(bounds not above the truth, bounds given, median of bound to truth)."""
    pairs = [(each.runway_s, each.truth_s) for each in said if each.runway_s is not None and each.truth_s is not None]
    under = sum(mine <= truth for mine, truth in pairs)
    shares = sorted(mine / truth for mine, truth in pairs if truth > 0.0)
    return under, len(pairs), shares[len(shares) // 2] if shares else None
