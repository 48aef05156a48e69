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
RETRY_S = (2.0, 10.0, 30.0)
"""After a failure the program is run again so much later: in an outage switches and routers come and go."""

log = structlog.get_logger()


class Teller:
    """Runs *command* with POWERGUARD_LEVEL, _TEXT, _FACTS (JSON), _NODE and _ATTEMPT (from 1) in its environment.

    In order: while one announcement is tried again the next ones wait. Status 0 is success.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        node: str,
        *,
        program_s: float = PROGRAM_S,
        retry_s: tuple[float, ...] = RETRY_S,
    ) -> None:
        self.command = command  # may be changed at any time
        self._node, self._program_s, self._retry_s = node, program_s, retry_s
        self._ending = threading.Event()
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
        """Ends once what waits is told, each tried once more at most, or after *wait_s*."""
        self._ending.set()
        try:
            self._waiting.put(None, timeout=wait_s)
        except queue.Full:
            return
        self._thread.join(wait_s)

    def _run(self) -> None:
        while (news := self._waiting.get()) is not None:
            for attempt, wait_s in enumerate((*self._retry_s, 0.0), start=1):
                why = self._told(news, attempt)
                if not why:
                    break
                log.warning("notify command failed", why=why, attempt=attempt, text=news.text)
                if self._ending.wait(wait_s):
                    break

    def _told(self, news: Announce, attempt: int) -> str:
        """ "" once the program has it, else why not."""
        command = self.command
        if not command:
            return ""
        env = {
            **os.environ,
            "POWERGUARD_LEVEL": news.level,
            "POWERGUARD_TEXT": news.text,
            "POWERGUARD_FACTS": msgspec.json.encode(news.facts).decode(),
            "POWERGUARD_NODE": self._node,
            "POWERGUARD_ATTEMPT": str(attempt),
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
            return f"{command[0]} didn't return within {self._program_s:g} s"
        except Exception as err:  # a program of the operator's may fail in any way
            return f"{command[0]}: {err}"
        return f"{command[0]} ended with {done.returncode}" if done.returncode else ""
