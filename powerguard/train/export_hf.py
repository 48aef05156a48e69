"""A generation's model as a folder that ``from_pretrained`` of Hugging Face's transformers loads.

transformers isn't needed here: what it would have written of the model's configuration was recorded with the state (the
Trainer's adapter does it; `powerguard.integrations.huggingface.ModelConfig` in other loops), or is given.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from powerguard.errors import CheckpointError, UsageError
from powerguard.generations.disk import DISK
from powerguard.generations.durable import fsync_path, write_file
from powerguard.train.portable import Portable, Sharded
from powerguard.train.tensor_file import write_tensors

RECORDED = "powerguard-hf-1"
"""What a recorded configuration says of itself, as its `format`."""
CONFIG, GENERATION_CONFIG, WEIGHTS = "config.json", "generation_config.json", "model.safetensors"
_ADAPTERS = (".lora_A.", ".lora_B.", ".lora_embedding_A", "base_model.model.")


def to_hf(portable: Portable, place: Path, *, model: str = "", config: str | Path | None = None) -> tuple[str, ...]:
    """Writes the model of *portable* into the new folder *place*, durable on return; what stayed out, in words.

    *model* names it where the state holds several: a source, or what is below one ("module.net"); *config* is a
    config.json, or a folder with one, where none was recorded or another is wanted. Raises CheckpointError where there
    is no model or no configuration, UsageError where *config* is none.
    """
    source, inner = _choose(portable, model)
    recorded = _recorded(portable.state)
    files = _given(Path(config)) if config else _files(recorded)
    tensors = _tensors(portable, source, inner)
    _check(tensors, files, source)
    tied = recorded.get("tied")
    kept = untied(tensors, set(tied) if isinstance(tied, (list, tuple)) else set())
    for name in recorded.get("unsaved", ()):
        kept.pop(name, None)
    aside = place.with_name(f".{place.name}.{os.getpid()}.part")
    aside.mkdir()
    try:
        write_tensors(aside / WEIGHTS, kept, {"format": "pt"})
        for name, text in files.items():
            write_file(DISK, aside / name, text.encode())
        fsync_path(DISK, aside)
        DISK.rename(aside, place)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    fsync_path(DISK, place.parent)
    return tuple(sorted(set(portable.state) - {source}))


def _choose(portable: Portable, model: str) -> tuple[str, str]:
    """(the source, what all names of the model begin with in it)."""
    if not model:
        modules = portable.modules
        if not modules:
            raise CheckpointError("there is no model in it", todo="name the source that is one: --model NAME")
        if len(modules) > 1 and "model" not in modules:
            raise CheckpointError(
                f"there are several models in it: {', '.join(sorted(modules))}", todo="choose one: --model NAME"
            )
        return ("model" if "model" in modules else next(iter(modules))), ""
    parts = model.split(".")
    for end in range(len(parts), 0, -1):
        source, inner = ".".join(parts[:end]), ".".join(parts[end:])
        if isinstance(portable.state.get(source), dict):
            return source, f"{inner}." if inner else ""
    known = ", ".join(sorted(portable.modules)) or "no model"
    raise CheckpointError(f"there is no source {parts[0]!r} in it, but {known}", todo="name one of them: --model NAME")


def _recorded(state: dict[str, Any]) -> dict[str, Any]:
    """What was recorded of the configuration: a source of the state, or an item of one; {} where nothing was."""
    sources = [value for value in state.values() if isinstance(value, dict)]
    for value in [*sources, *(item for source in sources for item in source.values())]:
        if isinstance(value, dict) and value.get("format") == RECORDED:
            return value
    return {}


def _files(recorded: dict[str, Any]) -> dict[str, str]:
    texts = {CONFIG: recorded.get("config"), GENERATION_CONFIG: recorded.get("generation_config")}
    return {name: text for name, text in texts.items() if isinstance(text, str) and text}


def _given(config: Path) -> dict[str, str]:
    """What the user gave: a file, or a folder as ``save_pretrained`` makes it."""
    places = {CONFIG: config}
    if config.is_dir():
        beside = config / GENERATION_CONFIG
        places = {CONFIG: config / CONFIG} | ({GENERATION_CONFIG: beside} if beside.exists() else {})
    try:
        texts = {name: place.read_text() for name, place in places.items()}
        whole = all(isinstance(json.loads(text), dict) for text in texts.values())
    except (OSError, ValueError) as error:
        raise UsageError(f"{config} can't be read as a model's config: {error}") from error
    if not whole:
        raise UsageError(f"{config} is no model's config: it isn't an object of JSON")
    return texts


def _tensors(portable: Portable, source: str, inner: str) -> dict[str, torch.Tensor | Sharded]:
    """The model's tensors by name."""
    held = portable.state[source]
    named = {name.removeprefix(inner): value for name, value in held.items() if str(name).startswith(inner)}
    tensors = {name: value for name, value in named.items() if isinstance(value, (torch.Tensor, Sharded))}
    if not tensors:
        where = f"{source}.{inner}"[:-1] if inner else source
        raise CheckpointError(f"{where} holds no tensors", todo="name the model: --model NAME")
    return tensors


def _check(tensors: dict[str, torch.Tensor | Sharded], files: dict[str, str], source: str) -> None:
    """Raises CheckpointError for what from_pretrained wouldn't load as the model that it was."""
    if any(mark in f".{name}" for name in tensors for mark in _ADAPTERS):
        raise CheckpointError(
            f"{source} is a model with adapters (PEFT), whose weights have names of PEFT's own",
            todo="build it as in training, resume, merge_and_unload() and save_pretrained(), or export to safetensors",
        )
    if any(isinstance(value, torch.Tensor) and value.is_quantized for value in tensors.values()):
        raise CheckpointError(
            f"{source} is quantised by torch, which transformers doesn't load", todo="export it to torch or safetensors"
        )
    if CONFIG not in files:
        raise CheckpointError(
            f"no Hugging Face config is recorded with {source}",
            todo="give one: --config config.json, or the base model's folder; a Trainer's callback records it, "
            "elsewhere put powerguard.integrations.huggingface.ModelConfig(model) into the state",
        )
    if json.loads(files[CONFIG]).get("quantization_config"):
        raise CheckpointError(
            f"{source} is quantised, and only its quantiser knows how its weights are kept in files",
            todo="resume the run and call save_pretrained() there, or export to safetensors",
        )


def untied(tensors: dict[str, torch.Tensor | Sharded], tied: set[str]) -> dict[str, torch.Tensor | Sharded]:
    """*tensors*, with what several names share under one name: one that isn't in *tied*, the first of those.

    So does save_pretrained, whose models say in `all_tied_weights_keys` which names are *tied* to another. Without
    that the first name is the embedding's, which is the one that transformers keeps; and it loads either.
    """
    groups: dict[object, list[str]] = {}
    for name, value in tensors.items():
        groups.setdefault(_memory(name, value), []).append(name)
    kept = {next((name for name in names if name not in tied), names[0]) for names in groups.values()}
    return {name: value for name, value in tensors.items() if name in kept}


def _memory(name: str, value: torch.Tensor | Sharded) -> object:
    """What is equal for tensors that were one in memory, as their generation holds them once."""
    parts = value.parts if isinstance(value, Sharded) else {(): value}
    if not parts or any(part.numel() == 0 for part in parts.values()):
        return name
    where = sorted((offset, part.data_ptr(), tuple(part.shape), part.stride()) for offset, part in parts.items())
    return (value.dtype, tuple(value.shape), tuple(where))
