"""The virtual machine: QEMU without KVM, on that disk, with a console that can be read."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from hil.virtual.vm.disk import VolatileDisk
from hil.virtual.vm.image import Image
from powerguard.errors import DrillFailed

MEMORY_MB = 2048
LOOK_S = 0.2


class Machine:
    """Off when made. One log of the console for each boot, in *folder*."""

    def __init__(self, image: Image, disk: VolatileDisk, folder: Path, upsd_port: int) -> None:
        self.disk, self.boots = disk, 0
        self._image, self._folder, self._port = image, folder, upsd_port
        self._process: subprocess.Popen[bytes] | None = None

    def boot(self) -> None:
        """Switches it on."""
        self.boots += 1
        self.disk.power_on()
        command = [
            "qemu-system-x86_64", "-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2",
            "-m", str(MEMORY_MB), "-display", "none", "-nodefaults", "-no-reboot", "-serial", f"file:{self.log}",
            "-kernel", str(self._image.kernel),
            "-append", "console=ttyS0 root=/dev/nvme0n1 rw quiet panic=-1 mitigations=off "
                       f"systemd.show_status=0 rig.upsd={self._port}",
            "-drive", f"file=nbd+unix:///?socket={self.disk.address},format=raw,if=none,id=disk",
            "-device", "nvme,serial=rig,drive=disk",
            "-netdev", "user,id=net,ipv6=off", "-device", "virtio-net-pci,netdev=net",
        ]  # fmt: skip
        with (self._folder / "qemu.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    @property
    def log(self) -> Path:
        """The console of this boot."""
        return self._folder / f"console-{self.boots}.log"

    @property
    def off(self) -> bool:
        """It has switched itself off, or was switched off."""
        return self._process is None or self._process.poll() is not None

    def kill(self) -> None:
        """The power is gone. May be called from any thread."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Nothing of it is left running."""
        self.kill()
        if self._process is not None:
            self._process.wait(60)

    # ---- what it says ------------------------------------------------------------------------------

    def lines(self) -> list[str]:
        """The console, whole lines only."""
        if not self.log.exists():
            return []
        return self.log.read_text(errors="replace").replace("\r", "").split("\n")[:-1]

    def told(self, word: str) -> list[list[str]]:
        """What the training told about *word*: the rest of each such line."""
        begins = ["TRAIN", word]
        return [words[2:] for line in self.lines() if (words := line.split())[:2] == begins]

    def until(self, what: str, holds: Callable[[], object], within_s: float) -> float:
        """Seconds until it *holds*. DrillFailed if the machine is off before, or after *within_s*."""
        begun = time.monotonic()
        while not holds():
            if self.off:
                raise DrillFailed(f"the machine went off while {what} was awaited: {self._last_words()}")
            if time.monotonic() - begun > within_s:
                raise DrillFailed(f"waited {within_s:.0f} s for {what}: {self._last_words()}")
            time.sleep(LOOK_S)
        return time.monotonic() - begun

    def _last_words(self) -> str:
        return " | ".join(line.strip() for line in self.lines()[-12:]) + (self._folder / "qemu.log").read_text()[-500:]
