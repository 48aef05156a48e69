"""What outages teach the running daemon: taken when they are over, in force from the next decision on line power on."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from powerguard.config import Config
from powerguard.core.state import State
from powerguard.core.types import Announce, Phase
from powerguard.node.parts import Parts


def learnt(
    parts: Parts, config: Config, before: State, state: State, *, now: float, announce: Callable[[Announce], None]
) -> Config:
    """Takes what has ended for a lesson; the configuration to go on with."""
    for taught in parts.learned.watch(before, state, now, real=parts.power.way.real):
        parts.journal.learnt(now, taught.feed, taught.lesson, phi=taught.phi, proven=taught.proven)
        level = "warning" if taught.lesson.what == "replaced" else "info"
        announce(Announce(level, "a time on battery is over, and was learned from", taught.facts()))
    if calm(state) and parts.learned.stale:
        new = parts.learned.policy(config.policy)
        if new != config.policy:
            config = replace(config, policy=new)
            parts.journal.rules(now, new)
    return config


def calm(state: State) -> bool:
    """Nothing is the matter: online, and known to be on mains."""
    return state.phase is Phase.ONLINE and state.power is not None and state.power.on_battery is False
