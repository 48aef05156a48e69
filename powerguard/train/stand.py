"""The training thread at an armed boundary: does what the order says, until it may go on or must leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from powerguard.core.follow import Go, Hold, Leave, Park, Rest, Save, Todo
from powerguard.core.messages import Quiesced
from powerguard.errors import EXIT_REQUEUE
from powerguard.train.desk import Desk
from powerguard.train.shield import shielded
from powerguard.train.verdict import GO, Verdict

if TYPE_CHECKING:  # it needs torch
    from powerguard.train.saver import Saver

PARK_ALONE_S = 120.0
"""Parked, and no daemon connected for so long: it won't come back, and the mains may have. Training goes on."""
REST_ALONE_S = 30.0
"""Told to get ready to leave, and no daemon connected for so long: leave."""

Say = Callable[..., None]


def stand(desk: Desk, saver: Saver, step: int, say: Say) -> Verdict:
    """Waits, saves and parks at boundary *step* as ordered."""
    desk.enter()
    waited = ""
    try:
        while True:
            todo = desk.next(step)
            if isinstance(todo, Go):
                if waited in ("parked", "held"):
                    say("training goes on", step=step, was=waited)
                return GO
            if isinstance(todo, Leave):
                say("leaving", step=step, reason=todo.reason, code=todo.code)
                return Verdict(True, todo.reason, todo.code)
            if isinstance(todo, Rest) and desk.alone_s() > REST_ALONE_S:
                return Verdict(True, f"{todo.reason}; the daemon is gone", EXIT_REQUEUE)
            waited = _do(desk, saver, todo, waited, lambda text, **facts: say(text, step=step, **facts))
    finally:
        desk.leave()
        desk.busy = ""


def _do(desk: Desk, saver: Saver, todo: Todo, waited: str, say: Say) -> str:
    """One thing to do; what it is called."""
    if isinstance(todo, Save):
        say("saving", generation=todo.generation, stop=todo.stop, lone=todo.lone)
        if todo.stop:
            with shielded():
                saver.stop(todo)
        else:
            saver.snapshot(todo)
        return "saving"
    if isinstance(todo, Hold):
        desk.busy = "held"
        desk.wait(todo.until)
        return "held"
    if isinstance(todo, Park):
        if waited != "parked":
            idle_device()
            desk.busy = "parked"
            say("parked", reason=todo.reason)
        desk.wait()
        if desk.alone_s() > PARK_ALONE_S:
            say("the daemon is gone and doesn't come back: training on", alone_s=round(desk.alone_s()))
            desk.let_go()
        return "parked"
    assert isinstance(todo, Rest)
    _rest(desk, saver, todo, waited)
    return "resting"


def _rest(desk: Desk, saver: Saver, rest: Rest, waited: str) -> None:
    """Once nothing moves any more it is said; then EXIT is waited for."""
    if waited != "resting":
        desk.busy = "parked"
        idle_device()
    if desk.quiesced:
        desk.wait()
    elif saver.quiet(0.5):
        desk.say(Quiesced(rest.seq))


def idle_device() -> None:
    """Nothing of this process's work is left on its device."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
