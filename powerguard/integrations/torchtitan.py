"""torchtitan: a wrapper around its checkpoint manager.

::

    trainer = config.build()
    guard_trainer(trainer, "checkpoints/powerguard")
    trainer.train()

The Trainer calls `checkpointer.save(step)` after each step: that is the boundary. Its own checkpoints go on as
configured. Where the node halts, `Halted` ends the process with code 75 out of that call: no save is forced by
`last_step`, which would write the model only (`last_save_model_only`), and no loop goes on to validate. `load` takes
the newest of both, ours or torchtitan's; random numbers, which torchtitan doesn't keep, come with ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from powerguard.integrations.halted import Halted
from powerguard.train.attach import attach
from powerguard.train.guard import Guard


class GuardedManager:
    """Has the interface of torchtitan's `BaseCheckpointManager`; everything else is the wrapped *manager*'s."""

    def __init__(self, manager: Any, guard: Guard) -> None:
        self.manager, self.guard = manager, guard

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)

    def load(self, step: int = -1) -> bool:
        """The newest state: ours unless torchtitan has a later one, or *step* asks for one of its."""
        if step != -1:
            return bool(self.manager.load(step=step))
        theirs = self._newest_of_theirs()
        from powerguard.generations import latest

        found = latest(self.guard.directory, verify=False, world_size=self.guard.identity.world_size).generation
        if found is None or found.step < theirs:
            return bool(self.manager.load(step=step))
        return self.guard.resume() > 0

    def _newest_of_theirs(self) -> int:
        find = getattr(self.manager, "_find_load_step", None)
        return int(find()) if find is not None and getattr(self.manager, "enable", False) else -1

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Step *curr_step* is complete. Raises Halted where the node halts."""
        verdict = self.guard.boundary(curr_step)
        if verdict:
            self.guard.close(verdict.reason)
            raise Halted(verdict, curr_step)
        return bool(self.manager.save(curr_step, last_step=last_step))

    def close(self) -> None:
        """Ends both."""
        self.guard.close()
        self.manager.close()


def guard_trainer(trainer: Any, directory: str | Path, **options: Any) -> GuardedManager:
    """Guards *trainer* (torchtitan's), before its `train()`. *options* are those of `powerguard.attach`.

    Checkpointing must be enabled in its configuration, since the manager then knows what there is to save.
    """
    from powerguard.errors import UsageError

    manager = trainer.checkpointer
    if not getattr(manager, "enable", False):
        raise UsageError("torchtitan's checkpointing is off, so it doesn't say what to save", todo="checkpoint.enable")
    state = {name: value for name, value in manager.states.items() if value is not None}
    trainer.checkpointer = guarded = GuardedManager(manager, attach(state, directory, **options))
    return guarded
