"""Generations for other tools, and other tools' checkpoints as generations.

Everything that is written here is durable on return and is never written over anything.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch

from powerguard.errors import CheckpointError, DirectoryError, UsageError
from powerguard.generations.disk import DISK
from powerguard.generations.durable import fsync_path, trouble
from powerguard.generations.names import generation_name
from powerguard.generations.scan import Generation, look
from powerguard.generations.seal import seal_if_whole
from powerguard.generations.verify import verify
from powerguard.train import quantized
from powerguard.train.export_hf import to_hf
from powerguard.train.flush import Flusher
from powerguard.train.portable import Sharded, by_index, read_portable
from powerguard.train.tensor_file import write_tensors

FORMATS = ("dcp", "torch", "safetensors", "hf")


def export(
    generation: Generation,
    target: str | Path,
    to: str,
    *,
    optimizer_names: str = "fqn",
    check: bool = True,
    model: str = "",
    config: str | Path | None = None,
) -> tuple[str, ...]:
    """Turns *generation* into *target*, which must not exist; durable on return. Returns what stayed out, in words.

    *to*: "dcp" is a directory that stock ``dcp.load`` reads at any world size, "torch" a file for ``torch.load``,
    "safetensors" a file with all tensors and nothing else, "hf" a directory for ``from_pretrained`` (*model* and
    *config*: see `export_hf.to_hf`; the others take neither). Memory: none for dcp; one assembled tensor at a time for
    safetensors and hf; all sharded tensors for torch. Raises CheckpointError where *generation* doesn't verify (unless
    *check* is False) or holds no such model, DirectoryError where *target* can't be written.
    """
    assert to in FORMATS
    if to != "hf" and (model or config):
        raise UsageError(f"a model and its config are chosen for hf only, not for {to}", todo="leave them out")
    place = Path(target).absolute()
    if place.exists():
        raise DirectoryError(f"{place} exists already", todo="give a new name: nothing is overwritten")
    problems = verify(generation) if check else []
    if problems or not generation.whole:
        words = "; ".join(map(str, problems[:3] or generation.problems[:3]))
        raise CheckpointError(f"{generation.name} can't be exported: {words}")
    portable = read_portable(generation, optimizer_names=optimizer_names)
    if to not in ("torch", "hf"):
        portable.state = plain(portable.state)
    state = {**portable.state, "powerguard": {"step": portable.step, "unit": portable.unit}}
    try:
        if to == "dcp":
            _to_dcp(state, place)
        elif to == "torch":
            _to_torch(state, place)
        elif to == "hf":
            return portable.left + to_hf(portable, place, model=model, config=config)
        else:
            write_tensors(place, dict(_flat("", portable.state)))
    except OSError as error:
        raise trouble(error, "can't export to", place) from error
    return portable.left


def _to_dcp(state: dict[str, Any], place: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    from powerguard.train.dcp import DurableWriter, PortablePlanner, stand_ins

    sharded: dict[int, Sharded] = {}
    stood_in = stand_ins(state, sharded)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group is there, is meant
        save(stood_in, storage_writer=DurableWriter(place), planner=PortablePlanner(sharded), no_dist=True)


def _to_torch(state: dict[str, Any], place: Path) -> None:
    aside = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        with open(aside, "xb") as file:
            torch.save(_assembled(state), file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(aside, place)
    finally:
        aside.unlink(missing_ok=True)
    fsync_path(DISK, place.parent)


def _assembled(value: Any) -> Any:
    """*value* with whole tensors; mapped ones are copied out of their file, which torch.save would write whole."""
    if isinstance(value, Sharded):
        return value.assemble()
    if isinstance(value, torch.Tensor):
        return value if value.is_quantized else value.clone()  # those were copied already
    if isinstance(value, dict):
        return {key: _assembled(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_assembled(item) for item in value)
    return value


def plain(value: Any) -> Any:
    """*value* with each quantised tensor as a dict of its integers and what they mean: other formats know none."""
    if isinstance(value, torch.Tensor) and value.is_quantized:
        _, facts = quantized.describe(value, "it")
        return {"values": quantized.integers(value), **quantized.numbers(facts)}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain(item) for item in value)
    return value


def _flat(path: str, value: Any) -> list[tuple[str, torch.Tensor | Sharded]]:
    """All tensors of a state, each with the path to it."""
    if isinstance(value, (torch.Tensor, Sharded)):
        return [(path, value)]
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    else:
        return []
    return [found for key, item in items for found in _flat(f"{path}.{key}" if path else str(key), item)]


def import_dcp(
    source: str | Path, directory: str | Path, *, step: int | None = None, tag: str = "import"
) -> Generation:
    """Makes a sealed generation of the checkpoint that torch.distributed.checkpoint wrote at *source*.

    Runs of any number of ranks can resume from it: each takes what it owns. Its top-level keys become the sources, an
    optimizer's state by parameter name is turned into one by index. *step* may be left out for what `export` wrote.
    Memory: two times the checkpoint. Raises CheckpointError where *source* can't be read, DirectoryError where
    *directory* is something else.
    """
    from powerguard.train.dcp import read_whole

    source = Path(source)
    if not (source / ".metadata").is_file():
        raise CheckpointError(
            f"{source} is no DCP checkpoint: it has no .metadata", todo="name the directory that dcp.save wrote"
        )
    _check_directory(Path(directory))
    state = read_whole(source)
    ours = state.pop("powerguard", None)
    if step is None:
        if not isinstance(ours, dict) or not isinstance(ours.get("step"), int):
            raise CheckpointError(f"{source} doesn't say its step", todo="give the step")
        step = ours["step"]
    sources = {name: by_index(value) if isinstance(value, dict) else value for name, value in state.items()}
    name = generation_name(step, tag)
    flusher = Flusher(directory, rank=0, world_size=1, slots=1, reserve=False, portable=True)
    try:
        flusher.flush(sources, step, name)
    finally:
        flusher.close()
    sealed = seal_if_whole(directory, name)
    assert sealed.sealed
    return look(sealed.path)


def _check_directory(place: Path) -> None:
    """Raises DirectoryError where *place* is something else than a directory, or lies below such a thing."""
    there = next((one for one in (place, *place.absolute().parents) if os.path.lexists(one)), None)
    if there is not None and not os.path.isdir(there):
        raise DirectoryError(f"{there} isn't a directory", todo="name the directory given to attach(dir=...)")
