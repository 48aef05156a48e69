"""Plans how a record becomes a live state again: which bytes go where, and what is called afterwards.

Three steps, so that a state that doesn't fit is refused before any of it is touched: `plan` (compare, choose or make
the target of each part), the caller reads the bytes to where `tensors.spans` says, `finish` (copies of shared memory,
then each object's ``load_state_dict``). Tensors that are there are filled in place; nothing is loaded twice.
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
from powerguard.train import quantized
from powerguard.train.dtypes import dtype_of
from powerguard.train.layout import Entry
from powerguard.train.objects import check_keys, load_object, resizable, sharded_template, wrapped_names
from powerguard.train.targets import Targets
from powerguard.train.tree import class_name, is_stateful

_MAPPINGS: dict[str, Callable[..., Any]] = {"dict": dict, "ordered": OrderedDict}
_SEQUENCES: dict[str, Callable[..., Any]] = {"tuple": tuple}


class Restore:
    """One load in the making."""

    def __init__(self, entries: Mapping[str, Entry], meshes: list[Any], *, allow_pickle: bool) -> None:
        self.tensors = Targets(entries, meshes)
        self.allow_pickle = allow_pickle
        self._calls: list[Callable[[], object]] = []

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
        self.tensors.finish()
        for call in self._calls:
            call()

    # ---- objects ---------------------------------------------------------------------------------

    def stateful(self, payload: dict[str, Any], current: Any, path: str) -> object:
        if not is_stateful(current):
            raise StateError(
                f"{path} was saved from a {payload['class']}, there is {class_name(current)} now",
                todo="give the same objects under the same names",
            )
        template = current.state_dict()
        if isinstance(current, torch.optim.Optimizer) and not template["state"]:
            template = sharded_template(current, payload["value"], template)
        is_module = isinstance(current, torch.nn.Module)
        if is_module:
            if not payload["class"]:  # of another tool, which knows no wrappers
                payload = {**payload, "value": wrapped_names(payload["value"], template, current)}
            check_keys(payload["value"], template, path)
        outer = self.tensors.exact, self.tensors.sized
        self.tensors.exact = path if is_module else ""
        if is_module:
            self.tensors.sized = frozenset(join(path, name) for name in resizable(current, template))
        state = self.plan(payload["value"], template, path)
        self.tensors.exact, self.tensors.sized = outer
        if "metadata" in payload:
            state._metadata = OrderedDict(self.plan(payload["metadata"], None, path))
        self._calls.append(lambda: load_object(current, state, path))
        return current

    def generator(self, payload: dict[str, Any], current: object, path: str) -> object:
        """A torch.Generator."""
        state = self.tensors.tensor(payload["tensor"], None, path)
        target = current if isinstance(current, torch.Generator) else torch.Generator()
        self._calls.append(lambda: target.set_state(state))
        return target

    def python_random(self, payload: Node, current: object, path: str) -> object:
        """A random.Random."""
        target = current if isinstance(current, random.Random) else random.Random()
        target.setstate(self.plan(payload, None, path))
        return target

    def quantized(self, payload: dict[str, Any], current: object, path: str) -> object:
        """A quantised tensor; its scales are its own, so one that stands there gets values and scales together."""
        values = payload["values"]
        device = current.device if isinstance(current, torch.Tensor) else torch.device("cpu")
        made = quantized.empty(payload, values["dtype"], values["shape"], device)
        self.tensors.tensor(values, quantized.integers(made), path)
        if not isinstance(current, torch.Tensor) or not quantized.alike(current, made):
            return made
        self._calls.append(lambda: current.copy_(made))
        return current

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
        self.tensors.tensor(payload["data"], torch.from_numpy(array.reshape(-1).view(np.uint8)), path)
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
    "tensor": lambda restore, payload, current, path: restore.tensors.tensor(payload, current, path),
    "dtensor": lambda restore, payload, current, path: restore.tensors.dtensor(payload, current, path),
    "stateful": Restore.stateful,
    "torch.dtype": lambda _restore, payload, _current, _path: dtype_of(payload),
    "torch.Size": lambda _restore, payload, _current, _path: torch.Size(payload),
    "torch.device": lambda _restore, payload, _current, _path: torch.device(payload),
    "torch.Generator": Restore.generator,
    "quantized": Restore.quantized,
    "random.Random": Restore.python_random,
    "numpy.ndarray": Restore.array,
    "numpy.scalar": Restore.scalar,
    "numpy.Generator": Restore.numpy_generator,
    "numpy.RandomState": Restore.random_state,
    "pickle": Restore.pickled,
}


def _element(current: object, index: int, length: int) -> object:
    return current[index] if isinstance(current, (list, tuple)) and len(current) == length else None
