"""Power cuts, on real ext4 and xfs: what was reported durable is there after the file system's recovery.

A cut at every single call, and what the usual ways of saving leave behind, are in `tests/hil`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hil.virtual.disks import PageCacheDisk
from hil.virtual.volume import KINDS, Cut, Volume, missing
from powerguard.errors import DirectoryError, PowerguardError
from powerguard.generations import generation_name, latest, retire, seal
from powerguard.generations.disk import Disk

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.root,
    pytest.mark.slow,
]

SIZE = 2_500_000  # floats: one chunk and a bit
CUTS = int(os.environ.get("POWERGUARD_TEST_CUTS", "50"))


@pytest.fixture(params=KINDS)
def volume(request, tmp_path) -> Iterator[Volume]:
    """A mounted file system of each kind."""
    if why := missing(request.param):
        pytest.skip(why)
    with Volume(request.param, tmp_path) as made:
        yield made


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((SIZE,), float(step)), "step": step}


def check(directory: Path, durable: int) -> int:
    """The newest generation verifies, is no older than *durable*, and holds its step's values."""
    from powerguard.train.load import load_state

    found = latest(directory)
    assert found.generation is not None, found.describe()
    assert found.generation.step >= durable, found.describe()
    there = state_of(0)
    assert load_state(found.generation, 0, there).values["step"] == found.generation.step
    assert there["w"].eq(found.generation.step).all()
    return found.generation.step


@pytest.mark.timeout(600)
def test_cuts_at_random_instants(volume):
    """The power goes in the middle of whatever is going on, with several writes in flight."""
    from powerguard.train.flush import Flusher

    directory = volume.path / "run"
    dice = random.Random(3)
    step, within_s = 0, 0.12
    for number in range(CUTS):
        flusher = Flusher(directory, rank=0, world_size=1, disk=PageCacheDisk() if number % 2 else Disk())
        flusher.prepare(state_of(0), prove=False)
        how = Cut.WITHOUT_LOG if number % 3 else Cut.WITH_LOG
        timer = threading.Timer(dice.random() * within_s, volume.cut, [how])
        durable = before = step
        timer.start()
        with contextlib.suppress(PowerguardError):
            while True:
                step += 1
                name = generation_name(step, f"r{number}")
                _, written = flusher.flush(state_of(step), step, name)
                durable = step
                seal(directory, name, step=step, world_size=1, shards=[written.record])
                retire(directory, 2)
                flusher.settle()
        timer.join()
        within_s = min(5.0, 2.0 * within_s) if durable == before else max(0.12, within_s / 1.5)  # by the machine's pace
        flusher.close()
        volume.reboot()
        step = check(directory, durable) if durable else 0
    assert step > CUTS / 4


def test_a_full_file_system_still_takes_two_saves(volume):
    """With not a byte left for anybody else, two generations and their seals fit into what was reserved."""
    from powerguard.train.flush import Flusher

    directory = volume.path / "run"
    flusher = Flusher(directory, rank=0, world_size=1)
    ready = flusher.prepare(state_of(0), prove=False)
    assert ready.reserved == 2
    fill_up(volume.path / "hog")
    for step in (1, 2):
        name = generation_name(step, "full")
        _, written = flusher.flush(state_of(step), step, name)
        seal(directory, name, step=step, world_size=1, shards=[written.record])
    (warning,) = flusher.settle()
    assert "GB more must be free" in warning
    with pytest.raises(DirectoryError, match=r"No space left on device; the newest .* is step-0000000002"):
        flusher.flush(state_of(3), 3, generation_name(3, "full"))
    flusher.close()
    volume.cut(Cut.WITHOUT_LOG)
    volume.reboot()
    assert check(directory, 2) == 2


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
def test_an_export_survives_a_cut(volume):
    """What `export` returned from is there after the power went at once, in each format."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    from powerguard.train.export import export
    from powerguard.train.flush import Flusher

    flusher = Flusher(volume.path / "run", rank=0, world_size=1, reserve=False)
    _, written = flusher.flush(state_of(5), 5, generation_name(5, "x"))
    flusher.close()
    seal(volume.path / "run", generation_name(5, "x"), step=5, world_size=1, shards=[written.record])
    for to in ("dcp", "torch", "safetensors"):
        generation = latest(volume.path / "run").generation
        assert generation is not None
        export(generation, volume.path / to, to)
        volume.cut(Cut.WITHOUT_LOG)
        volume.reboot()
    state = {"w": torch.zeros(SIZE)}
    dcp.load(state, checkpoint_id=volume.path / "dcp", no_dist=True)
    assert state["w"].eq(5).all()
    assert torch.load(volume.path / "torch")["w"].eq(5).all()
    assert load_file(volume.path / "safetensors")["w"].eq(5).all()


def fill_up(path: Path) -> None:
    """Takes every free block."""
    libc = ctypes.CDLL(None)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    at = 0
    for size in (1 << 24, 1 << 20, 1 << 16, 1 << 12):
        while libc.fallocate(fd, 0, ctypes.c_int64(at), ctypes.c_int64(size)) == 0:
            at += size
    os.fsync(fd)
    os.close(fd)
