"""What a directory's file system and disk promise about a power cut, as far as Linux tells.

For `check`: only warnings come out, since nothing here can be proved without cutting the power.
"""

from __future__ import annotations

import os
from pathlib import Path

from msgspec import Struct

JOURNALLED = {"ext4", "ext3", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "jfs"}
MEMORY = {"tmpfs", "ramfs"}
NETWORK = {"nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "lustre", "ceph", "glusterfs", "beegfs", "gpfs", "afs"}


class Mount(Struct, frozen=True):
    """A line of /proc/self/mountinfo."""

    device: str  # "major:minor"
    point: str
    kind: str
    source: str
    options: frozenset[str]


def advise(directory: str | Path, *, mountinfo: str | None = None, sys: Path = Path("/sys")) -> tuple[str, ...]:
    """Warnings for operators about saving into *directory*; empty where nothing is known against it."""
    text = Path("/proc/self/mountinfo").read_text() if mountinfo is None else mountinfo
    mount = find_mount(os.path.realpath(directory), parse_mounts(text))
    if mount is None:
        return ()
    return (*_file_system(mount), *_disk(mount, sys))


def counter(directory: str | Path, *, mountinfo: str | None = None, sys: Path = Path("/sys")) -> Path | None:
    """The file in which the kernel counts what the disk under *directory* has taken; None where there is no such disk.

    For `written_bytes`. A whole disk's, also where the directory is on a partition: its writers share the disk.
    """
    try:
        text = Path("/proc/self/mountinfo").read_text() if mountinfo is None else mountinfo
    except OSError:
        return None
    mount = find_mount(os.path.realpath(directory), parse_mounts(text))
    queue = _queue(mount, sys) if mount is not None else None
    return queue.parent / "stat" if queue is not None else None


def written_bytes(counter: Path | None) -> int | None:
    """What the disk has taken since the system started; None where that isn't known."""
    try:
        return int(counter.read_text().split()[6]) * 512 if counter is not None else None
    except (OSError, IndexError, ValueError):
        return None


def parse_mounts(text: str) -> list[Mount]:
    """The mounts in the text of /proc/self/mountinfo."""
    mounts = []
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, rest = left.split(), right.split()
        if len(fields) < 6 or len(rest) < 3:
            continue
        options = frozenset(fields[5].split(",")) | frozenset(rest[2].split(","))
        mounts.append(Mount(fields[2], _unescape(fields[4]), rest[0], _unescape(rest[1]), options))
    return mounts


def _unescape(text: str) -> str:
    for code, plain in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, plain)
    return text


def find_mount(path: str, mounts: list[Mount]) -> Mount | None:
    """The mount that *path* lies on: the longest mount point above it, the last one if several."""
    above = [m for m in mounts if path == m.point or path.startswith(m.point.rstrip("/") + "/")]
    longest = max((len(m.point) for m in above), default=0)
    return next((m for m in reversed(above) if len(m.point) == longest), None)


def _file_system(mount: Mount) -> list[str]:
    where = f"{mount.point} ({mount.kind})"
    found = []
    if mount.kind in MEMORY:
        found.append(f"{where} is in memory: nothing there survives a power cut")
    elif mount.kind in NETWORK:
        found.append(f"{where} is remote: what fsync promises there, and the server's own power, isn't known here")
    elif mount.kind == "overlay":
        found.append(f"{where} is a container's own layer: it may vanish with the container, use a volume")
    elif mount.kind.startswith("fuse"):
        found.append(f"{where} is served by a process: what fsync promises there isn't known here")
    elif mount.kind not in JOURNALLED:
        found.append(f"{where} has no journal: a rename may be half done after a power cut")
    if mount.options & {"nobarrier", "barrier=0"}:
        found.append(f"{where} is mounted without write barriers: fsync doesn't reach the disk")
    if mount.kind in ("ext4", "ext3") and mount.options & {"data=writeback"}:
        found.append(f"{where} is mounted with data=writeback: new files may hold old blocks after a power cut")
    return found


def _disk(mount: Mount, sys: Path) -> list[str]:
    queue = _queue(mount, sys)
    if queue is None:
        return []
    try:
        cache = (queue / "write_cache").read_text().strip()
    except OSError:
        return []
    if cache == "write back":
        return [
            f"the disk of {mount.point} has a volatile write cache: fsync flushes it, but a disk without power-loss "
            "protection may still lie; prove it with a drill that cuts the power"
        ]
    return []


def _queue(mount: Mount, sys: Path) -> Path | None:
    """The block layer's settings of the disk under *mount*; None where there is no such disk."""
    device = mount.device
    if device.startswith("0:"):  # btrfs and its like number their own devices; the source names the real one
        try:
            number = os.stat(mount.source).st_rdev
        except OSError:
            return None
        device = f"{os.major(number)}:{os.minor(number)}"
    block = (sys / "dev" / "block" / device).resolve()
    for folder in (block, block.parent):  # a partition has its disk's queue
        if (folder / "queue").is_dir():
            return folder / "queue"
    return None
