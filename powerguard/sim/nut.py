"""A private real NUT: upsd and its drivers as children of this process, fed by a scenario.

    with RealNut({"demo": {"ups.status": "OL", "battery.charge": "100"}}) as nut:
        nut.set("demo", {"ups.status": "OB DISCHRG"})
        ... nut.address("demo") ...

Everything runs in the foreground under a directory of its own, on a port of its own, as user `nut` if we are
root, and is waited for: a daemonised upsd that died would go on looking alive until init reaps it.
Linux only; needs the packages of `INSTALL`.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from powerguard.errors import MissingDependency, PowerguardError
from powerguard.sim.upsd_answers import USERS, User

INSTALL = "apt-get install nut-server nut-client (and nut-snmp for SNMP)"
FOLDERS = ("/lib/nut", "/usr/lib/nut", "/usr/libexec/nut", "/usr/lib/ups/driver", "/usr/sbin", "/sbin", "/usr/bin")
"""Where distributions keep upsd and the drivers. Debian's /usr/sbin/upsd is a wrapper that does nothing while
/etc/nut/nut.conf says MODE=none, so the folders of the real binaries come first."""

READY_S = 60.0
"""A driver and upsd need some 3 s until the first data is in (WAIT until then); far longer where cores are scarce."""

# dummy-ups reads its file with parseconf: these are eaten or end the value
_UNWRITABLE = set('"#\\\n\r')


@dataclass(frozen=True)
class Driver:
    """A section of ups.conf for a driver other than dummy-ups: *name* and its *options*."""

    name: str
    options: Mapping[str, str] = field(default_factory=dict)


def find(program: str) -> Path:
    """The real *program* of NUT. Raises MissingDependency."""
    for folder in FOLDERS:
        candidate = Path(folder, program)
        if os.access(candidate, os.X_OK):
            return candidate
    raise MissingDependency(f"NUT's {program} isn't installed (looked in {', '.join(FOLDERS)})", todo=INSTALL)


def missing(*programs: str) -> str:
    """Why a real NUT can't be run here; "" if it can."""
    try:
        for program in programs or ("upsd", "dummy-ups"):
            find(program)
    except MissingDependency as error:
        return str(error)
    return ""


class RealNut:
    """upsd with one driver for each of *upses*: variables (or the text of a `.dev`/`.seq` file) for dummy-ups, or a
    `Driver`. *upsd_conf* is appended to upsd.conf. One thread at a time.
    """

    def __init__(
        self,
        upses: Mapping[str, Mapping[str, str] | str | Driver],
        *,
        users: Mapping[str, User] = USERS,
        port: int = 0,
        host: str = "127.0.0.1",
        maxage_s: int = 15,
        upsd_conf: str = "",
        ready: bool = True,
    ) -> None:
        self.upsd_program = find("upsd")
        self.host, self.port = host, port or _free_port(host)
        self._upses = dict(upses)
        self._programs = {
            name: find(each.name if isinstance(each, Driver) else "dummy-ups") for name, each in upses.items()
        }
        self._users, self._maxage_s, self._more = users, maxage_s, upsd_conf
        self._wait_ready = ready
        self._values: dict[str, dict[str, str]] = {}
        self._edits: dict[str, int] = {}  # whole seconds given as mtime, by UPS
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self.as_user = _nut_user()
        self.directory = Path()

    # ---- life ------------------------------------------------------------------------------------

    def __enter__(self) -> RealNut:
        # not under a caller's directory: user nut must be able to reach it
        self.directory = Path(tempfile.mkdtemp(prefix="powerguard-nut-"))
        try:
            self._configure()
            for name in self._upses:
                self.start_driver(name)
            self.start_upsd()
            if self._wait_ready:
                self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every child and removes the directory."""
        for name in reversed(list(self._children)):
            self.stop(name)
        if self.directory != Path():
            shutil.rmtree(self.directory, ignore_errors=True)

    # ---- use -------------------------------------------------------------------------------------

    def address(self, ups: str) -> str:
        """`ups@host:port`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{ups}@{host}:{self.port}"

    def set(self, ups: str, variables: Mapping[str, str]) -> None:
        """Changes variables of a dummy UPS. Clients see it within about 1 s (dummy-ups looks at its file every second).

        dummy-ups keeps what was set before: a variable can be changed, never taken away. Raises ValueError for an empty
        value and for quotes, #, backslashes and line ends, which dummy-ups doesn't read back.
        """
        for name, value in variables.items():
            if not value or _UNWRITABLE & set(name + value):
                raise ValueError(f"dummy-ups can't show {name} = {value!r}")
        self._values[ups].update(variables)
        self._write_device(ups, "".join(f"{name}: {value}\n" for name, value in self._values[ups].items()))

    def start_driver(self, ups: str) -> None:
        """Starts the driver of *ups*; returns when upsd can connect to it."""
        program = self._programs[ups]
        waits_for = self.directory / "state" / f"{program.name}-{ups}"
        waits_for.unlink(missing_ok=True)  # a driver in the foreground leaves its socket behind
        self._spawn(ups, [str(program), "-a", ups, "-F"])
        self._until(waits_for.exists, f"the driver of {ups} to open its socket", ups)

    def start_upsd(self) -> None:
        """Starts upsd; returns when it listens.

        A dummy-ups 2.8.0 that outlived an upsd aborts at the next SET VAR, which writes to the dead connection; `set`,
        which goes by the file, is safe.
        """
        self._spawn("upsd", [str(self.upsd_program), "-F"])
        self._until(lambda: bool(self.ask("VER")), "upsd to listen", "upsd")

    def start_upsmon(self, conf: str) -> None:
        """Starts NUT's own client with *conf* as its upsmon.conf, in one process (-p): else its unprivileged half would
        outlive the one that we end, and stay logged in.
        """
        _write(self.directory / "etc" / "upsmon.conf", conf)
        self.give_away(self.directory / "etc" / "upsmon.conf")
        self._spawn("upsmon", [str(find("upsmon")), "-F", "-p"])

    def stop(self, name: str, with_signal: signal.Signals = signal.SIGTERM) -> None:
        """Ends "upsd" or the driver of a UPS, and waits for its end."""
        child = self._children.pop(name, None)
        if child is None:
            return
        if child.poll() is None:
            child.send_signal(signal.SIGCONT)
            child.send_signal(with_signal)
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(5)

    def send(self, name: str, what: signal.Signals) -> None:
        """A signal to "upsd" or the driver of a UPS: SIGSTOP hangs it, SIGCONT lets it go on."""
        self._children[name].send_signal(what)

    def wait_ready(self, *upses: str, within_s: float = READY_S) -> None:
        """Waits until *upses* (default: all) have data."""
        for ups in upses or tuple(self._upses):
            self._until(lambda ups=ups: self._has_data(ups), f"data of {ups}", ups, within_s)  # type: ignore[misc]

    def _has_data(self, ups: str) -> bool:
        status = self.ask(f"GET VAR {ups} ups.status")
        return status.startswith("VAR ") and "WAIT" not in status

    def ask(self, question: str) -> str:
        """The first line that upsd answers on a connection of its own; "" if it doesn't."""
        with contextlib.suppress(OSError), socket.create_connection((self.host, self.port), 1.0) as connection:
            connection.sendall(question.encode() + b"\n")
            return connection.makefile("rb").readline().decode("utf-8", "surrogateescape").strip()
        return ""

    def log(self, name: str) -> str:
        """What "upsd" or a driver printed so far."""
        return (self.directory / f"{name}.log").read_text("utf-8", "replace")

    # ---- files -----------------------------------------------------------------------------------

    def _configure(self) -> None:
        etc, state = self.directory / "etc", self.directory / "state"
        self.directory.chmod(0o755)
        etc.mkdir()
        state.mkdir()
        _write(
            etc / "upsd.conf",
            f"LISTEN {self.host} {self.port}\nMAXAGE {self._maxage_s}\nSTATEPATH {state}\n{self._more}\n",
        )
        _write(etc / "upsd.users", "\n".join(_user_lines(self._users)) + "\n")
        _write(etc / "ups.conf", "\n".join(self._conf_lines()) + "\n")
        for name, what in self._upses.items():
            if isinstance(what, Driver):
                continue
            if isinstance(what, str):
                self._write_device(name, what)
            else:
                self._values[name] = {}
                self.set(name, what)
        self.give_away(etc, state, *etc.iterdir())
        state.chmod(0o770)

    def give_away(self, *paths: Path) -> None:
        if self.as_user:
            account = pwd.getpwnam(self.as_user)
            for each in paths:
                os.chown(each, account.pw_uid, account.pw_gid)

    def _conf_lines(self) -> Iterator[str]:
        yield from ("maxretry = 1", "pollinterval = 1")
        for name, what in self._upses.items():
            yield f"[{name}]"
            if isinstance(what, Driver):
                yield f"  driver = {what.name}"
                yield from (f'  {key} = "{value}"' for key, value in what.options.items())
                continue
            looped = isinstance(what, str) and "TIMER" in what
            yield "  driver = dummy-ups"
            yield f"  port = {name}.{'seq' if looped else 'dev'}"
            yield f"  mode = dummy-{'loop' if looped else 'once'}"
            yield f'  desc = "powerguard {name}"'

    def _write_device(self, ups: str, text: str) -> None:
        """dummy-ups looks at the file's time in whole seconds: every edit gets a later one, and comes by rename."""
        kind = "seq" if "TIMER" in text else "dev"
        path = self.directory / "etc" / f"{ups}.{kind}"
        fresh = path.with_suffix(".new")
        fresh.write_text(text, "utf-8")
        fresh.chmod(0o644)
        self._edits[ups] = max(self._edits.get(ups, 0) + 1, int(time.time()))
        os.utime(fresh, (self._edits[ups], self._edits[ups]))
        fresh.replace(path)

    # ---- children --------------------------------------------------------------------------------

    def _spawn(self, name: str, command: list[str]) -> None:
        assert name not in self._children, f"{name} runs already"
        folders = {"NUT_CONFPATH": "etc", "NUT_STATEPATH": "state", "NUT_ALTPIDPATH": "state"}
        environment = dict(os.environ, **{key: str(self.directory / folder) for key, folder in folders.items()})
        with (self.directory / f"{name}.log").open("ab") as log:
            self._children[name] = subprocess.Popen(
                command + (["-u", self.as_user] if self.as_user else []),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _until(self, holds: Callable[[], bool], what: str, name: str, within_s: float = READY_S) -> None:
        ends = time.monotonic() + within_s
        while not holds():
            code = self._children[name].poll() if name in self._children else None
            if code is not None or time.monotonic() > ends:
                ended = f"ended with {code}" if code is not None else f"nothing in {within_s:.0f} s"
                raise PowerguardError(f"waited for {what}: {ended}", todo=f"{name} printed: {self.log(name)[-800:]}")
            time.sleep(0.02)


def _write(path: Path, text: str) -> None:
    path.write_text(text, "utf-8")
    path.chmod(0o640)


def _user_lines(users: Mapping[str, User]) -> Iterator[str]:
    for name, user in users.items():
        yield f"[{name}]"
        yield f'  password = "{user.password}"'
        if user.upsmon:
            yield f"  upsmon {user.upsmon}"
        if user.may_set:
            yield "  actions = SET"
        if user.may_fsd:
            yield "  actions = FSD"
        if user.instcmds:
            yield "  instcmds = ALL"


def _nut_user() -> str:
    """Whom root hands the daemons to; "" if we aren't root, or there is no such user (then they stay as we are)."""
    if os.geteuid() != 0:
        return ""
    for name in ("nut", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    return ""


def _free_port(host: str) -> int:
    """A free port below the ephemeral range, so that upsd can be restarted on it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    first = 20000 + os.getpid() % 10000
    for port in range(first, first + 500):
        with socket.socket(family, socket.SOCK_STREAM) as trial, contextlib.suppress(OSError):
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port))
            return port
    raise PowerguardError("no free port for upsd")
