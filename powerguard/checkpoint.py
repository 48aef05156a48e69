"""Periodic checkpoints as a plain library: the flush engine without daemon, agreement or UPS.

::

    from powerguard import checkpoint

    checkpoint.save({"model": model, "optimizer": optimizer}, "/checkpoints/run1", step)   # durable on return
    checkpoint.load({"model": model, "optimizer": optimizer}, "/checkpoints/run1")         # newest that verifies

    with checkpoint.Checkpointer("/checkpoints/run1", keep=3) as saver:                    # for a training loop
        saver.save_async(state, step)                    # blocks for the copy only

All ranks of a run call the same at the same step and need to see the same directory; no collective is called, and the
rank that finishes last seals. What is written is what the daemon writes: see docs/format.md.

From a shell: ``powerguard checkpoints export|import``, or ``python -m powerguard.checkpoint export|import`` where only
the hook is installed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from powerguard.errors import CheckpointError, PowerguardError
from powerguard.generations.names import parse_generation
from powerguard.generations.scan import Generation, latest, look
from powerguard.train.export import FORMATS, export, import_dcp
from powerguard.train.load import LoadReport
from powerguard.train.periodic import Checkpointer, Saving

__all__ = [
    "Checkpointer",
    "LoadReport",
    "Saving",
    "async_save",
    "close",
    "export",
    "find",
    "import_dcp",
    "load",
    "save",
]

_open: dict[tuple[str, int], Checkpointer] = {}


def save(state: Mapping[str, object], directory: str | Path, step: int) -> Path:
    """Saves *state*; durable and, if all ranks are done, sealed on return. Returns the generation's path.

    Memory of one state is kept for the next save, until `close`. Raises StateError, DirectoryError.
    """
    return _of(directory).save(state, step)


def async_save(state: Mapping[str, object], directory: str | Path, step: int) -> Saving:
    """Copies *state* and saves the copy in the background; see `Checkpointer.save_async`."""
    return _of(directory).save_async(state, step)


def load(state: Mapping[str, object], directory: str | Path, *, strict: bool = True) -> LoadReport | None:
    """Loads the newest generation that verifies into *state*; None where there is none. See `Checkpointer.load`.

    It only reads, however often: a training loop that wants a generation passed over which ends every run that goes on
    from it uses `Checkpointer.load`.
    """
    return _of(directory).load(state, strict=strict, cap=None)


def close() -> None:
    """Waits for running saves and gives all memory back."""
    while _open:
        _open.popitem()[1].close()


def _of(directory: str | Path) -> Checkpointer:
    key = (os.path.realpath(directory), os.getpid())
    if key not in _open:
        _open[key] = Checkpointer(directory)
    return _open[key]


def main(arguments: list[str] | None = None) -> int:
    """``python -m powerguard.checkpoint``; returns the exit code."""
    parser = argparse.ArgumentParser("python -m powerguard.checkpoint", description="Checkpoints for other tools.")
    commands = parser.add_subparsers(dest="command", required=True)
    out = commands.add_parser("export", help="turn a generation into what another tool reads")
    out.add_argument("generation", type=Path, help="a generation's folder, or a directory of them (takes the newest)")
    out.add_argument("target", type=Path, help="what to write; must not exist")
    out.add_argument("--to", choices=FORMATS, default="dcp")
    out.add_argument("--optimizer-names", choices=("fqn", "index"), default="fqn")
    out.add_argument("--model", default="", help="hf: the source that is the model, or what is in it (module.net)")
    out.add_argument("--config", type=Path, help="hf: a config.json, or the base model's folder")
    into = commands.add_parser("import", help="make a generation of a DCP checkpoint")
    into.add_argument("source", type=Path, help="the DCP checkpoint's directory")
    into.add_argument("directory", type=Path, help="where generations go")
    into.add_argument("--step", type=int, help="the optimizer step that it holds, if it doesn't say so itself")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "import":
            print(import_dcp(chosen.source, chosen.directory, step=chosen.step).path)  # noqa: T201
            return 0
        generation = find(chosen.generation)
        left = export(
            generation, chosen.target, chosen.to,
            optimizer_names=chosen.optimizer_names, model=chosen.model, config=chosen.config,
        )  # fmt: skip
        print(f"{generation.name} exported to {chosen.target}; left out: {', '.join(left) or 'nothing'}")  # noqa: T201
    except PowerguardError as error:
        print(f"powerguard: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    return 0


def find(path: str | Path) -> Generation:
    """The generation whose folder *path* is, or the newest whole one in it; raises CheckpointError where none is."""
    path = Path(path)
    if parse_generation(path.name):
        if not path.is_dir():
            raise CheckpointError(f"{path} isn't there", todo="see powerguard checkpoints list")
        return look(path)
    found = latest(path, verify=False, cap=None)
    if found.generation is None:
        raise CheckpointError(f"{path}: {found.describe()}", todo="name a generation's folder")
    return found.generation


if __name__ == "__main__":
    sys.exit(main())
