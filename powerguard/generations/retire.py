"""Deletes old generations, only after newer ones are sealed, and so that a power cut in the middle does no harm.

A generation leaves by one rename into the trash, and is deleted there: none is ever seen half deleted.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from powerguard.errors import DirectoryError
from powerguard.generations import resumes
from powerguard.generations.disk import DISK, Disk
from powerguard.generations.durable import fsync_path, make_directory, remove_tree
from powerguard.generations.names import TRASH, home
from powerguard.generations.scan import Generation, scan


def retire(directory: str | Path, keep: int, *, disk: Disk = DISK) -> list[str]:
    """Removes all that is older than the *keep* newest sealed, whole generations; returns the names removed.

    Older is what is of an earlier step than those of them with the highest steps, and was written before those of them
    that were written last: a run that begins anew beside an older one loses nothing of its own. What isn't sealed is
    never counted, and removed only when it is older than those; so is what was resumed from too often. Without *keep*
    sealed generations nothing is removed. Raises DirectoryError where the directory can't be
    written; a generation that can't be moved is left for the next time.
    """
    assert keep >= 1
    root = Path(directory)
    worn = {name for name, times in resumes.read(root).items() if times >= resumes.CAP}
    generations = scan(root)
    counted = [g for g in generations if g.sealed and g.whole and g.name not in worn]
    sweep(root, disk=disk)
    if len(counted) < keep:
        return []
    oldest = counted[keep - 1]
    before = sorted((g.written_at for g in counted), reverse=True)[keep - 1]
    out = [g for g in generations if _order(g) < _order(oldest) and _written_at(g) < before]
    if not out:
        return []
    trash = home(root) / TRASH
    removed: list[str] = []
    try:
        make_directory(disk, trash)
        for generation in out:
            with contextlib.suppress(FileNotFoundError, FileExistsError, NotADirectoryError):
                disk.rename(generation.path, _free_name(trash, generation.name))
                removed.append(generation.name)
        fsync_path(disk, trash)
        fsync_path(disk, root)
    except OSError as error:
        raise DirectoryError(
            f"can't retire old generations in {root}: {error.strerror}", todo="check permissions and the disk"
        ) from error
    sweep(root, disk=disk)
    return removed


def _order(generation: Generation) -> tuple[int, float]:
    return (generation.step, generation.written_at)


def _written_at(generation: Generation) -> float:
    """When it was written, or begun where no rank has finished."""
    with contextlib.suppress(OSError):
        return generation.written_at or generation.path.stat().st_mtime
    return 0.0


def _free_name(trash: Path, name: str) -> Path:
    target = trash / name
    number = 0
    while target.exists():
        number += 1
        target = trash / f"{name}.{number}"
    return target


def sweep(directory: str | Path, *, disk: Disk = DISK) -> None:
    """Deletes what an earlier retirement left in the trash; what can't be deleted stays for the next time."""
    trash = home(Path(directory)) / TRASH
    try:
        names = os.listdir(trash)
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError):
            remove_tree(disk, trash / name)
