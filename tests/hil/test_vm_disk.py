"""The virtual machine's disk, asked in the protocol that QEMU speaks to it (NBD, fixed newstyle)."""

from __future__ import annotations

import socket
import struct
import threading

import pytest

from hil.virtual.vm.disk import BLOCK, VolatileDisk

SIZE = 64 * BLOCK
READ, WRITE, DISCONNECT, FLUSH, TRIM = range(5)
FUA = 1


class Computer:
    """What hangs on the disk."""

    def __init__(self, disk: VolatileDisk) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(60)
        self.socket.connect(str(disk.address))
        assert self._take(16) == b"NBDMAGICIHAVEOPT"
        assert struct.unpack(">H", self._take(2)) == (1,)
        self.socket.sendall(struct.pack(">I", 1))
        self.socket.sendall(struct.pack(">QIIIH", 0x49484156454F5054, 7, 6, 0, 0))  # GO
        magic, option, kind, length = struct.unpack(">QIII", self._take(20))
        assert (magic, option, kind, length) == (0x3E889045565A9, 7, 3, 12)
        _, self.size, flags = struct.unpack(">HQH", self._take(12))
        assert flags == 1 | 4 | 8
        assert struct.unpack(">QIII", self._take(20)) == (0x3E889045565A9, 7, 1, 0)

    def ask(self, kind: int, offset: int = 0, length: int = 0, data: bytes = b"", flags: int = 0) -> tuple[int, bytes]:
        """(error, data)."""
        self.socket.sendall(struct.pack(">IHHQQI", 0x25609513, flags, kind, 7, offset, length or len(data)) + data)
        magic, error, handle = struct.unpack(">IIQ", self._take(16))
        assert (magic, handle) == (0x67446698, 7)
        return error, self._take(length) if kind == READ and not error else b""

    def write(self, offset: int, data: bytes, flags: int = 0) -> None:
        assert (0, b"") == self.ask(WRITE, offset, data=data, flags=flags)

    def read(self, offset: int, length: int) -> bytes:
        error, data = self.ask(READ, offset, length)
        assert error == 0
        return data

    def _take(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            part = self.socket.recv(length - len(data))
            if not part:
                raise EOFError
            data += part
        return data


@pytest.fixture
def disk(tmp_path):
    """A disk of 64 blocks, each full of its number."""
    image = tmp_path / "image"
    image.write_bytes(b"".join(bytes([number]) * BLOCK for number in range(64)))
    made = VolatileDisk(image, tmp_path / "disk")
    yield made
    made.close()


@pytest.fixture
def computer(disk):
    """One that is connected to it."""
    made = Computer(disk)
    yield made
    made.socket.close()


def test_what_is_written_is_read(computer):
    """Across blocks, from the middle of one to the middle of another; its neighbours stay."""
    assert computer.size == SIZE
    computer.write(BLOCK + 100, b"x" * (BLOCK + 50))

    assert bytes([1]) * 100 + b"x" * (BLOCK + 50) + bytes([2]) * 10 == computer.read(BLOCK, BLOCK + 160)
    assert bytes([0]) * BLOCK == computer.read(0, BLOCK)


def test_a_cut_loses_what_isnt_flushed(disk, computer):
    """What was flushed, or written with FUA, stays."""
    computer.write(0, b"a" * BLOCK)
    assert (0, b"") == computer.ask(FLUSH)
    computer.write(0, b"b" * BLOCK)
    computer.write(BLOCK, b"c" * BLOCK, flags=FUA)
    computer.write(2 * BLOCK, b"d" * BLOCK)

    assert 2 == disk.cut()
    with pytest.raises((EOFError, OSError)):
        computer.ask(READ, 0, BLOCK)
    disk.power_on()
    again = Computer(disk)
    assert b"a" * BLOCK + b"c" * BLOCK + bytes([2]) * BLOCK == again.read(0, 3 * BLOCK)
    again.socket.close()


def test_a_cut_may_keep_any_of_it(disk, computer):
    """In any order, as real caches do: some later blocks without some earlier ones."""
    computer.write(0, b"z" * SIZE)
    lost = disk.cut(keep=0.5)

    assert 0 < lost < 64
    disk.power_on()
    again = Computer(disk)
    kept = [again.read(number * BLOCK, 1) == b"z" for number in range(64)]
    again.socket.close()
    assert 64 - lost == sum(kept)
    assert kept != sorted(kept, reverse=True)


def test_the_power_goes_in_the_middle_of_a_write(disk, computer):
    """At so many bytes that aren't flushed; the write isn't answered any more."""
    gone = threading.Event()
    disk.cut_at(3 * BLOCK, gone.set, keep=0.0)
    computer.write(0, b"1" * 2 * BLOCK)
    assert not gone.is_set()
    with pytest.raises((EOFError, OSError)):
        computer.write(2 * BLOCK, b"2" * BLOCK)
    assert gone.wait(60)
    assert (1, 3) == (disk.cuts, disk.lost_blocks)


def test_the_image_itself_is_never_changed(disk, computer, tmp_path):
    """What is durable can be taken out as an image of its own."""
    before = (tmp_path / "image").read_bytes()
    computer.write(5 * BLOCK, b"n" * BLOCK)
    computer.ask(FLUSH)
    computer.write(6 * BLOCK, b"v" * BLOCK)
    disk.save(tmp_path / "out")

    assert before == (tmp_path / "image").read_bytes()
    assert before[: 5 * BLOCK] + b"n" * BLOCK + before[6 * BLOCK :] == (tmp_path / "out").read_bytes()


def test_what_it_cant_do(computer):
    """An error, and it goes on."""
    assert 22 == computer.ask(TRIM, 0, BLOCK)[0]
    assert bytes([3]) * 4 == computer.read(3 * BLOCK, 4)
