"""torch.distributed.checkpoint, made durable, fed from what a generation holds, and read though it may be damaged.

``dcp.save`` returns before its ``.metadata`` is durable (torch 2.13 fsyncs the file while the bytes are still in
Python's buffer), and never fsyncs the directory: a power cut right after it leaves nothing that loads.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from io import IOBase
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.storage import WriteResult

from powerguard.errors import CheckpointError, DirectoryError
from powerguard.generations.disk import DISK
from powerguard.generations.durable import fsync_path, make_directory, trouble
from powerguard.train.portable import Sharded


class DurableWriter(FileSystemWriter):
    """DCP's own writer, whose checkpoint is durable when ``dcp.save`` returns, and which overwrites nothing.

    Use as ``dcp.save(state, storage_writer=DurableWriter(path))``; read with stock ``dcp.load``.
    """

    def __init__(self, path: str | Path, *, thread_count: int = 1) -> None:
        super().__init__(path, sync_files=True, thread_count=thread_count, overwrite=False)
        self._folder = Path(path).absolute()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuses a place where a checkpoint already is: DCP would unlink its metadata first."""
        if (self._folder / ".metadata").exists():
            raise DirectoryError(f"{self._folder} already holds a checkpoint", todo="give a new directory")
        try:
            make_directory(DISK, self._folder)
        except OSError as error:
            raise trouble(error, "can't make", self._folder) from error
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the metadata; durable on return, its folder and parent too."""
        super().finish(metadata, results)
        try:
            fsync_path(DISK, self._folder / ".metadata")
            fsync_path(DISK, self._folder)
            fsync_path(DISK, self._folder.parent)
        except OSError as error:
            raise trouble(error, "can't make durable", self._folder) from error


class PortablePlanner(DefaultSavePlanner):
    """Saves `Sharded` tensors part by part, as the ranks wrote them, so that no tensor is ever put together.

    *sharded* is by the id of the meta tensor that stands for it in the state.
    """

    def __init__(self, sharded: dict[int, Sharded]) -> None:
        super().__init__()
        self._sharded = sharded

    def create_local_plan(self) -> SavePlan:
        """One item for each part."""
        items: list[WriteItem] = []
        for name, value in self.state_dict.items():
            sharded = self._sharded.get(id(value))
            if sharded is None:
                items += _create_write_items(name, value)
            else:
                items += [_item(name, sharded, offset, part) for offset, part in sharded.parts.items()]
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The part that *index* names."""
        value = self.state_dict[index.fqn]
        sharded = self._sharded.get(id(value))
        if sharded is None:
            return super().lookup_object(index)
        assert index.offset is not None
        return sharded.parts[tuple(index.offset)]


def _item(name: str, whole: Sharded, offset: tuple[int, ...], part: torch.Tensor) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, torch.Size(offset)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(offset), part.shape),
            properties=TensorProperties.create_from_tensor(part),
            size=whole.shape,
        ),
    )


def stand_ins(value: Any, sharded: dict[int, Sharded]) -> Any:
    """*value* with a meta tensor in place of each `Sharded`, which is entered into *sharded*."""
    if isinstance(value, Sharded):
        stand_in = torch.empty(value.shape, dtype=value.dtype, device="meta")
        sharded[id(stand_in)] = replace(value)
        return stand_in
    if isinstance(value, dict):
        return {key: stand_ins(item, sharded) for key, item in value.items()}
    if isinstance(value, list):
        return [stand_ins(item, sharded) for item in value]
    return value


WORDS_MAX = 200
"""Of an error of torch's: what it says first is what is wrong, the rest is advice for another case."""
_UNTRUSTED = "WeightsUnpickler error:"
"""torch.load says before it how to read a file that it doesn't trust, and after it what is wrong with this one."""


class _Files(FileSystem):
    """Remembers which file was opened last: the one that an error is about."""

    def __init__(self) -> None:
        self.last = ""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[IOBase, None, None]:
        """As it is."""
        self.last = os.fspath(path)
        with super().create_stream(path, mode) as stream:
            yield stream


def read_whole(source: Path) -> dict[str, Any]:
    """Everything that the checkpoint at *source* holds. CheckpointError: the file that can't be read, and its cause."""
    files, state = _Files(), dict[str, Any]()
    reader = FileSystemReader(source)
    reader.fs = files
    try:
        _check_lengths(source, reader.read_metadata())  # else torch tells of damage in a log of its own
        _load_state_dict(
            state,
            storage_reader=reader,
            planner=_EmptyStateDictLoadPlanner(),  # type: ignore[no-untyped-call]
            no_dist=True,
        )
    except CheckpointError:
        raise
    except CheckpointException as error:
        cause = next((one for one, _ in error.failures.values()), error)
        if isinstance(cause, KeyboardInterrupt):  # it takes everything for its own
            raise cause from None
        raise damaged(source, files.last, in_a_line(cause)) from error
    except Exception as error:
        raise damaged(source, files.last, in_a_line(error)) from error
    return state


def _check_lengths(source: Path, metadata: Metadata) -> None:
    """Raises CheckpointError for a file that ends before what is to be read from it."""
    needed: dict[str, int] = {}
    for info in metadata.storage_data.values():
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    for name, length in needed.items():
        try:
            has = (source / name).stat().st_size
        except OSError as error:
            raise damaged(source, source / name, in_a_line(error)) from None
        if has < length:
            raise damaged(source, source / name, f"it ends after {has} of {length} bytes")


def damaged(source: Path, file: str | Path, why: str) -> CheckpointError:
    """One line about the checkpoint at *source*, the *file* of it where that is known, and what is wrong."""
    name = f"{os.path.basename(file)}: " if file else ""
    return CheckpointError(
        f"{source} can't be read as a DCP checkpoint: {name}{why}", todo="copy it here anew, or name another one"
    )


def in_a_line(error: BaseException) -> str:
    """What *error* says itself, without what others would add."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error)
    text = (text.partition(_UNTRUSTED)[2] or text).strip()
    first = text.split("\n", 1)[0].split(". ", 1)[0].strip()
    return first[:WORDS_MAX].rstrip(".") or type(error).__name__
