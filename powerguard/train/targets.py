"""Which bytes of a shard go into which memory: the tensors of a load.

A tensor that stands there and fits is filled in place. Extra memory is taken only for tensors that are missing, and for
those whose memory isn't contiguous or is shared in another way than in the shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from powerguard.errors import CheckpointError, StateError
from powerguard.train.blobs import bytes_view, count_bytes
from powerguard.train.dtypes import dtype_of
from powerguard.train.layout import Entry
from powerguard.train.sharded import (
    describe_mesh,
    describe_placement,
    is_dtensor,
    local_of,
    local_offset,
    mesh_like,
    wrap_local,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Targets:
    """One load's tensors. *exact* holds the path of a Module while its tensors are planned: they must fit.

    All but those at the paths in *sized*, or below: their owners take another shape, or refuse it, by themselves.
    """

    def __init__(self, entries: Mapping[str, Entry], meshes: list[Any]) -> None:
        self.entries = entries
        self.meshes = meshes
        self.exact = ""
        self.sized: frozenset[str] = frozenset()
        self.parts: dict[str, torch.Tensor] = {}  # part -> contiguous tensor that its bytes go to
        self.ranges: list[tuple[int, int, torch.Tensor]] = []  # bytes of the file -> contiguous tensor
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def spans(self) -> list[tuple[int, int, torch.Tensor]]:
        """(first byte, end, tensor) in the order of the file: what has to be read where."""
        parts = [(self.entries[name].begin, self.entries[name].end, tensor) for name, tensor in self.parts.items()]
        return sorted((span for span in parts + self.ranges if span[0] < span[1]), key=lambda span: span[0])

    def finish(self) -> None:
        """The copies that are left once all bytes are where `spans` said."""
        with torch.no_grad():
            for target, source in self._copies:
                target.copy_(source)

    def tensor(self, payload: dict[str, Any], current: object, path: str) -> torch.Tensor:
        dtype, shape = dtype_of(payload["dtype"]), torch.Size(payload["shape"])
        self._check_part(payload, dtype, shape, path)
        if is_dtensor(current):
            return self._own_piece(payload, dtype, shape, current, path)
        there = self._usable(current, dtype, shape, path)
        held = self._view(payload, dtype, shape) if "view" in payload else self._whole(payload, dtype, shape, there)
        if there is None:
            return _dressed(held, payload)
        if held.data_ptr() != there.data_ptr() or held.stride() != there.stride() or _lazy(there):
            self._copies.append((there.detach(), held))
        return there

    def _check_part(self, payload: dict[str, Any], dtype: torch.dtype, shape: torch.Size, path: str) -> None:
        entry = self.entries.get(payload["ref"])
        if entry is None:
            raise CheckpointError(f"{path}: the shard has no {payload['ref']!r}")
        size = entry.end - entry.begin
        if "view" in payload:
            offset, stride = payload["view"]
            last = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if 0 not in shape else -1
            fits = offset >= 0 and offset + (last + 1) * dtype.itemsize <= size and all(s >= 0 for s in stride)
        else:
            fits = size == count_bytes(list(shape), dtype.itemsize)
        if not fits:
            raise CheckpointError(f"{path}: {payload['ref']!r} in the shard is of another size")

    def _usable(self, current: object, dtype: torch.dtype, shape: torch.Size, path: str) -> torch.Tensor | None:
        """The tensor that stands there, if it can take the bytes as they are."""
        if not isinstance(current, torch.Tensor) or is_dtensor(current) or current.device.type == "meta":
            return None
        if current.shape != shape or current.dtype != dtype:
            if self.exact and not any(path == free or path.startswith(f"{free}.") for free in self.sized):
                raise StateError(
                    f"{path} is {current.dtype} {list(current.shape)} here and {dtype} {list(shape)} in the checkpoint",
                    todo="build the model as it was when it was saved",
                )
            return None
        return current

    def _whole(
        self, payload: dict[str, Any], dtype: torch.dtype, shape: torch.Size, there: torch.Tensor | None
    ) -> torch.Tensor:
        """A tensor over a whole part, which becomes the part's target if it has none yet."""
        ref = payload["ref"]
        if ref in self.parts:
            return _reinterpret(self.parts[ref], dtype, shape)
        device = there.device if there is not None else _device(payload["device"])
        if there is not None and there.is_contiguous() and not _lazy(there):
            target = there.detach()
        else:
            target = torch.empty(shape, dtype=dtype, device=device)
        self.parts[ref] = target
        stride = payload.get("stride")
        if there is None and stride is not None:
            permuted = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            self._copies.append((permuted, target))
            return permuted
        return target

    def _view(self, payload: dict[str, Any], dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """A tensor over a piece of a part that several tensors share."""
        ref, (offset, stride) = payload["ref"], payload["view"]
        entry = self.entries[ref]
        if ref not in self.parts:
            size = entry.end - entry.begin
            self.parts[ref] = torch.empty(size, dtype=torch.uint8, device=_device(payload["device"]))
        base = self.parts[ref]
        start = base.storage_offset() * base.element_size() + offset
        view = torch.empty(0, dtype=dtype, device=base.device)
        if start % dtype.itemsize == 0:
            view.set_(base.untyped_storage(), start // dtype.itemsize, shape, stride)
            return view
        # memory that was shared at an address that this dtype can't have here: keep the values, not the sharing
        length = entry.end - entry.begin - offset
        aligned = torch.empty(-(-length // 16) * 16, dtype=torch.uint8, device=base.device)
        self._copies.append((aligned[:length], bytes_view(base, offset, length)))
        view.set_(aligned.untyped_storage(), 0, shape, stride)
        return view

    def _own_piece(
        self, payload: dict[str, Any], dtype: torch.dtype, shape: torch.Size, current: DTensor, path: str
    ) -> torch.Tensor:
        """This rank's piece of a tensor that was saved whole, into the DTensor that is there."""
        if current.shape != shape or current.dtype != dtype:
            raise StateError(
                f"{path} is {current.dtype} {list(current.shape)} here and {dtype} {list(shape)} in the checkpoint",
                todo="build the model as it was when it was saved",
            )
        local, offset = local_of(current), local_offset(current)
        if not local.numel():
            return current
        if local.shape[1:] == shape[1:] and local.is_contiguous() and "view" not in payload:  # rows: one range
            row = local[0].numel() * dtype.itemsize
            begin = self.entries[payload["ref"]].begin + offset[0] * row
            self.ranges.append((begin, begin + local.shape[0] * row, local))
            return current
        held = self._view(payload, dtype, shape) if "view" in payload else self._whole(payload, dtype, shape, None)
        self._copies.append((local, held[tuple(slice(a, a + n) for a, n in zip(offset, local.shape, strict=True))]))
        return current

    def dtensor(self, payload: dict[str, Any], current: object, path: str) -> torch.Tensor:
        local = payload["local"]
        if is_dtensor(current):
            here = (
                list(current.shape),
                [describe_placement(p, path) for p in current.placements],
                describe_mesh(current.device_mesh),
            )
            if here != (payload["shape"], payload["placements"], payload["mesh"]):
                raise StateError(
                    f"{path} is sharded otherwise than in the checkpoint",
                    todo="resume with the same world size and mesh, or export the generation to DCP and load that",
                )
            self.tensor(local, local_of(current), path)
            return current
        return _dressed(
            wrap_local(self.tensor(local, None, path), payload, mesh_like(self.meshes, payload["mesh"])), {}
        )


def _lazy(tensor: torch.Tensor) -> bool:
    """Its values are the conjugate or the negative of what its memory holds."""
    return tensor.is_conj() or tensor.is_neg()


def _device(kind: str) -> torch.device:
    """Where a tensor without a place is made: on this process's device of the kind that it was on."""
    if kind == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _reinterpret(target: torch.Tensor, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """*target*'s memory as a packed tensor of that dtype and shape."""
    if target.dtype == dtype and target.shape == shape:
        return target
    view = torch.empty(0, dtype=dtype, device=target.device)
    start = target.storage_offset() * target.element_size() // dtype.itemsize
    stride = torch.empty(shape, device="meta").stride()
    view.set_(target.untyped_storage(), start, shape, stride)
    return view


def _dressed(tensor: torch.Tensor, payload: dict[str, Any]) -> torch.Tensor:
    if payload.get("parameter"):
        return torch.nn.Parameter(tensor, requires_grad=bool(payload.get("grad")))
    return tensor.requires_grad_() if payload.get("grad") else tensor
