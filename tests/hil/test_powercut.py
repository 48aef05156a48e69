"""The rig of the real file systems, at a part of its instants; `make hil-virtual` takes them all."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

from hil.virtual.disks import PageCacheDisk
from hil.virtual.powercut import cut_everywhere
from hil.virtual.volume import KINDS, Volume, missing
from hil.virtual.ways import WAYS, compare
from powerguard.errors import DrillFailed

pytestmark = [pytest.mark.torch, pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(600)]
EVERY = int(os.environ.get("POWERGUARD_TEST_CUT_EVERY", "16"))


@pytest.fixture(params=KINDS)
def volume(request, tmp_path) -> Iterator[Volume]:
    """A mounted file system of each kind."""
    if why := missing(request.param):
        pytest.skip(why)
    with Volume(request.param, tmp_path) as made:
        yield made


class Forgetful(PageCacheDisk):
    """A disk whose fsync does nothing."""

    def fsync(self, _fd: int) -> None:
        self._next("fsync")


def test_a_cut_at_any_instant_leaves_a_whole_generation(volume):
    """In a flush and in a retention delete, with and without the log: the newest durable generation loads."""
    tally = cut_everywhere(volume, every=EVERY)

    assert tally.flush >= 200 // EVERY
    assert tally.retention >= 80 // EVERY
    assert tally.after == 8  # both phases, past the page cache and through it, with the log and without
    assert tally.newest > 0 < tally.older


def test_the_rig_sees_a_missing_fsync(volume):
    """It isn't the file system's kindness: without fsync, what was reported durable is lost, and that is said."""
    with pytest.raises(DrillFailed, match=r"durable and is lost|nothing can be loaded|isn't whole|not whole|counts as"):
        cut_everywhere(volume, every=8, disks={"forgetful": Forgetful})


def test_the_usual_ways_lose_what_they_reported(volume):
    """`torch.save` and rename, and `torch.distributed.checkpoint.save`, lose a checkpoint that ours keeps."""
    renamed, distributed, ours = compare(volume, times=2, ways=[WAYS[1], WAYS[3], WAYS[5]])

    assert renamed.lost > 0 < distributed.lost
    assert (0, 0, 0) == (ours.lost, ours.nothing, ours.wrong)
