"""A generation as a storage of torch.distributed.checkpoint: ``dcp.load`` reads it as it lies, without an export."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from powerguard.errors import CheckpointError
from powerguard.generations.names import parse_generation
from powerguard.generations.scan import look
from powerguard.generations.verify import verify
from powerguard.train.dcp import PortablePlanner, stand_ins
from powerguard.train.export import plain
from powerguard.train.portable import Sharded, read_portable


class GenerationReader(StorageReader):
    """``dcp.load(state, storage_reader=GenerationReader(path))``, at any world size; *path* is a generation's folder.

    With *check* (default) the coordinator verifies every byte first. Tensors are mapped, so a rank reads what it needs.
    *optimizer_names* as of `export`. Its counterpart for writing is `dcp.DurableWriter`.
    """

    def __init__(self, path: str | Path, *, optimizer_names: str = "fqn", check: bool = True) -> None:
        self.path = Path(path)
        self.optimizer_names = optimizer_names
        self.check = check
        self._planner: PortablePlanner | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another generation's folder, if given."""
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)
        self._planner = None

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """What the generation holds; raises CheckpointError where it isn't whole."""
        if parse_generation(self.path.name) is None:
            raise CheckpointError(f"{self.path} isn't a generation's folder", todo="see powerguard checkpoints list")
        generation = look(self.path)
        if not generation.whole:
            raise CheckpointError(f"{generation.name} isn't whole: {'; '.join(generation.problems[:3])}")
        portable = read_portable(generation, optimizer_names=self.optimizer_names)
        state = {**plain(portable.state), "powerguard": {"step": portable.step, "unit": portable.unit}}
        sharded: dict[int, Sharded] = {}
        self._planner = PortablePlanner(sharded)
        self._planner.set_up_planner(stand_ins(state, sharded), is_coordinator=True)
        _, metadata = self._planner.create_global_plan([self._planner.create_local_plan()])
        return metadata

    def set_up_storage_reader(
        self,
        metadata: Metadata,  # noqa: ARG002
        is_coordinator: bool,
        *_args: Any,
        **_kwargs: Any,
    ) -> None:
        """On the coordinator: every checksum, before anything is overwritten. Raises CheckpointError."""
        problems = verify(look(self.path)) if self.check and is_coordinator else []
        if problems:
            raise CheckpointError(f"{self.path.name} can't be loaded: {'; '.join(map(str, problems[:3]))}")

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copies from the mapped shards into the tensors that are there."""
        assert self._planner is not None
        for request in plan.items:
            value = self._planner.lookup_object(request.storage_index)
            if request.type == LoadItemType.BYTE_IO:
                planner.load_bytes(request, _pickled(value))
                continue
            piece = tuple(slice(a, a + n) for a, n in zip(request.storage_offsets, request.lengths, strict=True))
            target = planner.resolve_tensor(request).detach()
            target.copy_(value[piece] if piece else value)
            planner.commit_tensor(request, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether that may be a generation's folder."""
        return parse_generation(Path(checkpoint_id).name) is not None


def _pickled(value: Any) -> io.BytesIO:
    """As DCP's own files hold what isn't a tensor."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data
