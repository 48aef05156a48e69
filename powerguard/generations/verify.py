"""Every byte of a generation against its checksums."""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct

from powerguard.errors import CheckpointError
from powerguard.generations.names import SHARD, rank_name
from powerguard.generations.record import RecordHead, decode
from powerguard.generations.scan import Generation, check_identity, read_record_bytes, split_problems
from powerguard.generations.stream import THREADS, read_shard


class Problem(Struct, frozen=True):
    """One thing that is wrong; *rank* is -1 where it is no rank's."""

    rank: int
    text: str

    def __str__(self) -> str:
        return self.text


def verify(generation: Generation, *, ranks: Collection[int] | None = None, threads: int = THREADS) -> list[Problem]:
    """All that is wrong with *generation*, empty if it can be trusted; data of *ranks* only, if given.

    The other ranks' records are checked too, without their data unless *ranks* need it. At most one problem a rank is
    reported.
    """
    problems = [Problem(-1, text) for text in generation.problems]
    if not generation.shards and not problems:
        problems.append(Problem(-1, "it has no shards"))
    heads: list[RecordHead] = []
    for shard in generation.shards:
        folder = generation.path / shard.path
        try:
            data = read_record_bytes(folder)
            head = decode(data, RecordHead, f"{folder.name}'s record")
            if head.digest != shard.digest:
                raise CheckpointError(f"{folder.name}'s record isn't the one that was sealed")
            check_identity(head, folder, generation.name, generation.step, shard.rank)
            if head.world_size != generation.world_size or head.unit != generation.unit:
                raise CheckpointError(f"{folder.name} is of a run of {head.world_size} ranks, counting {head.unit}")
            heads.append(head)
        except CheckpointError as error:
            problems.append(Problem(shard.rank, error.message))
    problems += [Problem(-1, text) for text in split_problems(heads)[:3]]
    wanted = None if ranks is None else _with_replicas(heads, ranks)
    for head in heads:
        if wanted is None or head.rank in wanted:
            try:
                read_shard(generation.path / rank_name(head.rank) / SHARD, head.file, threads=threads)
            except CheckpointError as error:
                problems.append(Problem(head.rank, error.message))
    return problems


def _with_replicas(heads: list[RecordHead], ranks: Collection[int]) -> set[int]:
    """*ranks*, and those who wrote a part of their state."""
    return {other for head in heads if head.rank in ranks for split in head.splits for other in split.group} | set(
        ranks
    )
