"""What happens next and when, if things stay as they are: the phase machine itself, run ahead on what is reckoned now.

Nothing here acts or decides, and nothing is promised: readings still to come change the answer. On line power the
question is what would happen if the mains failed at this moment; on battery, if they stay away; with mains back in an
event, if they stay. The UPS is taken to go on as reckoned and ranks to save as planned.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from powerguard.core.feeds import Power, park_max_s
from powerguard.core.need import Need
from powerguard.core.phase import Do, Flush, FlushView, PhaseView
from powerguard.core.policy import Policy
from powerguard.core.serve import flush_view
from powerguard.core.state import State
from powerguard.core.transition import transition
from powerguard.core.types import Phase

STEPS_MAX = 600
"""Looks ahead, at most."""

SHOWN_MAX = 6
"""Steps told, at most; what comes later is too uncertain to be of use."""

WORDS = {
    Phase.ONLINE: "training goes on, the event is over",
    Phase.FLUSHING: "training stops at one step, all is saved",
    Phase.PARKED: "ranks wait with idle GPUs",
    Phase.HALTING: "ranks leave, the node powers off",
}
SNAPSHOT = "all ranks save, training goes on"
NOTHING = "nothing is left to save, the node waits"


class Expected(Struct, frozen=True):
    """One thing that is about to happen, *in_s* seconds from now, and why."""

    what: str
    in_s: float
    why: str


class Outlook(Struct, frozen=True):
    """What is assumed, what follows in order, and when power is presumed gone (seconds; None: unknown or never)."""

    assuming: str
    steps: tuple[Expected, ...] = ()
    power_gone_s: float | None = None


class _World(Struct):
    """A future, moved on step by step."""

    policy: Policy
    view: PhaseView
    power: Power
    need: Need
    flush: FlushView
    saved_at: float  # what is being written is durable then


def outlook(policy: Policy, state: State, now: float) -> Outlook:
    """The outlook of *state*. Never raises."""
    power, phase = state.power, state.phase
    if power is None:
        return Outlook("no UPS has been read yet")
    if phase is Phase.HALTING:
        return Outlook("the halt is under way")
    if power.on_battery is False and phase is not Phase.ONLINE:
        return Outlook("if the mains stay", tuple(_ahead(_world(policy, state, power, now), now)))
    assuming = "if the mains stay away"
    if phase is Phase.ONLINE and power.on_battery is not True:
        assuming = "if the mains failed now"
        power = replace(power, since=now, online_since=None, blind_s=None, save_now="", halt_now="")
    world = _world(policy, state, replace(power, on_battery=True), now)
    steps = tuple(_ahead(world, now))
    left_s = world.power.idle_runway_s
    halt = next((step for step in steps if step.what == WORDS[Phase.HALTING]), None)
    return Outlook(assuming, steps, None if halt is None or left_s is None else halt.in_s + left_s)


def _world(policy: Policy, state: State, power: Power, now: float) -> _World:
    flush = flush_view(state)
    taken_s = now - state.phase_since if state.phase is Phase.FLUSHING else 0.0
    policy = replace(policy, park_max_s=park_max_s(policy, state.feeds))
    return _World(policy, state.view, power, state.need, flush, now + max(0.0, state.need.save_s - taken_s))


def _ahead(world: _World, now: float) -> Iterator[Expected]:
    """The steps to come, moving *world* on; ends at a halt, at the event's end, or where nothing is in sight."""
    began, told = now, 0
    step_s = max(1.0, (world.power.idle_runway_s or 0.0) / STEPS_MAX)
    for _ in range(STEPS_MAX):
        before = world.view.phase
        nxt = transition(world.policy, world.view, world.power, world.need, world.flush, now)
        world.view = nxt.view
        if Do.SNAPSHOT in nxt.orders:
            world.flush, world.saved_at = replace(world.flush, underway=True), now + world.need.save_s
            yield Expected(SNAPSHOT, now - began, nxt.reason)
            told += 1
        if nxt.phase is not before and nxt.phase in WORDS:
            if nxt.phase is Phase.FLUSHING:
                world.flush = replace(world.flush, state=Flush.UNDERWAY, underway=True)
                world.saved_at = now + world.need.save_s
            nobody = nxt.phase is Phase.PARKED and world.flush.state is Flush.NONE
            yield Expected(NOTHING if nobody else WORDS[nxt.phase], now - began, nxt.reason)
            told += 1
        if told >= SHOWN_MAX or nxt.phase in (Phase.HALTING, Phase.ONLINE):
            return
        now += step_s
        _pass(world, step_s, now)


def _pass(world: _World, step_s: float, now: float) -> None:
    """*step_s* go by: the battery is used at the load of the phase, and what is written gets durable."""
    power, idle = world.power, world.view.phase is Phase.PARKED
    if power.on_battery:
        runway, rest = power.runway_s, power.idle_runway_s
        ratio = rest / runway if runway and rest else 1.0
        flushing = world.view.phase is Phase.FLUSHING
        used_s = step_s / ratio if idle and ratio > 0.0 else step_s * (world.need.eased if flushing else 1.0)
        world.power = replace(
            power,
            runway_s=None if runway is None else max(0.0, runway - used_s),
            idle_runway_s=None if rest is None else max(0.0, rest - used_s * ratio),
        )
    if world.flush.underway and now >= world.saved_at:
        durable = Flush.PARKED if world.flush.state is Flush.UNDERWAY else world.flush.state
        world.flush = replace(world.flush, state=durable, underway=False)
