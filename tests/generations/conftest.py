"""Generations made without torch: random bytes for shards, real records and seals."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import Raw

from powerguard.core.messages import ShardRecord
from powerguard.generations import generation_name, seal
from powerguard.generations.names import RECORD, SHARD, rank_name
from powerguard.generations.record import RECORD_FORMAT, Record, ShardFile, checksum, encode

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path) -> Make:
    """Returns a maker of generations in *tmp_path*; the shards' bytes depend on step, rank and *salt* alone."""

    def maker(
        step: int,
        *,
        tag: str = "e1-1",
        world_size: int = 2,
        ranks: range | None = None,
        sealed: bool = True,
        size: int = 3000,
        chunk: int = 1024,
        attempt: str = "",
        salt: str = "",
    ) -> Path:
        name = generation_name(step, tag)
        folder = tmp_path / name
        shards = []
        for rank in range(world_size) if ranks is None else ranks:
            data = random.Random(f"{step}/{rank}/{salt}").randbytes(size)
            rank_folder = folder / rank_name(rank)
            rank_folder.mkdir(parents=True)
            (rank_folder / SHARD).write_bytes(data)
            record = Record(
                format=RECORD_FORMAT,
                digest="",
                generation=name,
                step=step,
                unit="optimizer_step",
                rank=rank,
                world_size=world_size,
                attempt=attempt,
                portable=False,
                written_at=1000.0 + step,
                created_by="test",
                file=ShardFile(SHARD, size, chunk, tuple(checksum(data[i : i + chunk]) for i in range(0, size, chunk))),
                state=Raw(b'{"step":1}'),
            )
            encoded, digest = encode(record)
            (rank_folder / RECORD).write_bytes(encoded)
            shards.append(ShardRecord(rank, rank_name(rank), size + len(encoded), digest))
        if sealed:
            seal(tmp_path, name, step=step, world_size=world_size, shards=shards)
        return folder

    return maker
