"""The ways to power a node off: by logind, by the NUT primary on this node, by a command, or only in words.

Each can be proven beforehand without halting (`prove`), may be asked twice, and gives up within a bound.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from powerguard.config import UpsConfig
from powerguard.errors import HaltNotPermitted
from powerguard.node import fsd
from powerguard.node.program import ProgramFailed, run

BUS_S = 5.0
"""Every D-Bus call has this long; logind answers in milliseconds."""
PROGRAM_S = 20.0
"""A halting program has this long. `systemctl poweroff` returns once the job is queued."""
HALT_FILE = "halt"
"""In run_dir: what powerguard-halt.path waits for."""
PATH_UNIT = "powerguard-halt.path"
UNIT_FOLDERS = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
)
SYSTEMCTL = ("/usr/bin/systemctl", "--no-ask-password", "poweroff")
UPSMON = ("/sbin/upsmon", "-c", "fsd")
UPSMON_PIDS = (Path("/run/nut/upsmon.pid"), Path("/var/run/nut/upsmon.pid"), Path("/run/upsmon.pid"))
_LOGIND_TODO = "install the polkit rule (systemd/powerguard.rules), or set [halt] method"


class HaltFailed(Exception):
    """The node couldn't be told to halt by this way."""


class Way(Protocol):
    """One way to halt."""

    name: str
    real: bool  # whether power goes off
    logs_out: bool  # the primary that our LOGIN would keep waiting is this node itself

    def prove(self) -> str:
        """What `halt` would do, in words; raises HaltNotPermitted if it would fail. Halts nothing."""

    def halt(self, reason: str) -> str:
        """Halts; returns what was done. Raises HaltFailed. Bounded."""


class DryRun:
    """Says that it would halt."""

    name, real, logs_out = "dry-run", False, False

    def prove(self) -> str:
        return "a dry run: the node is not powered off"

    def halt(self, reason: str) -> str:
        return f"dry run: the node would be powered off now ({reason})"


class Program:
    """Runs a program, which is told the reason in POWERGUARD_REASON."""

    name, real, logs_out = "command", True, False

    def __init__(self, command: Sequence[str], *, bound_s: float = PROGRAM_S) -> None:
        self._command, self._bound_s = tuple(command), bound_s

    def prove(self) -> str:
        program = self._command[0]
        if not os.path.isfile(program) or not os.access(program, os.X_OK):
            raise HaltNotPermitted(f"{program} isn't a program that this user may run", todo="correct [halt] command")
        return f"runs {' '.join(self._command)}"

    def halt(self, reason: str) -> str:
        return _run(self._command, reason, self._bound_s)


class Logind:
    """Asks logind over D-Bus. Where that fails it asks process 1, which needs no D-Bus to see the file that
    powerguard-halt.path waits for, and runs `systemctl poweroff`.
    """

    name, real, logs_out = "logind", True, False

    def __init__(
        self,
        halt_file: Path | None = None,
        *,
        systemctl: Sequence[str] = SYSTEMCTL,
        unit_folders: Sequence[str] = UNIT_FOLDERS,
        bound_s: float = BUS_S,
    ) -> None:
        self._file, self._systemctl, self._folders, self._bound_s = halt_file, tuple(systemctl), unit_folders, bound_s

    def prove(self) -> str:
        try:
            answer = _logind(self._bound_s, "CanPowerOff")
        except HaltFailed as err:
            raise HaltNotPermitted(str(err), todo="start dbus and systemd-logind, or set [halt] method") from None
        if answer != "yes":
            raise HaltNotPermitted(
                f"logind answers {answer!r} when asked whether user {os.geteuid()} may power off", todo=_LOGIND_TODO
            )
        way = f"and {PATH_UNIT} does where D-Bus is dead" if self._watched() else f"no {PATH_UNIT}, so D-Bus must live"
        return f"logind lets this user power the node off, {way}"

    def halt(self, reason: str) -> str:
        try:
            _logind(self._bound_s, "PowerOff", "b", (False,))
        except HaltFailed as err:
            return self._without_logind(reason, str(err))
        return f"logind was asked to power off ({reason})"

    def _without_logind(self, reason: str, why: str) -> str:
        done, failed = [], []
        if self._watched() and self._file is not None:
            try:
                self._file.write_text(f"{reason}\n")
                done.append(f"{self._file} was made for {PATH_UNIT}")
            except OSError as err:
                failed.append(f"{self._file}: {err.strerror}")
        try:
            done.append(_run(self._systemctl, reason, PROGRAM_S))
        except HaltFailed as err:
            failed.append(str(err))
        if not done:
            raise HaltFailed("; ".join((why, *failed)))
        return f"{' and '.join(done)} ({reason}), because {why}"

    def _watched(self) -> bool:
        """Whether the file would be seen, as far as can be told without D-Bus."""
        return self._file is not None and any(os.path.exists(f"{folder}/{PATH_UNIT}") for folder in self._folders)


class UpsmonFsd:
    """A forced shutdown by the NUT primary on this node: upsmon waits for the secondaries, halts this node, and has the
    UPS cut its output, which comes back with the mains.

    `upsmon -c fsd` needs root or upsmon's own user. Without that the FSD is set in upsd, by our own user, where that is
    a primary: upsmon sees it at its next poll. Where neither works the node is powered off *otherwise*.
    """

    name, real, logs_out = "upsmon-fsd", True, True

    def __init__(
        self,
        feeds: Sequence[UpsConfig],
        otherwise: Way,
        *,
        command: Sequence[str] = UPSMON,
        pids: Sequence[Path] = UPSMON_PIDS,
        bound_s: float = PROGRAM_S,
    ) -> None:
        self._feeds, self._otherwise, self._command = tuple(feeds), otherwise, tuple(command)
        self._pids, self._bound_s = pids, bound_s
        self._asked = False

    def prove(self) -> str:
        signal = _may_signal(self._pids)
        if signal is None:
            raise HaltNotPermitted("no upsmon runs here", todo='start nut-monitor, or set [halt] method = "logind"')
        if signal and os.access(self._command[0], os.X_OK):
            return f"runs {' '.join(self._command)}"
        granted = [ups.name for ups in self._feeds if fsd.permitted(ups)]
        if not granted:
            raise HaltNotPermitted(
                "this user may neither signal upsmon nor set FSD in upsd",
                todo='give the user of [[ups]] an "upsmon primary" line in upsd.users, or set [halt] method = "logind"',
            )
        return f"sets FSD in upsd for {', '.join(granted)}, and upsmon on this node obeys"

    def halt(self, reason: str) -> str:
        if self._asked:  # and we are still here: upsmon doesn't do it
            return self._otherwise.halt(reason)
        failed = []
        if _may_signal(self._pids):
            try:
                done = _run(self._command, reason, self._bound_s)
            except HaltFailed as err:
                failed.append(str(err))
            else:
                self._asked = True
                return f"{done} ({reason})"
        set_for = []
        for ups in self._feeds:
            try:
                fsd.command(ups)
                set_for.append(ups.name)
            except fsd.FsdFailed as err:
                failed.append(str(err))
        if set_for:
            self._asked = True
            return f"FSD was set for {', '.join(set_for)} ({reason})"
        why = "; ".join(failed) or "no upsmon runs here"
        return f"{self._otherwise.halt(reason)}; not by FSD, because {why}"


def _may_signal(pids: Sequence[Path]) -> bool | None:
    """Whether we may signal the upsmon of this node; None = none runs."""
    for path in pids:
        try:
            os.kill(int(path.read_text()), 0)
        except PermissionError:
            return False
        except (OSError, ValueError):
            continue
        return True
    return None


def _logind(bound_s: float, method: str, signature: str | None = None, body: tuple[object, ...] = ()) -> object:
    """A call of logind's manager and the first value of its answer; HaltFailed for whatever goes wrong. Bounded."""
    outcome: list[object] = []

    def call() -> None:
        try:
            outcome.append(_call(bound_s, method, signature, body))
        except Exception as err:  # a broken bus may break in any way
            outcome.append(err)

    # On a thread: jeepney bounds the authentication and the call, but not its first call, Hello.
    thread = threading.Thread(target=call, name="logind", daemon=True)
    thread.start()
    thread.join(2 * bound_s)
    answer = outcome[0] if outcome else TimeoutError(f"no answer within {2 * bound_s:g} s")
    if isinstance(answer, Exception):
        raise HaltFailed(f"D-Bus: {answer}")
    return answer


def _call(bound_s: float, method: str, signature: str | None, body: tuple[object, ...]) -> object:
    from jeepney import DBusAddress, MessageType, new_method_call
    from jeepney.io.blocking import open_dbus_connection

    manager = DBusAddress("/org/freedesktop/login1", "org.freedesktop.login1", "org.freedesktop.login1.Manager")
    with open_dbus_connection("SYSTEM") as bus:
        reply = bus.send_and_get_reply(new_method_call(manager, method, signature, body), timeout=bound_s)
    if reply.header.message_type is MessageType.error:
        raise HaltFailed(f"logind refused {method}: {reply.body[0] if reply.body else 'no reason given'}")
    return reply.body[0] if reply.body else None


def _run(command: Sequence[str], reason: str, bound_s: float) -> str:
    try:
        run(command, bound_s, {**os.environ, "POWERGUARD_REASON": reason})
    except ProgramFailed as err:
        raise HaltFailed(str(err)) from None
    return f"{' '.join(command)} was run"


def choose(
    method: str, command: Sequence[str], *, really: bool, run_dir: str = "", feeds: Sequence[UpsConfig] = ()
) -> Way:
    """The way that the configuration names; a dry run unless *really*. *run_dir*: the daemon's, of its service."""
    if not really or method == "dry-run":
        return DryRun()
    if method == "command":
        return Program(command)
    logind = Logind(Path(run_dir, HALT_FILE) if run_dir else None)
    return logind if method == "logind" else UpsmonFsd(feeds, logind, command=command or UPSMON)
