"""A machine with a real systemd for the tests of this folder: a container with an init of its own, on this host.

Its root is made once by mmdebstrap and kept under the temporary folder; each run works on an overlay of it. Everything
here needs root; where that or a tool is missing the tests are skipped, with the reason.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
SUITES = {(3, 11): "bookworm", (3, 13): "trixie"}
"""Debian's Python must be ours: packages are installed from outside."""
PACKAGES = "systemd,systemd-sysv,dbus,polkitd,libpam-systemd,procps,python3"
VENV = "opt/powerguard"
WAIT_S = 120.0

LAUNCHER = """#!/opt/powerguard/bin/python3
from powerguard.cli import main
main()
"""

UPSD = """[Unit]
Description=A simulated upsd, which does what is written to its file
[Service]
ExecStartPre=/usr/bin/touch /run/upsd.in
ExecStart=/bin/sh -c 'tail -s 0.1 -n 0 -f /run/upsd.in | /opt/powerguard/bin/python3 -um powerguard.sim.upsd --ups demo'
KillMode=mixed
[Install]
WantedBy=multi-user.target
"""


def missing() -> str:
    """Why there can be no such machine here; "" if there can."""
    if os.geteuid() != 0:
        return "a machine with systemd needs root"
    for tool in ("systemd-nspawn", "mmdebstrap", "nsenter"):
        if shutil.which(tool) is None:
            return f"{tool} isn't installed (apt-get install systemd-container mmdebstrap)"
    if sys.version_info[:2] not in SUITES:
        return f"no Debian release has Python {sys.version_info[0]}.{sys.version_info[1]}"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs the machine."""
    why = missing()
    for item in items:
        if "/tests/systemd/" in item.path.as_posix():
            for mark in (pytest.mark.systemd, pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(400)):
                item.add_marker(mark)
            if why:
                item.add_marker(pytest.mark.skip(reason=why))


def made_root() -> Path:
    """The root file system with everything but powerguard itself. Raises CalledProcessError where it can't be made."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    needs = [*project["dependencies"], *project["optional-dependencies"]["node"]]
    suite = SUITES[sys.version_info[:2]]
    digest = hashlib.sha256(repr((suite, PACKAGES, needs)).encode()).hexdigest()[:12]
    root = Path(tempfile.gettempdir(), f"powerguard-systemd-{digest}")
    with open(f"{root}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            part = Path(f"{root}.part")
            shutil.rmtree(part, ignore_errors=True)
            print(f"making {root} (a minute or two)", file=sys.__stderr__, flush=True)
            done(
                "mmdebstrap", "--quiet", "--variant=minbase", "--dpkgopt=force-unsafe-io", f"--include={PACKAGES}",
                "--aptopt=Acquire::Languages none", suite, str(part),
            )  # fmt: skip
            (part / "etc/resolv.conf").unlink(missing_ok=True)  # a name that isn't known must not cost 20 s
            (part / "etc/hosts").write_text("127.0.0.1 localhost pgvm\n::1 localhost\n")
            (part / "etc/hostname").write_text("pgvm\n")
            done("chroot", str(part), "python3", "-m", "venv", "--without-pip", f"/{VENV}")
            pip_install(part, *needs)
            (part / VENV / "bin/powerguard").write_text(LAUNCHER)
            (part / VENV / "bin/powerguard").chmod(0o755)
            (part / "usr/local/bin/powerguard").symlink_to(f"/{VENV}/bin/powerguard")
            part.rename(root)
    return root


def pip_install(root: Path, *what: str) -> None:
    """Into the root's virtual environment, by our own pip."""
    done(
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--root-user-action=ignore",
        "--no-warn-conflicts", "--upgrade", "--target", str(packages(root)), *what,
    )  # fmt: skip


def packages(root: Path) -> Path:
    """Where the root's virtual environment has its packages."""
    return next(root.glob(f"{VENV}/lib/python3*/site-packages"))


def done(*command: str, **how) -> subprocess.CompletedProcess[str]:
    """A command that must work; its output is in the error if it doesn't."""
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False, **how)
    if result.returncode:
        raise AssertionError(f"{' '.join(command)} returned {result.returncode}:\n{result.stdout}{result.stderr}")
    return result


class Machine:
    """A container with systemd as process 1, a private network and a simulated upsd."""

    def __init__(self, base: Path, folder: Path) -> None:
        self.folder, self.root = folder, folder / "root"
        for name in ("upper", "work", "root"):
            (folder / name).mkdir(parents=True)
        layers = f"lowerdir={base},upperdir={folder}/upper,workdir={folder}/work"
        done("mount", "-t", "overlay", "overlay", "-o", layers, str(self.root))
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._init = 0

    # ---- life --------------------------------------------------------------------------------------

    def boot(self) -> None:
        """Switches it on; returns when everything that starts at boot has been started."""
        self._cut()
        with (self.folder / "console.log").open("ab") as log:
            self._nspawn = subprocess.Popen(
                [
                    "systemd-nspawn", "--quiet", "--directory", str(self.root), "--machine=pgvm", "--register=no",
                    "--keep-unit", "--private-network", "--boot", "--console=pipe", "--link-journal=no",
                    "--capability=CAP_SYS_RESOURCE,CAP_IPC_LOCK",  # as on a real machine: a unit may lock memory
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.until(self._find_init, "process 1 to be there")
        self.until(lambda: self.run("systemctl", "is-system-running", check=False).stdout.strip() in
                   ("running", "degraded"), "the boot to be over")  # fmt: skip

    def boot_anew(self) -> None:
        """Another boot. The kernel is this host's, and so is its name for the boot: what the daemon has kept of the
        last one would be taken for memories of this one, and goes.
        """
        for path in (self.root / "var/lib/powerguard").glob("journal-*"):
            path.unlink()
        (self.root / "var/lib/powerguard-shed/limits.json").unlink(missing_ok=True)
        self.boot()

    def _find_init(self) -> bool:
        assert self._nspawn is not None
        assert self._nspawn.poll() is None, self.console()
        with contextlib.suppress(OSError):
            for child in Path(f"/proc/{self._nspawn.pid}/task/{self._nspawn.pid}/children").read_text().split():
                if Path(f"/proc/{child}/comm").read_text().strip() == "systemd":
                    self._init = int(child)
                    return True
        return False

    def off(self, within_s: float = WAIT_S) -> int:
        """Waits until it is switched off; nspawn's exit code."""
        assert self._nspawn is not None
        try:
            return self._nspawn.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still up after {within_s} s:\n{self.console()}\n{self.log()}") from None

    def close(self) -> None:
        """As a power cut, and nothing is left."""
        self._cut()
        subprocess.run(["umount", "--lazy", str(self.root)], check=False)
        for group in Path("/sys/fs/cgroup").glob("*/payload"):  # nspawn leaves its groups behind; those in use stay
            for folder, _, _ in os.walk(group, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)

    def _cut(self) -> None:
        if self._nspawn is not None and self._nspawn.poll() is None:
            if self._init:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._init, signal.SIGKILL)
            self._nspawn.kill()
            self._nspawn.wait(20)
        self._nspawn, self._init = None, 0

    # ---- inside ------------------------------------------------------------------------------------

    def run(self, *command: str, check: bool = True, user: str = "", within_s: float = 60.0):
        """A command in it, as root or *user*."""
        who = ["runuser", "-u", user, "--"] if user else []
        result = subprocess.run(
            ["nsenter", "-t", str(self._init), "-a", *who, *command],
            capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False, timeout=within_s,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "LC_ALL": "C"},
        )  # fmt: skip
        if check and result.returncode:
            raise AssertionError(f"{' '.join(command)}: {result.returncode}\n{result.stdout}{result.stderr}")
        return result

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """A file on its disk."""
        where = self.root / path.lstrip("/")
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(text)
        where.chmod(mode)

    def read(self, path: str) -> str:
        """A file of its disk."""
        return (self.root / path.lstrip("/")).read_text()

    def ups(self, *lines: str) -> None:
        """What the simulated upsd is told."""
        self.run("sh", "-c", "".join(f"echo '{line}' >> /run/upsd.in; " for line in lines))

    def ups_status(self) -> str:
        """What the simulated upsd says."""
        ask = "from powerguard.node.ups_client import CheckedClient as C; print(C().get_var('demo', 'ups.status'))"
        return self.run(f"/{VENV}/bin/python3", "-c", ask).stdout

    def show(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.run("systemctl", "show", "-P", name, unit).stdout.strip()

    def status(self) -> dict:
        """What the daemon says of itself; {} if there is none."""
        answer = self.run("powerguard", "status", "--json", check=False)
        return json.loads(answer.stdout) if answer.returncode == 0 else {}

    def log(self, unit: str = "powerguard") -> str:
        """The last lines of a unit's log."""
        with contextlib.suppress(Exception):
            return self.run("journalctl", "--no-pager", "-n", "300", "-o", "cat", "-u", unit, check=False).stdout
        return ""

    def console(self) -> str:
        """What it printed."""
        return (self.folder / "console.log").read_text(errors="replace")[-3000:]

    def until(self, condition: Callable[[], object], what: str, within_s: float = WAIT_S) -> None:
        """Waits, bounded."""
        ends = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > ends:
                raise AssertionError(f"waited {within_s} s for {what}\n{self.console()}\n{self.log()}")
            time.sleep(0.05)


@pytest.fixture(scope="session")
def machine(tmp_path_factory) -> Iterator[Machine]:
    """The machine, booted, with powerguard's wheel in a virtual environment and nothing installed as a service."""
    base = made_root()
    folder = tmp_path_factory.mktemp("machine")
    wheels = folder / "wheels"
    done(sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "-w", str(wheels),
         str(REPO))  # fmt: skip
    one = Machine(base, folder)
    try:
        pip_install(one.root, "--no-deps", *map(str, wheels.glob("powerguard-*.whl")))
        one.write("/etc/systemd/system/upsd.service", UPSD)
        wants = one.root / "etc/systemd/system/multi-user.target.wants/upsd.service"
        wants.parent.mkdir(exist_ok=True)
        wants.symlink_to("/etc/systemd/system/upsd.service")
        one.boot()
        yield one
    finally:
        one.close()
