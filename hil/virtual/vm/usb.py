"""Rig: NUT's usbhid-ups reads a UPS on USB that isn't there, in a virtual machine whose kernel can be given one.

The whole system is in memory, as the initial ram disk of Debian's usual kernel (the one for clouds knows no USB).
"""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hil.virtual.vm import image
from powerguard.errors import DrillFailed, PowerguardError

PACKAGES = "nut-server,python3,kmod,mount,libusb-1.0-0"
KERNEL = "linux-image-amd64"
NEEDED = tuple(name for name in image.NEEDED if name not in ("torch", "numpy"))
MODULES = ("kernel/drivers/usb/core", "kernel/drivers/usb/common", "kernel/drivers/usb/usbip")
WAIT_S = 1800.0
MEMORY_MB = 2048
INIT = """#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmpfs /run
exec < /dev/null > /dev/ttyS0 2>&1
modprobe vhci-hcd
/opt/powerguard/bin/python3 -u -m hil.virtual.usb_ups
echo o > /proc/sysrq-trigger
sleep 60
"""


def missing() -> str:
    """Why it can't run here; "" if it can."""
    return image.missing()


def rig(say: Callable[[str], None]) -> None:
    """An outage as a USB UPS tells it. Raises DrillFailed."""
    with tempfile.TemporaryDirectory(prefix="pg-usb-") as folder:
        kernel, archive, console = Path(folder, "vmlinuz"), Path(folder, "root.cpio"), Path(folder, "console")
        _make(kernel, archive)
        command = [
            "qemu-system-x86_64", "-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2",
            "-m", str(MEMORY_MB), "-display", "none", "-nodefaults", "-no-reboot", "-serial", f"file:{console}",
            "-kernel", str(kernel), "-initrd", str(archive), "-append", "console=ttyS0 quiet panic=-1 mitigations=off",
        ]  # fmt: skip
        qemu = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        try:
            qemu.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            raise DrillFailed(
                f"usb: not done within {WAIT_S:.0f} s: {console.read_text(errors='replace')[-2000:]}"
            ) from None
        finally:
            qemu.kill()
            qemu.wait()
        lines = console.read_text(errors="replace").replace("\r", "").split("\n")
        told = [line.removeprefix("RIG ") for line in lines if line.startswith("RIG ")]
        for line in told:
            say(line)
        if not told or not told[-1].startswith("done"):
            raise DrillFailed("usb: " + " | ".join(lines[-25:]))


def _make(kernel: Path, archive: Path) -> None:
    def fill(root: Path) -> None:
        image.put_kernel(root, KERNEL)
        _thin(root)
        image.put_packages(root, NEEDED)
        init = root / "init"
        init.write_text(INIT)
        init.chmod(0o755)

    base = image.debian("usb", PACKAGES, (KERNEL, INIT, *NEEDED), fill)
    with open(f"{base}.lock", "w"):
        for name in ("powerguard", "hil"):
            image.put_package(base, name)
        begun = time.monotonic()
        with archive.open("wb") as out:
            for part in _cpio(base):
                out.write(part)
        kernel.write_bytes(next((base / "boot").glob("vmlinuz-*")).read_bytes())
    if time.monotonic() - begun > WAIT_S:
        raise PowerguardError("this machine is too slow for the rig")


def _thin(root: Path) -> None:
    """Away with what would only fill memory."""
    modules = next((root / "usr/lib/modules").iterdir())
    for path in sorted(modules.rglob("*.ko*"), reverse=True):
        if not any(str(path.relative_to(modules)).startswith(kept) for kept in MODULES):
            path.unlink()
    for folder in ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/lib/apt", "var/cache"):
        image.run("rm", "-rf", str(root / folder))
    image.run("chroot", str(root), "depmod", modules.name)


def _cpio(root: Path) -> Iterator[bytes]:
    """The tree as an archive in the kernel's format (newc: Documentation/driver-api/early-userspace/buffer-format)."""
    number = 0
    for folder, folders, files in os.walk(root):
        for name in sorted([*folders, *files]):
            path = Path(folder, name)
            if (
                path.relative_to(root).parts[0] in ("boot", "proc", "sys", "dev", "run")
                and len(path.relative_to(root).parts) > 1
            ):
                continue
            number += 1
            yield from _entry(path, str(path.relative_to(root)), number)
    yield _header("TRAILER!!!", 0, 0, None)


def _entry(path: Path, name: str, number: int) -> Iterator[bytes]:
    about = path.lstat()
    data = b""
    if stat.S_ISLNK(about.st_mode):
        data = os.readlink(path).encode()
    elif stat.S_ISREG(about.st_mode):
        data = path.read_bytes()
    yield _header(name, number, len(data), about)
    yield data + bytes(-len(data) % 4)


def _header(name: str, number: int, size: int, about: os.stat_result | None) -> bytes:
    mode, user, group = (about.st_mode, about.st_uid, about.st_gid) if about else (0, 0, 0)
    encoded = name.encode() + b"\0"
    fields = (number, mode, user, group, 1, 0, size, 0, 0, 0, 0, len(encoded), 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
    return head + bytes(-len(head) % 4)
