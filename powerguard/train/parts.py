"""Where the bytes of a rank's state lie: in its own shard, and for what is written once in those of its replicas too.

All of them together make one space of addresses: the rank's own shard as it is, and behind it each shared part, whole.
A reader of the state needs to know no more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from powerguard.errors import CheckpointError
from powerguard.generations.names import SHARD, rank_name
from powerguard.generations.record import ALIGN, Record, decode
from powerguard.generations.scan import Generation, check_identity, read_record_bytes
from powerguard.generations.stream import read_range, read_shard
from powerguard.train.layout import HEADER_BYTES_MAX, Entry, parse_header

Take = Callable[[int, memoryview], None]


def read_record(generation: Generation, rank: int) -> Record:
    """The verified record of *rank*; raises CheckpointError."""
    shard = next((shard for shard in generation.shards if shard.rank == rank), None)
    if shard is None:
        raise CheckpointError(f"{generation.name} has no shard of rank {rank}")
    folder = generation.path / shard.path
    record = decode(read_record_bytes(folder), Record, f"{folder.name}'s record")
    if record.digest != shard.digest:
        raise CheckpointError(f"{folder.name}'s record isn't the one that was sealed")
    check_identity(record, folder, generation.name, generation.step, rank)
    return record


def read_entries(generation: Generation, record: Record) -> dict[str, Entry]:
    """The verified header of a rank's shard."""
    path = generation.path / rank_name(record.rank) / SHARD
    size = int.from_bytes(read_range(path, record.file, 0, min(8, record.file.bytes)), "little")
    if size > HEADER_BYTES_MAX or 8 + size > record.file.bytes:
        raise CheckpointError(f"{path.parent.name}'s shard has a header of {size} bytes")
    _, entries = parse_header(read_range(path, record.file, 0, 8 + size))
    for name, entry in entries.items():
        if not 0 <= entry.begin <= entry.end <= record.file.bytes:
            raise CheckpointError(f"{path.parent.name}'s shard has {name!r} outside the file")
    return entries


@dataclass
class Source:
    """One rank's shard, and which of its bytes are wanted: (first byte in the file, end, address)."""

    path: Path
    record: Record
    entries: dict[str, Entry]
    spans: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class Parts:
    """What `read_parts` found. *entries* holds every part of the rank's state by name, with its addresses."""

    entries: dict[str, Entry]
    sources: list[Source]  # the rank's own shard first

    @property
    def bytes(self) -> int:
        """Of the rank's state."""
        own = self.sources[0].record
        return own.file.bytes + sum(end - begin for source in self.sources[1:] for begin, end, _ in source.spans)

    def stream(self, take: Take) -> None:
        """Gives *take* every byte with its address, verified, from several threads; raises CheckpointError."""
        for number, source in enumerate(self.sources):
            wanted = None if number == 0 else [(begin, end) for begin, end, _ in source.spans]
            read_shard(source.path, source.record.file, _translated(source, take, own=number == 0), ranges=wanted)


def _translated(source: Source, take: Take, *, own: bool) -> Take:
    """*take* for what is read of *source*: at its place in the file, where it is the rank's own, and at its address."""

    def sink(offset: int, data: memoryview) -> None:
        if own:
            take(offset, data)
        for begin, end, address in source.spans:
            low, high = max(begin, offset), min(end, offset + len(data))
            if low < high:
                take(address + low - begin, data[low - offset : high - offset])

    return sink


def read_parts(generation: Generation, rank: int, cache: dict[int, Source] | None = None) -> Parts:
    """All parts of *rank*'s state in *generation*; raises CheckpointError where they don't make a whole.

    *cache* keeps what was read of ranks, for who asks for several.
    """
    known = cache if cache is not None else {}
    own = _source(generation, rank, known)
    sources = {rank: own}
    entries = dict(own.entries)
    address = -(-own.record.file.bytes // ALIGN) * ALIGN
    pieces = {index: _pieces(generation, own.record, index, known) for index in range(len(own.record.splits))}
    for shared in own.record.shared:
        if not 0 <= shared.split < len(own.record.splits):
            raise CheckpointError(f"{rank_name(rank)}'s record names a split that isn't there")
        entries[shared.ref] = Entry("U8", (shared.bytes,), address, address + shared.bytes)
        at = 0
        for begin, end, name, source in sorted(pieces[shared.split].get(shared.ref, []), key=lambda piece: piece[:2]):
            held = source.entries.get(name)
            if begin != at or held is None or held.end - held.begin != end - begin:
                break
            mine = sources.setdefault(source.record.rank, Source(source.path, source.record, source.entries))
            mine.spans.append((held.begin, held.end, address + begin))
            at = end
        if at != shared.bytes:
            raise CheckpointError(f"{shared.ref!r}, which ranks hold in common, isn't whole from byte {at} on")
        address += -(-shared.bytes // ALIGN) * ALIGN
    return Parts(entries, list(sources.values()))


def _pieces(
    generation: Generation, record: Record, index: int, known: dict[int, Source]
) -> dict[str, list[tuple[int, int, str, Source]]]:
    """What the ranks of a split have written of it, by the name of the part."""
    split = record.splits[index]
    found: dict[str, list[tuple[int, int, str, Source]]] = {}
    for rank in split.group:
        source = _source(generation, rank, known)
        theirs = next((number for number, other in enumerate(source.record.splits) if other == split), None)
        if theirs is None:
            raise CheckpointError(f"{rank_name(rank)} and {rank_name(record.rank)} disagree on what they share")
        refs = {shared.ref for shared in source.record.shared if shared.split == theirs}
        for piece in source.record.pieces:
            if piece.ref in refs:
                found.setdefault(piece.ref, []).append((piece.begin, piece.end, piece.name, source))
    return found


def _source(generation: Generation, rank: int, known: dict[int, Source]) -> Source:
    """A rank's shard, with nothing of it wanted so far."""
    if rank not in known:
        record = read_record(generation, rank)
        path = generation.path / rank_name(rank) / SHARD
        known[rank] = Source(path, record, read_entries(generation, record))
    held = known[rank]
    return Source(held.path, held.record, held.entries)
