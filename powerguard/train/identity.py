"""Who this process is among the ranks of its job: as told, as torch.distributed or the launcher says, or alone."""

from __future__ import annotations

import os
from collections.abc import Mapping

from msgspec import Struct

from powerguard import wire
from powerguard.errors import UsageError

DEFAULT_SOCKET = "/run/powerguard/ranks.sock"


class Identity(Struct, frozen=True):
    """A rank of a job."""

    job: str
    rank: int
    local_rank: int
    world_size: int
    master: str = ""  # the job's master address, where it is known


def find_identity(
    env: Mapping[str, str],
    *,
    job: str | None = None,
    rank: int | None = None,
    local_rank: int | None = None,
    world_size: int | None = None,
    group: tuple[int, int] | None = None,
    pid: int | None = None,
) -> Identity:
    """What was given wins, then *group* (rank and world size of an initialised process group), then *env*.

    Raises UsageError, with what to do, for numbers that make no rank.
    """
    step = "SLURM_STEP_NUM_TASKS" in env  # set inside srun only: a batch script alone is one process
    rank = _first("rank", rank, group and group[0], env.get("RANK"), env.get("SLURM_PROCID") if step else None, 0)
    world = _first(
        "world_size",
        world_size,
        group and group[1],
        env.get("WORLD_SIZE"),
        env.get("SLURM_STEP_NUM_TASKS"),
        1,
    )
    local = _first("local_rank", local_rank, env.get("LOCAL_RANK"), env.get("SLURM_LOCALID") if step else None, rank)
    if not 0 <= rank < world or local < 0:
        raise UsageError(
            f"rank {rank} (local rank {local}) of {world} can't be",
            todo="give rank= and world_size=, or set RANK and WORLD_SIZE as torchrun does",
        )
    name = job or env.get("POWERGUARD_JOB_ID", "")
    if not name:
        name = _launcher(env)
        if world == 1:
            # alone, nobody must find it under the same name; several in one allocation must not collide
            name = f"{name or 'process'}.{os.getpid() if pid is None else pid}"
    if not name:
        raise UsageError(
            f"nothing names the job that rank {rank} of {world} belongs to",
            todo="give job=, or set POWERGUARD_JOB_ID to the same value for all its ranks",
        )
    try:
        wire.identity(name, rank)
    except wire.WireError as error:
        raise UsageError(f"job name {name[:40]!r}: {error}", todo="give a shorter job=") from error
    return Identity(name, rank, local, world, env.get("MASTER_ADDR", ""))


def _launcher(env: Mapping[str, str]) -> str:
    """The name that all ranks of a launch share; "" = none."""
    if env.get("SLURM_JOB_ID"):
        return env["SLURM_JOB_ID"]
    run = env.get("TORCHELASTIC_RUN_ID", "")
    if run and run != "none":  # torchrun's default where no --rdzv-id is given
        return run
    address, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    return f"{address}:{port}" if address and port else run


def _first(what: str, *candidates: int | str | None) -> int:
    for candidate in candidates:
        if candidate is not None and candidate != "":
            try:
                return int(candidate)
            except ValueError as error:
                raise UsageError(f"{what} is {candidate!r}, not a number", todo=f"give {what}= a number") from error
    raise AssertionError(what)
