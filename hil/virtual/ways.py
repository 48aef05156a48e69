"""Rig: what is left of a checkpoint after a power cut, by the way it was saved.

For each way and file system, with and without the log flushed: the power goes as soon as the save has *returned*, or in
its *middle*, at even distances over the time that it takes. An older checkpoint was there, saved the same way and
synced long ago. After the reboot the newest that loads is taken, as its own users would.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from msgspec import Struct
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from hil.virtual.volume import SHUTDOWN, Cut, Volume
from powerguard.train.periodic import Checkpointer

FLOATS = 2_500_000
OLD, NEW = 1, 2

State = dict[str, torch.Tensor]


class Way(Struct, frozen=True):
    """One way of saving *state* of a step under a folder, and of getting the newest back: its step, or None."""

    name: str
    save: Callable[[State, Path, int], None]
    load: Callable[[Path], State | None]


class Score(Struct):
    """What became of one way's checkpoints on one file system."""

    kind: str
    way: str
    returned: int = 0  # cuts right after the save had returned
    lost: int = 0  # of these: the checkpoint that was reported saved isn't there, or doesn't load
    middle: int = 0  # cuts in the middle of a save
    nothing: int = 0  # of all: no checkpoint is left that loads, not even the older one
    wrong: int = 0  # of all: it loads, with other values than were saved


def state_of(step: int) -> State:
    return {"w": torch.full((FLOATS,), float(step))}


# ---- the ways --------------------------------------------------------------------------------------


def _torch_in_place(state: State, folder: Path, _step: int) -> None:
    torch.save(state, folder / "last.pt")


def _torch_renamed(state: State, folder: Path, _step: int) -> None:
    torch.save(state, folder / "last.pt.tmp")
    os.replace(folder / "last.pt.tmp", folder / "last.pt")


def _torch_synced(state: State, folder: Path, _step: int) -> None:
    torch.save(state, folder / "last.pt.tmp")
    _sync(folder / "last.pt.tmp")
    os.replace(folder / "last.pt.tmp", folder / "last.pt")
    _sync(folder)


def _torch_load(folder: Path) -> State | None:
    with contextlib.suppress(OSError, EOFError, RuntimeError, ValueError):
        state: State = torch.load(folder / "last.pt", weights_only=True)
        return state
    return None


def _dcp(state: State, folder: Path, step: int) -> None:
    dcp_save(dict(state), checkpoint_id=folder / f"step-{step}", no_dist=True)


def _dcp_synced(state: State, folder: Path, step: int) -> None:
    _dcp(state, folder, step)
    for path in (*(folder / f"step-{step}").iterdir(), folder / f"step-{step}", folder):
        _sync(path)


def _dcp_load(folder: Path) -> State | None:
    for path in sorted(folder.glob("step-*"), reverse=True):
        state = {"w": torch.zeros(FLOATS)}
        with contextlib.suppress(OSError, EOFError, RuntimeError, ValueError, CheckpointException):
            dcp_load(state, checkpoint_id=path, no_dist=True)
            return state
    return None


def _powerguard(state: State, folder: Path, step: int) -> None:
    with Checkpointer(folder, keep=2) as saver:
        saver.save(state, step)


def _powerguard_load(folder: Path) -> State | None:
    state = {"w": torch.zeros(FLOATS)}
    with Checkpointer(folder) as saver:
        return state if saver.load(state) is not None else None


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


WAYS = (
    Way("`torch.save`", _torch_in_place, _torch_load),
    Way("`torch.save` + rename", _torch_renamed, _torch_load),
    Way("`torch.save`, fsync, rename, fsync of the folder", _torch_synced, _torch_load),
    Way("`torch.distributed.checkpoint.save`", _dcp, _dcp_load),
    Way("the same, then fsync of its files and folders", _dcp_synced, _dcp_load),
    Way("`powerguard.checkpoint.save`", _powerguard, _powerguard_load),
)
"""The third and the fifth are what their users have to write themselves."""

# ---- the rig ---------------------------------------------------------------------------------------

_CUTTER = """
import fcntl, os, struct, sys, time
fd = os.open(sys.argv[1], os.O_RDONLY)
print(flush=True)
sys.stdin.readline()
time.sleep(float(sys.argv[3]))
fcntl.ioctl(fd, int(sys.argv[4]), struct.pack("I", int(sys.argv[2])))
"""


def compare(volume: Volume, *, times: int, ways: Iterable[Way] = WAYS) -> list[Score]:
    """*times* cuts of each sort, half with the log and half without, for each way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about no_dist and the like
        logging.disable(logging.CRITICAL)  # ... and what it logs of each checkpoint that it can't read
        try:
            return [_score(volume, way, times) for way in ways]
        finally:
            logging.disable(logging.NOTSET)


def _score(volume: Volume, way: Way, times: int) -> Score:
    score = Score(volume.kind, way.name)
    for number in range(times):
        how = Cut.WITH_LOG if number % 2 else Cut.WITHOUT_LOG
        folder, takes_s = _with_older(volume, way)
        way.save(state_of(NEW), folder, NEW)
        volume.cut(how)
        step = _after(volume, way, folder, score)
        score.returned += 1
        score.lost += step != NEW
        score.nothing += step is None
        folder, takes_s = _with_older(volume, way)
        _cut_in_the_middle(volume, way, folder, how, takes_s * (number + 0.5) / times)
        step = _after(volume, way, folder, score)
        score.middle += 1
        score.nothing += step is None
    return score


def _with_older(volume: Volume, way: Way) -> tuple[Path, float]:
    """A folder with an older checkpoint that is on the disk, and how long a save takes."""
    folder = volume.path / "run"
    folder.mkdir()
    begun = time.monotonic()
    way.save(state_of(OLD), folder, OLD)
    takes_s = time.monotonic() - begun
    os.sync()
    return folder, takes_s


def _cut_in_the_middle(volume: Volume, way: Way, folder: Path, how: Cut, after_s: float) -> None:
    """A process of its own cuts: torch may hold the interpreter for the whole of a write."""
    command = [sys.executable, "-ISc", _CUTTER, str(volume.path), str(int(how)), str(after_s), str(SHUTDOWN)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as cutter:
        assert cutter.stdin is not None
        assert cutter.stdout is not None
        cutter.stdout.readline()
        cutter.stdin.write(b"\n")
        cutter.stdin.flush()
        with contextlib.suppress(Exception, CheckpointException):  # the latter is no Exception
            way.save(state_of(NEW), folder, NEW)
        if cutter.wait(60):
            raise RuntimeError("the power couldn't be cut")
    volume.down = True


def _after(volume: Volume, way: Way, folder: Path, score: Score) -> int | None:
    """The step that is taken after the reboot; the folder is cleared away."""
    volume.reboot()
    state = way.load(folder)
    step = None if state is None else int(state["w"][-1])
    if state is not None and not (step in (OLD, NEW) and bool(state["w"].eq(step).all())):
        score.wrong += 1
        step = None
    del state
    shutil.rmtree(folder)
    return step


def table(scores: Iterable[Score]) -> str:
    """The comparison in Markdown, file systems side by side."""
    scores = list(scores)
    kinds = list(dict.fromkeys(score.kind for score in scores))
    heads = [f"{what} ({kind})" for kind in kinds for what in ("lost though reported saved", "nothing left to load")]
    lines = ["| saved by | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for way in dict.fromkeys(score.way for score in scores):
        cells = [cell for kind in kinds for cell in _cells(next(s for s in scores if (s.kind, s.way) == (kind, way)))]
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cells(score: Score) -> tuple[str, str]:
    wrong = f", {score.wrong} with wrong values" if score.wrong else ""
    return f"{score.lost} of {score.returned}{wrong}", f"{score.nothing} of {score.returned + score.middle}"
