"""Small acts that are durable when they return: a name, a file, a folder.

POSIX promises less than is often thought: a file's fsync doesn't make its *name* durable (its folder's does), and a
rename may reach the disk before the data it names. Hence the order everywhere: data, fsync, name, fsync of the folder.
After a failed fsync the kernel may have dropped the data, so fsync is never called again on the same file: the caller
writes the whole anew, elsewhere.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from powerguard.errors import DirectoryError
from powerguard.generations.disk import Buffer, Disk

T = TypeVar("T")

TRANSIENT_TRIES = 3
"""An EIO that goes away was a path that switched or a cable; one that stays for three tries is a dead disk."""

FULL = (errno.ENOSPC, errno.EDQUOT)

_TODO = {
    errno.ENOSPC: "free space on the file system",
    errno.EDQUOT: "raise the quota or free space",
    errno.EACCES: "give this user write permission",
    errno.EPERM: "give this user write permission",
    errno.EROFS: "remount the file system read-write",
    errno.EIO: "look at the kernel log: the disk reports errors",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.EEXIST: "a generation is written once: give it another tag",
}


def trouble(error: OSError, what: str, path: str | Path) -> DirectoryError:
    """The operator's version of *error*."""
    reason = error.strerror or str(error)
    return DirectoryError(f"{what} {path}: {reason}", todo=_TODO.get(error.errno or 0, ""))


def persistently(call: Callable[[], T]) -> T:
    """*call*, again after EINTR, and twice more after EIO. Never for fsync."""
    eio_left = TRANSIENT_TRIES - 1
    while True:
        try:
            return call()
        except InterruptedError:
            continue
        except OSError as error:
            if error.errno != errno.EIO or eio_left == 0:
                raise
            eio_left -= 1


def uninterrupted(call: Callable[[], T]) -> T:
    """*call*, again after EINTR only."""
    while True:
        try:
            return call()
        except InterruptedError:
            continue


def write_all(disk: Disk, fd: int, data: Buffer, offset: int) -> None:
    """All of *data* at *offset*, however often the kernel takes only a part of it."""
    rest = memoryview(data)
    while rest:
        wrote = persistently(partial(disk.pwrite, fd, rest, offset))
        if wrote <= 0:
            raise OSError(errno.EIO, "the file takes no more bytes")
        rest = rest[wrote:]
        offset += wrote


def fsync_path(disk: Disk, path: Path) -> None:
    """Makes the file or folder at *path* durable (a folder: the names in it)."""
    fd = persistently(partial(disk.open, path, os.O_RDONLY))
    try:
        uninterrupted(partial(disk.fsync, fd))
    finally:
        disk.close(fd)


def make_directory(disk: Disk, path: Path) -> None:
    """*path* and its missing parents, durable; an existing folder is fine."""
    if path.is_dir():
        return
    if path.parent != path:
        make_directory(disk, path.parent)
    try:
        uninterrupted(partial(disk.mkdir, path))
    except FileExistsError:
        if not path.is_dir():
            raise
    fsync_path(disk, path.parent)


def write_file(disk: Disk, path: Path, data: bytes) -> None:
    """A small file, whole and durable or not there: written aside, synced, renamed, folder synced.

    The name aside holds the process id, so that two writers of the same file don't share it.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    fd = persistently(partial(disk.open, aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
    try:
        write_all(disk, fd, data, 0)
        uninterrupted(partial(disk.fsync, fd))
    finally:
        disk.close(fd)
    persistently(partial(disk.rename, aside, path))
    fsync_path(disk, path.parent)


def remove_tree(disk: Disk, path: Path) -> None:
    """Deletes a folder of ours: files and folders, links are unlinked and not followed."""
    with os.scandir(path) as entries:
        inside = list(entries)
    for entry in inside:
        if entry.is_dir(follow_symlinks=False):
            remove_tree(disk, Path(entry.path))
        else:
            uninterrupted(partial(disk.unlink, Path(entry.path)))
    uninterrupted(partial(disk.rmdir, path))
