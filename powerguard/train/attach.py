"""`powerguard.attach`: who this rank is, where its daemon is, and a guard for its state."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

from powerguard.errors import MissingDependency, UsageError
from powerguard.train import single
from powerguard.train.guard import Guard, StagingGuard
from powerguard.train.identity import DEFAULT_SOCKET, find_identity
from powerguard.train.leaver import Leaver


def attach(
    state: Mapping[str, object],
    dir: str | Path,
    *,
    job: str | None = None,
    rank: int | None = None,
    local_rank: int | None = None,
    world_size: int | None = None,
    socket: str | Path | None = None,
    keep: int = 2,
    unit: str = "optimizer_step",
    allow_pickle: bool = False,
    reserve: bool = True,
    prove: bool = True,
    exit_on_halt: bool = True,
    exit_grace_s: float = 10.0,
    stage_every: int = 0,
    save_every: int | str | None = None,
    mtbf: str | float | None = None,
    storage: Literal["local", "shared"] = "local",
    replicated: Collection[str] = (),
) -> Guard:
    """Guards a training run whose *state* (names to modules, optimizers, anything with state_dict) is saved in *dir*.

    Who this rank is comes from the arguments, torch.distributed, or the launcher's environment. The daemon is looked
    for at *socket* (POWERGUARD_SOCKET, else /run/powerguard/ranks.sock); without one training goes on unguarded, and is
    guarded when one appears. *prove* writes the state once, which measures a save and shows that there is room. With
    *exit_on_halt* the process leaves with code 75 at most *exit_grace_s* after the order to.

    With *stage_every* N the state is copied into shared memory after every N-th step, where a process of its own can
    make it durable should this one hang or die (see `Guard.stage`); all ranks give the same N. It takes two more
    copies of the state in host memory, and the time of a copy every N steps.

    What ranks hold alike (under DDP or HSDP, or the sources named in *replicated*) is written once: with *storage*
    "local" once for each node, with "shared" once for the whole job. Either way all ranks see the same *dir*: one of
    each node's own is refused by `resume` and by the first periodic save. All ranks give the same. `train/replicas.py`
    says what is known to be alike.

    With *save_every* `boundary` takes the run's periodic checkpoints too: 100 (steps), "5min", or "auto", which is what
    costs least by the measured time that a save blocks training and by how often failures come unannounced: as *mtbf*
    says ("30d", of all failures), else as this directory's record of interruptions has it. All ranks give the same,
    and agree here on a name for the saves of this start: they wait for each other, by torch.distributed, or before that
    is initialised by torchrun's own store.

    Raises StateError where *state* can't be saved, DirectoryError where *dir* can't be written, UsageError where there
    is a guard already or nothing says which rank this is, MissingDependency without torch.
    """
    single.check_free()
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise MissingDependency(f"torch can't be imported: {error}", todo="pip install 'powerguard[train]'") from error
    group = (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else None
    identity = find_identity(os.environ, job=job, rank=rank, local_rank=local_rank, world_size=world_size, group=group)
    path = str(socket or os.environ.get("POWERGUARD_SOCKET") or DEFAULT_SOCKET)
    if stage_every < 0:
        raise UsageError(f"stage_every is {stage_every}", todo="give a number of steps, or 0 not to stage")
    kind = StagingGuard if stage_every or save_every else Guard
    guard = kind(
        state,
        dir,
        identity,
        keep=keep,
        unit=unit,
        allow_pickle=allow_pickle,
        reserve=reserve,
        storage=storage,
        replicated=replicated,
    )
    guard.stage_every = stage_every
    if save_every:
        guard.keep_time(save_every, mtbf)
    guard.begin(path, prove, Leaver(exit_grace_s) if exit_on_halt else None)
    return guard
