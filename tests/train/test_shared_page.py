"""The page file of a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from powerguard.core import page
from powerguard.train.page import PREFIX, SHM, SharedPage


def read(path):
    """What the daemon would read."""
    return page.read(Path(path).read_bytes())


def test_a_store_is_seen_from_outside():
    """The file shows pid and step as soon as they are stored; it goes with the guard, twice closed or not."""
    shared = SharedPage("job/../x.0")
    try:
        assert Path(shared.path).parent == SHM
        assert read(shared.path) == page.Page(os.getpid(), -1)
        shared.cells[page.CELL] = 12345678901
        assert read(shared.path) == page.Page(os.getpid(), 12345678901)
        assert os.stat(shared.path).st_mode & 0o777 == 0o644
    finally:
        shared.close()
        shared.close()
    assert not Path(shared.path).exists()


@pytest.mark.slow
def test_pages_of_dead_processes_are_swept():
    """A killed rank leaves its page; the next rank of that user removes it, and no other."""
    code = (
        "import os; from powerguard.train.page import SharedPage; print(SharedPage('j').path, flush=True); os._exit(9)"
    )
    left = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
    assert Path(left).exists()
    (SHM / f"{PREFIX}.nonsense").touch()
    mine = SharedPage("one")
    other = SharedPage("two")
    try:
        assert not Path(left).exists()
        assert Path(mine.path).exists()
    finally:
        mine.close()
        other.close()
        (SHM / f"{PREFIX}.nonsense").unlink()
