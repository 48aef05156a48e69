"""Each call by which a save changes the disk fails in turn: the newest generation that is whole stays right."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from powerguard.errors import DirectoryError
from powerguard.generations import generation_name, latest, scan, seal

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

SIZE = 2_200_000  # floats: one chunk and a bit


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((SIZE,), float(step)), "step": step}


class Once:
    """A fault at one call, or from that call on."""

    def __init__(self, at: int, how: str, *, for_ever: bool) -> None:
        self.at, self.how, self.for_ever = at, how, for_ever
        self.hit = ""

    def __call__(self, number: int, name: str) -> int | None:
        if number < self.at or (number > self.at and not self.for_ever):
            return None
        if self.how == "short":
            if name not in ("pwrite", "pwritev"):
                return None
            self.hit = name
            return 4096
        self.hit = name
        raise OSError(getattr(errno, self.how), os.strerror(getattr(errno, self.how)))


def check(directory: Path, expected: set[int]) -> int:
    """The newest generation verifies, is one of *expected*, and holds that step's values; returns the step."""
    found = latest(directory, verify=False)  # every byte is checked below, while it is loaded
    assert found.generation is not None, found.describe()
    step = found.generation.step
    assert step in expected, found.describe()
    from powerguard.train.load import load_state

    there = state_of(0)
    assert load_state(found.generation, 0, there).values["step"] == step
    assert there["w"].eq(step).all()
    return step


@pytest.mark.parametrize(
    ("how", "for_ever"),
    [
        *((how, False) for how in ("EIO", "ENOSPC", "EINTR", "short")),
        *((how, True) for how in ("EIO", "ENOSPC", "EDQUOT", "short")),  # a call interrupted for ever is a kill
    ],
)
def test_every_call_fails_in_turn(flusher, faulty_disk, how, for_ever):
    """Whatever call fails in whatever way, the save succeeds or says why, and nothing that counted is lost."""
    disk = faulty_disk()
    f = flusher(disk=disk)
    f.prepare(state_of(0), prove=False)
    f.flush(state_of(1), 1, generation_name(1, "good"))
    durable = 1
    for at in range(200):
        step = at + 2
        f.settle(keep=2)
        staged = f.stage(state_of(step), step)
        disk.number, disk.fault = 0, Once(at, how, for_ever=for_ever)
        try:
            written = f.write(staged, generation_name(step, "new"))
            seal(f.directory, generation_name(step, "new"), step=step, world_size=1, shards=[written.record], disk=disk)
            durable = step
        except DirectoryError:
            assert for_ever or how in ("EIO", "ENOSPC", "EDQUOT")
        hit, disk.fault = disk.fault.hit, lambda _number, _name: None
        assert check(f.directory, {durable, step}) >= durable
        if not hit and disk.number <= at:
            break
    assert 15 < at < 199


@pytest.mark.parametrize("how", ["EIO", "ENOSPC", "EINTR"])
def test_one_failure_of_a_write_costs_no_save(flusher, faulty_disk, how):
    """A single EIO, ENOSPC or EINTR while data is written or synced is survived by another attempt."""
    disk = faulty_disk()
    f = flusher(disk=disk)
    f.prepare(state_of(0), prove=False)
    for step in range(1, 12):
        f.settle(keep=1)
        staged = f.stage(state_of(step), step)
        disk.number, disk.fault = 0, Once(step - 1, how, for_ever=False)
        f.write(staged, generation_name(step, "new"))
        assert disk.fault.hit
        disk.fault = lambda _number, _name: None
        check(f.directory, {step})


def test_preparing_fails_clearly(flusher, faulty_disk):
    """Whatever fails while a run starts is one clear error or a warning, and old generations stay."""
    f = flusher()
    f.flush(state_of(1), 1, generation_name(1, "good"))
    f.close()
    for how in ("EIO", "ENOSPC", "EACCES"):
        for at in range(100):
            disk = faulty_disk(Once(at, how, for_ever=True))
            again = flusher(disk=disk)
            with contextlib.suppress(DirectoryError):
                again.prepare(state_of(0), prove=False)
            disk.fault = lambda _number, _name: None
            again.close()
            if disk.number <= at:
                break
        assert 5 < at < 99
        check(f.directory, {1})


def test_the_error_says_what_is_left(flusher, faulty_disk):
    """When a save fails for good, the rank's report names the generation that is still there."""
    disk = faulty_disk()
    f = flusher(disk=disk)
    f.flush(state_of(1), 1, generation_name(1, "good"))
    staged = f.stage(state_of(2), 2)
    disk.number, disk.fault = 0, Once(0, "ENOSPC", for_ever=True)
    with pytest.raises(DirectoryError) as caught:
        f.write(staged, generation_name(2, "new"))
    disk.fault = lambda _number, _name: None
    assert "No space left on device" in caught.value.message
    assert "the newest whole generation there is step-0000000001.good" in caught.value.message
    assert caught.value.todo == "free space on the file system"


def test_ballast_is_freed_for_a_folder(flusher, faulty_disk):
    """With no block left for the generation's own folder, the ballast is let go and the save succeeds."""
    disk = faulty_disk()
    f = flusher(disk=disk)
    f.prepare(state_of(0), prove=False)
    (ballast,) = f.directory.glob(".powerguard/reserve/*.ballast")

    def no_block(_number: int, name: str) -> None:
        if name == "mkdir" and ballast.exists():
            raise OSError(errno.ENOSPC, "No space left on device")

    staged = f.stage(state_of(1), 1)
    disk.fault = no_block
    f.write(staged, generation_name(1, "a"))
    check(f.directory, {1})


@pytest.mark.parametrize(
    ("how", "words"), [("ENOSPC", "0.018 GB more must be free"), ("EOPNOTSUPP", "can't reserve space")]
)
def test_space_that_can_t_be_reserved_is_a_warning_with_numbers(flusher, faulty_disk, how, words):
    """The run starts without a reserve, and says so."""

    def full(_number: int, name: str) -> None:
        if name == "fallocate":
            raise OSError(getattr(errno, how), os.strerror(getattr(errno, how)))

    f = flusher(disk=faulty_disk(full))
    ready = f.prepare({"w": torch.zeros(2_250_000)}, prove=False)
    assert ready.reserved == 0
    (warning,) = ready.warnings
    assert words in warning


class Ladder:
    """A file system that can't do what stands above a rung."""

    def __init__(self, base: type, without: set[str]) -> None:
        class Lacking(base):  # type: ignore[misc]
            def open(self, path: str | Path, flags: int, mode: int = 0o644) -> int:
                if "direct" in without and flags & os.O_DIRECT:
                    raise OSError(errno.EINVAL, "no O_DIRECT")
                return super().open(path, flags, mode)  # type: ignore[no-any-return]

            def pwritev(self, *args: Any) -> int:
                if "dontcache" in without:
                    raise OSError(errno.EOPNOTSUPP, "no RWF_DONTCACHE")
                return super().pwritev(*args)  # type: ignore[no-any-return]

            def sync_file_range(self, *args: Any) -> None:
                if "range" in without:
                    raise OSError(errno.ENOSYS, "no sync_file_range")
                super().sync_file_range(*args)

        self.disk = Lacking()


@pytest.mark.parametrize(
    ("without", "writer"),
    [
        (set(), "direct"),
        ({"direct"}, "dontcache"),
        ({"direct", "dontcache"}, "range"),
        ({"direct", "dontcache", "range"}, "buffered"),
    ],
    ids=["direct", "dontcache", "range", "buffered"],
)
def test_every_rung_of_the_ladder_writes_the_same(flusher, faulty_disk, without, writer):
    """Whatever the file system lacks, the best that it has is chosen, and the bytes are right."""
    f = flusher(disk=Ladder(faulty_disk, without).disk)
    ready = f.prepare(state_of(0))
    if writer == "dontcache" and ready.writer != writer:
        pytest.skip("this kernel or file system has no RWF_DONTCACHE")
    assert ready.writer == writer
    f.flush(state_of(1), 1, generation_name(1, "a"))
    check(f.directory, {1})


def test_two_flushers_of_one_process_don_t_meet(flusher):
    """A periodic saver beside the hook, in the same directory and rank: each has space of its own."""
    one, two = flusher(), flusher()
    one.prepare(state_of(0), prove=False)
    two.prepare(state_of(0), prove=False)
    one.flush(state_of(1), 1, generation_name(1, "a"))
    two.flush(state_of(2), 2, generation_name(2, "a"))
    assert [g.step for g in scan(one.directory)] == [2, 1]
    check(one.directory, {2})


def test_leftovers_of_a_crash_are_swept(flusher):
    """Folders in waiting that a killed process left behind don't fill the disk."""
    f = flusher()
    f.prepare(state_of(0), prove=False)
    root = f.directory / ".powerguard" / "reserve"
    (root / "rank-00000.0.99").mkdir()
    (root / "rank-00000.0.99" / "shard.safetensors").write_bytes(b"x" * 1000)
    (root / "rank-00001.0.99").mkdir()
    f.close()
    again = flusher()
    again.prepare(state_of(0), prove=False)
    assert not (root / "rank-00000.0.99").exists()
    assert (root / "rank-00001.0.99").exists()
