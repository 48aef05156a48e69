"""The UPS on USB that isn't there, asked as a kernel asks over USB/IP; `make hil-virtual` gives it to a real one."""

from __future__ import annotations

import socket
import struct
import threading

import pytest

from hil.virtual.usb_ups import PRODUCT, VENDOR, UsbUps

SUBMIT, UNLINK, SUBMITTED, UNLINKED = 1, 2, 3, 4
OUT, IN = 0, 1


class Kernel:
    """The other end of its cable."""

    def __init__(self, ups: UsbUps) -> None:
        self.cable, theirs = socket.socketpair()
        self.cable.settimeout(60)
        self.thread = threading.Thread(target=ups.serve, args=(theirs,))
        self.thread.start()
        self._theirs = theirs
        self.number, self.direction = 0, IN

    def submit(self, setup: bytes = bytes(8), length: int = 255, direction: int = IN, endpoint: int = 0) -> None:
        self.number, self.direction = self.number + 1, direction
        header = struct.pack(">5I", SUBMIT, self.number, 1, direction, endpoint)
        self.cable.sendall(header + struct.pack(">Iiiii", 0, length, 0, 0, 0) + setup)
        if direction == OUT:
            self.cable.sendall(bytes(length))

    def answer(self) -> tuple[int, int, int, bytes]:
        """(command, number, status, data)."""
        header = self._take(48)
        command, number, _, _, _, status, actual = struct.unpack(">5IiI", header[:28])
        return command, number, status, self._take(actual) if command == SUBMITTED and self.direction == IN else b""

    def control(self, kind: int, request: int, value: int, length: int = 255) -> bytes | None:
        """The data of a control request; None for a stall."""
        self.submit(struct.pack("<BBHHH", kind, request, value, 0, length), length)
        command, number, status, data = self.answer()
        assert (command, number) == (SUBMITTED, self.number)
        return data if status == 0 else None

    def close(self) -> None:
        self.cable.close()
        self.thread.join(60)
        self._theirs.close()

    def _take(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            part = self.cable.recv(length - len(data))
            assert part
            data += part
        return data


@pytest.fixture
def ups():
    """On mains, full."""
    return UsbUps()


@pytest.fixture
def kernel(ups):
    """One that it is plugged into."""
    made = Kernel(ups)
    yield made
    made.close()


def test_it_says_what_it_is(kernel):
    """The descriptors that an enumeration asks for, each as long as it says."""
    device = kernel.control(0x80, 6, 0x0100)
    configuration = kernel.control(0x80, 6, 0x0200)
    report = kernel.control(0x81, 6, 0x2200)

    assert (18, VENDOR, PRODUCT) == (device[0], *struct.unpack("<HH", device[8:12]))
    assert len(configuration) == struct.unpack("<H", configuration[2:4])[0]
    assert len(report) == struct.unpack("<H", configuration[25:27])[0]
    assert configuration[:9] == kernel.control(0x80, 6, 0x0200, length=9)
    names = [kernel.control(0x80, 6, 0x0300 + number)[2:].decode("utf-16le") for number in (1, 2, 3)]
    assert ["American Power Conversion", "Smart-UPS 3000 FW:SIM", "SIM0001"] == names


def test_its_reports_are_its_state(kernel, ups):
    """Charge, runtime, and the bits AC present, discharging, below the limit."""
    assert [b"\x01\x64", b"\x02\x08\x07", b"\x03\x01"] == [kernel.control(0xA1, 1, 0x0300 + n) for n in (1, 2, 3)]
    ups.on_battery = ups.low = True
    ups.charge, ups.runtime_s = 9, 60
    assert [b"\x01\x09", b"\x02\x3c\x00", b"\x03\x0a"] == [kernel.control(0xA1, 1, 0x0300 + n) for n in (1, 2, 3)]


def test_what_it_doesnt_have_stalls(kernel):
    """An unknown report, descriptor or request; it goes on after that."""
    assert [None, None, None] == [
        kernel.control(0xA1, 1, 0x0309), kernel.control(0x80, 6, 0x0600), kernel.control(0xC0, 99, 0)
    ]  # fmt: skip
    assert b"\x01\x64" == kernel.control(0xA1, 1, 0x0301)


def test_what_is_set_is_taken(kernel):
    """A request without an answer, with and without data."""
    kernel.submit(struct.pack("<BBHHH", 0, 9, 1, 0, 0), 0, OUT)  # SET_CONFIGURATION
    assert (SUBMITTED, 1, 0, b"") == kernel.answer()
    kernel.submit(struct.pack("<BBHHH", 0x21, 9, 0x0301, 0, 0), 2, OUT)  # SET_REPORT
    assert (SUBMITTED, 2, 0, b"") == kernel.answer()


def test_the_interrupt_pipe_is_silent_until_it_is_given_up(kernel):
    """As of a UPS that has nothing to say."""
    kernel.submit(endpoint=1, length=8)
    waiting = kernel.number
    assert b"\x01\x64" == kernel.control(0xA1, 1, 0x0301)
    kernel.cable.sendall(struct.pack(">5II24x", UNLINK, 99, 1, 0, 0, waiting))
    assert (UNLINKED, 99, -104) == kernel.answer()[:3]
