"""Plain loops without an edit of the loop: the boundary is where the optimizer's step ends.

::

    model, optimizer, schedule, loader = ...
    guard = guard_optimizer({"model": model, "schedule": schedule, "loader": loader}, "checkpoints", optimizer,
                            schedule=schedule)
    train(model, optimizer, schedule, loader)       # the loop as it was; guard.resumed_steps are done already

A loop of the form ``optimizer.step(); schedule.step()`` changes the state twice: with *schedule*, the boundary is after
the schedule's step. A step inside an accumulation never reaches the optimizer, so it is none. Where the node halts,
`Halted` is raised out of that step and ends the process with code 75.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from powerguard.errors import UsageError
from powerguard.integrations.halted import Halted
from powerguard.train.attach import attach
from powerguard.train.guard import Guard


class OptimizerGuard:
    """The hook on an optimizer; *guard* is powerguard's own."""

    def __init__(self, guard: Guard, place: dict[str, int], steps_each: int) -> None:
        self.guard, self._place, self._each = guard, place, steps_each
        self.resumed_steps = 0
        self._remove: list[Callable[[], None]] = []

    @property
    def steps(self) -> int:
        """Boundaries passed over the whole run."""
        return self._place["calls"] // self._each

    def _boundary(self) -> None:
        """A step is complete."""
        self._place["calls"] += 1
        if self._place["calls"] % self._each:
            return
        verdict = self.guard.boundary(self.steps)
        if verdict:
            self.close(verdict.reason)
            raise Halted(verdict, self.steps)

    def close(self, why: str = "finished") -> None:
        """Takes the hook off, and ends the guard."""
        while self._remove:
            self._remove.pop()()
        self.guard.close(why)


def guard_optimizer(
    state: Mapping[str, object],
    directory: str | Path,
    optimizer: Any,
    *,
    schedule: Any = None,
    steps_each: int = 1,
    **options: Any,
) -> OptimizerGuard:
    """Guards *state* and *optimizer*, and loads the newest generation into them.

    *schedule*: what the loop steps after the optimizer at each step; its step then is the boundary. *steps_each*: so
    many steps of *optimizer* make one of the run (a loop that steps it twice per batch). With several optimizers, give
    the one that is stepped last, and the others in *state*. *options* are those of `powerguard.attach`.
    """
    if steps_each < 1:
        raise UsageError(f"steps_each={steps_each} is no number of steps", todo="give 1 or more")
    place = {"calls": 0}
    guard = attach({**state, "optimizer": optimizer, "place": place}, directory, **options)
    hook = OptimizerGuard(guard, place, steps_each)
    hook.guard.resume()
    hook.resumed_steps = hook.steps
    if schedule is None:
        handle = optimizer.register_step_post_hook(lambda *_: hook._boundary())
        hook._remove.append(handle.remove)
        return hook
    plain = type(schedule)

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = plain.step(self, *args, **kwargs)
        hook._boundary()
        return answer

    # by its class: what stands in a schedule's own dict is part of its state_dict
    schedule.__class__ = type(plain.__name__, (plain,), {"step": step, "__module__": plain.__module__})
    hook._remove.append(lambda: setattr(schedule, "__class__", plain))
    return hook
