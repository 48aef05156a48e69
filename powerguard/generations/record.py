"""The two small files of a generation: a rank's record and the seal, as frozen values with their own checksum.

Both are JSON objects whose member "digest" is the xxh3-128 of the whole file with the digest's 32 digits set to '0'.
So each file proves itself, and another program needs no canonical form to check it.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
import xxhash
from msgspec import Raw, Struct

from powerguard.core.messages import ShardRecord
from powerguard.errors import CheckpointError

CHUNK_BYTES = 8 * 1024 * 1024
"""A shard is written, read and checked in parts of this size."""

ALIGN = 4096
"""Where a shard's tensor data starts, and what direct I/O is aligned to (512 to 4096 are asked for by devices)."""

RECORD_FORMAT = "powerguard-record-1"
SPLIT_FORMAT = "powerguard-record-2"
"""Of a record whose state lies partly in the shards of other ranks: an older reader must not take it for its own."""
SEAL_FORMAT = "powerguard-seal-1"
RECORD_BYTES_MAX = 1 << 30

_ZEROS = "0" * 32
_KEY = b'"digest":"'


class ShardFile(Struct, frozen=True):
    """A shard's size and the xxh3-128 of each of its chunks, in order; the last one may be short."""

    name: str
    bytes: int
    chunk_bytes: int
    sums: tuple[str, ...]


class Split(Struct, frozen=True):
    """What this rank has in common with the other ranks of *group*, who write it between them."""

    group: tuple[int, ...]  # ascending
    bytes: int  # of the whole, once
    digest: str  # of the plan; all of the group have the same, or the parts don't make a whole


class Shared(Struct, frozen=True):
    """A part of the state that the group of a split writes between them."""

    ref: str  # its name in the state
    bytes: int
    split: int  # index into `RecordHead.splits`


class Piece(Struct, frozen=True):
    """Bytes *begin* to *end* of the shared part *ref*, which this rank's shard holds under *name*."""

    ref: str
    begin: int
    end: int
    name: str


class Content(Struct, frozen=True, omit_defaults=True):
    """What a rank's record says of its state, apart from who wrote it when."""

    state: Raw
    splits: tuple[Split, ...] = ()
    shared: tuple[Shared, ...] = ()
    pieces: tuple[Piece, ...] = ()


class RecordHead(Struct, frozen=True, omit_defaults=True):
    """What rank *rank* put into *generation*, without the state, which may be large."""

    format: str
    digest: str
    generation: str
    step: int
    unit: str
    rank: int
    world_size: int
    attempt: str  # records of one generation agree on it; "" where the name alone is unique
    portable: bool  # its one shard is the whole state, and any number of ranks may load it
    written_at: float  # seconds since 1970, for people and for the order among equal steps
    created_by: str
    file: ShardFile
    splits: tuple[Split, ...] = ()  # none: the shard holds all of the state


class Record(RecordHead, frozen=True, omit_defaults=True, kw_only=True):
    """The whole record. *state* is the typed JSON of `values.py`."""

    shared: tuple[Shared, ...] = ()
    pieces: tuple[Piece, ...] = ()
    state: Raw


class Seal(Struct, frozen=True):
    """That *generation* is whole: *shards* are the records of ranks 0..world_size-1."""

    format: str
    digest: str
    generation: str
    step: int
    unit: str
    world_size: int
    portable: bool
    written_at: float
    created_by: str
    shards: tuple[ShardRecord, ...]


T = TypeVar("T", Record, RecordHead, Seal)


def checksum(data: bytes | memoryview) -> str:
    """xxh3-128 in 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def encode(value: Record | Seal) -> tuple[bytes, str]:
    """(the file's bytes, its digest). The value's own *digest* is ignored."""
    data = msgspec.json.encode(msgspec.structs.replace(value, digest=_ZEROS))
    at = data.index(_KEY) + len(_KEY)
    assert data[at : at + 32] == _ZEROS.encode()
    digest = checksum(data)
    return data[:at] + digest.encode() + data[at + 32 :], digest


def decode(data: bytes, kind: type[T], what: str) -> T:
    """The value in a file's bytes; raises CheckpointError where a byte of it is wrong."""
    at = data.find(_KEY, 0, 200) + len(_KEY)
    if at < len(_KEY):
        raise CheckpointError(f"{what} has no digest")
    digest = data[at : at + 32]
    if checksum(data[:at] + _ZEROS.encode() + data[at + 32 :]).encode() != digest:
        raise CheckpointError(f"{what} doesn't match its own checksum")
    try:
        value = msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{what} can't be read: {error}") from error
    expected = (SEAL_FORMAT,) if kind is Seal else (RECORD_FORMAT, SPLIT_FORMAT)
    if value.format not in expected:
        raise CheckpointError(f"{what} is of format {value.format!r}, this version reads {' and '.join(expected)}")
    return value
