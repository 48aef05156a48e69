"""The rank's half of the agreement: what an order asks of the training thread, and what to answer. Pure.

The listener thread gives it what arrives (`hear`), the training thread asks at a boundary what to do (`arrive`), and
all of them tell it what they did (`say`). Every call is made under one lock, so that a rank can't promise what it has
passed.
What was said is remembered: an order heard again is answered again, which is all that a restarted daemon needs.

`now` is any clock of this process; `Place` says where the training thread is.
"""

from __future__ import annotations

from msgspec.structs import replace

from powerguard.core.duty import GO, Deed, Duty, Follower, Go, Hold, Leave, Park, Place, Rest, Save, Todo, Unheard
from powerguard.core.messages import (
    Ack,
    Decide,
    Exit,
    Failed,
    FromRank,
    Missed,
    Pace,
    Parked,
    Plan,
    Prepare,
    Promise,
    Purpose,
    Quiesce,
    Quiesced,
    Resume,
    Seal,
    Sealed,
    SealWritten,
    Shard,
    Staged,
    ToRank,
)

__all__ = [
    "GO",
    "Deed",
    "Duty",
    "Follower",
    "Go",
    "Hold",
    "Leave",
    "Park",
    "Place",
    "Rest",
    "Save",
    "Todo",
    "arrive",
    "due",
    "hear",
    "let_go",
    "next_due",
    "say",
]

REPEAT_FIRST_S = 0.25
REPEAT_MAX_S = 2.0
PAST = 2
"""So many overtaken orders are remembered."""

# ---- what the training thread is to do at a boundary -----------------------------------------------


def arrive(f: Follower, step: int, now: float) -> tuple[Follower, Todo]:
    """What the training thread, which waits inside boundary *step*, is to do.

    `Go` is the leave to pass: the caller marks itself as outside under the same lock.
    """
    if f.exit is not None:
        return f, Leave(f.exit.code, f.exit.reason)
    if f.quiesce is not None:
        return f, Rest(f.quiesce.seq, f.quiesce.reason)
    duty = f.duty
    if duty is None or duty.done:
        return f, GO
    if duty.decide is not None:
        return _decided(f, duty, duty.decide, step, now)
    if duty.edge < 0 or step < duty.edge:
        return f, GO
    f, until = _hold(f, duty, now)
    if now < until:
        return f, Hold(until, duty.reason)
    if not any(isinstance(deed, (Staged, Shard, Failed)) and deed.step == step for deed in duty.deeds):
        generation = f"step-{step:010d}.{duty.tag}"
        return f, Save(duty.seq, step, generation, stop=duty.purpose is Purpose.STOP, lone=True)
    return _with(f, replace(duty, edge=-1, held_at=None)), GO


def _hold(f: Follower, duty: Duty, now: float) -> tuple[Follower, float]:
    """The hold noted, and when it ends: hold_max after the training thread began to wait for this order."""
    if duty.held_at is None:
        duty = replace(duty, held_at=now)
    return _with(f, duty), (duty.held_at or 0.0) + duty.hold_max_s


def _decided(f: Follower, duty: Duty, decide: Decide, step: int, now: float) -> tuple[Follower, Todo]:
    if step < decide.step:
        return f, GO
    if decide.plan is Plan.STAGED and decide.purpose is Purpose.STOP:
        if not duty.did(Parked):
            f = say(f, Parked(duty.seq, step), now)
        return f, Park(duty.seq, duty.reason)
    if duty.did(Missed) or (step > decide.step and not duty.did(Shard)):
        if not duty.did(Missed):
            f = say(f, Missed(duty.seq, step, f"it was at step {step}, past the stop step {decide.step}"), now)
            duty = f.duty or duty
        f, until = _hold(f, duty, now)
        if decide.purpose is Purpose.STOP and now < until:
            return f, Hold(until, "past the stop step: waiting for a new order")
        return _with(f, replace(duty, done=True)), GO
    saved = duty.did(Shard) or duty.did(Failed)
    if decide.purpose is Purpose.SNAPSHOT:
        if saved or duty.did(Staged) or decide.plan is not Plan.FRESH:
            return _with(f, replace(duty, done=True)), GO
        return f, Save(duty.seq, step, decide.generation, stop=False, weights=decide.weights)
    if saved or decide.plan is not Plan.FRESH:
        if not duty.did(Parked):
            f = say(f, Parked(duty.seq, step), now)
        return f, Park(duty.seq, duty.reason)
    return f, Save(duty.seq, step, decide.generation, stop=True, budget_s=decide.budget_s, weights=decide.weights)


# ---- what the listener hears ------------------------------------------------------------------------


def hear(f: Follower, message: ToRank, place: Place, pace: Pace, now: float) -> tuple[Follower, tuple[FromRank, ...]]:
    """A message of the daemon: the new state, and what to answer at once. What is stale changes nothing."""
    if isinstance(message, Ack):
        kept = tuple(u for u in f.unheard if (u.deed.seq, type(u.deed).__name__) != (message.seq, message.of))
        return replace(f, unheard=kept), ()
    if isinstance(message, Prepare):
        return _prepare(f, message, place, pace, now)
    if isinstance(message, Decide):
        return _decide(f, message, place, now)
    if isinstance(message, (Seal, Sealed)):
        return f, (Ack(message.seq, type(message).__name__), *_remembered(f, message.seq, SealWritten))
    if isinstance(message, Resume):
        return _resume(f, message), (Ack(message.seq, "Resume"),)
    if isinstance(message, Quiesce):
        if f.quiesce is None or message.seq > f.quiesce.seq:
            f = replace(f, quiesce=message, quiesced=False)
        told = (Quiesced(message.seq),) if f.quiesced else ()
        return f, (Ack(message.seq, "Quiesce"), *told)
    if isinstance(message, Exit):
        return replace(f, exit=f.exit or message), (Ack(message.seq, "Exit"),)
    return f, ()


def _prepare(
    f: Follower, message: Prepare, place: Place, pace: Pace, now: float
) -> tuple[Follower, tuple[FromRank, ...]]:
    if message.seq <= f.over:
        return f, (Ack(message.seq, "Resume"),)
    duty = f.duty
    if duty is not None and message.seq < duty.seq:
        return f, ()
    if duty is None or message.seq > duty.seq:
        f = _overtaken(f)
        duty = Duty(message.seq, message.purpose, message.hold_max_s, message.tag, message.reason)
    if duty.decide is not None:
        return f, (Ack(duty.seq, "Decide"), *duty.deeds)
    if duty.edge < 0 or duty.edge < place.edge:
        duty = replace(duty, edge=place.edge, held_at=None, done=False)
    promise = Promise(duty.seq, duty.edge, pace)
    return _unheard(_with(f, duty), promise, now), (promise,)


def _decide(f: Follower, message: Decide, place: Place, now: float) -> tuple[Follower, tuple[FromRank, ...]]:
    ack = Ack(message.seq, "Decide")
    if message.seq <= f.over:
        return f, (ack, Ack(message.seq, "Resume"))
    duty = f.duty
    if duty is not None and message.seq < duty.seq:
        deeds = _remembered(f, message.seq)
        gone = Missed(message.seq, place.step, f"order {duty.seq} overtook it")
        return f, (ack, *(deeds or (gone,)))
    if duty is not None and message.seq == duty.seq and duty.decide is not None:
        return f, (ack, *duty.deeds)
    if duty is None or message.seq > duty.seq:
        f = _overtaken(f)
        duty = Duty(message.seq, message.purpose, reason="", tag="")
    duty = replace(duty, decide=message, held_at=None, done=False)
    heard = tuple(u for u in f.unheard if not isinstance(u.deed, Promise))  # a decision answers every promise
    f = replace(f, duty=duty, unheard=heard)
    if message.plan is Plan.STAGED or place.edge <= message.step or duty.did(Shard) or duty.did(Staged):
        return f, (ack, *duty.deeds)
    missed = Missed(message.seq, place.step, f"step {place.step} is past the stop step {message.step}")
    return say(f, missed, now), (ack,)


def _resume(f: Follower, message: Resume) -> Follower:
    f = replace(f, over=max(f.over, message.seq))
    if f.duty is not None and message.seq >= f.duty.seq:
        f = _with(f, replace(f.duty, done=True, edge=-1))
    if f.quiesce is not None and message.seq >= f.quiesce.seq and f.exit is None:
        f = replace(f, quiesce=None, quiesced=False)
    return f


def let_go(f: Follower) -> Follower:
    """The order at hand is over by this rank's own judgement: its daemon is gone and doesn't come back."""
    if f.duty is None:
        return f
    return _with(f, replace(f.duty, done=True, edge=-1))


def _overtaken(f: Follower) -> Follower:
    """The newest order steps back; it is remembered while its write may still be going on, or was done."""
    if f.duty is None or not f.duty.deeds:
        return replace(f, duty=None)
    return replace(f, duty=None, past=(f.duty, *f.past)[:PAST])


def _with(f: Follower, duty: Duty) -> Follower:
    return replace(f, duty=duty)


# ---- what was done ----------------------------------------------------------------------------------


def say(f: Follower, deed: Deed, now: float) -> Follower:
    """A deed: remembered with its order, `due` at once, and again until the daemon acknowledges it."""
    if isinstance(deed, Quiesced):
        f = replace(f, quiesced=f.quiesce is not None and f.quiesce.seq == deed.seq)
    elif f.duty is not None and f.duty.seq == deed.seq:
        f = _with(f, _remember(f.duty, deed))
    else:
        f = replace(f, past=tuple(_remember(duty, deed) if duty.seq == deed.seq else duty for duty in f.past))
    return _unheard(f, deed, now - REPEAT_FIRST_S)


def _remember(duty: Duty, deed: Deed) -> Duty:
    others = tuple(old for old in duty.deeds if type(old) is not type(deed) or isinstance(deed, (Shard, Staged)))
    return duty if deed in duty.deeds else replace(duty, deeds=(*others, deed)[-8:])


def _unheard(f: Follower, deed: Deed, now: float) -> Follower:
    same = (deed.seq, type(deed))
    others = tuple(u for u in f.unheard if (u.deed.seq, type(u.deed)) != same)
    return replace(f, unheard=(*others, Unheard(deed, now + REPEAT_FIRST_S))[-16:])


def _remembered(f: Follower, seq: int, kind: type[Deed] | None = None) -> tuple[Deed, ...]:
    """What was done for order *seq*, as far as it is remembered."""
    for duty in (f.duty, *f.past):
        if duty is not None and duty.seq == seq:
            return tuple(deed for deed in duty.deeds if kind is None or isinstance(deed, kind))
    return ()


def due(f: Follower, now: float) -> tuple[Follower, tuple[FromRank, ...]]:
    """Deeds to say (again) now, with a bounded back-off."""
    ripe = tuple(u.deed for u in f.unheard if now >= u.at)
    if not ripe:
        return f, ()
    unheard = tuple(
        u
        if now < u.at
        else Unheard(u.deed, now + min(REPEAT_FIRST_S * 1.5 ** min(u.tries, 9), REPEAT_MAX_S), u.tries + 1)
        for u in f.unheard
    )
    return replace(f, unheard=unheard), ripe


def next_due(f: Follower) -> float | None:
    """When `due` will have something to say."""
    return min((u.at for u in f.unheard), default=None)
