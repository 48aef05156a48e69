"""What the feeds of a node say of each other, after each was judged by itself (`supply.py`).

1. A feed's last word on battery counts for as long as its link is silent, unless enough other feeds have been on line
   since: then that outage is over, and of this feed nobody knows. A link that died in one outage would else make the
   next one, or a silence of the others, a halt.
2. OFF hides a feed that is on battery only where another one carries the node: it runs, so something feeds it.
"""

from __future__ import annotations

from powerguard.core.policy import Policy
from powerguard.core.supply import SILENT_S, Feed, Supply, Verdict


def together(policy: Policy, feeds: dict[str, Feed], judged: dict[str, Verdict], now: float) -> dict[str, Verdict]:
    """*judged* by rules 1 and 2."""
    found = {name: _of_now(policy, feeds, judged, name, now) for name in judged}
    if any(verdict.supply in (Supply.MAINS, Supply.BATTERY) for verdict in found.values()):
        return found
    return {name: _not_hidden(feeds[name], verdict) for name, verdict in found.items()}


def _of_now(policy: Policy, feeds: dict[str, Feed], judged: dict[str, Verdict], name: str, now: float) -> Verdict:
    """Rule 1."""
    verdict, heard_at = judged[name], feeds[name].last_good_at
    if verdict.supply is not Supply.BATTERY or heard_at is None or now - heard_at <= SILENT_S:
        return verdict
    since = [other for other in judged if other != name and _on_line_at(feeds[other]) > heard_at + SILENT_S]
    if len(since) < policy.min_supplies:
        return verdict
    why = f"{name} was on battery when last heard, and mains have been seen since"
    return Verdict(Supply.UNKNOWN, why, heard_at)


def _on_line_at(feed: Feed) -> float:
    """When it was on line last, as far as known."""
    if feed.on_battery is False and feed.last_good_at is not None:
        return feed.last_good_at
    return feed.on_battery_since if feed.transfers and feed.on_battery_since is not None else float("-inf")


def _not_hidden(feed: Feed, verdict: Verdict) -> Verdict:
    """Rule 2."""
    if verdict.supply is not Supply.ABSENT or feed.on_battery is not True:
        return verdict
    why = f"{feed.name} is on battery, and says that its output is off"
    return Verdict(Supply.BATTERY, why, feed.on_battery_since)
