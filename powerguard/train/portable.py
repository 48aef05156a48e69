"""A generation as one state dict, whatever number of ranks wrote it: what other tools want to have.

Nothing is copied: tensors are mapped from the shards, so reading costs page cache and no memory of one's own. What
ranks hold alike (replicas under DDP) is taken from rank 0, shards of one tensor are put side by side. Random states
stay out: they belong to ranks.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from powerguard.errors import CheckpointError
from powerguard.generations.scan import Generation
from powerguard.generations.values import decode
from powerguard.train import quantized, rng
from powerguard.train.dtypes import dtype_of
from powerguard.train.layout import Entry
from powerguard.train.objects import clean_name
from powerguard.train.parts import Parts, Source, read_parts

_VALUES: dict[str, Callable[[Any], Any]] = {
    "torch.dtype": dtype_of,
    "torch.Size": torch.Size,
    "torch.device": torch.device,
}


@dataclass
class Sharded:
    """A tensor of which each rank wrote a part: (where the part starts, the part)."""

    shape: torch.Size
    dtype: torch.dtype
    parts: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def assemble(self) -> torch.Tensor:
        """The whole tensor, copied; raises CheckpointError where a part is missing."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        if sum(part.numel() for part in self.parts.values()) != whole.numel():
            raise CheckpointError(f"the parts of a tensor of {list(self.shape)} don't add up")
        for offset, part in self.parts.items():
            whole[tuple(slice(at, at + size) for at, size in zip(offset, part.shape, strict=True))] = part
        return whole


@dataclass
class Portable:
    """The merged state, and what had to stay out, in words."""

    state: dict[str, Any]
    step: int
    unit: str
    left: tuple[str, ...]
    modules: dict[str, str] = field(default_factory=dict)
    """Which sources were modules: the class of each, as its rank 0 had it."""


def read_portable(generation: Generation, *, optimizer_names: str = "fqn") -> Portable:
    """The state of all ranks of *generation* (which should have been verified).

    With *optimizer_names* "fqn", optimizer state goes by parameter name, as torch.distributed.checkpoint's helpers have
    it; with "index" as ``Optimizer.state_dict`` has it. Raises CheckpointError.
    """
    assert optimizer_names in ("fqn", "index")
    files = _Files(generation)
    ranks = [_Rank(files, shard.rank, optimizer_names == "fqn") for shard in generation.shards]
    if not ranks:
        raise CheckpointError(f"{generation.name} has no shards")
    states = [one.read() for one in ranks]
    left = [f"random states of {len(ranks)} ranks"]
    left += sorted({text for one in ranks for text in one.left})
    merged = states[0]
    for state in states[1:]:
        merged = _merge(merged, state)
    return Portable(merged, generation.step, generation.unit, tuple(left), ranks[0].modules())


def _merge(one: Any, other: Any) -> Any:
    """*one*, with what only *other* has and the parts of shards that only *other* has."""
    if isinstance(one, Sharded) and isinstance(other, Sharded):
        one.parts.update(other.parts)
    elif isinstance(one, dict) and isinstance(other, dict):
        for key, value in other.items():
            one[key] = _merge(one[key], value) if key in one else value
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [_merge(a, b) for a, b in zip(one, other, strict=True)]
    return one


class _Files:
    """The shards of a generation, mapped once each."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.sources: dict[int, Source] = {}
        self._maps: dict[int, torch.Tensor] = {}
        self._joined: dict[tuple[object, ...], torch.Tensor] = {}

    def map(self, source: Source) -> torch.Tensor:
        """The bytes of a rank's shard."""
        record = source.record
        if record.rank not in self._maps:
            self._maps[record.rank] = torch.from_file(
                str(source.path), shared=False, size=record.file.bytes, dtype=torch.uint8
            )
        return self._maps[record.rank]

    def shared(self, parts: Parts, entry: Entry) -> torch.Tensor:
        """The bytes of a part that ranks wrote between them: mapped where one wrote it all, else put together."""
        spans = sorted(
            (address, begin, end, source)
            for source in parts.sources
            for begin, end, address in source.spans
            if entry.begin <= address < entry.end
        )
        key = tuple((source.record.rank, begin, end) for _, begin, end, source in spans)
        if key not in self._joined:
            pieces = [self.map(source)[begin:end] for _, begin, end, source in spans]
            self._joined[key] = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return self._joined[key]


class _Rank:
    """One rank's part, with tensors mapped from the shards that hold it."""

    def __init__(self, files: _Files, rank: int, by_name: bool) -> None:
        self.by_name = by_name
        self.left: list[str] = []
        self.files = files
        self.parts = read_parts(files.generation, rank, files.sources)
        own = self.parts.sources[0]
        self.nodes: dict[str, Any] = msgspec.json.decode(own.record.state)
        self.bytes = files.map(own)

    def read(self) -> dict[str, Any]:
        return {name: decode(node, self.build) for name, node in self.nodes.items() if name != rng.KEY}

    def modules(self) -> dict[str, str]:
        """The class of each source that was a module."""
        found = {name: node.get("stateful") for name, node in self.nodes.items() if isinstance(node, dict)}
        return {name: item["class"] for name, item in found.items() if item and "metadata" in item}

    def build(self, kind: str, payload: Any) -> Any:
        """The value of what isn't plain JSON."""
        if kind == "tensor":
            return self.tensor(payload)
        if kind == "dtensor":
            local = self.tensor(payload["local"])
            parts = {tuple(payload["offset"]): local} if local.numel() else {}
            return Sharded(torch.Size(payload["shape"]), local.dtype, parts)
        if kind == "quantized":
            return self.quantized(payload)
        if kind == "stateful":
            return self.stateful(payload)
        if kind in _VALUES:
            return _VALUES[kind](payload)
        if kind == "torch.Generator":
            return self.tensor(payload["tensor"])
        if kind in ("random.Random", "numpy.Generator", "numpy.RandomState"):
            return decode(payload, self.build)
        if kind.startswith("numpy."):
            return self.numpy(kind, payload)
        self.left.append(f"a {kind}")
        return None

    def tensor(self, payload: dict[str, Any]) -> torch.Tensor:
        dtype, shape = dtype_of(payload["dtype"]), torch.Size(payload["shape"])
        entry = self.parts.entries.get(payload["ref"])
        if entry is None:
            raise CheckpointError(f"the shard has no {payload['ref']!r}")
        offset, stride = payload.get("view", (0, None))
        if stride is None:
            stride = torch.empty(shape, device="meta").stride()
        memory, start = self.bytes, entry.begin
        if start >= len(memory):  # behind the rank's own shard
            memory = self.files.shared(self.parts, entry)
            start = int(memory.storage_offset())
        stop = start + entry.end - entry.begin
        start += offset
        if start % dtype.itemsize:  # a view at an odd address
            whole = torch.empty(0, dtype=torch.uint8).set_(memory.untyped_storage())
            memory, start = whole[start:stop].clone(), 0
        view = torch.empty(0, dtype=dtype)
        view.set_(memory.untyped_storage(), start // dtype.itemsize, shape, stride)
        return view

    def quantized(self, payload: dict[str, Any]) -> torch.Tensor:
        """Copied: a quantised tensor can't lie in mapped memory."""
        values = payload["values"]
        made = quantized.empty(payload, values["dtype"], values["shape"], torch.device("cpu"))
        quantized.integers(made).copy_(self.tensor(values))
        return made

    def numpy(self, kind: str, payload: Any) -> Any:
        import numpy as np

        if kind == "numpy.scalar":
            return np.frombuffer(base64.b64decode(payload[1]), dtype=np.dtype(payload[0]))[0]
        data = self.tensor(payload["data"]).numpy()
        return data.view(np.dtype(payload["dtype"])).reshape(payload["shape"]).copy()

    def stateful(self, payload: dict[str, Any]) -> Any:
        state = decode(payload["value"], self.build)
        if not isinstance(state, dict):
            return state
        if "metadata" in payload:  # a Module: names as they are without wrappers
            return {clean_name(payload["class"], name): value for name, value in state.items()}
        names = payload.get("parameters")
        if names and self.by_name and all(names):
            return by_name(state, [self.full_name(*name) for name in names])
        return state

    def full_name(self, source: str, name: str) -> str:
        node = self.nodes[source]
        return clean_name(node["stateful"]["class"] if "stateful" in node else "", name)


def by_name(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """An optimizer's state dict with parameter names in place of indices."""
    groups = [{**group, "params": [names[index] for index in group["params"]]} for group in state["param_groups"]]
    return {**state, "state": {names[index]: value for index, value in state["state"].items()}, "param_groups": groups}


def by_index(state: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `by_name`; what isn't an optimizer's state by names is returned as it is."""
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not isinstance(state.get("state"), dict):
        return state
    names = [name for group in groups for name in group.get("params", [])]
    if not names or not all(isinstance(name, str) for name in names):
        return state
    index = {name: at for at, name in enumerate(names)}
    return {
        **state,
        "state": {index[name]: value for name, value in state["state"].items()},
        "param_groups": [{**group, "params": [index[name] for name in group["params"]]} for group in groups],
    }
