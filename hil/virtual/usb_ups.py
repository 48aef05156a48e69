"""A UPS on USB that isn't there: a HID power device in user space, given to this kernel over USB/IP.

The kernel's own virtual host controller (vhci_hcd) takes a TCP connection for a cable. NUT's usbhid-ups sees a device
of American Power Conversion and reads its feature reports, as it does of a real one.
"""

from __future__ import annotations

import contextlib
import fcntl
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from powerguard.core.status import parse
from powerguard.core.types import Reading, Sample
from powerguard.errors import DrillFailed, PowerguardError
from powerguard.node.ups import UpsReader
from powerguard.node.ups_line import UpsAddress
from powerguard.sim import nut

WAIT_S = 300.0

VENDOR, PRODUCT = 0x051D, 0x0002
CONTROLLER = Path("/sys/devices/platform/vhci_hcd.0")
SPEED_FULL = 2
DEVICE_ID = (1 << 16) | 2
_SUBMIT, _UNLINK, _SUBMITTED, _UNLINKED = 1, 2, 3, 4
_IN = 1
_EPIPE, _ECONNRESET = -32, -104

# items of a HID report descriptor: Device Class Definition for HID 1.11, 6.2.2
_PAGE, _USAGE, _LEAST, _MOST, _BITS, _COUNT, _REPORT = 0x04, 0x08, 0x14, 0x24, 0x74, 0x94, 0x84
_FEATURE, _COLLECTION, _END = 0xB0, 0xA0, b"\xc0"
_APPLICATION, _LOGICAL = 1, 2
_VOLATILE, _CONSTANT = 0x82, 0x01
# usages: HID Usage Tables for Power Devices 1.0
_POWER, _BATTERY = 0x84, 0x85
_UPS, _SUMMARY, _STATUS, _PERCENT_LOAD = 0x04, 0x24, 0x02, 0x35
_CAPACITY, _RUNTIME, _CAPACITY_LIMIT = 0x66, 0x68, 0x29
_FLAGS = (0xD0, 0x45, 0x44, 0x42)
"""AC present, discharging, charging, below the capacity limit: the bits of report 3, from the lowest."""


def _item(kind: int, value: int, size: int = 1) -> bytes:
    return bytes([kind | {1: 1, 2: 2, 4: 3}[size]]) + value.to_bytes(size, "little")


def _number(report: int, page: int, usage: int, most: int, bits: int = 8) -> bytes:
    """One number, which is all that its report holds."""
    return (
        _item(_REPORT, report) + _item(_PAGE, page) + _item(_USAGE, usage) + _item(_LEAST, 0) + _item(_MOST, most, 4)
        + _item(_BITS, bits) + _item(_COUNT, 1) + _item(_FEATURE, _VOLATILE)
    )  # fmt: skip


_DESCRIPTOR = (
    _item(_PAGE, _POWER) + _item(_USAGE, _UPS) + _item(_COLLECTION, _APPLICATION)
    + _item(_USAGE, _SUMMARY) + _item(_COLLECTION, _LOGICAL)
    + _number(1, _BATTERY, _CAPACITY, 100)
    + _number(2, _BATTERY, _RUNTIME, 65535, 16)
    + _item(_REPORT, 3) + _item(_PAGE, _POWER) + _item(_USAGE, _STATUS) + _item(_COLLECTION, _LOGICAL)
    + _item(_PAGE, _BATTERY) + b"".join(_item(_USAGE, flag) for flag in _FLAGS)
    + _item(_LEAST, 0) + _item(_MOST, 1) + _item(_BITS, 1) + _item(_COUNT, len(_FLAGS)) + _item(_FEATURE, _VOLATILE)
    + _item(_COUNT, 8 - len(_FLAGS)) + _item(_FEATURE, _CONSTANT) + _END
    + _number(4, _POWER, _PERCENT_LOAD, 100)
    + _number(5, _BATTERY, _CAPACITY_LIMIT, 100)
    + _END + _END
)  # fmt: skip
_TEXTS = ("American Power Conversion", "Smart-UPS 3000 FW:SIM", "SIM0001")


class UsbUps:
    """Its values may be changed at any time. `plug` needs root and vhci_hcd."""

    def __init__(self) -> None:
        self.charge, self.runtime_s, self.load = 100, 1800, 35
        self.on_battery = self.low = False
        self._cable: socket.socket | None = None
        self._thread: threading.Thread | None = None

    # ---- the cable ---------------------------------------------------------------------------------

    def plug(self, port: int = 0) -> None:
        """Gives it to this kernel, on *port* of the virtual controller."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            kernels = socket.create_connection(server.getsockname())
            self._cable, _ = server.accept()
        self._thread = threading.Thread(target=self.serve, args=(self._cable,), daemon=True)
        self._thread.start()
        with kernels:  # the kernel takes a reference of its own
            (CONTROLLER / "attach").write_text(f"{port} {kernels.fileno()} {DEVICE_ID} {SPEED_FULL}")

    def unplug(self) -> None:
        """The cable is out."""
        if self._cable is not None:
            with contextlib.suppress(OSError):
                self._cable.shutdown(socket.SHUT_RDWR)
            self._cable.close()
            self._cable = None

    def serve(self, cable: socket.socket) -> None:
        """Answers the kernel's requests until the cable is out."""
        with contextlib.suppress(OSError, EOFError):
            while True:
                self._answer(cable)

    def _answer(self, cable: socket.socket) -> None:
        header = _exactly(cable, 48)
        command, number, _, direction, endpoint = struct.unpack(">5I", header[:20])
        if command == _UNLINK:
            cable.sendall(struct.pack(">5Ii24x", _UNLINKED, number, 0, 0, 0, _ECONNRESET))
            return
        length = struct.unpack(">I", header[24:28])[0]
        if direction != _IN and length:
            _exactly(cable, length)
        if endpoint != 0:
            return  # the interrupt pipe: nothing ever comes
        data = self.control(header[40:48])
        status = _EPIPE if data is None else 0
        sent = data if data is not None and direction == _IN else b""
        actual = len(sent) if direction == _IN else length
        cable.sendall(struct.pack(">5IiiiiI8x", _SUBMITTED, number, 0, 0, 0, status, actual, 0, 0, 0) + sent)

    # ---- USB ---------------------------------------------------------------------------------------

    def control(self, setup: bytes) -> bytes | None:
        """The answer to a control request; None is a stall."""
        kind, request, value, _, length = struct.unpack("<BBHHH", setup)
        if (kind, request) == (0x80, 6):
            data = self._descriptor(value >> 8, value & 0xFF)
        elif (kind, request) == (0x81, 6):
            data = {0x22: _DESCRIPTOR, 0x21: _hid()}.get(value >> 8)
        elif (kind, request) == (0xA1, 1):
            data = self.report(value & 0xFF)
        elif (kind, request) == (0x80, 0):
            data = b"\1\0"  # self-powered
        elif (kind, request) == (0x80, 8):
            data = b"\1"
        else:
            data = None if kind & 0x80 else b""
        return None if data is None else data[:length]

    def _descriptor(self, kind: int, number: int) -> bytes | None:
        if kind == 1:
            return struct.pack("<BBHBBBBHHHBBBB", 18, 1, 0x0110, 0, 0, 0, 8, VENDOR, PRODUCT, 0x0106, 1, 2, 3, 1)
        if kind == 2:
            interface = struct.pack("<BBBBBBBBB", 9, 4, 0, 0, 1, 3, 0, 0, 0) + _hid()
            interface += struct.pack("<BBBBHB", 7, 5, 0x81, 3, 8, 10)
            return struct.pack("<BBHBBBBB", 9, 2, 9 + len(interface), 1, 1, 0, 0xE0, 1) + interface
        if kind == 3 and number == 0:
            return struct.pack("<BBH", 4, 3, 0x0409)
        if kind == 3 and number <= len(_TEXTS):
            text = _TEXTS[number - 1].encode("utf-16le")
            return bytes([2 + len(text), 3]) + text
        return None

    def report(self, number: int) -> bytes | None:
        """A feature report."""
        status = (not self.on_battery) | self.on_battery << 1 | self.low << 3
        values = {
            1: bytes([self.charge]), 2: self.runtime_s.to_bytes(2, "little"), 3: bytes([status]),
            4: bytes([self.load]), 5: bytes([20]),
        }  # fmt: skip
        return bytes([number]) + values[number] if number in values else None


def _hid() -> bytes:
    return struct.pack("<BBHBBBH", 9, 0x21, 0x0110, 0, 1, 0x22, len(_DESCRIPTOR))


def _exactly(cable: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = cable.recv(length - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _let_in() -> None:
    """The driver gives root up; where there is no udev, nobody lets it at the device."""
    ends = time.monotonic() + 60.0
    while time.monotonic() < ends:
        for path in Path("/sys/bus/usb/devices").glob("*/idVendor"):
            if int(path.read_text(), 16) == VENDOR:
                numbers = [int((path.parent / name).read_text()) for name in ("busnum", "devnum")]
                Path("/dev/bus/usb/{:03d}/{:03d}".format(*numbers)).chmod(0o666)
                return
        time.sleep(0.1)
    raise DrillFailed("usb: the kernel doesn't see the device")


def main() -> None:
    """Inside the virtual machine: one line for what was seen, and one for how it ended."""
    options = {"port": "auto", "vendorid": f"{VENDOR:04x}", "pollonly": "enabled", "pollfreq": "2"}
    ups = UsbUps()
    try:
        _loopback_up()
        ups.plug()
        _let_in()
        with nut.RealNut({"usb": nut.Driver("usbhid-ups", options)}, maxage_s=10) as running:
            told = _outage(ups, UpsAddress.parse(running.address("usb")))
    except PowerguardError as error:
        print(f"RIG failed: {error}", flush=True)
    else:
        print(f"RIG USB HID: {told}\nRIG done", flush=True)


def _outage(ups: UsbUps, address: UpsAddress) -> str:
    """On battery and back, and a low battery, as the daemon's reader sees them.

    Not the cable out: usbhid-ups 2.8.0 went on to serve the last values for 300 s after it, and called them fresh.
    """
    seen = queue.SimpleQueue[Sample]()
    reader = UpsReader(address, seen.put, time.monotonic, poll_s=0.5, answer_s=20.0, poll_max_s=60.0)
    reader.start()
    times: list[float] = []

    def until(holds: Callable[[Reading], bool], what: str) -> None:
        begun = time.monotonic()
        while time.monotonic() - begun < WAIT_S:
            with contextlib.suppress(queue.Empty):
                reading = parse(seen.get(timeout=5.0))
                if holds(reading):
                    times.append(time.monotonic() - begun)
                    return
        raise DrillFailed(f"waited {WAIT_S:.0f} s for {what}")

    until(lambda seen: seen.on_battery is False and seen.charge_pct == 100, "mains")
    ups.on_battery, ups.charge, ups.runtime_s = True, 90, 1500
    until(lambda seen: seen.on_battery is True, "the outage")
    until(lambda seen: (seen.charge_pct, seen.runtime_s) == (90, 1500), "its values")
    ups.on_battery = False
    until(lambda seen: seen.on_battery is False, "mains again")
    ups.on_battery = ups.low = True
    until(lambda seen: bool(seen.on_battery and seen.low_battery), "the low battery")
    reader.close()
    words = ("on line", "on battery", "charge and runtime", "on line again", "low battery")
    return ", ".join(f"{word} after {after:.1f} s" for word, after in zip(words, times, strict=True))


def _loopback_up() -> None:
    """As `ip link set lo up`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 1 | 0x40))  # SIOCSIFFLAGS, IFF_UP | IFF_RUNNING


if __name__ == "__main__":
    main()
