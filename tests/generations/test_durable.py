"""The small durable acts, with a disk that misbehaves."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from powerguard.generations.disk import Buffer, Disk
from powerguard.generations.durable import make_directory, remove_tree, trouble, write_file


class Moody(Disk):
    """Interrupts, fails for a while, writes little at a time."""

    def __init__(self, *, eio: int = 0, eintr: int = 0, at_most: int = 1 << 30, sync_fails: bool = False) -> None:
        self.eio, self.eintr, self.at_most, self.sync_fails = eio, eintr, at_most, sync_fails
        self.syncs = 0

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        if self.eintr:
            self.eintr -= 1
            raise InterruptedError(errno.EINTR, "interrupted")
        if self.eio:
            self.eio -= 1
            raise OSError(errno.EIO, "Input/output error")
        return super().pwrite(fd, memoryview(data)[: self.at_most], offset)

    def fsync(self, fd: int) -> None:
        self.syncs += 1
        if self.sync_fails:
            raise OSError(errno.EIO, "Input/output error")
        super().fsync(fd)


@pytest.mark.parametrize("disk", [Moody(eintr=5), Moody(eio=2), Moody(at_most=1), Moody(eio=1, eintr=3, at_most=7)])
def test_a_moody_disk_still_gets_all_bytes(tmp_path, disk):
    """Interrupted, short and for a moment failing writes end in the whole file."""
    write_file(disk, tmp_path / "f", b"0123456789" * 10)
    assert (tmp_path / "f").read_bytes() == b"0123456789" * 10
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_a_dead_disk_is_given_up(tmp_path):
    """An EIO that stays is an error, and the old file stays whole."""
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(OSError, match="Input/output"):
        write_file(Moody(eio=100), tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"old"


def test_a_failed_fsync_is_never_tried_again(tmp_path):
    """After one failure the kernel may have dropped the data: a second fsync would lie."""
    disk = Moody(sync_fails=True)
    with pytest.raises(OSError, match="Input/output"):
        write_file(disk, tmp_path / "f", b"new")
    assert disk.syncs == 1
    assert not (tmp_path / "f").exists()


def test_directories_are_made_once(tmp_path):
    """Making what is there is fine; a file in the way isn't."""
    make_directory(Disk(), tmp_path / "a" / "b")
    make_directory(Disk(), tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        make_directory(Disk(), tmp_path / "file" / "b")


def test_removing_a_tree_doesn_t_follow_links(tmp_path):
    """A link in a generation is removed, what it points to isn't."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("x")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "precious")
    remove_tree(Disk(), tmp_path / "tree")
    assert not (tmp_path / "tree").exists()
    assert (tmp_path / "precious" / "file").exists()


def test_trouble_says_what_to_do():
    """An errno becomes a sentence with a next step."""
    error = trouble(OSError(errno.ENOSPC, "No space left on device"), "can't write to", Path("/ck"))
    assert str(error) == "can't write to /ck: No space left on device; free space on the file system"
    assert error.exit_code == 8
