"""From the tensors of a state to the parts of a shard: each byte of memory is kept once.

Tensors whose memory overlaps (tied weights, a flat buffer and views into it, interleaved slices) become one part, and
each tensor a view of it; all others a part of their own, packed. What a part is called is for people and other tools:
the path of the (first) tensor in the state.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from msgspec import Struct

from powerguard.train.dtypes import dtype_name


class Blob(Struct, frozen=True):
    """One part of a shard: *source*'s values in C order."""

    name: str
    source: torch.Tensor
    group: tuple[int, ...] = ()  # the ranks that hold it alike, this one among them; () = this one alone

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in the file."""
        return self.source.numel() * self.source.element_size()


class Found(Struct):
    """A tensor in the state, and the record's description of it, filled by `pack`."""

    path: str
    tensor: torch.Tensor
    payload: dict[str, Any]
    group: tuple[int, ...] = ()
    start: int = 0  # first byte of memory
    extent: int = 0  # bytes from the first to the last, holes included


def bytes_view(tensor: torch.Tensor, offset: int, length: int) -> torch.Tensor:
    """*length* bytes of the memory of *tensor*, from *offset* bytes after its first element."""
    start = tensor.storage_offset() * tensor.element_size() + offset
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    view.set_(tensor.untyped_storage(), start, (length,))  # type: ignore[call-overload]
    return view


def extent_bytes(tensor: torch.Tensor) -> int:
    """Bytes of memory from the first to the last element."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


class Names:
    """Names for parts that are unique and never "__metadata__", which safetensors keeps for itself."""

    def __init__(self) -> None:
        self._taken = {"__metadata__"}

    def unique(self, path: str) -> str:
        """*path*, or with a number behind."""
        if not path.isascii():
            path = path.encode("utf-8", "replace").decode()  # a lone surrogate has no UTF-8
        name, number = path, 1
        while name in self._taken:
            number += 1
            name = f"{path}#{number}"
        self._taken.add(name)
        return name


def pack(found: list[Found]) -> list[Blob]:
    """The parts of a shard, in the order in which their first tensors were found; completes each payload."""
    names = Names()
    for item in found:
        tensor = item.tensor
        item.start = tensor.data_ptr()
        item.extent = tensor.nbytes if tensor.is_contiguous() else extent_bytes(tensor)
    groups = _groups(found)
    groups.sort(key=lambda group: group[0][0])
    return [_blob([item for _, item in group], names) for group in groups]


def _groups(found: list[Found]) -> list[list[tuple[int, Found]]]:
    """Tensors whose memory overlaps, together, each with its place in *found*; sorted by place within a group."""
    groups: list[list[tuple[int, Found]]] = []
    spans: list[tuple[str, int, int, int]] = []
    devices: dict[torch.device, str] = {}
    for place, item in enumerate(found):
        if item.extent:
            device = item.tensor.device
            name = devices.get(device) or devices.setdefault(device, str(device))
            spans.append((name, item.start, -item.extent, place))
        else:
            groups.append([(place, item)])
    spans.sort()
    end, last = -1, ""
    for name, start, less, place in spans:
        if name != last or start >= end:
            groups.append([(place, found[place])])
            end, last = start - less, name
        else:
            groups[-1].append((place, found[place]))
            end = max(end, start - less)
    for group in groups:
        if len(group) > 1:
            group.sort(key=lambda pair: pair[0])
    return groups


def _blob(group: list[Found], names: Names) -> Blob:
    first = group[0]
    if len(group) == 1 and first.tensor.is_contiguous():  # nearly all are
        name, tensor = names.unique(first.path), first.tensor
        first.payload.update(
            dtype=dtype_name(tensor.dtype), shape=list(tensor.shape), device=tensor.device.type, ref=name
        )
        return Blob(name, tensor, first.group)
    for item in group:
        tensor = item.tensor
        item.payload.update(dtype=dtype_name(tensor.dtype), shape=list(tensor.shape), device=tensor.device.type, ref="")
    repeats = first.extent < first.tensor.numel() * first.tensor.element_size()  # expanded: stride 0
    if not repeats and all(_same(first.tensor, item.tensor) for item in group):
        name = names.unique(first.path)
        for item in group:
            item.payload["ref"] = name
            if not first.tensor.is_contiguous():
                item.payload["stride"] = _dense_stride(first)
        return Blob(name, first.tensor, _common(group))
    return _shared(group, names)


def _dense_stride(item: Found) -> list[int] | None:
    """The strides, where they are a mere permutation (as of channels_last); None where there are holes."""
    dense = item.extent == item.tensor.numel() * item.tensor.element_size()
    return list(item.tensor.stride()) if dense else None


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


def _shared(group: list[Found], names: Names) -> Blob:
    """One part for all the memory that the group touches; each tensor a view of it."""
    low = min(item.start for item in group)
    size = max(item.start + item.extent for item in group) - low
    owner = next((i for i in group if i.start == low and i.extent == size and i.tensor.is_contiguous()), None)
    lowest = min(group, key=lambda item: item.start)
    name = names.unique((owner or group[0]).path)
    for item in group:
        item.payload["ref"] = name
        if owner is None or not _same(item.tensor, owner.tensor):
            item.payload["view"] = [item.start - low, list(item.tensor.stride())]
    return Blob(name, owner.tensor if owner else bytes_view(lowest.tensor, 0, size), _common(group))


def _common(group: list[Found]) -> tuple[int, ...]:
    """The ranks that hold all of the group's memory alike: as all its tensors say, or nobody."""
    ranks = {item.group for item in group}
    return ranks.pop() if len(ranks) == 1 else ()


def count_bytes(shape: list[int], itemsize: int) -> int:
    """Bytes of a packed tensor."""
    return math.prod(shape) * itemsize
