"""Where each part of a state lies in the shard file: a safetensors file whose data starts aligned.

The header is padded with spaces (safetensors allows them) so that the data starts at a multiple of `ALIGN`. Parts
follow each other without holes (safetensors demands it), widest dtype first, so each is aligned to its dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from powerguard.errors import CheckpointError
from powerguard.generations.record import ALIGN
from powerguard.train.blobs import Blob
from powerguard.train.dtypes import kept_as

HEADER_BYTES_MAX = 100_000_000
"""The limit of the safetensors format."""


@dataclass(frozen=True)
class Part:
    """Where one blob lies: *offset* from the start of the file."""

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """A shard file's plan: equal for equal names, dtypes and shapes, whatever the values."""

    signature: tuple[object, ...]
    header: bytes
    parts: tuple[Part, ...]  # in the order of the blobs that were planned
    file_bytes: int


def signature(blobs: list[Blob]) -> tuple[object, ...]:
    """What decides the layout."""
    return tuple((blob.name, blob.source.dtype, tuple(blob.source.shape)) for blob in blobs)


def plan(blobs: list[Blob], metadata: dict[str, str] | None = None) -> Layout:
    """The layout for *blobs*; *metadata* is what readers are told beside the tensors."""
    order = sorted(range(len(blobs)), key=lambda i: -blobs[i].source.element_size())
    entries: dict[str, dict[str, object]] = {"__metadata__": dict(metadata)} if metadata else {}
    offsets = [0] * len(blobs)
    at = 0
    for index in order:
        blob = blobs[index]
        dtype, shape = kept_as(blob.source.dtype, tuple(blob.source.shape))
        entries[blob.name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + blob.nbytes]}
        offsets[index] = at
        at += blob.nbytes
    header = _header(entries)
    start = len(header)
    parts = tuple(Part(blob.name, start + offset, blob.nbytes) for blob, offset in zip(blobs, offsets, strict=True))
    return Layout(signature(blobs), header, parts, start + at)


def _header(entries: dict[str, dict[str, object]]) -> bytes:
    text = msgspec.json.encode(entries)
    text += b" " * (-(8 + len(text)) % ALIGN)
    assert len(text) <= HEADER_BYTES_MAX
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class Entry:
    """One tensor of a safetensors header; *begin* and *end* from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def parse_header(head: bytes) -> tuple[int, dict[str, Entry]]:
    """(where the data starts, the tensors) of a whole safetensors header; raises CheckpointError if it is none."""
    size = int.from_bytes(head[:8], "little")
    try:
        raw = msgspec.json.decode(head[8 : 8 + size])
        raw.pop("__metadata__", None)
        entries = {
            name: Entry(e["dtype"], tuple(e["shape"]), 8 + size + e["data_offsets"][0], 8 + size + e["data_offsets"][1])
            for name, e in raw.items()
        }
    except (msgspec.MsgspecError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointError(f"a shard's header can't be read: {error}") from error
    return 8 + size, entries
