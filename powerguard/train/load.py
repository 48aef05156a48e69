"""Reads a rank's shard straight into a live state, checking every byte on the way.

Extra memory: one chunk (8 MiB) per reading thread, and a copy of those tensors only whose memory isn't contiguous or
is shared. If a byte turns out wrong, the state is partly overwritten and must be loaded from another generation.
"""

from __future__ import annotations

import bisect
import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct

from powerguard.errors import CheckpointError, StateError
from powerguard.generations import resumes
from powerguard.generations.scan import Generation, Skipped, latest, scan
from powerguard.train import rng
from powerguard.train.blobs import bytes_view
from powerguard.train.parts import read_parts
from powerguard.train.restore import Restore
from powerguard.train.sharded import find_meshes
from powerguard.train.targets import Targets
from powerguard.train.tree import is_stateful


class LoadReport(Struct, frozen=True):
    """What was loaded. *values* are the sources by name, which matters for those that can't be changed in place."""

    generation: str
    step: int
    bytes: int
    load_s: float
    values: dict[str, Any]
    left: tuple[str, ...] = ()  # what couldn't be restored here, in words
    skipped: tuple[str, ...] = ()  # newer generations that were passed over, and why

    def describe(self) -> str:
        """One line for the log."""
        return "; ".join([f"resumed from {self.generation}", *self.skipped, *self.left])


def load_state(
    generation: Generation, rank: int, state: dict[str, object], *, allow_pickle: bool = False, strict: bool = True
) -> LoadReport:
    """Loads *rank*'s part of *generation* into *state*, random states last; what its replicas wrote of it, too.

    With *strict*, the names of the sources must be the same on both sides. Raises StateError where the state doesn't
    fit (before touching it, as far as that can be told), CheckpointError where the generation can't be trusted.
    """
    begun = time.monotonic()
    parts = read_parts(generation, rank)
    nodes: dict[str, Any] = msgspec.json.decode(parts.sources[0].record.state)
    left = _check_sources(nodes, state, strict)
    restore = Restore(parts.entries, find_meshes(_tensors(state)), allow_pickle=allow_pickle)
    values = {name: restore.plan(nodes[name], value, name) for name, value in state.items() if name in nodes}
    random_states = restore.plan(nodes[rng.KEY], None, rng.KEY) if rng.KEY in nodes else None
    parts.stream(_Scatter(restore.tensors).take)
    restore.finish()
    for name, value in values.items():
        _assign(state[name], value)
    if random_states is not None:
        left += rng.restore(random_states)
    return LoadReport(
        generation=generation.name,
        step=generation.step,
        bytes=parts.bytes,
        load_s=time.monotonic() - begun,
        values=values,
        left=left,
    )


def load_newest(
    directory: Path,
    load: Callable[[Generation], LoadReport],
    *,
    world_size: int,
    cap: int | None = resumes.CAP,
) -> LoadReport | None:
    """*load* of the newest generation that can be trusted, falling back as often as needed; None where none is whole.

    For a run of one rank: with more, one of them must choose for all. Raises CheckpointError where whole generations
    were there and none could be trusted, StateError where all are of another number of ranks: a run mustn't start from
    scratch for that without anybody knowing.
    """
    damaged: dict[str, str] = {}
    while True:
        found = latest(directory, verify=False, world_size=world_size, cap=cap, exclude=damaged)
        skipped = tuple(str(Skipped(name, reason)) for name, reason in damaged.items())
        skipped += tuple(map(str, found.skipped))
        if found.generation is None:
            if not damaged:
                refuse_others(directory, world_size)
                return None
            raise CheckpointError(
                f"no generation in {directory} can be trusted: {'; '.join(skipped)}",
                todo="move the directory away to start from scratch",
            )
        try:
            report = load(found.generation)
        except CheckpointError as error:
            damaged[found.generation.name] = error.message
            continue
        if cap is not None:
            resumes.count(directory, found.generation.name)
        return msgspec.structs.replace(report, skipped=skipped)


def refuse_others(directory: Path, world_size: int) -> None:
    """For a run that has found nothing to go on from: raises StateError where other runs would find something.

    Starting from scratch is right only where nothing is there.
    """
    others = {generation.world_size for generation in scan(directory) if generation.whole} - {world_size}
    if others:
        raise StateError(
            f"{directory} holds generations of {max(others)} ranks, this process takes itself for one of {world_size}",
            todo="start as many ranks as before, with torchrun (it tells each who it is before a framework does); or "
            "export the newest (powerguard checkpoints export), load that, and go on in another directory",
        )


def _check_sources(nodes: dict[str, Any], state: dict[str, object], strict: bool) -> tuple[str, ...]:
    saved = set(nodes) - {rng.KEY}
    missing, extra = sorted(set(state) - saved), sorted(saved - set(state))
    if strict and (missing or extra):
        parts = [f"the checkpoint has no {missing}"] if missing else []
        parts += [f"the state given has no {extra}, the checkpoint has"] if extra else []
        raise StateError("; ".join(parts), todo="give the same sources as when it was saved, or load with strict=False")
    return tuple(f"{name!r} isn't in the checkpoint" for name in missing) + tuple(
        f"{name!r} is only in the checkpoint" for name in extra
    )


def _tensors(value: object) -> list[Any]:
    """All tensors of a state, for the meshes that they are sharded over."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, torch.nn.Module):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, torch.optim.Optimizer):
        return [p for group in value.param_groups for p in group["params"]]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _assign(current: object, value: object) -> None:
    """Brings a plain source up to date in place where it can be, so that who holds it sees the loaded values."""
    if current is value or is_stateful(current):
        return
    if isinstance(current, dict) and isinstance(value, dict):
        for key in [key for key in current if key not in value]:
            del current[key]
        for key, item in value.items():
            there = current.get(key)
            if isinstance(there, (dict, list)) and type(there) is type(item):
                _assign(there, item)
            else:
                current[key] = item
    elif isinstance(current, list) and isinstance(value, list):
        current[:] = value
    elif isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
        raise StateError(
            f"a tensor of the state is {current.dtype} {list(current.shape)} here and "
            f"{value.dtype} {list(value.shape)} in the checkpoint"
        )


class _Scatter:
    """Puts the bytes that pass by where they belong; called from several threads."""

    def __init__(self, targets: Targets) -> None:
        self.layers: list[list[tuple[int, int, torch.Tensor]]] = []  # spans overlap in different layers only
        for span in targets.spans():
            layer = next((layer for layer in self.layers if layer[-1][1] <= span[0]), None)
            if layer is None:
                self.layers.append([span])
            else:
                layer.append(span)
        self.begins = [[begin for begin, _, _ in layer] for layer in self.layers]

    def take(self, offset: int, data: memoryview) -> None:
        source = ctypes.addressof(ctypes.c_char.from_buffer(data))
        for layer, begins in zip(self.layers, self.begins, strict=True):
            index = max(0, bisect.bisect_right(begins, offset) - 1)
            while index < len(layer) and begins[index] < offset + len(data):
                _put(layer[index], offset, data, source)
                index += 1


def _put(span: tuple[int, int, torch.Tensor], offset: int, data: memoryview, source: int) -> None:
    """The bytes that *data* (at *offset* of the file, *source* in memory) and the span have in common."""
    begin, stop, tensor = span
    low, high = max(begin, offset), min(stop, offset + len(data))
    if low >= high:
        return
    if tensor.device.type == "cpu":
        ctypes.memmove(tensor.data_ptr() + low - begin, source + low - offset, high - low)
    else:
        piece = torch.frombuffer(data[low - offset : high - offset], dtype=torch.uint8)
        bytes_view(tensor, low - begin, high - low).copy_(piece)
