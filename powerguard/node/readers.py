"""Keeps one reader thread running for each feed: started, slowed, hurried, and started anew should one end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec
import structlog

from powerguard.config import Secret, UpsConfig

RESTART_S = 1.0
"""A reader that ended is started anew after this long."""

log = structlog.get_logger()


class Reader(Protocol):
    """What is needed of `ups.UpsReader`."""

    @property
    def login_held(self) -> bool:
        """Whether the NUT primary knows of us."""

    @property
    def login_problem(self) -> str:
        """Why not, where upsd gave a reason."""

    def start(self) -> None:
        """Begins to read."""

    def is_alive(self) -> bool:
        """Whether the thread runs."""

    def trouble(self) -> str:
        """What is wrong with the thread, or ""."""

    def set_poll(self, seconds: float, *, calm: bool) -> None:
        """Reads so often from now on; *calm*: what isn't new needn't be told each time."""

    def close(self, *, logout: bool = True, within_s: float = 10.0) -> bool:
        """Ends it."""


class Readers:
    """The readers of all feeds; *make* gives a new one, not yet started. For the loop's thread alone."""

    def __init__(self, make: Callable[[UpsConfig, float], Reader], clock: Callable[[], float]) -> None:
        self._make, self._clock = make, clock
        self._poll_s, self._calm = 5.0, False
        self._configs: dict[str, UpsConfig] = {}
        self._readers: dict[str, Reader] = {}
        self._tried_at: dict[str, float] = {}

    def apply(self, feeds: Iterable[UpsConfig]) -> None:
        """Reads exactly *feeds* from now on; those that didn't change keep their connection and their LOGIN."""
        wanted = {ups.name: ups for ups in feeds}
        for name in [n for n, ups in self._configs.items() if wanted.get(n) != ups]:
            del self._configs[name]
            reader = self._readers.pop(name, None)
            if reader is not None:
                reader.close(within_s=1.0)
        for name, ups in wanted.items():
            if name not in self._configs:
                self._configs[name] = ups
                self._begin(name)

    def log_out(self) -> None:
        """Gives every LOGIN up, and reads on: the primary that would wait for us is to go down first."""
        self.apply([msgspec.structs.replace(ups, user="", password=Secret()) for ups in self._configs.values()])

    def poll(self, seconds: float, *, calm: bool) -> None:
        """The period of all of them, and whether nothing is the matter."""
        if (seconds, calm) != (self._poll_s, self._calm):
            self._poll_s, self._calm = seconds, calm
            for reader in self._readers.values():
                reader.set_poll(seconds, calm=calm)

    def care(self) -> None:
        """Starts anew what has ended. Called at every tick."""
        for name in self._configs:
            reader = self._readers.get(name)
            if reader is not None and reader.is_alive():
                continue
            if self._clock() - self._tried_at.get(name, -RESTART_S) >= RESTART_S:
                log.error("ups reader ended, starting it anew", feed=name, why=reader.trouble() if reader else "")
                self._begin(name)

    def logins(self) -> dict[str, bool | None]:
        """By feed: whether LOGIN is held; None where no user is configured. From any thread, as `problems`."""
        return {
            name: (reader.login_held if self._configs[name].user else None)
            for name, reader in list(self._readers.items())
            if name in self._configs
        }

    def problems(self) -> dict[str, str]:
        """By feed: why LOGIN isn't held, where upsd gave a reason."""
        return {name: reader.login_problem for name, reader in list(self._readers.items()) if reader.login_problem}

    def close(self, *, logout: bool) -> None:
        """Ends all of them; without *logout* the LOGINs hold until the process ends."""
        for reader in self._readers.values():
            reader.close(logout=logout, within_s=2.0)

    def _begin(self, name: str) -> None:
        self._tried_at[name] = self._clock()
        try:
            reader = self._make(self._configs[name], self._poll_s)
            reader.set_poll(self._poll_s, calm=self._calm)
            reader.start()
        except Exception as err:  # no thread to be had, say: tried again at the next tick
            log.error("ups reader can't be started", feed=name, why=str(err))
            self._readers.pop(name, None)
            return
        self._readers[name] = reader
