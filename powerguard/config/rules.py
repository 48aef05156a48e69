"""What a configuration must hold, beyond the kinds of its values: limits of each number, and relations between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from powerguard.core.policy import Policy

DAY_S = 86400.0

LIMITS: dict[str, tuple[float, float]] = {
    "node.min_supplies": (1, 16),
    "ups.answer_max_s": (0.2, 60),
    "policy.poll_online_s": (0.2, 60),
    "policy.poll_battery_s": (0.2, 30),
    "policy.loss_weight_s": (0, 1e8),
    "policy.flush_factor": (1, 10),
    "policy.flush_default_s": (1, DAY_S),
    "policy.flush_max_s": (10, DAY_S),
    "policy.prepare_max_s": (0.1, 60),
    "policy.hold_max_s": (1, 600),
    "policy.seal_max_s": (0.5, 600),
    "policy.halt_s": (1, 3600),
    "policy.exit_wait_s": (0.5, 600),
    "policy.park_max_s": (1, DAY_S),
    "policy.lb_polls": (1, 100),
    "policy.off_s": (1, DAY_S),
    "policy.flush_load": (0.05, 2),
    "policy.time_scale": (0.01, 1),
    "shed.gpu_power_pct": (0, 100),
}
"""Lowest and highest value by key; every other `_s` is 0 to a day."""

CHOICES: dict[str, tuple[str, ...]] = {
    "policy.on_battery": ("ride", "park"),
    "policy.snapshot": ("auto", "always", "never"),
    "halt.method": ("dry-run", "logind", "command", "upsmon-fsd"),
    "shed.method": ("auto", "unit", "direct"),
    "log.level": ("debug", "info", "warning", "error"),
    "log.format": ("auto", "json", "console"),
    "ups.tls": ("off", "require"),
    "ups.chemistry": ("vrla", "lfp"),
}


class Relation(NamedTuple):
    """A law between several keys of `[policy]`; the first key is the one that a problem is filed under."""

    keys: tuple[str, ...]
    holds: Callable[[Policy], bool]
    wrong: str
    write: Callable[[Policy], str]


RELATIONS: tuple[Relation, ...] = (
    Relation(
        ("blind_halt_s", "blind_save_s"),
        lambda p: p.blind_halt_s <= p.blind_save_s,
        "parked ranks have nothing left to save, so blindness must halt no later than it stops training (blind_save_s)",
        lambda p: f"at most {p.blind_save_s:g}",
    ),
    Relation(
        ("blind_save_s", "poll_battery_s"),
        lambda p: p.blind_save_s >= 3 * p.poll_battery_s,
        "two lost polls would already stop training",
        lambda p: f"at least {3 * p.poll_battery_s:g} (three times poll_battery_s)",
    ),
    Relation(
        ("blind_halt_s", "poll_battery_s"),
        lambda p: p.blind_halt_s >= 2 * p.poll_battery_s,
        "one lost poll would already halt a parked node",
        lambda p: f"at least {2 * p.poll_battery_s:g} (twice poll_battery_s)",
    ),
    Relation(
        ("poll_battery_s", "poll_online_s"),
        lambda p: p.poll_battery_s <= p.poll_online_s,
        "the UPS would be read less often on battery than on line (poll_online_s)",
        lambda p: f"at most {p.poll_online_s:g}",
    ),
    Relation(
        ("hold_max_s", "prepare_max_s"),
        lambda p: p.hold_max_s >= 2 * p.prepare_max_s,
        "ranks would stop waiting before the slowest PROMISE is given up (prepare_max_s) and the decision is sent",
        lambda p: f"at least {2 * p.prepare_max_s:g} (twice prepare_max_s)",
    ),
    Relation(
        ("hold_max_s", "margin_s", "halt_s"),
        lambda p: p.hold_max_s <= p.margin_s + p.halt_s,
        "a rank left alone saves after hold_max_s, which must fit into what is kept for the halt (margin_s + halt_s)",
        lambda p: f"at most {p.margin_s + p.halt_s:g}",
    ),
    Relation(
        ("exit_wait_s", "halt_s"),
        lambda p: 2 * p.exit_wait_s <= p.halt_s,
        "ranks have exit_wait_s to quiesce and again to leave, and both must fit into halt_s",
        lambda p: f"at most {p.halt_s / 2:g}, or a longer halt_s",
    ),
    Relation(
        ("flush_max_s", "flush_default_s", "flush_factor"),
        lambda p: p.flush_max_s >= p.flush_default_s * p.flush_factor,
        "a flush would be given up sooner than it is planned to take (flush_default_s times flush_factor)",
        lambda p: f"at least {p.flush_default_s * p.flush_factor:g}",
    ),
    Relation(
        ("snapshot_again_s", "snapshot_after_s"),
        lambda p: p.snapshot_again_s >= p.snapshot_after_s,
        "a second snapshot of an outage would come sooner than the first (snapshot_after_s)",
        lambda p: f"at least {p.snapshot_after_s:g}",
    ),
    Relation(
        ("snapshot_after_s", "confirm_s"),
        lambda p: p.snapshot_after_s >= p.confirm_s,
        "a snapshot would be ordered in an outage that isn't one yet (confirm_s)",
        lambda p: f"at least {p.confirm_s:g}",
    ),
)


def broken(policy: Policy, skip: set[str]) -> Iterator[tuple[str, str, str]]:
    """Key, what is wrong, what to write, for each relation that doesn't hold and has no key in *skip*."""
    for relation in RELATIONS:
        if not skip.intersection(relation.keys) and not relation.holds(policy):
            yield relation.keys[0], relation.wrong, relation.write(policy)
