"""Power cuts, on real ext4 and xfs: what was reported durable is there after the file system's recovery.

The file system's shutdown ioctl makes everything fail that comes after it, and throws away what isn't on the disk; an
unmount and a mount then are the reboot.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import random
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from powerguard.errors import DirectoryError, PowerguardError
from powerguard.generations import generation_name, latest, retire, seal
from powerguard.generations.disk import Disk

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root and loop devices"),
]

SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32): XFS_IOC_GOINGDOWN, EXT4_IOC_SHUTDOWN
WITH_LOG, WITHOUT_LOG = 1, 2
SIZE = 2_500_000  # floats: one chunk and a bit
CUTS = int(os.environ.get("POWERGUARD_TEST_CUTS", "50"))


class Volume:
    """A file system in a file, whose power can be cut."""

    def __init__(self, kind: str, root: Path, size: str = "400M") -> None:
        self.image, self.path = root / f"{kind}.img", root / kind
        self.path.mkdir()
        options = {"ext4": ["-F", "-m", "0"], "xfs": ["-f"]}[kind]
        subprocess.run(["truncate", "-s", size, self.image], check=True)
        subprocess.run([f"mkfs.{kind}", "-q", *options, self.image], check=True)
        self.mount()
        self.down = False

    def mount(self) -> None:
        subprocess.run(["mount", "-o", "loop", self.image, self.path], check=True)

    def unmount(self) -> None:
        for _ in range(50):
            if subprocess.run(["umount", self.path], check=False, capture_output=True).returncode == 0:
                return
            time.sleep(0.05)
        subprocess.run(["umount", "-l", self.path], check=True)

    def cut(self, how: int) -> None:
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", how))
        finally:
            os.close(fd)
        self.down = True

    def reboot(self) -> None:
        self.unmount()
        self.mount()
        self.down = False


class NoDirect(Disk):
    """A disk that has only the page cache: all durability rests on fsync."""

    def open(self, path: str | Path, flags: int, mode: int = 0o644) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return super().open(path, flags, mode)

    def pwritev(self, *_args: Any) -> int:
        raise OSError(errno.EOPNOTSUPP, "no RWF_DONTCACHE")

    def sync_file_range(self, *_args: Any) -> None:
        raise OSError(errno.ENOSYS, "no sync_file_range")


@pytest.fixture(params=["ext4", "xfs"])
def volume(request, tmp_path) -> Iterator[Volume]:
    """A mounted file system of each kind."""
    if shutil.which(f"mkfs.{request.param}") is None:
        pytest.skip(f"needs mkfs.{request.param}")
    made = Volume(request.param, tmp_path)
    yield made
    made.unmount()


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
def test_a_cut_before_every_call(volume, faulty_disk):
    """The power goes before the first, second, ... call of a save, its seal, the retirement and the new reserve."""
    from powerguard.train.flush import Flusher

    directory = volume.path / "run"
    durable = step = 0
    for at in range(300):
        disk = faulty_disk()
        flusher = Flusher(directory, rank=0, world_size=1, disk=disk)
        flusher.prepare(state_of(0), prove=False)

        def cut(number: int, _name: str, at: int = at) -> None:
            if number == at:
                volume.cut(WITHOUT_LOG if at % 3 else WITH_LOG)

        disk.number, disk.fault = 0, cut
        with contextlib.suppress(PowerguardError):
            for _ in range(2):
                step += 1
                name = generation_name(step, "c")
                _, written = flusher.flush(state_of(step), step, name)
                durable = step
                seal(directory, name, step=step, world_size=1, shards=[written.record], disk=disk)
                retire(directory, 2, disk=disk)
                flusher.settle()
        calls, disk.fault = disk.number, lambda _number, _name: None
        flusher.close()
        if volume.down:
            volume.reboot()
        if durable:
            step = check(directory, durable)
        if calls <= at:
            break
    assert at >= 50, "a save has fewer calls than there should be cuts"
    assert at < 299


@pytest.mark.timeout(600)
def test_cuts_at_random_instants(volume):
    """The power goes in the middle of whatever is going on, with several writes in flight."""
    from powerguard.train.flush import Flusher

    directory = volume.path / "run"
    dice = random.Random(3)
    step = 0
    for number in range(CUTS):
        flusher = Flusher(directory, rank=0, world_size=1, disk=NoDirect() if number % 2 else Disk())
        flusher.prepare(state_of(0), prove=False)
        how = WITHOUT_LOG if number % 3 else WITH_LOG
        timer = threading.Timer(dice.random() * 0.12, volume.cut, [how])
        durable = step
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
    volume.cut(WITHOUT_LOG)
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
        volume.cut(WITHOUT_LOG)
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["dcp.save", "torch.save and rename"])
def test_the_usual_ways_fail_here(volume, how):
    """What is common loses the checkpoint that it has just reported saved: the rig can tell the difference."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    target = volume.path / "checkpoint"
    if how == "dcp.save":
        dcp.save({"a": torch.ones(1000)}, checkpoint_id=target, no_dist=True)
    else:
        torch.save({"a": torch.ones(1000)}, volume.path / "aside")
        os.replace(volume.path / "aside", target)
    volume.cut(WITHOUT_LOG)
    volume.reboot()
    if how == "dcp.save":
        with pytest.raises(CheckpointException):
            dcp.load({"a": torch.zeros(1000)}, checkpoint_id=target, no_dist=True)
    else:
        with pytest.raises((OSError, EOFError)):
            torch.load(target)
