"""`powerguard checkpoints`: what is on the disk, whether it can be trusted, and the way to other tools and back."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from powerguard import generations
from powerguard.cli import torch_side
from powerguard.cli.out import console, safe, say, say_json, size
from powerguard.errors import CheckpointError, DirectoryError
from powerguard.generations import Generation

Directory = Annotated[
    Path, typer.Argument(help="the directory given to attach(dir=...)", show_default=False, readable=False)
]
Json = Annotated[bool, typer.Option("--json", help="one line of JSON")]


class Format(str, Enum):
    """What an export can be."""

    DCP = "dcp"
    TORCH = "torch"
    SAFETENSORS = "safetensors"
    HF = "hf"


SUFFIX = {Format.DCP: ".dcp", Format.TORCH: ".pt", Format.SAFETENSORS: ".safetensors", Format.HF: ".hf"}


class OptimizerNames(str, Enum):
    """How an export names the state of an optimizer."""

    FQN = "fqn"
    INDEX = "index"


class Shown(msgspec.Struct):
    """One generation in JSON."""

    name: str
    step: int
    unit: str
    world_size: int
    bytes: int
    sealed: bool
    whole: bool
    written: str
    problems: tuple[str, ...]


def register(app: typer.Typer) -> None:
    """Adds the group to *app*."""
    group = typer.Typer(help="The generations of a checkpoint directory, and other tools' files.", no_args_is_help=True)
    group.command("list")(list_)
    group.command()(verify)
    group.command()(export)
    group.command("import")(import_)
    app.add_typer(group, name="checkpoints")


def list_(directory: Directory, as_json: Json = False) -> None:
    """List generations, newest first, without reading their data."""
    found = [_shown(generation) for generation in _scan(directory)]
    if as_json:
        say_json(found)
        return
    if not found:
        say(f"{directory}: no generations")
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("generation", no_wrap=True)  # its name begins with the step; whole, to be copied
    table.add_column("ranks", justify="right")
    table.add_column("size", justify="right")
    table.add_column("written (UTC)")
    table.add_column("state")
    for one in found:
        state = "sealed" if one.sealed and one.whole else "whole, no seal" if one.whole else "; ".join(one.problems)
        written = one.written.removesuffix("+00:00").replace("T", " ")
        table.add_row(safe(one.name), str(one.world_size), size(one.bytes), written, safe(state))
    console().print(table)


def verify(
    directory: Directory,
    generation: Annotated[str, typer.Option(help="only this one; default: the one that would be resumed from")] = "",
    every: Annotated[bool, typer.Option("--all", help="every generation")] = False,
    as_json: Json = False,
) -> None:
    """Check every byte against its checksum. Exit code 12 if none can be trusted, or a chosen one can't."""
    found = _scan(directory)
    if not found:
        raise CheckpointError(
            f"{directory} holds no generation", todo="check the path, and that the run has saved once"
        )
    chosen = [one for one in found if one.name == generation] if generation else found
    if not chosen:
        raise CheckpointError(f"{directory} holds no generation {generation}", todo="see powerguard checkpoints list")
    results: list[Shown] = []
    for one in chosen:
        problems = tuple(str(problem) for problem in generations.verify(one))
        results.append(_shown(one, problems))
        if not as_json:
            _say(one, problems)
        if not problems and not (every or generation):
            break
    if as_json:
        say_json(results)
    bad = [one for one in results if one.problems]
    if (bad and (generation or every)) or len(bad) == len(results):
        names = ", ".join(one.name for one in bad)
        raise CheckpointError(f"can't be trusted: {names}", todo="resume falls back to the newest one that verifies")


def export(
    generation: Annotated[
        Path,
        typer.Argument(help="a generation's folder, or a directory of them (takes the newest)", show_default=False),
    ],
    target: Annotated[
        Path | None,
        typer.Argument(help="must not exist; default: named as the generation, here", show_default=False),
    ] = None,
    *,
    to: Annotated[
        Format,
        typer.Option(
            help="a directory for dcp.load, a file for torch.load, one of safetensors, or a directory for "
            "from_pretrained of transformers"
        ),
    ],
    optimizer_names: Annotated[
        OptimizerNames, typer.Option(help="optimizer state by parameter name, or by index as Optimizer.state_dict()")
    ] = OptimizerNames.FQN,
    model: Annotated[
        str, typer.Option(help="hf: the source that is the model, or what is in it (module.net), if there are several")
    ] = "",
    config: Annotated[
        Path | None, typer.Option(help="hf: a config.json or the base model's folder, if none was recorded")
    ] = None,
    as_json: Json = False,
) -> None:
    """Turn a generation into what another tool reads; verified before, durable after. Needs torch."""
    checkpoint = torch_side.load("powerguard.checkpoint")
    chosen: Generation = checkpoint.find(generation)
    place = (target or Path(chosen.name + SUFFIX[to])).absolute()
    left = checkpoint.export(chosen, place, to.value, optimizer_names=optimizer_names.value, model=model, config=config)
    if as_json:
        say_json({"generation": chosen.name, "step": chosen.step, "target": str(place), "left_out": left})
    else:
        say(f"{chosen.name} exported to {place}; left out: {', '.join(left) or 'nothing'}")


def import_(
    source: Annotated[Path, typer.Argument(help="the directory that dcp.save wrote", show_default=False)],
    directory: Directory,
    *,
    step: Annotated[
        int | None, typer.Option(help="the optimizer step that it holds, if it doesn't say so itself", min=0)
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a sealed generation of a checkpoint of torch.distributed.checkpoint. Needs torch."""
    made: Generation = torch_side.load("powerguard.checkpoint").import_dcp(source, directory, step=step)
    if as_json:
        say_json(_shown(made))
    else:
        say(f"{made.path}: step {made.step}, {size(made.bytes)}, sealed; runs of any number of ranks resume from it")


def _say(one: Generation, problems: tuple[str, ...]) -> None:
    if problems:
        say(f"bad   {one.name}: {'; '.join(problems)}")
    else:
        say(f"good  {one.name}: step {one.step}, {one.world_size} ranks, {size(one.bytes)}, every checksum matches")


def _scan(directory: Path) -> list[Generation]:
    if not os.path.isdir(directory):
        raise DirectoryError(f"{directory} isn't a directory", todo="name the directory given to attach(dir=...)")
    return generations.scan(directory)


def _shown(one: Generation, problems: tuple[str, ...] | None = None) -> Shown:
    written = datetime.fromtimestamp(one.written_at, tz=UTC).isoformat(timespec="seconds") if one.written_at else ""
    return Shown(
        one.name, one.step, one.unit, one.world_size, one.bytes, one.sealed, one.whole, written,
        one.problems if problems is None else problems,
    )  # fmt: skip
