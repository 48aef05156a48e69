"""A new configuration while the daemon runs: what it changes is said and put in force, one with mistakes is refused."""

from __future__ import annotations

import structlog
from msgspec.structs import replace

from powerguard.config import Config, describe_change
from powerguard.errors import ConfigError
from powerguard.node.parts import Parts

log = structlog.get_logger()

LATER = ("node.", "metrics.", "halt.delay_shutdown", "peers.")
"""Keys that count from the next start of the daemon on."""
NOW = ("node.min_supplies",)


def reloaded(parts: Parts, old: Config, reason: str) -> Config:
    """The configuration to go on with; a file with mistakes leaves the *old* one in force."""
    parts.notify.reloading()
    config = old
    try:
        new = parts.reload()
    except ConfigError as err:
        log.error("reload refused, the old configuration stays in force", always=True, problems=len(err.problems))
        for problem in err.problems or (err.message,):
            log.error("problem", always=True, what=problem)
    else:
        config = _applied(parts, old, new)
    parts.notify.ready(reason)
    return config


def _applied(parts: Parts, old: Config, new: Config) -> Config:
    new = parts.learned.applied(new)
    changes = describe_change(old, new)
    for change in changes:
        later = change.startswith(LATER) and not change.startswith(NOW)
        log.info("configuration changed", always=True, what=change, **({"takes_effect": "restart"} if later else {}))
    if not changes:
        log.info("configuration is unchanged", always=True)
    config = replace(new, node=replace(old.node, min_supplies=new.node.min_supplies), peers=old.peers)
    parts.journal.rules(parts.clock(), new.policy)
    parts.readers.apply(new.ups)
    parts.teller.command = new.notify.command
    parts.system.apply(new)
    parts.lines.reload()
    if not parts.power.ordered:
        parts.power.way = parts.way(new)
    return config
