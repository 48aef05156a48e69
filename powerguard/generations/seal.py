"""The last file of a generation: after it, the generation counts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

from msgspec import structs

import powerguard
from powerguard.core.messages import ShardRecord
from powerguard.errors import CheckpointError
from powerguard.generations.disk import DISK, Disk
from powerguard.generations.durable import FULL, fsync_path, trouble, write_file
from powerguard.generations.names import BALLAST, RESERVE, SEAL, home
from powerguard.generations.record import SEAL_FORMAT, RecordHead, Seal, encode
from powerguard.generations.scan import Generation, look, read_head, seal_problems, split_problems

CREATOR = f"powerguard {powerguard.__version__}"


def seal(
    directory: str | Path,
    generation: str,
    *,
    step: int,
    world_size: int,
    unit: str = "optimizer_step",
    shards: Iterable[ShardRecord],
    disk: Disk = DISK,
) -> Path:
    """Writes the seal of *generation* over *shards*, which must be there; durable on return.

    Sealing again is fine. Raises CheckpointError where a shard is missing or isn't the one named, DirectoryError where
    the seal can't be written.
    """
    folder = Path(directory) / generation
    ordered = tuple(sorted(shards, key=lambda shard: shard.rank))
    value = Seal(
        format=SEAL_FORMAT,
        digest="",
        generation=generation,
        step=step,
        unit=unit,
        world_size=world_size,
        portable=False,
        written_at=time.time(),
        created_by=CREATOR,
        shards=ordered,
    )
    problems = seal_problems(value, generation, step)
    heads: list[RecordHead] = []
    for shard in ordered:
        try:
            head = read_head(folder / shard.path, generation, step, shard.rank)
            heads.append(head)
            value = structs.replace(value, portable=head.portable)
            if head.digest != shard.digest:
                problems.append(f"{shard.path}'s record isn't the one that rank {shard.rank} reported")
        except CheckpointError as error:
            problems.append(error.message)
    problems += split_problems(heads)
    if problems:
        raise CheckpointError(f"{generation} can't be sealed: {'; '.join(problems[:3])}")
    try:
        try:
            write_file(disk, folder / SEAL, encode(value)[0])
        except OSError as error:
            if error.errno not in FULL:
                raise
            _free_ballast(disk, folder.parent)
            write_file(disk, folder / SEAL, encode(value)[0])
        fsync_path(disk, folder.parent)
    except OSError as error:
        raise trouble(error, "can't write the seal of", folder) from error
    return folder / SEAL


def _free_ballast(disk: Disk, directory: Path) -> None:
    """Lets go of what the ranks keep for the case that not one block is left."""
    for path in (home(directory) / RESERVE).glob(f"*.{BALLAST}"):
        with contextlib.suppress(OSError):
            disk.unlink(path)


def seal_if_whole(directory: str | Path, generation: str, *, disk: Disk = DISK) -> Generation:
    """Seals *generation* if all its ranks have written it; for runs without a daemon. Returns it as it is now."""
    found = look(Path(directory) / generation)
    if not found.whole or found.sealed:
        return found
    seal(
        directory,
        generation,
        step=found.step,
        world_size=found.world_size,
        unit=found.unit,
        shards=found.shards,
        disk=disk,
    )
    return look(found.path)
