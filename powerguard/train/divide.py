"""This rank's part of a state: what is its own, and its stretch of what it holds in common with other ranks."""

from __future__ import annotations

from collections.abc import Sequence

from powerguard.generations.record import Piece, Shared, Split
from powerguard.generations.split import SMALL_BYTES, Cut, Item, digest, split
from powerguard.train.blobs import Blob, Names


class Division:
    """*blobs* are what this rank writes; the rest is what its record says of it."""

    def __init__(self, blobs: list[Blob]) -> None:
        self.blobs = blobs
        self.splits: tuple[Split, ...] = ()
        self.shared: tuple[Shared, ...] = ()
        self.pieces: tuple[Piece, ...] = ()


def divide(blobs: list[Blob], rank: int, weights: Sequence[float] = ()) -> Division:
    """*blobs* without what others of their groups write. *weights* go by rank; () = all the same."""
    groups = sorted({blob.group for blob in blobs if _is_common(blob)})
    if not groups:
        return Division(blobs)
    made = Division([])
    names = Names()
    for blob in blobs:
        names.unique(blob.name)
    taken: dict[str, list[Piece]] = {}
    for number, group in enumerate(groups):
        common = [blob for blob in blobs if _is_common(blob) and blob.group == group]
        items = [Item(blob.name, blob.nbytes, not blob.source.is_contiguous()) for blob in common]
        cuts = split(items, len(group), [weights[r] if r < len(weights) else 0.0 for r in group] if weights else ())
        made.splits += (Split(group, sum(item.bytes for item in items), digest(items, group, cuts)),)
        made.shared += tuple(Shared(blob.name, blob.nbytes, number) for blob in common)
        sizes = {item.name: item.bytes for item in items}
        for cut in cuts[group.index(rank)]:
            taken.setdefault(cut.name, []).append(_piece(cut, sizes[cut.name], names))
    for blob in blobs:
        if not _is_common(blob):
            made.blobs.append(blob)
        for piece in taken.get(blob.name, ()):
            made.blobs.append(_part(blob, piece))
            made.pieces += (piece,)
    return made


def _is_common(blob: Blob) -> bool:
    return bool(blob.group) and blob.nbytes >= SMALL_BYTES


def _piece(cut: Cut, size: int, names: Names) -> Piece:
    """A part that is whole keeps its name, so that other tools find it."""
    whole = (cut.begin, cut.end) == (0, size)
    return Piece(*cut, name=cut.name if whole else names.unique(f"{cut.name}[bytes {cut.begin}:{cut.end}]"))


def _part(blob: Blob, piece: Piece) -> Blob:
    if piece.name == blob.name:
        return blob
    width = blob.source.element_size()
    flat = blob.source.reshape(-1)  # a view: what can't be one isn't cut
    return Blob(piece.name, flat[piece.begin // width : piece.end // width])
