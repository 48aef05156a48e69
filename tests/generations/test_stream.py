"""Reading a shard in parallel: all of it, once, checked."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard.errors import CheckpointError
from powerguard.generations.disk import Disk
from powerguard.generations.record import ShardFile, checksum
from powerguard.generations.stream import read_range, read_shard


class Short(Disk):
    """Reads a few bytes at a time, and has no direct I/O."""

    def preadv(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
        return super().preadv(fd, [into[0][:777]], offset)


def shard(tmp_path, size: int, chunk: int) -> tuple:
    data = random.Random(size).randbytes(size)
    path = tmp_path / "shard"
    path.write_bytes(data)
    sums = tuple(checksum(data[at : at + chunk]) for at in range(0, size, chunk))
    return path, ShardFile("shard", size, chunk, sums), data


@pytest.mark.parametrize("chunk", [1000, 4096, 8192])
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 50_000])
@pytest.mark.parametrize("disk", [Disk(), Short()])
def test_every_byte_passes_by_once(tmp_path, size, chunk, disk):
    """Whatever the sizes and however little a read gives, the sink sees the file, each byte once."""
    path, file, data = shard(tmp_path, size, chunk)
    seen = bytearray(size)
    lock = threading.Lock()
    total = 0

    def sink(offset: int, piece: memoryview) -> None:
        nonlocal total
        with lock:
            seen[offset : offset + len(piece)] = piece
            total += len(piece)

    read_shard(path, file, sink, disk=disk)
    assert bytes(seen) == data
    assert total == size


@given(st.data())
def test_any_range_is_what_is_there(tmp_path_factory, data):
    """A range of a shard is read whole, over any chunk edges."""
    size = data.draw(st.integers(0, 5000))
    chunk = data.draw(st.sampled_from([512, 1000, 4096]))
    begin = data.draw(st.integers(0, size))
    end = data.draw(st.integers(begin, size))
    path, file, content = shard(tmp_path_factory.mktemp("s"), size, chunk)
    assert read_range(path, file, begin, end) == content[begin:end]


def test_a_range_outside_is_an_error(tmp_path):
    """No read past the end."""
    path, file, _ = shard(tmp_path, 100, 64)
    with pytest.raises(CheckpointError):
        read_range(path, file, 50, 101)


def test_a_shorter_file_is_an_error(tmp_path):
    """A file that shrank since its size was looked at raises and doesn't hang."""
    path, file, data = shard(tmp_path, 10_000, 4096)
    path.write_bytes(data[:9000])
    with pytest.raises(CheckpointError, match="shorter"):
        read_shard(path, file)


def test_a_record_with_too_few_sums_is_an_error(tmp_path):
    """Chunks without a checksum aren't trusted."""
    path, file, _ = shard(tmp_path, 10_000, 4096)
    with pytest.raises(CheckpointError, match="2 checksums for 3 chunks"):
        read_shard(path, ShardFile("shard", file.bytes, file.chunk_bytes, file.sums[:2]))


def test_a_failing_sink_stops_the_reading(tmp_path):
    """An exception in the caller's sink comes out, and no thread goes on."""
    path, file, _ = shard(tmp_path, 100_000, 4096)
    calls = []

    def sink(offset: int, piece: memoryview) -> None:
        calls.append(offset)
        raise KeyError("mine")

    with pytest.raises(KeyError):
        read_shard(path, file, sink)
    assert len(calls) <= 4
