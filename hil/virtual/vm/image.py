"""The disk image of the virtual machine: Debian with systemd, this powerguard as its service, and a training loop.

The root with everything but powerguard is made once by mmdebstrap and kept in the temporary folder; torch and the other
packages are those of this Python, so the guest's must be of the same version.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from powerguard.errors import MissingDependency, PowerguardError
from powerguard.sim import nut
from powerguard.sim.upsd_answers import USERS

SUITES = {(3, 11): "bookworm", (3, 13): "trixie"}
PACKAGES = "systemd,systemd-sysv,dbus,udev,kmod,polkitd,libpam-systemd,procps,python3"
KERNEL = "linux-image-cloud-amd64"
"""Debian's for virtual machines: NVMe and ext4 are built in, so there is no initial ram disk."""
SITE = "opt/powerguard/lib/python{0}.{1}/site-packages"
NEEDED = ("torch", "numpy", "pyzmq", "msgspec", "structlog", "xxhash", "pynut2", "prometheus-client", "jeepney",
          "typer", "rich")  # fmt: skip
SIZE = "4G"
QUIET = ("serial-getty@ttyS0.service", "apt-daily.timer", "apt-daily-upgrade.timer", "e2scrub_all.timer",
         "e2scrub_reap.service", "fstrim.timer", "systemd-timesyncd.service", "getty@tty1.service")  # fmt: skip
"""Units that would only cost time, or close the console that the training prints to."""
HOST = "10.0.2.2"
"""This host, as QEMU's own network shows it to the guest."""
CHECKPOINTS = "var/lib/training/run"
STATE = "var/lib/powerguard"

LAUNCHER = "#!/opt/powerguard/bin/python3\nfrom powerguard.cli import main\nmain()\n"
NETWORK = "[Match]\nType=ether\n[Network]\nAddress=10.0.2.15/24\nLinkLocalAddressing=no\nIPv6AcceptRA=no\n"
PORT_UNIT = """[Unit]
Description=Where upsd listens is said on the kernel's command line
Before=powerguard.service
[Service]
Type=oneshot
ExecStart=/bin/sh /opt/upsd-port.sh
[Install]
WantedBy=multi-user.target
"""
PORT_SCRIPT = r"""port=$(sed -n 's/.*rig.upsd=\([0-9]*\).*/\1/p' /proc/cmdline)
sed -i "s/@10.0.2.2:[0-9]*/@10.0.2.2:$port/" /etc/powerguard/powerguard.toml
"""
TRAINING_UNIT = """[Unit]
Description=A training run
Wants=powerguard.service
After=powerguard.service
[Service]
ExecStart=/opt/powerguard/bin/python3 -u /opt/train.py /var/lib/training/run
User=trainer
SupplementaryGroups=powerguard
StateDirectory=training
Environment=OMP_NUM_THREADS=1
KillMode=mixed
TimeoutStopSec=180
Restart=on-failure
RestartPreventExitStatus=75
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
[Install]
WantedBy=multi-user.target
"""
CONSOLE = "[Service]\nStandardOutput=journal+console\n"
TIMEOUTS = "[Service]\nWatchdogSec=180\nTimeoutStartSec=600\n"
"""An emulated processor is some twenty times slower than the one that the unit's limits are for."""


def missing() -> str:
    """Why no such image can be made here; "" if it can."""
    if os.geteuid() != 0:
        return "a virtual machine's image needs root"
    if sys.version_info[:2] not in SUITES or not sys.platform.startswith("linux"):
        return f"no Debian release has Python {sys.version_info[0]}.{sys.version_info[1]}"
    if os.uname().machine != "x86_64":
        return f"the rig is written for x86_64, not for {os.uname().machine}"
    for tool, package in (
        ("qemu-system-x86_64", "qemu-system-x86"), ("mmdebstrap", "mmdebstrap"), ("mkfs.ext4", "e2fsprogs"),
        ("apt-get", "apt"),
    ):  # fmt: skip
        if shutil.which(tool) is None:
            return f"{tool} isn't installed (apt-get install {package})"
    for name in NEEDED:
        try:
            distribution(name)
        except PackageNotFoundError:
            return f"{name} isn't installed in this Python"
    return nut.missing("upsd", "dummy-ups")


class Image:
    """An image file and the kernel to boot it with, in *folder*."""

    def __init__(self, folder: Path, configuration: str) -> None:
        self.path, self.kernel = folder / "root.img", folder / "vmlinuz"
        base = _base()
        with open(f"{base}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _put_powerguard(base, configuration)
            shutil.copy(next((base / "boot").glob("vmlinuz-*")), self.kernel)
            run("truncate", "-s", SIZE, str(self.path))
            run("mkfs.ext4", "-q", "-F", "-d", str(base), "-L", "rig", str(self.path))


def _base() -> Path:
    """The root without powerguard. Raises PowerguardError where it can't be made."""

    def fill(root: Path) -> None:
        put_kernel(root, KERNEL)
        put_packages(root, NEEDED)
        _put_system(root)

    return debian("vm", PACKAGES, (KERNEL, *NEEDED), fill)


def debian(name: str, packages: str, what: Sequence[str], fill: Callable[[Path], None]) -> Path:
    """A root of Debian with *packages*, then *fill*ed; made once for *what* is put there, as installed here."""
    suite = SUITES[sys.version_info[:2]]
    versions = [f"{each} {_version(each)}" for each in what]
    digest = hashlib.sha256(repr((suite, packages, versions)).encode()).hexdigest()[:12]
    base = Path(tempfile.gettempdir(), f"powerguard-{name}-{digest}")
    with open(f"{base}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not base.exists():
            part = Path(f"{base}.part")
            shutil.rmtree(part, ignore_errors=True)
            print(f"making {base} (a minute or two)", flush=True)
            run(
                "mmdebstrap", "--quiet", "--variant=minbase", "--dpkgopt=force-unsafe-io", f"--include={packages}",
                "--aptopt=Acquire::Languages none", suite, str(part),
            )  # fmt: skip
            (part / "etc/resolv.conf").unlink(missing_ok=True)  # a name that isn't known must not cost 20 s
            (part / "etc/hosts").write_text("127.0.0.1 localhost vm\n::1 localhost\n")
            (part / "etc/hostname").write_text("vm\n")
            run("chroot", str(part), "python3", "-m", "venv", "--without-pip", "/opt/powerguard")
            fill(part)
            part.rename(base)
    return base


def _version(name: str) -> str:
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return ""


def put_kernel(root: Path, kernel: str) -> None:
    """Unpacked, not installed: there is no boot loader and no initial ram disk."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = _said("apt-cache", "depends", kernel)
        names = [line.split()[-1] for line in wanted.splitlines() if "Depends:" in line]
        if not names:
            raise MissingDependency(f"apt knows no {kernel}", todo="apt-get update")
        run("apt-get", "-qq", "download", names[0], cwd=folder)
        package = next(Path(folder).glob("*.deb"))
        run("dpkg-deb", "-x", str(package), f"{folder}/kernel")
        shutil.copytree(f"{folder}/kernel/boot", root / "boot", dirs_exist_ok=True)
        modules = next(Path(folder).glob("kernel/**/lib/modules/*"))
        shutil.copytree(modules, root / "usr/lib/modules" / modules.name, symlinks=True)
        run("chroot", str(root), "depmod", modules.name)


def put_packages(root: Path, names: tuple[str, ...]) -> None:
    """*names* and what they need, from this Python's own packages."""
    site = root / SITE.format(*sys.version_info[:2])
    for name in sorted(_closure(names)):
        found = distribution(name)
        for file in found.files or ():
            top = file.parts[0]
            source = Path(str(found.locate_file(top)))
            if top in ("..", "__pycache__") or (site / top).exists():
                continue
            if source.is_dir():
                shutil.copytree(source, site / top, ignore=_useless)
            elif source.exists():
                shutil.copy(source, site / top)


def _useless(folder: str, names: list[str]) -> set[str]:
    """What only a compiler or a test needs. Compiled modules stay: the emulated processor is slow at that."""
    return ({"include", "test"} if folder.endswith("/torch") else set()) & set(names)


def _closure(names: tuple[str, ...]) -> set[str]:
    """*names* and what they need, as far as it is installed."""
    from importlib.metadata import requires

    found: set[str] = set()
    rest = list(names)
    while rest:
        name = rest.pop()
        if name in found:
            continue
        try:
            needs = requires(name) or []
        except PackageNotFoundError:
            continue  # for another system, or another Python
        found.add(name)
        rest += [
            need.split(";")[0].split("[")[0].strip(" ()<>=!~.0123456789,") for need in needs if "extra ==" not in need
        ]
    return found


def _put_system(root: Path) -> None:
    (root / "etc/fstab").write_text("")
    _write(root / "etc/systemd/network/10-all.network", NETWORK)
    _write(root / "etc/sysusers.d/trainer.conf", 'u trainer - "training" /var/lib/training\n')
    _write(root / "etc/systemd/system/rig-upsd.service", PORT_UNIT)
    _write(root / "opt/upsd-port.sh", PORT_SCRIPT)
    _write(root / "etc/systemd/system/training.service", TRAINING_UNIT)
    for name in ("rig-upsd.service", "training.service", "systemd-networkd.service"):
        _enable(root, name)
    for name in QUIET:
        (root / "etc/systemd/system" / name).unlink(missing_ok=True)
        (root / "etc/systemd/system" / name).symlink_to("/dev/null")
    _write(root / "usr/bin/powerguard", LAUNCHER, 0o755)
    _write(root / "etc/systemd/system/powerguard.service.d/rig.conf", CONSOLE + TIMEOUTS)


def put_package(root: Path, name: str) -> Path:
    """A package of this checkout, compiled. Where it is here."""
    package = find_spec(name)
    assert package is not None
    assert package.origin is not None
    source = Path(package.origin).parent
    target = root / SITE.format(*sys.version_info[:2]) / name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    run("chroot", str(root), "/opt/powerguard/bin/python3", "-m", "compileall", "-q", f"/{target.relative_to(root)}")
    return source


def _put_powerguard(root: Path, configuration: str) -> None:
    """Its service, by its own installer for images."""
    source = put_package(root, "powerguard")
    units = root / SITE.format(*sys.version_info[:2]) / "powerguard/systemd"
    shutil.copytree(source.parent / "systemd", units, dirs_exist_ok=True)
    shutil.rmtree(root / "etc/powerguard", ignore_errors=True)
    _write(root / "etc/powerguard/powerguard.toml", configuration, 0o640)
    with tempfile.NamedTemporaryFile("w") as password:
        password.write(USERS["secondary"].password + "\n")
        password.flush()
        run(
            sys.executable, "-m", "powerguard.cli", "service", "install", "--root", str(root), "--yes",
            "--user", "secondary", "--password-file", password.name,
        )  # fmt: skip
    _enable(root, "powerguard.service")
    _enable(root, "powerguard-halt.path")
    shutil.copy(Path(__file__).with_name("train.py"), root / "opt/train.py")


def _enable(root: Path, unit: str) -> None:
    wants = root / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir(parents=True, exist_ok=True)
    (wants / unit).unlink(missing_ok=True)
    here = (root / "etc/systemd/system" / unit).exists()
    (wants / unit).symlink_to(f"../{unit}" if here else f"/lib/systemd/system/{unit}")


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False).stdout


def run(*command: str, cwd: str | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False, cwd=cwd)
    if done.returncode:
        raise PowerguardError(f"{' '.join(command)} returned {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
