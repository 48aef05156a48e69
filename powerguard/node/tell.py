"""Tells people: a program of the operator's is run for each announcement, one at a time, bounded, never waited for."""

from __future__ import annotations

import os
import queue
import subprocess
import threading

import msgspec
import structlog

from powerguard.core.types import Announce

PROGRAM_S = 10.0
WAITING_MAX = 64
"""Announcements that may wait for a slow program; beyond, they are only logged."""

log = structlog.get_logger()


class Teller:
    """Runs *command* with POWERGUARD_LEVEL, _TEXT, _FACTS (JSON) and _NODE in its environment."""

    def __init__(self, command: tuple[str, ...], node: str, *, program_s: float = PROGRAM_S) -> None:
        self.command = command  # may be changed at any time
        self._node, self._program_s = node, program_s
        self._waiting: queue.Queue[Announce | None] = queue.Queue(WAITING_MAX)
        self._thread = threading.Thread(target=self._run, name="notify", daemon=True)
        self._thread.start()

    def tell(self, news: Announce) -> None:
        """Queues *news*. Never waits, never raises."""
        if not self.command:
            return
        try:
            self._waiting.put_nowait(news)
        except queue.Full:
            log.warning("notify command is too slow, an announcement isn't passed on", text=news.text)

    def close(self, wait_s: float = 1.0) -> None:
        """Ends once what waits is told, or after *wait_s*."""
        try:
            self._waiting.put(None, timeout=wait_s)
        except queue.Full:
            return
        self._thread.join(wait_s)

    def _run(self) -> None:
        while (news := self._waiting.get()) is not None:
            try:
                self._tell(self.command, news)
            except Exception as err:  # a program of the operator's may fail in any way
                log.warning("notify command failed", why=str(err))

    def _tell(self, command: tuple[str, ...], news: Announce) -> None:
        if not command:
            return
        env = {
            **os.environ,
            "POWERGUARD_LEVEL": news.level,
            "POWERGUARD_TEXT": news.text,
            "POWERGUARD_FACTS": msgspec.json.encode(news.facts).decode(),
            "POWERGUARD_NODE": self._node,
        }
        try:
            done = subprocess.run(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=self._program_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            log.warning("notify command didn't return in time", command=command[0], seconds=self._program_s)
            return
        if done.returncode:
            log.warning("notify command failed", command=command[0], status=done.returncode)
