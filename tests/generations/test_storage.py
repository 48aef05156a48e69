"""What is said of the file system and disk under a checkpoint directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from powerguard.generations.storage import advise, counter, find_mount, parse_mounts, written_bytes

TABLE = r"""
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
30 22 254:1 / /data rw - xfs /dev/vdb1 rw,nobarrier
31 22 0:30 / /run rw - tmpfs tmpfs rw
32 22 0:31 / /net rw - nfs4 server:/x rw,vers=4.2
33 22 0:32 / /wb rw - ext4 /dev/vdc rw,data=writeback
34 22 0:33 / /usb rw - vfat /dev/sda1 rw
35 22 0:34 / /box rw - overlay overlay rw
36 22 0:35 / /with\040space rw - fuse.sshfs host:/ rw
37 22 254:9 / /data rw - btrfs /dev/vdd rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/run/x", "in memory"),
        ("/net/x/y", "remote"),
        ("/wb/x", "data=writeback"),
        ("/usb/x", "no journal"),
        ("/box", "container's own layer"),
        ("/with space/x", "served by a process"),
    ],
)
def test_what_promises_less_is_named(tmp_path, path, words):
    """Each kind of file system that may lose a finished save is told apart."""
    (warning,) = advise(path, mountinfo=TABLE, sys=tmp_path)
    assert words in warning


def test_an_ordinary_file_system_has_no_warning(tmp_path):
    """ext4 with its defaults is fine."""
    assert advise("/home/x", mountinfo=TABLE, sys=tmp_path) == ()


def test_barriers_that_are_off_are_named(tmp_path):
    """Without barriers, fsync is a promise of nobody."""
    table = TABLE.replace("37 22 254:9 / /data rw - btrfs", "37 22 254:9 / /other rw - btrfs")
    assert any("barriers" in warning for warning in advise("/data/x", mountinfo=table, sys=tmp_path))


def test_the_last_mount_on_a_point_counts():
    """A file system mounted over another hides it."""
    assert find_mount("/data/x", parse_mounts(TABLE)).kind == "btrfs"
    assert find_mount("/database", parse_mounts(TABLE)).point == "/"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(("cache", "count"), [("write back", 1), ("write through", 0)])
def test_a_volatile_write_cache_is_named(tmp_path, cache, count):
    """Also for a partition, whose queue is its disk's."""
    write(tmp_path / "devices" / "vda" / "queue" / "write_cache", cache + "\n")
    (tmp_path / "devices" / "vda" / "vda1").mkdir()
    (tmp_path / "dev" / "block").mkdir(parents=True)
    (tmp_path / "dev" / "block" / "254:0").symlink_to(tmp_path / "devices" / "vda" / "vda1")
    warnings = advise("/home", mountinfo=TABLE, sys=tmp_path)
    assert len(warnings) == count
    assert all("volatile write cache" in warning for warning in warnings)


def test_what_a_disk_has_taken_is_read_from_its_own_counter(tmp_path):
    """Also for a partition; a file system without a disk has none, and nonsense is unknown."""
    write(tmp_path / "devices" / "vda" / "queue" / "write_cache", "write back\n")
    write(tmp_path / "devices" / "vda" / "stat", "1 2 3 4 5 6 100 8 9\n")
    (tmp_path / "devices" / "vda" / "vda1").mkdir()
    (tmp_path / "dev" / "block").mkdir(parents=True)
    (tmp_path / "dev" / "block" / "254:0").symlink_to(tmp_path / "devices" / "vda" / "vda1")
    assert written_bytes(counter("/home", mountinfo=TABLE, sys=tmp_path)) == 51_200
    assert counter("/run/x", mountinfo=TABLE, sys=tmp_path) is None
    assert written_bytes(None) is None
    write(tmp_path / "devices" / "vda" / "stat", "1 2\n")
    assert written_bytes(counter("/home", mountinfo=TABLE, sys=tmp_path)) is None


def test_this_machine_can_be_asked(tmp_path):
    """On a real system it answers without an error."""
    assert isinstance(advise(tmp_path), tuple)


def test_check_passes_the_advice_on(tmp_path):
    """What is known against the disk under the checkpoints is a warning of `powerguard check --dir`, not a failure."""
    from powerguard.cli.checks import checkpoint_directory

    found = list(checkpoint_directory(tmp_path, None))
    assert tuple(one.text for one in found if one.level == "warn") == advise(tmp_path)
    assert not any(one.level == "fail" for one in found)
