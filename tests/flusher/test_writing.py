"""The deputy's writing, in one process: what changes under it, and disks that fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec import Raw

from powerguard.errors import StateError
from powerguard.flusher.writing import Pen
from powerguard.generations.disk import Buffer, Disk
from powerguard.generations.ledger import Facts
from powerguard.generations.record import Content
from powerguard.generations.shelf import Shelf

SIZE = 3_000_001
NAME = "step-0000000003.ev-7"


class Watched(Disk):
    """The real disk; *before* is called before each write and each fsync."""

    before: Callable[[str], None] = staticmethod(lambda _what: None)

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        self.before("write")
        return super().pwrite(fd, data, offset)

    def fsync(self, fd: int) -> None:
        self.before("fsync")
        super().fsync(fd)


@pytest.fixture
def rig(tmp_path):
    """(shelf, pen, disk, put): a shelf that holds nothing yet, and its deputy's pen."""
    shm = tmp_path / "shm"
    shm.mkdir()
    facts = Facts("job", 0, 1, os.getpid(), str(tmp_path / "s"), str(tmp_path / "ckpt"), "optimizer_step")
    shelf = Shelf(facts, folder=shm)
    content = msgspec.json.encode(Content(Raw(b"{}")))
    shelf.make(SIZE, len(content))
    disk = Watched()
    pen = Pen(shelf.ledger, facts, disk=disk)

    def put(step: int) -> None:
        opened = shelf.open(SIZE, len(content))
        assert opened is not None
        opened[1].view[:SIZE] = bytes([step]) * SIZE
        shelf.fill(opened[0], step=step, data_bytes=SIZE, content=content)

    yield shelf, pen, disk, put
    pen.close()
    shelf.close()


def folders(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "ckpt").glob("step-*/*")]


def test_a_state_that_is_overwritten_while_it_is_read_makes_no_shard(rig, tmp_path):
    """Though nothing kept it: what was written of two states gets no name, and nothing of it stays."""
    _, pen, disk, put = rig
    put(3)
    pen.ready(pen.ledger.lines()[0])
    seen: list[str] = []

    def overwrite(what: str) -> None:
        seen.append(what)
        if what == "write" and seen.count("write") == 1:
            put(6)
            put(9)

    disk.before = overwrite
    with pytest.raises(StateError, match="was overwritten while it was read"):
        pen.write(7, 3, NAME)
    assert seen.count("write")
    assert [] == folders(tmp_path)
    disk.before = lambda _what: None
    assert 9 == pen.write(8, 9, "step-0000000009.ev-8").step


def test_disk_space_for_one_save_is_kept_and_given_back(rig, tmp_path):
    """Its blocks are allocated beforehand, beside what the rank keeps for itself; none is left at the end."""
    _, pen, _, put = rig
    put(3)
    pen.ready(pen.ledger.lines()[0])
    reserve = tmp_path / "ckpt" / ".powerguard" / "reserve"

    assert [SIZE <= path.stat().st_blocks * 512 for path in reserve.glob("rank-00000.90.*/shard.safetensors")] == [True]
    pen.close()
    assert [] == [path for path in reserve.iterdir() if not path.name.endswith(".lock")]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_failing_disk_is_tried_elsewhere_then_said(rig, tmp_path, error):
    """Once: the save is made all the same. Always: the error comes out, and no half folder gets a name."""
    _, pen, disk, put = rig
    put(3)
    pen.ready(pen.ledger.lines()[0])
    left = [1]

    def fail(what: str) -> None:
        if what == "fsync" and left[0]:
            left[0] -= 1
            raise OSError(error, os.strerror(error))

    disk.before = fail
    assert 3 == pen.write(7, 3, NAME).step
    left[0] = 10**6
    with pytest.raises(OSError, match=os.strerror(error)):
        pen.write(8, 3, "step-0000000003.ev-8")
    assert ["rank-00000"] == folders(tmp_path)
    disk.before = lambda _what: None
