"""sd_notify(3) without a library: words to the service manager, lost without harm when there is none."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping


class Notifier:
    """Speaks to `$NOTIFY_SOCKET`, abstract sockets ("@name") too. Never raises, never waits."""

    def __init__(self, env: Mapping[str, str] = os.environ, pid: int | None = None) -> None:
        self._address = env.get("NOTIFY_SOCKET", "")
        self._socket: socket.socket | None = None
        self._said = ""
        self.manager_gone = False  # nobody listens any more: the service manager has given way to systemd-shutdown
        if self._address.startswith(("/", "@")):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        mine = env.get("WATCHDOG_PID") in (None, "", str(os.getpid() if pid is None else pid))
        usec = env.get("WATCHDOG_USEC", "")
        self.watchdog_s: float | None = int(usec) / 1e6 if mine and usec.isdigit() and int(usec) else None

    def ready(self, status: str = "") -> None:
        """The daemon works: everything it needs was found."""
        self._send(f"READY=1\nSTATUS={_line(status)}")

    def reloading(self) -> None:
        """A reload begins; `ready` ends it."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self, status: str = "") -> None:
        """The daemon is on its way out."""
        self._send(f"STOPPING=1\nSTATUS={_line(status)}")

    def watchdog(self, status: str = "") -> None:
        """A tick was completed; *status* is shown by `systemctl status`, sent only when it differs from the last."""
        changed, self._said = status != self._said, status
        self._send(f"WATCHDOG=1\nSTATUS={_line(status)}" if changed else "WATCHDOG=1")

    def extend(self, seconds: float) -> None:
        """Asks for *seconds* more before a stop is forced."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def close(self) -> None:
        """No more words."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, text: str) -> None:
        if self._socket is None:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            self._socket.sendto(text.encode(errors="replace"), address)
        except (ConnectionRefusedError, FileNotFoundError):
            self.manager_gone = True
        except OSError:
            return  # a manager that doesn't listen mustn't cost a flush
        else:
            self.manager_gone = False


def _line(text: str) -> str:
    return " ".join(text.split())[:500]
