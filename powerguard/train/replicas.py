"""Which ranks hold a tensor alike, known without asking them.

- A DTensor says it: where a dimension of its mesh is replicated, the ranks along it hold the same local shard (HSDP).
- The parameters under DistributedDataParallel are the same on all ranks of its process group, and so is what an
  optimizer of ``torch.optim`` has made of their gradients. Buffers aren't: those of batch norm are each rank's own.
- For anything else the user says it (``replicated=["ema"]``).

That replicas are equal bit for bit is the promise of those who replicate; it isn't checked. Random states are nobody's
but their rank's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, TypeAlias

import torch

from powerguard.errors import StateError, UsageError
from powerguard.train.sharded import is_dtensor, local_of

Storage: TypeAlias = Literal["local", "shared"]
Group: TypeAlias = tuple[int, ...]

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)

_SAFE_HOOKS = ("torch.distributed.algorithms.ddp_comm_hooks.default_hooks",)
"""Gradient hooks that leave every rank with the same gradients."""


class Replicas:
    """The rules of one rank. *storage* "local": replicas split within their node; "shared": over all nodes."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        storage: Storage = "local",
        replicated: Collection[str] = (),
        env: Mapping[str, str] = os.environ,
    ) -> None:
        if storage not in ("local", "shared"):
            raise UsageError(f"storage is {storage!r}", todo='say "local" or "shared"')
        self.rank, self.world_size = rank, world_size
        self.storage, self.replicated = storage, frozenset(replicated)
        self.near: Collection[int] = range(world_size) if storage == "shared" else node_ranks(rank, world_size, env)

    def check(self, state: Mapping[str, object]) -> None:
        """Raises StateError where a name that is said to be replicated is none of *state*'s."""
        strange = sorted(self.replicated - set(state))
        if strange:
            raise StateError(f"{strange} is said to be replicated and isn't in the state", todo="give sources' names")

    def of_state(self, state: Mapping[str, object]) -> Known:
        """What is known of the tensors of *state*, as it is now."""
        known = Known(self)
        if len(self.near) > 1 and _ranks_agree(self.rank, self.world_size):
            for module in _ddp_modules(state):
                known.learn_module(module)
            for optimizer in _optimizers(state):
                known.learn_optimizer(optimizer)
        return known

    def within(self, ranks: Collection[int]) -> Group:
        """Those of *ranks* that this rank splits with: () where it is alone."""
        group = tuple(sorted(set(ranks) & set(self.near)))
        return group if len(group) > 1 and self.rank in group else ()


class Known:
    """The groups of one state's tensors, by where they lie in memory."""

    def __init__(self, rules: Replicas) -> None:
        self._rules = rules
        self._at: dict[tuple[str, int], Group] = {}

    def group(self, value: torch.Tensor, source: str) -> Group:
        """The ranks that hold *value*, which belongs to *source*, alike; () = this one alone."""
        if type(value) not in PLAIN_TENSORS and is_dtensor(value):
            return self._mesh_group(value)
        if source in self._rules.replicated:
            return self._rules.within(range(self._rules.world_size))
        return self._at.get(_place(value), ()) if self._at else ()

    def _mesh_group(self, value: Any) -> Group:
        """The ranks of its mesh that differ from this one in replicated dimensions only."""
        mesh = value.device_mesh
        where = mesh.get_coordinate()
        kept = [type(placement).__name__ == "Replicate" for placement in value.placements]
        if where is None or not any(kept) or not _ranks_agree(self._rules.rank, self._rules.world_size):
            return ()
        index = tuple(slice(None) if free else at for free, at in zip(kept, where, strict=True))
        return self._rules.within([int(rank) for rank in mesh.mesh[index].flatten().tolist()])

    def learn_module(self, module: Any) -> None:
        """A DDP module: its parameters."""
        if not all(_hook_is_safe(hook) for hook, _ in getattr(module, "_comm_hooks", [])):
            return
        from torch.distributed.distributed_c10d import get_process_group_ranks

        group = self._rules.within(get_process_group_ranks(module.process_group))
        ignored = set(getattr(module, "parameters_to_ignore", ()))
        for name, parameter in module.module.named_parameters(remove_duplicate=False):
            if group and name not in ignored and not is_dtensor(parameter):
                self._learn(parameter, group)

    def learn_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of torch's own: what it keeps for parameters that are alike is alike."""
        if not type(optimizer).__module__.startswith("torch.optim"):
            return  # one that shards or averages has reasons of its own
        for parameter, held in optimizer.state.items():
            group = self._at.get(_place(parameter)) if isinstance(parameter, torch.Tensor) else None
            if group:
                for value in held.values():
                    if isinstance(value, torch.Tensor) and not is_dtensor(value):
                        self._learn(value, group)

    def _learn(self, tensor: torch.Tensor, group: Group) -> None:
        if tensor.numel():
            self._at[_place(tensor)] = group


def _place(tensor: torch.Tensor) -> tuple[str, int]:
    if is_dtensor(tensor):
        tensor = local_of(tensor)
    return str(tensor.device), tensor.data_ptr()


def node_ranks(rank: int, world_size: int, env: Mapping[str, str]) -> range:
    """The ranks of this node, as torchrun numbers them; this rank alone where nobody says."""
    alone = range(rank, rank + 1)
    try:
        local, count = int(env["LOCAL_RANK"]), int(env["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        return alone
    first = rank - local
    return range(first, first + count) if 0 <= local < count and 0 <= first <= world_size - count else alone


def _ranks_agree(rank: int, world_size: int) -> bool:
    """Whether torch.distributed numbers the ranks as we do: its groups mean nothing to us otherwise."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return False
    return (dist.get_rank(), dist.get_world_size()) == (rank, world_size)


def _hook_is_safe(hook: Any) -> bool:
    return getattr(hook, "__module__", "") in _SAFE_HOOKS


def _each(value: object) -> Iterator[object]:
    """*value* and, for containers, what is in it."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _each(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _each(item)
    else:
        yield value


def _ddp_modules(state: Mapping[str, object]) -> Iterator[Any]:
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    if parallel is None:
        return
    for value in _each(state):
        if isinstance(value, torch.nn.Module):
            yield from (m for m in value.modules() if isinstance(m, parallel.DistributedDataParallel))


def _optimizers(state: Mapping[str, object]) -> Iterator[torch.optim.Optimizer]:
    return (value for value in _each(state) if isinstance(value, torch.optim.Optimizer))
