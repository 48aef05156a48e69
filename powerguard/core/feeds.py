"""Several feeds, one view of the node.

The node is on line while `min_supplies` feeds are mains. Otherwise it is on battery if any feed says so (unknown ones
don't contradict), else nobody knows: None, with a reason. Its start is level-triggered: a daemon that starts in the
middle of an outage sees it at once.

How long it lasts: of the feeds on battery *k* must live on. All of them share the load until the first one dies, and
then the others carry more, so the node's bound is

    the least of all feeds' bounds, or, if later,
    the k-th longest of what each has at the load of the last survivors (nothing, if that load is an overload)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import Struct
from msgspec.structs import replace

from powerguard.core.bound import PARKED_BLIND_S, Bound
from powerguard.core.capacity import LOAD_RISES
from powerguard.core.draw import Runway
from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.runway import bound as bound_runway
from powerguard.core.runway import load_back, load_step, shows_volts
from powerguard.core.status import parse
from powerguard.core.supply import Feed, Supply, Verdict, hear, judge, troubles
from powerguard.core.together import together
from powerguard.core.types import Sample

__all__ = ["Feed", "Power", "absorb", "bounds", "step_load", "unpark", "view"]

LOAD_MOST_PCT = 100.0
"""A survivor that would carry more than its rating is presumed to trip."""


class Power(Struct, frozen=True, omit_defaults=True):
    """The node's power at one instant, over all feeds. Seconds are real seconds."""

    on_battery: bool | None  # None: nobody knows, *reason* says why
    since: float | None = None  # the node's outage began
    online_since: float | None = None  # enough feeds have been mains since
    runway_s: float | None = None  # at the present load; on line: what an outage from now on would surely give
    idle_runway_s: float | None = None  # with ranks parked
    prior_s: float | None = None  # what was known beforehand, from the first poll on; in a silence on line: less that
    save_now: str = ""  # why a save must start whatever the runway
    halt_now: str = ""  # why parked ranks should leave (only after `step_load` announced a park)
    fsd: str = ""  # who commands a forced shutdown
    blind_s: float | None = None  # on battery: no fresh value for so long
    by: str = ""  # which feed and which witness bind
    reason: str = ""
    troubles: tuple[str, ...] = ()
    settling_s: float = 0.0  # on battery, and the runway is unknown for so long only because it is early


class _Alive(Struct, frozen=True):
    """A feed that carries the node, and how long it will."""

    feed: Feed
    bound: Bound
    verdict: Verdict
    left_s: float | None
    idle_s: float | None
    prior_s: float | None  # what was known of it beforehand


def absorb(policy: Policy, feeds: dict[str, Feed], samples: Iterable[Sample], now: float) -> dict[str, Feed]:
    """The configured feeds with *samples* taken in, in order; samples of feeds that aren't configured are dropped."""
    known = {each.name: feeds.get(each.name) or Feed(each.name, now, comm_since=now) for each in policy.feeds}
    for sample in samples:
        feed = known.get(sample.feed)
        if feed is not None:
            known[sample.feed] = hear(policy, feed, parse(sample), sample.detail, min(sample.at, now))
    return known


def step_load(policy: Policy, feeds: dict[str, Feed], now: float, factor: float) -> dict[str, Feed]:
    """We change the node's load to *factor* of what it is (see `runway.load_step`)."""
    return _runways(policy, feeds, lambda runway: load_step(runway, now, factor))


def unpark(policy: Policy, feeds: dict[str, Feed], now: float, factor: float) -> dict[str, Feed]:
    """Parked ranks train again, at *factor* of the load (see `runway.load_back`)."""
    return _runways(policy, feeds, lambda runway: load_back(runway, now, factor))


def _runways(policy: Policy, feeds: dict[str, Feed], after: Callable[[Runway], Runway]) -> dict[str, Feed]:
    """The configured feeds with another runway each."""
    ours = {config.name for config in policy.feeds}
    return {name: replace(feed, runway=after(feed.runway)) if name in ours else feed for name, feed in feeds.items()}


def park_max_s(policy: Policy, feeds: dict[str, Feed]) -> float:
    """So long ranks may stay parked on battery: less where no UPS shows a voltage to watch (`bound.py`)."""
    heard = [(each, feeds[each.name].runway) for each in policy.feeds if each.name in feeds]
    if any(runway.reading is None or shows_volts(config, runway) for config, runway in heard) or not heard:
        return policy.park_max_s
    return min(policy.park_max_s, PARKED_BLIND_S)


def bounds(policy: Policy, feeds: dict[str, Feed], now: float, *, save_s: float, halt_s: float) -> dict[str, Bound]:
    """Each configured feed's own bound, with its evidence."""
    return {
        config.name: _bound(policy, config, feeds, now, save_s=save_s, halt_s=halt_s)
        for config in policy.feeds
        if config.name in feeds
    }


def _bound(
    policy: Policy, config: FeedPolicy, feeds: dict[str, Feed], now: float, *, save_s: float, halt_s: float
) -> Bound:
    return bound_runway(policy, config, feeds[config.name].runway, now, save_s=save_s, halt_s=halt_s)


def view(
    policy: Policy, feeds: dict[str, Feed], now: float, *, save_s: float, halt_s: float, outage: bool = False
) -> Power:
    """The node at *now*. *save_s*: what a save and the halt need, margin included; *halt_s*: what the halt needs.

    In an *outage* that is under way no battery test excuses anything.
    """
    answers = bounds(policy, feeds, now, save_s=save_s, halt_s=halt_s)
    each = {name: judge(policy, feeds[name], answers[name], now, save_s=save_s, outage=outage) for name in answers}
    judged = together(policy, feeds, each, now)
    found = tuple(text for name, verdict in judged.items() for text in troubles(feeds[name], verdict, now))
    mains = [name for name, verdict in judged.items() if verdict.supply is Supply.MAINS]
    battery = [name for name, verdict in judged.items() if verdict.supply is Supply.BATTERY]
    fsd = _fsd(policy, feeds, judged)
    needed = policy.min_supplies
    if len(mains) >= needed:
        alive = [_alive(policy, feeds[name], answers[name], judged[name], now) for name in answers]
        left, idle, prior, by = _node_left(alive, needed, needed)
        since = sorted(feeds[name].on_line_since or feeds[name].since for name in mains)[needed - 1]
        reason = f"{len(mains)} of {len(judged)} feeds on mains, {needed} needed"
        return Power(False, None, since, left, idle, prior, fsd=fsd, by=by, reason=reason, troubles=found)
    others = "; ".join(verdict.why for verdict in judged.values() if verdict.supply is not Supply.MAINS)
    if not battery:
        reason = others or "no feed is configured"
        left = _unheard_s(feeds, answers, judged, now, short=needed - len(mains), needed=needed)
        return Power(None, prior_s=left, fsd=fsd, reason=reason, troubles=found)
    alive = [_alive(policy, feeds[name], answers[name], judged[name], now) for name in battery]
    short = needed - len(mains)
    left, idle, prior, by = _node_left(alive, short, needed)
    blind = sorted(each.bound.blind_s for each in alive)[min(short, len(alive)) - 1]
    return Power(
        on_battery=True,
        since=_since(judged, needed),
        runway_s=left,
        idle_runway_s=idle,
        prior_s=prior,
        save_now=_spread([(each.feed.name, each.bound.save_now) for each in alive], short),
        halt_now=_spread([(each.feed.name, each.bound.halt_now) for each in alive], short),
        fsd=fsd,
        blind_s=blind,
        by=by,
        reason=others,
        troubles=found,
        settling_s=max(each.bound.settling_s for each in alive) if left is None else 0.0,
    )


def _alive(policy: Policy, feed: Feed, bound: Bound, verdict: Verdict, now: float) -> _Alive:
    left, idle = bound.runway_s, bound.idle_runway_s
    if feed.fsd_at is not None:
        commanded = max(0.0, feed.fsd_at + policy.fsd_s - now)
        left = commanded if left is None else min(left, commanded)
        idle = commanded if idle is None else min(idle, commanded)
    return _Alive(feed, bound, verdict, left, idle, bound.evidence.get("prior_s"))


def _unheard_s(
    feeds: dict[str, Feed],
    answers: dict[str, Bound],
    judged: dict[str, Verdict],
    now: float,
    *,
    short: int,
    needed: int,
) -> float | None:
    """With *short* feeds too few known to be on mains: what the silent ones would have left if mains failed right
    after their last word."""
    silent = []
    for name, verdict in judged.items():
        prior = answers[name].evidence.get("prior_s")
        if verdict.supply is Supply.UNKNOWN:
            since = feeds[name].last_good_at
            left = None if prior is None or since is None else max(0.0, prior - (now - since))
            silent.append(_Alive(feeds[name], answers[name], verdict, None, None, left))
    return _node_left(silent, short, needed)[2] if len(silent) >= short else None


_Left = tuple[float | None, float | None, float | None, str]
"""(bound, idle bound, prior, which feed binds) of the node."""


def _node_left(alive: list[_Alive], short: int, needed: int) -> _Left:
    """See the module's docstring; *short* of *alive* must live on."""
    if len(alive) < short or not alive:
        return 0.0, 0.0, 0.0, "too few feeds live"
    if len(alive) == needed == 1:  # one UPS, as most nodes have it: nothing to share
        only = alive[0]
        return only.left_s, only.idle_s, only.prior_s, "" if only.left_s is None else only.bound.by
    spread = (len(alive) + needed - short) / needed  # load of each survivor, to its load now
    left, by = _longest(alive, short, spread, [(each.left_s, each.feed.name, each.bound.by) for each in alive])
    idle, _ = _longest(alive, short, spread, [(each.idle_s, each.feed.name, each.bound.by) for each in alive])
    prior, _ = _longest(alive, short, spread, [(each.prior_s, each.feed.name, "prior") for each in alive])
    return left, idle, prior, by


def _longest(
    alive: list[_Alive], short: int, spread: float, each_s: list[tuple[float | None, str, str]]
) -> tuple[float | None, str]:
    several = len(each_s) > 1
    survivors: list[tuple[float, str]] = []
    for each, (left, name, by) in zip(alive, each_s, strict=True):
        if left is not None:
            reading = each.feed.reading
            load = reading.load_pct if reading is not None else None
            trips = spread > 1.0 and load is not None and load * spread > LOAD_MOST_PCT
            label = f"{name}: {by}" if several else by
            survivors.append((0.0 if trips else left / spread**LOAD_RISES, label))
    kth = sorted(survivors, reverse=True)[short - 1] if len(survivors) >= short else None
    least = None
    if len(survivors) == len(each_s):
        least = min((left, f"{name}: {by}" if several else by) for left, name, by in each_s if left is not None)
    both = [one for one in (kth, least) if one is not None]
    return max(both) if both else (None, "")


def _spread(signals: list[tuple[str, str]], short: int) -> str:
    """A strong signal of the node: fewer than *short* feeds are without one."""
    loud = [(name, text) for name, text in signals if text]
    if not loud or len(signals) - len(loud) >= short:
        return ""
    name, text = loud[0]
    return text if len(signals) == 1 else f"{name}: {text}"


def _fsd(policy: Policy, feeds: dict[str, Feed], judged: dict[str, Verdict]) -> str:
    """Who commands, if the feeds that don't are too few to live on."""
    commanding = [name for name in judged if feeds[name].fsd_at is not None]
    others = [
        name
        for name, verdict in judged.items()
        if name not in commanding and verdict.supply in (Supply.MAINS, Supply.BATTERY)
    ]
    return ", ".join(commanding) if commanding and len(others) < policy.min_supplies else ""


def _since(judged: dict[str, Verdict], needed: int) -> float | None:
    """When too few feeds were left on mains: the loss of one more than could be spared."""
    lost = sorted(
        float("-inf") if verdict.lost_at is None else verdict.lost_at
        for verdict in judged.values()
        if verdict.supply is not Supply.MAINS
    )
    at = lost[len(judged) - needed] if len(judged) >= needed else lost[0]
    return None if at == float("-inf") else at
