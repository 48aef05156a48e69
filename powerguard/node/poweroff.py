"""Powering the node off: by logind, by a command, by the local upsmon, or only in words.

Each way can be proven beforehand without halting (`prove`), may be asked twice, and gives up within a bound.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from powerguard.errors import HaltNotPermitted

BUS_S = 5.0
"""Every D-Bus call has this long; logind answers in milliseconds."""
PROGRAM_S = 20.0
"""A halting program has this long. `systemctl poweroff` returns once the job is queued."""
RETRY_S = 5.0
AGAIN_S = 120.0
"""A shutdown that takes longer than this hangs: systemd's own limit for one unit is 90 s."""
UPSMON = ("/sbin/upsmon", "-c", "fsd")
UPSMON_PIDS = (Path("/run/nut/upsmon.pid"), Path("/var/run/nut/upsmon.pid"), Path("/run/upsmon.pid"))
_LOGIND_TODO = "install the polkit rule (systemd/powerguard.rules), or set [halt] method"


class HaltFailed(Exception):
    """The node couldn't be told to halt by this way."""


class Way(Protocol):
    """One way to halt."""

    name: str
    real: bool  # whether power goes off

    def prove(self) -> str:
        """What `halt` would do, in words; raises HaltNotPermitted if it would fail. Halts nothing."""

    def halt(self, reason: str) -> str:
        """Halts; returns what was done. Raises HaltFailed. Bounded."""


class DryRun:
    """Says that it would halt."""

    name, real = "dry-run", False

    def prove(self) -> str:
        return "a dry run: the node is not powered off"

    def halt(self, reason: str) -> str:
        return f"dry run: the node would be powered off now ({reason})"


class Program:
    """Runs a program; *pids* are the files that name the process which it signals."""

    real = True

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str = "command",
        pids: Sequence[Path] | None = None,
        bound_s: float = PROGRAM_S,
    ) -> None:
        self.name, self._command, self._pids, self._bound_s = name, tuple(command), pids, bound_s

    def prove(self) -> str:
        program = self._command[0]
        if not os.path.isfile(program) or not os.access(program, os.X_OK):
            raise HaltNotPermitted(f"{program} isn't a program that this user may run", todo="correct [halt] command")
        if self._pids is not None:
            self._prove_signal(self._pids)
        return f"runs {' '.join(self._command)}"

    def _prove_signal(self, pids: Sequence[Path]) -> None:
        for path in pids:
            try:
                os.kill(int(path.read_text()), 0)
            except PermissionError:
                raise HaltNotPermitted(
                    "upsmon runs as root, and this user may not signal it", todo='set [halt] method = "logind"'
                ) from None
            except (OSError, ValueError):
                continue
            return
        raise HaltNotPermitted("no upsmon runs here", todo='start nut-monitor, or set [halt] method = "logind"')

    def halt(self, reason: str) -> str:
        env = {**os.environ, "POWERGUARD_REASON": reason}
        return _run(self._command, env, self._bound_s)


class Logind:
    """Asks logind over D-Bus, and `systemctl poweroff` where that fails."""

    name, real = "logind", True

    def __init__(self, fallback: Sequence[str] = ("/usr/bin/systemctl", "poweroff"), *, bound_s: float = BUS_S) -> None:
        self._fallback, self._bound_s = tuple(fallback), bound_s

    def prove(self) -> str:
        try:
            answer = _logind(self._bound_s, "CanPowerOff")
        except HaltFailed as err:
            raise HaltNotPermitted(str(err), todo="start dbus and systemd-logind, or set [halt] method") from None
        if answer != "yes":
            raise HaltNotPermitted(
                f"logind answers {answer!r} when asked whether user {os.geteuid()} may power off", todo=_LOGIND_TODO
            )
        return "logind lets this user power the node off"

    def halt(self, reason: str) -> str:
        try:
            _logind(self._bound_s, "PowerOff", "b", (False,))
        except HaltFailed as err:
            done = _run(self._fallback, os.environ, PROGRAM_S)
            return f"{done} ({reason}), because {err}"
        return f"logind was asked to power off ({reason})"


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


def _run(command: Sequence[str], env: Mapping[str, str], bound_s: float) -> str:
    shown = " ".join(command)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=bound_s,
            check=False,
            env=env,
            start_new_session=True,  # a signal to our own group mustn't end it
        )
    except subprocess.TimeoutExpired:
        raise HaltFailed(f"{shown} didn't return within {bound_s:g} s") from None
    except OSError as err:
        raise HaltFailed(f"{shown}: {err.strerror}") from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        raise HaltFailed(f"{shown} returned {done.returncode}{': ' + said[-1] if said else ''}")
    return f"{shown} was run"


def choose(method: str, command: Sequence[str], *, really: bool) -> Way:
    """The way that the configuration names; a dry run unless *really*."""
    if not really or method == "dry-run":
        return DryRun()
    if method == "logind":
        return Logind()
    if method == "upsmon-fsd":
        return Program(command or UPSMON, name=method, pids=UPSMON_PIDS)
    return Program(command)


class Result(Struct, frozen=True):
    """What became of one attempt."""

    done: bool
    real: bool
    text: str


class Poweroff:
    """Carries a halt out on its own thread, so that the loop goes on. *put* gets a Result for each attempt.

    Asked twice it is one halt. What fails is tried again after *retry_s*; a node that is still up *again_s* after it
    was powered off is powered off again.
    """

    def __init__(
        self, way: Way, put: Callable[[Result], None], *, retry_s: float = RETRY_S, again_s: float = AGAIN_S
    ) -> None:
        self.way, self._put, self._retry_s, self._again_s = way, put, retry_s, again_s
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    @property
    def ordered(self) -> bool:
        """Whether a halt is under way or done."""
        return self._thread is not None

    def halt(self, reason: str, *, done: bool = False) -> None:
        """Begins, once. *done*: it was carried out already (before a restart), so only watch that it takes effect."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._halt, args=(reason, done), name="poweroff", daemon=True)
            self._thread.start()

    def again(self) -> None:
        """Forgets a halt that was only a dry run: the next one is a new one."""
        if not self.way.real:
            self._thread = None

    def close(self) -> None:
        """No more retries."""
        self._stop.set()

    def _halt(self, reason: str, done: bool) -> None:
        while True:
            if done and (not self.way.real or self._stop.wait(self._again_s)):
                return
            if done:
                reason = f"still up {self._again_s:g} s after the power-off: {reason}"
            try:
                result = Result(True, self.way.real, self.way.halt(reason))
            except Exception as err:  # whatever it is, the node must still go down
                result = Result(False, self.way.real, str(err))
            done = result.done
            self._put(result)
            if not done and self._stop.wait(self._retry_s):
                return
