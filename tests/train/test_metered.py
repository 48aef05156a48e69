"""A save is measured whoever asks for it, and the next run knows what it took."""

from __future__ import annotations

import fcntl
import os
from typing import Any

import pytest

from powerguard.generations import generation_name, paces
from powerguard.generations.names import RESERVE, home
from powerguard.generations.paces import Save
from powerguard.generations.storage import counter, written_bytes

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def metered(directory: Any, **options: Any) -> Any:
    from powerguard.train.metered import MeteredFlusher
    from powerguard.train.pace import PaceMeter

    return MeteredFlusher(directory, meter=PaceMeter(), rank=0, world_size=1, **options)


STATE = {"w": torch.zeros(500_000)}
SIZE = 2_000_000


def test_a_restart_knows_what_saves_took(tmp_path):
    """The slowest save of the run before is this run's need before its first save, and isn't kept twice."""
    first = metered(tmp_path)
    first.prepare(STATE, prove=False)
    for step in (1, 2):
        first.flush(STATE, step, generation_name(step, "a"))
    slowest = first.meter.pace()
    assert slowest.write_s > 0
    first.settle(keep=1)
    first.close()
    kept = paces.read(tmp_path, paces.rank_key(0))
    assert len(kept) == 2
    assert all(save.at > 1.7e9 for save in kept)
    second = metered(tmp_path)
    second.prepare(STATE, prove=False)
    second.prepare(STATE, prove=False)
    recalled = second.meter.pace()
    assert recalled.write_s == pytest.approx(slowest.write_s, rel=0.05)
    assert recalled.fsync_s == slowest.fsync_s
    second.close()
    assert paces.read(tmp_path, paces.rank_key(0)) == kept


def test_the_proof_is_a_save_too(tmp_path):
    """`prepare` writes once; so a rank has a measured need from its first message on, of the copy as well."""
    one = metered(tmp_path)
    one.prepare(STATE)
    pace = one.meter.pace()
    assert pace.write_s > 0
    assert pace.stage_s > 0
    one.close()
    assert len(paces.read(tmp_path, paces.rank_key(0))) == 1


def test_a_calibration_counts_for_a_new_run(tmp_path):
    """What `powerguard calibrate` measured is the need of a run that never saved."""
    paces.keep(tmp_path, paces.CALIBRATED, [Save(SIZE, 12.0, 0.5, stage_s=0.25)])
    one = metered(tmp_path)
    one.prepare(STATE, prove=False)
    assert one.meter.pace().write_s == pytest.approx(12.0, rel=0.2)
    one.close()


def test_what_the_disk_took_is_counted(tmp_path):
    """On a real disk a save's own bytes are among what the disk took meanwhile."""
    if written_bytes(counter(tmp_path)) is None:
        pytest.skip("no block device under the temporary directory")
    one = metered(tmp_path)
    state = {"w": torch.ones(5_000_000)}
    one.prepare(state, prove=False)
    one.flush(state, 1, generation_name(1, "a"))
    (save,) = one.meter.new_saves()
    assert save.disk_bytes >= save.bytes * 0.9
    one.close()


def test_ranks_that_share_a_disk_are_counted(tmp_path):
    """By the launcher's word, or by the locks that the kernel lists: the larger of the two."""
    from powerguard.train.sharers import sharers

    assert sharers(tmp_path, {}) == 1
    assert sharers(tmp_path, {"LOCAL_WORLD_SIZE": "8"}) == 8
    assert sharers(tmp_path, {"SLURM_NTASKS_PER_NODE": "4"}) == 4
    reserve = home(tmp_path) / RESERVE
    reserve.mkdir(parents=True)
    lines, fds = [], []
    for rank in range(3):
        fds.append(os.open(reserve / f"rank-0000{rank}.0.lock", os.O_RDWR | os.O_CREAT))
        if rank:
            lines.append(f"{rank}: POSIX  ADVISORY  WRITE 77 fe:00:{os.fstat(fds[-1]).st_ino} 0 EOF")
    (tmp_path / "locks").write_text("\n".join([*lines, "9: FLOCK", ""]))
    assert sharers(tmp_path, {}, locks=tmp_path / "locks") == 2
    assert sharers(tmp_path, {"LOCAL_WORLD_SIZE": "3"}, locks=tmp_path / "locks") == 3
    for fd in fds:
        fcntl.lockf(fd, fcntl.LOCK_EX)
    assert sharers(tmp_path, {}) == 3
    for fd in fds:
        os.close(fd)
