"""Plans how a record becomes a live state again: which bytes go where, and what is called afterwards.

Three steps, so that a state that doesn't fit is refused before any of it is touched: `plan` (compare, choose or make
the target of each part), the caller reads the bytes into `targets`, `finish` (copies of shared memory, then each
object's ``load_state_dict``). Tensors that are there are filled in place; nothing is loaded twice.
"""

from __future__ import annotations

import base64
import pickle
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from powerguard.errors import CheckpointError, StateError
from powerguard.generations.values import Node, decode, join
from powerguard.train.blobs import bytes_view, count_bytes
from powerguard.train.dtypes import dtype_of
from powerguard.train.layout import Entry
from powerguard.train.objects import check_keys, load_object
from powerguard.train.sharded import describe_mesh, describe_placement, is_dtensor, local_of, mesh_like, wrap_local
from powerguard.train.tree import class_name, is_stateful

_MAPPINGS: dict[str, Callable[..., Any]] = {"dict": dict, "ordered": OrderedDict}
_SEQUENCES: dict[str, Callable[..., Any]] = {"tuple": tuple}


class Restore:
    """One load in the making."""

    def __init__(self, entries: Mapping[str, Entry], meshes: list[Any], *, allow_pickle: bool) -> None:
        self.entries = entries
        self.meshes = meshes
        self.allow_pickle = allow_pickle
        self.targets: dict[str, torch.Tensor] = {}  # part -> contiguous tensor that its bytes go to
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._calls: list[Callable[[], object]] = []
        self._module = ""  # path of the Module being planned: its tensors' dtypes must not change

    def plan(self, node: Node, current: object, path: str) -> Any:
        """The value that *node* will be once `finish` ran; *current* is what stands there now, None if nothing does."""
        if is_stateful(current) and not (isinstance(node, dict) and "stateful" in node):
            node = {"stateful": {"class": "", "value": node}}  # written by another tool: no object, only its state
        if isinstance(node, list):
            return [self.plan(item, _element(current, i, len(node)), join(path, i)) for i, item in enumerate(node)]
        if isinstance(node, dict) and len(node) == 1:
            ((kind, payload),) = node.items()
            if kind in _MAPPINGS:
                pairs = [(decode(key, self.build), item) for key, item in payload]
                now = current if isinstance(current, Mapping) else {}
                return _MAPPINGS[kind]([(k, self.plan(item, now.get(k), join(path, k))) for k, item in pairs])
            if kind in _SEQUENCES:
                return _SEQUENCES[kind](
                    self.plan(item, _element(current, i, len(payload)), join(path, i)) for i, item in enumerate(payload)
                )
            if kind in _SPECIAL:
                return _SPECIAL[kind](self, payload, current, path)
        return decode(node, self.build)

    def build(self, kind: str, payload: Any) -> object:
        """The value of a special node inside something that has no current value, as a set or a key."""
        if kind not in _SPECIAL:
            raise CheckpointError(f"a record holds a {kind!r}, which this version doesn't know")
        return _SPECIAL[kind](self, payload, None, "")

    def finish(self) -> None:
        """To be called once all targets hold their bytes. Raises StateError where an object refuses its state."""
        with torch.no_grad():
            for target, source in self._copies:
                target.copy_(source)
        for call in self._calls:
            call()

    # ---- tensors ---------------------------------------------------------------------------------

    def tensor(self, payload: dict[str, Any], current: object, path: str) -> torch.Tensor:
        dtype, shape = dtype_of(payload["dtype"]), torch.Size(payload["shape"])
        self._check_part(payload, dtype, shape, path)
        there = self._usable(current, dtype, shape, path)
        held = self._view(payload, dtype, shape) if "view" in payload else self._whole(payload, dtype, shape, there)
        if there is None:
            return _dressed(held, payload)
        if held.data_ptr() != there.data_ptr() or held.stride() != there.stride():
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
            if self._module:
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
        if ref in self.targets:
            return _reinterpret(self.targets[ref], dtype, shape)
        device = there.device if there is not None else _device(payload["device"])
        if there is not None and there.is_contiguous():
            target = there.detach()
        else:
            target = torch.empty(shape, dtype=dtype, device=device)
        self.targets[ref] = target
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
        if ref not in self.targets:
            size = entry.end - entry.begin
            self.targets[ref] = torch.empty(size, dtype=torch.uint8, device=_device(payload["device"]))
        base = self.targets[ref]
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

    # ---- objects ---------------------------------------------------------------------------------

    def stateful(self, payload: dict[str, Any], current: Any, path: str) -> object:
        if not is_stateful(current):
            raise StateError(
                f"{path} was saved from a {payload['class']}, there is {class_name(current)} now",
                todo="give the same objects under the same names",
            )
        template = current.state_dict()
        is_module = isinstance(current, torch.nn.Module)
        if is_module:
            check_keys(payload["value"], template, path)
        outer, self._module = self._module, path if is_module else ""
        state = self.plan(payload["value"], template, path)
        self._module = outer
        if "metadata" in payload:
            state._metadata = OrderedDict(self.plan(payload["metadata"], None, path))
        self._calls.append(lambda: load_object(current, state, path))
        return current

    def generator(self, payload: dict[str, Any], current: object, path: str) -> object:
        """A torch.Generator."""
        state = self.tensor(payload["tensor"], None, path)
        target = current if isinstance(current, torch.Generator) else torch.Generator()
        self._calls.append(lambda: target.set_state(state))
        return target

    def python_random(self, payload: Node, current: object, path: str) -> object:
        """A random.Random."""
        target = current if isinstance(current, random.Random) else random.Random()
        target.setstate(self.plan(payload, None, path))
        return target

    def array(self, payload: dict[str, Any], current: object, path: str) -> object:
        """A numpy array."""
        import numpy as np

        shape, dtype = tuple(payload["shape"]), np.dtype(payload["dtype"])
        array = current
        if not (
            isinstance(array, np.ndarray)
            and array.shape == shape
            and array.dtype == dtype
            and array.flags.c_contiguous
            and array.flags.writeable
        ):
            array = np.empty(shape, dtype)
        self.tensor(payload["data"], torch.from_numpy(array.reshape(-1).view(np.uint8)), path)
        return array

    def scalar(self, payload: list[str], _current: object, _path: str) -> object:
        """A numpy scalar."""
        import numpy as np

        return np.frombuffer(base64.b64decode(payload[1]), dtype=np.dtype(payload[0]))[0]

    def numpy_generator(self, payload: Node, current: object, path: str) -> object:
        """A numpy Generator; made anew only of numpy's own bit generators."""
        import numpy as np

        state = self.plan(payload, None, path)
        target = current
        if not isinstance(target, np.random.Generator):
            target = np.random.Generator(getattr(np.random, str(state["bit_generator"]))())
        self._calls.append(lambda: setattr(target.bit_generator, "state", state))
        return target

    def random_state(self, payload: Node, current: object, path: str) -> object:
        """A numpy RandomState."""
        import numpy as np

        state = self.plan(payload, None, path)
        target = current if isinstance(current, np.random.RandomState) else np.random.RandomState()
        self._calls.append(lambda: target.set_state(state))
        return target

    def pickled(self, payload: str, _current: object, path: str) -> object:
        """A custom object."""
        if not self.allow_pickle:
            raise StateError(
                f"{path} was pickled, and unpickling runs code from the checkpoint",
                todo="allow it (allow_pickle=True) if you trust the directory",
            )
        return pickle.loads(base64.b64decode(payload))


_SPECIAL: dict[str, Callable[[Restore, Any, Any, str], Any]] = {
    "tensor": Restore.tensor,
    "dtensor": Restore.dtensor,
    "stateful": Restore.stateful,
    "torch.dtype": lambda _restore, payload, _current, _path: dtype_of(payload),
    "torch.Size": lambda _restore, payload, _current, _path: torch.Size(payload),
    "torch.device": lambda _restore, payload, _current, _path: torch.device(payload),
    "torch.Generator": Restore.generator,
    "random.Random": Restore.python_random,
    "numpy.ndarray": Restore.array,
    "numpy.scalar": Restore.scalar,
    "numpy.Generator": Restore.numpy_generator,
    "numpy.RandomState": Restore.random_state,
    "pickle": Restore.pickled,
}


def _element(current: object, index: int, length: int) -> object:
    return current[index] if isinstance(current, (list, tuple)) and len(current) == length else None


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
