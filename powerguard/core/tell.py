"""What people are told of a decision: each fact once, when it comes and when it is over. Pure."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from powerguard.core.feeds import Power
from powerguard.core.phase import Do, Next
from powerguard.core.state import State, Trouble
from powerguard.core.types import Announce, Phase

CLEAR_S = 300.0
"""A trouble is over when it hasn't been seen for so long: APC units flash LB and RB for 2 s every few minutes."""

TEXT_MAX = 400

Facts = dict[str, str | int | float | bool | None]


class Reply(Struct, frozen=True):
    """The answer to an operator's command."""

    verb: str
    text: str
    refused: bool


def announce(before: Phase, state: State, nxt: Next, replies: list[Reply], now: float) -> tuple[State, list[Announce]]:
    """*state* with its troubles up to date, and what to say: phases, snapshots, answers, troubles that came or went."""
    told: list[Announce] = []
    news = state.phase is not before or Do.SNAPSHOT in nxt.orders
    for reply in replies:
        facts: Facts = {"command": reply.verb, "refused": reply.refused}
        if news and reply.text == nxt.reason:
            news = False
            facts = {**_facts(state), **facts}
        told.append(Announce("warning" if reply.refused else "info", reply.text, facts))
    if news:
        level = _LEVEL[state.phase] if state.phase is not before else "info"
        told.append(Announce(level, nxt.reason, _facts(state)))
    troubles, changed = _troubles(state.troubles, state.power, now)
    return replace(state, troubles=troubles), told + changed


def _troubles(known: dict[str, Trouble], power: Power | None, now: float) -> tuple[dict[str, Trouble], list[Announce]]:
    """The troubles, by their text without numbers (which may count on), and what is new about them."""
    if power is None:
        return known, []
    said = power.reason if power.on_battery else ""  # what the phase says already isn't a trouble
    found = {text.translate(_NO_DIGITS): text[:TEXT_MAX] for text in power.troubles if text not in said}
    told = [Announce("warning", text) for kind, text in found.items() if kind not in known]
    kept = {kind: Trouble(text, now) for kind, text in found.items()}
    for kind, trouble in known.items():
        if kind in found:
            continue
        if now - trouble.seen_at < CLEAR_S:
            kept[kind] = trouble
        else:
            told.append(Announce("info", f"cleared: {trouble.text}", {"last_seen_s": round(now - trouble.seen_at, 1)}))
    return kept, told


_NO_DIGITS = str.maketrans("", "", "0123456789.")

_LEVEL = {
    Phase.ONLINE: "info",
    Phase.ON_BATTERY: "warning",
    Phase.FLUSHING: "warning",
    Phase.PARKED: "warning",
    Phase.HALTING: "error",
}


def _facts(state: State) -> Facts:
    power, need = state.power, state.need
    return {
        "phase": state.phase.value,
        "event": state.event,
        "runway_s": None if power is None or power.runway_s is None else round(power.runway_s, 1),
        "need_s": round(need.total_s, 1),
        "jobs": sum(job.alive for job in state.jobs.values()),
    }
