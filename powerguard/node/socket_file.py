"""A socket file that only one daemon serves: its folder, its lock, its mode and its group."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from pathlib import Path

from powerguard.errors import DirectoryError

PATH_BYTES = 107
"""sun_path of unix(7), less its final zero."""


class SocketFile:
    """The right to serve *path*, held until `close` or the process's end. Raises DirectoryError where it can't be had.

    ZeroMQ replaces a socket file without asking, so a lock beside it is what keeps two daemons apart.
    """

    def __init__(self, path: str | Path, *, mode: int, group: str = "") -> None:
        self.path = Path(path)
        self.mode, self.group = mode, group
        if len(os.fsencode(self.path)) > PATH_BYTES:
            text = f"{self.path} is too long for a socket: over {PATH_BYTES} bytes"
            raise DirectoryError(text, todo="shorten run_dir")
        self._lock = -1
        try:
            self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            self._lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if self._lock >= 0:
                os.close(self._lock)
            if error.errno == errno.EAGAIN:
                raise DirectoryError(
                    f"another daemon serves {self.path}",
                    todo="stop it first, or give this one its own run_dir and state_dir",
                ) from error
            raise DirectoryError(
                f"can't make a socket in {self.path.parent}: {error.strerror}",
                todo="create the folder for this user (RuntimeDirectory=powerguard), or set run_dir",
            ) from error

    @property
    def endpoint(self) -> str:
        """For ZeroMQ."""
        return f"ipc://{self.path}"

    def open_up(self) -> None:
        """After the socket was bound: who may connect. Raises DirectoryError."""
        try:
            if self.group:
                shutil.chown(self.path, group=self.group)
            os.chmod(self.path, self.mode)
        except (OSError, LookupError) as error:
            raise DirectoryError(
                f"can't give {self.path} to group {self.group or 'of its folder'}: {error}",
                todo="set socket_group to a group that the daemon's user belongs to",
            ) from error

    def shut(self, *, door: bool) -> None:
        """Moves the file away, so that nobody new finds it, or back. Connections stay: unbinding would end them all."""
        source, target = (self.path, self._aside) if door else (self._aside, self.path)
        with contextlib.suppress(OSError):
            os.rename(source, target)

    @property
    def _aside(self) -> Path:
        return self.path.with_name(f"{self.path.name}.full")

    def close(self) -> None:
        """Gives the right up. The lock file stays: removing it would race with a successor."""
        if self._lock >= 0:
            for path in (self.path, self._aside):
                with contextlib.suppress(OSError):
                    path.unlink()  # what nobody answers on should not be there
            with contextlib.suppress(OSError):
                os.close(self._lock)
            self._lock = -1
