"""`powerguard calibrate`: what a save takes here, measured with as many bytes and ranks as a real one."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Annotated, Any

import msgspec
import typer

from powerguard import config as configuration
from powerguard import generations
from powerguard.cli import plan
from powerguard.cli.checkpoints import Directory, Json
from powerguard.cli.exit_codes import walk
from powerguard.cli.limits import within
from powerguard.cli.out import say, say_json, seconds, size
from powerguard.core.policy import Policy
from powerguard.errors import DirectoryError, MissingDependency, PowerguardError, StateError, UsageError
from powerguard.generations import paces
from powerguard.generations.memory import available_bytes
from powerguard.generations.paces import Save

CHILD = "powerguard.train.calibrate"

RANKS_MAX = 64
"""Of one node: even 16 GPUs would have four each. Every rank is a process with torch in it, so there must be an end."""

RANK_BYTES = 256 * 1024 * 1024
"""What a rank takes on top of its state: 224 MB were measured, torch and the random bytes that it copies."""

SPARE_BYTES = 512 * 1024 * 1024
"""Memory to leave to others."""


class Calibration(msgspec.Struct):
    """What was measured: the slowest rank of the slowest round counts. Seconds and bytes."""

    ranks: int
    rank_bytes: int
    rounds: int
    writer: str
    source: str  # "cpu" or "cuda": where the copy came from
    stage_s: float
    write_s: float
    fsync_s: float
    together_mbps: float
    save_s: float  # planned, with the policy's factor, without the step underway
    kept: str


def register(app: typer.Typer) -> None:
    """Adds the command to *app*."""
    app.command()(calibrate)


def calibrate(
    directory: Directory,
    *,
    state_bytes: Annotated[
        str | None,
        typer.Option(
            help="size of the whole training state on this node, as 80GB; default: as the newest there",
            show_default=False,
        ),
    ] = None,
    ranks: Annotated[
        int,
        typer.Option(
            help="ranks of this node, which write at once; default: those of the newest there",
            min=0,
            show_default=False,
        ),
    ] = 0,
    rounds: Annotated[int, typer.Option(help="saves that are measured", min=1, max=25)] = 3,
    file: Annotated[
        Path | None, typer.Option("-c", "--config", help="for its \\[policy]", show_default=False, readable=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure a save with real, state-sized writes, and keep it as the need of runs that save there.

    All ranks copy and write at once, as in an emergency. Takes memory and disk space of one state; no generation is
    touched. Refused while a run saves there.
    """
    policy = configuration.load(file).policy if file is not None else Policy()
    if not os.path.isdir(directory):
        raise DirectoryError(f"{directory} isn't a directory", todo="name the directory given to attach(dir=...)")
    ranks, rank_bytes = _size(directory, state_bytes, ranks)
    done = measure(directory, ranks, rank_bytes, rounds, policy)
    if as_json:
        say_json(done)
    else:
        for line in words(done):
            say(line)


def _size(directory: Path, state_bytes: str | None, ranks: int) -> tuple[int, int]:
    """(ranks, bytes of each), as given or as the newest whole generation has them."""
    newest = next((one for one in generations.scan(directory) if one.whole), None)
    if state_bytes is None and newest is None:
        raise UsageError(f"{directory} holds no generation to take the size from", todo="give --state-bytes")
    whose = "--ranks" if ranks else "--ranks as in the newest generation:"
    ranks = ranks or (newest.world_size if newest is not None else 1)
    within(whose, ranks, 1, RANKS_MAX, todo="give the ranks of this node, mostly one for each of its GPUs")
    if state_bytes is not None:
        return ranks, max(1, int(plan.parse_bytes(state_bytes) / ranks))
    assert newest is not None
    return ranks, max(1, newest.bytes // newest.world_size)


def measure(directory: Path, ranks: int, rank_bytes: int, rounds: int, policy: Policy) -> Calibration:
    """*rounds* times, *ranks* processes write *rank_bytes* each at once. Raises what they met.

    Before any is started: MissingDependency, and StateError where there isn't the memory for all of them.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency(
            "torch isn't installed in this environment", todo="pip install 'powerguard[node,train]'"
        )
    look_for_memory(ranks, rank_bytes, available_bytes())
    saves: list[Save] = []
    with _children(directory, ranks, rank_bytes) as children:
        ready = [_hear(child) for child in children]
        for _ in range(rounds):
            for child in children:
                assert child.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # it has said why
                    child.stdin.write("go\n")
                    child.stdin.flush()
            said = [_hear(child) for child in children]
            saves += [msgspec.convert(one["save"], Save) for one in said]
    paces.keep(directory, paces.CALIBRATED, saves)
    slowest = max(saves, key=lambda save: save.stage_s + save.write_s + save.fsync_s)
    need = plan.need_of_pace(policy, plan.pace_of(saves, ranks), "calibrated")
    return Calibration(
        ranks=ranks,
        rank_bytes=rank_bytes,
        rounds=rounds,
        writer=said[0]["writer"],
        source=ready[0]["source"],
        stage_s=max(save.stage_s for save in saves),
        write_s=max(save.write_s for save in saves),
        fsync_s=max(save.fsync_s for save in saves),
        together_mbps=ranks * rank_bytes / 1e6 / max(1e-9, slowest.write_s + slowest.fsync_s),
        save_s=need.flush_s,
        kept=str(paces.path(directory, paces.CALIBRATED)),
    )


def look_for_memory(ranks: int, rank_bytes: int, free: int | None) -> None:
    """Raises StateError where *free* bytes don't hold the states of all ranks at once; None: nobody knows.

    Each rank looks once more when it takes its own: but all that start together see the same free memory.
    """
    needed = ranks * (rank_bytes + RANK_BYTES)
    if free is not None and needed + SPARE_BYTES > free:
        who = f"{ranks} ranks together take" if ranks > 1 else "one rank takes"
        raise StateError(
            f"{who} {needed / 1e9:.2f} GB and only {free / 1e9:.2f} GB of memory are free",
            todo="free host memory, or give a smaller --state-bytes",
        )


def words(done: Calibration) -> list[str]:
    """The answer for people."""
    who = f"{done.ranks} ranks at once, {size(done.rank_bytes)} each" if done.ranks > 1 else size(done.rank_bytes)
    source = "the GPU" if done.source == "cuda" else "host memory"
    return [
        f"measured  {who}, {done.rounds} times, writer {done.writer}; the slowest counts",
        f"copy      {seconds(done.stage_s)} from {source}: training stands still for this when a snapshot is taken",
        f"write     {seconds(done.write_s)}, then {seconds(done.fsync_s)} until durable: "
        f"{done.together_mbps:.0f} MB/s in all",
        f"need      {seconds(done.save_s)} from the end of a step to durable, with what [policy] flush_factor adds",
        f"kept      in {done.kept}: runs that save there start from it, and so does check --dir",
    ]


@contextlib.contextmanager
def _children(directory: Path, ranks: int, rank_bytes: int) -> Iterator[list[subprocess.Popen[str]]]:
    """One process a rank; they end when their input does."""
    children = []
    try:
        for rank in range(ranks):
            command = [sys.executable, "-m", CHILD, str(directory), str(rank), str(rank_bytes)]
            children.append(
                subprocess.Popen(
                    command, stdin=PIPE, stdout=PIPE, text=True, env=_environment(), start_new_session=True
                )
            )
        yield children
    finally:
        for child in children:
            assert child.stdin is not None
            assert child.stdout is not None
            with contextlib.suppress(OSError):
                child.stdin.close()
        for child in children:
            try:
                child.wait(60)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            assert child.stdout is not None
            child.stdout.close()


def _environment() -> dict[str, str]:
    """Ours, with the packages found where we found them."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _hear(child: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line of *child*; raises what it says it met."""
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise PowerguardError(f"a measuring process ended without a word (exit code {child.wait(60)})")
    said: dict[str, Any] = json.loads(line)
    if "error" in said:
        kind = next((kind for kind in walk() if kind.__dict__.get("exit_code") == said["code"]), PowerguardError)
        raise kind(said["error"], todo=said.get("todo", ""))
    return said
