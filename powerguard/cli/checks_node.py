"""Checks of what else has a say: upsmon beside us, the primary's patience, logind's, and what shedding would buy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from powerguard.cli.checks import Finding, fail, ok, warn
from powerguard.cli.out import seconds
from powerguard.cli.plan import Plan
from powerguard.config import Config
from powerguard.core.need import Need
from powerguard.core.types import Sample
from powerguard.errors import PowerguardError
from powerguard.node import gpus, keyring, shed
from powerguard.node.inhibit import delay_now, too_short
from powerguard.node.upsmon import Upsmon

FORCED = (" -f", " --force", "-ff", " -n")
"""Options by which a shutdown doesn't go through logind, and waits for nobody."""


def upsmon(config: Config, conf: Upsmon | None, *, running: bool) -> Iterator[Finding]:
    """Of the upsmon on this node, if one runs: what it watches, and whether its shutdown waits for training."""
    if not running:
        return
    if conf is None:
        yield ok("upsmon", "runs on this node too; its upsmon.conf can't be read by this user")
        return
    watched = ", ".join(f"{each.address} ({'primary' if each.primary else 'secondary'})" for each in conf.monitors)
    yield ok(
        "upsmon", f"runs on this node too, for {watched or 'no UPS'}, and shuts it down by: {conf.shutdown or '?'}"
    )
    if any(option in f" {conf.shutdown}" for option in FORCED):
        yield warn(
            "upsmon", "its SHUTDOWNCMD waits for nobody", 'SHUTDOWNCMD "/sbin/shutdown -h +0" goes through logind'
        )
    if not config.halt.delay_shutdown:
        yield warn("upsmon", "its shutdown doesn't wait for training", "[halt] delay_shutdown = true")


def peers(config: Config) -> Iterator[Finding]:
    """Of `[peers]`: this node's key, and those that it believes. Nothing is said where it is off."""
    if not config.peers.listen:
        return
    try:
        ring = keyring.load(config.peers.keys, config.node.name)
    except PowerguardError as err:
        yield fail("peers", err)
        return
    for problem in ring.problems:
        yield warn("peers", problem)
    if ring.trusted:
        yield ok("peers", f"key of {ring.own.node}; believes {', '.join(sorted(ring.trusted))}")
    else:
        yield warn("peers", f"key of {ring.own.node}; no other node is believed", "powerguard keys trust")


def hostsync(config: Config, conf: Upsmon | None, secondary: Iterable[str], need: Need) -> Iterator[Finding]:
    """Of each UPS whose primary is somebody else: after an FSD it waits HOSTSYNC for us, which must hold a flush."""
    policy = config.policy
    for name in secondary:
        topic = f"ups {name}"
        here = conf is not None and conf.role(name) == "primary"
        waits_s = conf.hostsync_s if conf is not None and here else None
        if waits_s is None:
            yield ok(
                topic, f"ask whoever runs its primary: is HOSTSYNC at least {policy.fsd_s:.0f} s ([policy] fsd_s)?"
            )
        elif waits_s < policy.fsd_s:
            yield warn(
                topic,
                f"the primary on this node waits {waits_s:.0f} s (HOSTSYNC), fewer than [policy] fsd_s",
                f"fsd_s = {waits_s:.0f}, or HOSTSYNC {policy.fsd_s:.0f} in upsmon.conf",
            )
        least_s = policy.fsd_s if waits_s is None else min(waits_s, policy.fsd_s)
        if need.save_s > least_s:
            yield warn(
                topic,
                f"after an FSD ranks have {least_s:.0f} s, and a flush takes {need.save_s:.0f} s",
                f"HOSTSYNC {need.save_s:.0f} or more in the primary's upsmon.conf, and [policy] fsd_s to match",
            )


def shutdown(config: Config, need: Need, ask: Callable[[], float | None] = delay_now) -> Iterator[Finding]:
    """Of a shutdown by somebody's hand: does logind wait for a flush?"""
    if not config.halt.delay_shutdown:
        yield ok("shutdown", "a shutdown of the system doesn't wait for training ([halt] delay_shutdown)")
        return
    delay_s = ask()
    if delay_s is None:
        yield warn("shutdown", "logind doesn't answer: a shutdown wouldn't wait for training", "start systemd-logind")
        return
    short = too_short(delay_s, need.save_s, config.policy.margin_s)
    if short:
        yield warn("shutdown", short, "powerguard service install, or InhibitDelayMaxSec= in logind.conf.d")
    else:
        yield ok("shutdown", f"a shutdown waits up to {delay_s:.0f} s for training")


def shedding(
    config: Config,
    samples: tuple[Sample, ...],
    plan: Plan,
    at_load: Callable[[float], Plan],
    nvml: Callable[[], Any] = gpus.library,
) -> Iterator[Finding]:
    """Of `[shed]`: what it would buy now. Nothing is said where it is off."""
    pct = config.shed.gpu_power_pct
    if not pct:
        return
    try:
        found = gpus.look(nvml())
    except PowerguardError as err:
        yield fail("shed", err)
        return
    saved_w = sum(gpu.saved_w(pct) for gpu in found)
    fixed = [str(gpu.index) for gpu in found if gpu.lowered_w(pct) is None]
    if not found:
        yield warn("shed", "there is no GPU to shed", "drop [shed] gpu_power_pct")
        return
    if fixed:
        yield warn("shed", f"GPU {', '.join(fixed)} can't be limited: their power stays as it is")
    node_w = sum(filter(None, map(_watts, samples)))
    factor = 1.0 - saved_w / node_w if node_w > saved_w else shed.expected(pct)
    of = f" of {node_w:.0f} W" if node_w else ""
    text = f"{len(found)} GPUs at {pct:g} % would draw {saved_w:.0f} W{of} less now"
    if plan.load_pct is None or plan.runway_s is None:
        yield ok("shed", f"{text}; what that buys in runway isn't known")
        return
    then = at_load(max(1.0, plan.load_pct * factor))
    yield ok("shed", f"{text}: runway {seconds(plan.runway_s)} -> {seconds(then.runway_s)}, training slower meanwhile")


def _watts(sample: Sample) -> float | None:
    """What a UPS delivers, by its own word; None where it doesn't say."""
    try:
        return float(sample.variables["ups.realpower"])
    except (KeyError, ValueError):
        pass
    try:
        return float(sample.variables["ups.load"]) / 100.0 * float(sample.variables["ups.realpower.nominal"])
    except (KeyError, ValueError):
        return None
