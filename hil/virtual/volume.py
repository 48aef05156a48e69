"""A real file system in a file, whose power can be cut.

The shutdown ioctl makes every call fail that comes after it, and throws away what isn't on the disk yet; an unmount and
a mount then are the reboot, with the recovery of the file system's own log. Measured: 15-35 ms a cut.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
import time
from enum import IntEnum
from pathlib import Path
from types import TracebackType

KINDS = ("ext4", "xfs")
SIZE = "400M"  # xfs takes no less than 300

SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32): EXT4_IOC_SHUTDOWN, XFS_IOC_GOINGDOWN
_MKFS = {"ext4": ("-F", "-m", "0"), "xfs": ("-f",)}
_PACKAGE = {"ext4": "e2fsprogs", "xfs": "xfsprogs"}


class Cut(IntEnum):
    """What the file system's own log had time for: with it, renames and sizes survive that nobody synced."""

    WITH_LOG = 1
    WITHOUT_LOG = 2


def missing(kind: str) -> str:
    """Why there can be no such volume here; "" if there can."""
    if os.geteuid() != 0:
        return "a loop mount needs root"
    if shutil.which(f"mkfs.{kind}") is None:
        return f"mkfs.{kind} isn't installed (apt-get install {_PACKAGE[kind]})"
    if not Path("/dev/loop-control").exists():
        return "this kernel has no loop devices"
    return ""


class Volume:
    """Mounted when made. *root* is a folder of its own; without one a temporary folder is made, and goes with it."""

    def __init__(self, kind: str, root: Path | None = None, size: str = SIZE) -> None:
        self._mine = root is None
        self._root = root or Path(tempfile.mkdtemp(prefix=f"powerguard-{kind}-"))
        self.kind, self.down, self._mounted = kind, False, False
        self.image, self.path = self._root / f"{kind}.img", self._root / kind
        self.path.mkdir()
        _run("truncate", "-s", size, str(self.image))
        _run(f"mkfs.{kind}", "-q", *_MKFS[kind], str(self.image))
        self._mount()

    def __enter__(self) -> Volume:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def cut(self, how: Cut) -> None:
        """The power is gone. Once a life; may be called from any thread."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", how))
        finally:
            os.close(fd)
        self.down = True

    def reboot(self) -> None:
        """Whatever was open on it must be closed by now; RuntimeError if something still is after two minutes."""
        if not self._unmount(120.0):
            raise RuntimeError(f"{self.path} is still in use: by an open file, or in another mount namespace")
        self._mount()
        self.down = False

    def close(self) -> None:
        """Unmounts; the image stays in *root*, if one was given."""
        if not self._unmount(10.0) and self._mounted:
            _run("umount", "-l", str(self.path))
        if self._mine:
            shutil.rmtree(self._root, ignore_errors=True)

    def _mount(self) -> None:
        _run("mount", "-o", "loop", str(self.image), str(self.path))
        self._mounted = True

    def _unmount(self, within_s: float) -> bool:
        """Really, and everywhere: while any process's mount namespace has it, the next mount finds it as it was cut."""
        ends = time.monotonic() + within_s
        while not (self._unmounted() and self._free()):
            if time.monotonic() > ends:
                return False
            time.sleep(0.05)
        return True

    def _unmounted(self) -> bool:
        """Here; one try, if it isn't yet."""
        if self._mounted:  # not asked of the path: of an xfs that is shut down, even that is an error
            umounted = subprocess.run(["umount", self.path], check=False, capture_output=True)
            self._mounted = umounted.returncode != 0
        return not self._mounted

    def _free(self) -> bool:
        """No loop device has the image any more: it lets go of it by itself once nothing is mounted."""
        for path in Path("/sys/block").glob("loop*/loop/backing_file"):
            with contextlib.suppress(OSError):
                if path.read_text().strip() == str(self.image):
                    return False
        return True


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)
