"""Which generations a directory holds, found without trusting any pointer.

`scan` looks at names, seals, records and sizes; `verify.py` looks at every byte. Newest first means: by step, and
among equal steps by when they were written.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import Struct

from powerguard.core.messages import ShardRecord
from powerguard.errors import CheckpointError, DirectoryError
from powerguard.generations import resumes
from powerguard.generations.names import RECORD, SEAL, SHARD, parse_generation, parse_rank, rank_name
from powerguard.generations.record import RECORD_BYTES_MAX, RecordHead, Seal, decode


class Generation(Struct, frozen=True):
    """One generation as its names, seal, records and sizes tell; its data is not read yet."""

    path: Path
    name: str
    step: int
    tag: str
    sealed: bool
    whole: bool  # sealed with every shard of the right size, or unsealed with all records there and agreeing
    world_size: int = 0  # 0 = not known
    portable: bool = False  # any number of ranks may load it
    unit: str = ""
    bytes: int = 0
    written_at: float = 0.0
    created_by: str = ""
    shards: tuple[ShardRecord, ...] = ()
    problems: tuple[str, ...] = ()  # why it isn't whole

    @property
    def directory(self) -> Path:
        """Where it lies among the others."""
        return self.path.parent


class Skipped(Struct, frozen=True):
    """A generation that was passed over, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} skipped: {self.reason}"


@dataclass(frozen=True)
class Latest:
    """The answer of `latest`: falsy where there is none. *skipped* says what was passed over."""

    generation: Generation | None
    skipped: tuple[Skipped, ...] = field(default=())

    def __bool__(self) -> bool:
        return self.generation is not None

    def describe(self) -> str:
        """One line for the log."""
        found = f"{self.generation.name} is the newest whole generation" if self.generation else "no whole generation"
        return "; ".join([found, *map(str, self.skipped)])


def scan(directory: str | Path) -> list[Generation]:
    """All generations in *directory*, newest first; none where it doesn't exist.

    Raises DirectoryError where it can't be read.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DirectoryError(f"can't list {directory}: {error.strerror}", todo="check its permissions") from error
    found = [look(Path(directory) / name) for name in names if parse_generation(name)]
    return sorted(found, key=lambda g: (g.step, g.written_at, g.name), reverse=True)


def look(path: Path) -> Generation:
    """The generation at *path*. What is wrong with it is in its *problems*; raises nothing for it."""
    parsed = parse_generation(path.name)
    assert parsed is not None, path
    step, tag = parsed
    bare = Generation(path=path, name=path.name, step=step, tag=tag, sealed=False, whole=False)
    try:
        sealed = (path / SEAL).exists()
        return _sealed(bare) if sealed else _unsealed(bare)
    except CheckpointError as error:
        return _with(bare, sealed=False, problems=(error.message,))
    except OSError as error:
        return _with(bare, sealed=False, problems=(f"can't be read: {error}",))


def _with(generation: Generation, **changes: object) -> Generation:
    fields = {name: getattr(generation, name) for name in generation.__struct_fields__}
    return Generation(**{**fields, **changes})


def _sealed(bare: Generation) -> Generation:
    try:
        seal = decode((bare.path / SEAL).read_bytes(), Seal, "seal.json")
    except CheckpointError as error:
        # a seal that can't be read proves nothing, but the records may
        known = _unsealed(bare)
        return _with(known, problems=(*known.problems, error.message), whole=False)
    problems = seal_problems(seal, bare.name, bare.step)
    for shard in seal.shards:
        have = _folder_bytes(bare.path / shard.path)
        if have is None:
            problems.append(f"{shard.path} is missing")
        elif have != shard.bytes:
            problems.append(f"{shard.path} has {have} bytes, the seal says {shard.bytes}")
    return _with(
        bare,
        sealed=True,
        whole=not problems,
        world_size=seal.world_size,
        portable=seal.portable,
        unit=seal.unit,
        bytes=sum(shard.bytes for shard in seal.shards),
        written_at=seal.written_at,
        created_by=seal.created_by,
        shards=seal.shards,
        problems=tuple(problems),
    )


def seal_problems(seal: Seal, name: str, step: int) -> list[str]:
    """Why *seal* isn't one of generation *name*; empty where it is."""
    problems = []
    if seal.generation != name or seal.step != step:
        problems.append(f"the seal is of {seal.generation}")
    ranks = sorted(shard.rank for shard in seal.shards)
    if ranks != list(range(seal.world_size)):
        problems.append(f"the seal names {len(ranks)} ranks of {seal.world_size}")
    if any(shard.path != rank_name(shard.rank) for shard in seal.shards):
        problems.append("the seal names a folder that isn't its rank's")
    return problems


def _unsealed(bare: Generation) -> Generation:
    """Whole only if every rank's record is there and they agree: a cut between the last shard and the seal."""
    heads: list[RecordHead] = []
    shards: list[ShardRecord] = []
    problems: list[str] = []
    for name in sorted(os.listdir(bare.path)):
        rank = parse_rank(name)
        if rank is None:
            continue
        try:
            head = read_head(bare.path / name, bare.name, bare.step, rank)
        except CheckpointError as error:
            problems.append(error.message)
            continue
        heads.append(head)
        size = _folder_bytes(bare.path / name) or 0
        shards.append(ShardRecord(rank=rank, path=name, bytes=size, digest=head.digest))
    world = heads[0].world_size if heads else 0
    if len({(h.world_size, h.unit, h.attempt) for h in heads}) > 1:
        problems.append("its ranks are of different attempts")
    if not heads:
        problems.append("no rank has finished writing")
    elif [h.rank for h in heads] != list(range(world)):
        problems.append(f"only {len(heads)} of {world} ranks have finished writing")
    problems += split_problems(heads)
    return _with(
        bare,
        whole=not problems,
        world_size=world,
        portable=bool(heads) and heads[0].portable,
        unit=heads[0].unit if heads else "",
        bytes=sum(shard.bytes for shard in shards),
        written_at=max((h.written_at for h in heads), default=0.0),
        created_by=heads[0].created_by if heads else "",
        shards=tuple(shards),
        problems=tuple(problems),
    )


def split_problems(heads: Sequence[RecordHead]) -> list[str]:
    """Whether ranks that wrote something between them went by the same plan; empty where they did.

    Equal plans make a whole: each rank of a plan's group writes its own stretch of it. Ranks that aren't among *heads*
    are somebody else's trouble.
    """
    by_rank = {head.rank: head for head in heads}
    problems: list[str] = []
    for head in heads:
        for split in head.splits:
            others = (by_rank[rank] for rank in split.group if rank in by_rank)
            odd = next((other for other in others if split not in other.splits), None)
            if odd is not None:
                problems.append(f"{rank_name(head.rank)} and {rank_name(odd.rank)} disagree on what they share")
                break
    return problems


def read_record_bytes(folder: Path) -> bytes:
    """The bytes of a rank's record; raises CheckpointError where there are none."""
    path = folder / RECORD
    try:
        if path.stat().st_size > RECORD_BYTES_MAX:
            raise CheckpointError(f"{folder.name}'s record is larger than {RECORD_BYTES_MAX} bytes")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{folder.name}'s record can't be read: {error.strerror}") from error


def read_head(folder: Path, generation: str, step: int, rank: int) -> RecordHead:
    """The head of the record in *folder*, which must be that rank's of that generation, with a shard of its size.

    Raises CheckpointError otherwise.
    """
    head = decode(read_record_bytes(folder), RecordHead, f"{folder.name}'s record")
    check_identity(head, folder, generation, step, rank)
    return head


def check_identity(head: RecordHead, folder: Path, generation: str, step: int, rank: int) -> None:
    """Raises CheckpointError where *head* is of another generation or rank, or its shard isn't of its size."""
    if head.generation != generation or head.step != step:
        raise CheckpointError(f"{folder.name} is of {head.generation}")
    if head.rank != rank or folder.name != rank_name(rank):
        raise CheckpointError(f"{folder.name} is of rank {head.rank}")
    if head.file.name != SHARD or head.file.chunk_bytes <= 0:
        raise CheckpointError(f"{folder.name}'s record names no shard of its own")
    try:
        size = (folder / head.file.name).stat().st_size
    except OSError as error:
        raise CheckpointError(f"{folder.name}'s shard can't be read: {error.strerror}") from error
    if size != head.file.bytes:
        raise CheckpointError(f"{folder.name}'s shard has {size} bytes, its record says {head.file.bytes}")


def _folder_bytes(folder: Path) -> int | None:
    try:
        return (folder / SHARD).stat().st_size + (folder / RECORD).stat().st_size
    except OSError:
        return None


def latest(
    directory: str | Path,
    *,
    verify: bool = True,
    verify_ranks: Collection[int] | None = None,
    world_size: int | None = None,
    cap: int | None = resumes.CAP,
    exclude: Collection[str] = (),
) -> Latest:
    """The newest generation that is whole and, with *verify*, whose checksums match (of *verify_ranks* only, if given).

    Passed over: the names in *exclude* (in silence), what isn't whole, what doesn't match, what is of another
    *world_size* (if given), and what was resumed from *cap* times without a newer generation since; the last only
    while an older one is left to fall back to.
    Raises DirectoryError where the directory can't be read.
    """
    from powerguard.generations.verify import verify as check

    counts = resumes.read(directory) if cap is not None else {}
    skipped: list[Skipped] = []
    worn: list[Generation] = []
    for generation in scan(directory):
        if generation.name in exclude:
            continue
        reason = _unfit(generation, world_size)
        if not reason and cap is not None and counts.get(generation.name, 0) >= cap:
            worn.append(generation)
            reason = f"resumed from {counts[generation.name]} times without getting further"
        if not reason and verify:
            found = check(generation, ranks=verify_ranks)
            reason = "; ".join(str(problem) for problem in found[:3])
        if not reason:
            return Latest(generation, tuple(skipped))
        skipped.append(Skipped(generation.name, reason))
    for generation in worn:  # nothing older is left: better a worn one than a run from scratch
        if not verify or not check(generation, ranks=verify_ranks):
            rest = tuple(s for s in skipped if s.name != generation.name)
            return Latest(generation, rest)
    return Latest(None, tuple(skipped))


def _unfit(generation: Generation, world_size: int | None) -> str:
    if not generation.whole:
        return "; ".join(generation.problems[:3])
    if world_size is not None and generation.world_size != world_size and not generation.portable:
        return f"written by {generation.world_size} ranks, this run has {world_size}"
    return ""
