"""The rank's end of the bus: a DEALER on a listener thread, which answers while the training thread computes.

It reconnects for ever, greets whenever a connection is made, beats once a second and repeats what isn't acknowledged.
It owns its socket: other threads only ring a bell. In a forked child (a DataLoader worker) there is no such thread, and
nothing here touches the parent's socket.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from powerguard import wire
from powerguard.core.messages import Bye, FromRank, Message, ToRank, Welcome

BEAT_S = 1.0
RECONNECT_FIRST_MS = 100
RECONNECT_MAX_MS = 1000
POLL_MAX_S = 0.5
TAKE_MAX = 200
BYE_LINGER_MS = 300
ALONE_S = 3.0
"""A daemon that is there answers in milliseconds."""


class Ear(Protocol):
    """Whom the link serves; every method is called on the listener thread."""

    def hello(self) -> FromRank:
        """How this rank registers."""

    def beat(self) -> FromRank:
        """How it is."""

    def hear(self, message: ToRank) -> tuple[FromRank, ...]:
        """Takes a message in; what to answer at once."""

    def due(self) -> tuple[FromRank, ...]:
        """What is to be said (again) now."""

    def next_due(self) -> float | None:
        """When there will be something to say, by time.monotonic()."""

    def connected(self, *, yes: bool) -> None:
        """A daemon is there now, or isn't any more."""

    def alone(self, path: str) -> None:
        """Nobody serves *path* so far."""

    def trouble(self, error: Exception) -> None:
        """Something went wrong in here; the link goes on."""


class Link:
    """Speaks for one rank from `start` to `stop`."""

    def __init__(self, path: str, identity: bytes, ear: Ear, *, registers: bool = True) -> None:
        """With *registers* False it is a deputy's: there is no greeting and no farewell."""
        self.path, self._identity, self._ear, self._registers = path, identity, ear, registers
        self._pid = os.getpid()
        self._stopping = threading.Event()
        self._bye = Bye()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._bell_lock = threading.Lock()  # its number may be another file's once it is closed
        self._thread = threading.Thread(target=self._run, name="powerguard-listener", daemon=True)
        self._up = False  # a handshake was made and not undone
        self._known = not registers  # WELCOME came on this connection
        self._greeted = not registers  # WELCOME came at all: before it, what is said was meant for another process
        self._beat_at = 0.0

    def start(self) -> None:
        """Starts the thread, with all signals blocked in it: handlers belong to the main thread."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def wake(self) -> None:
        """There is something to say. From any thread."""
        if os.getpid() != self._pid:
            return
        with self._bell_lock:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def stop(self, why: str) -> None:
        """Says BYE and ends. In a forked child, and the second time, nothing."""
        if os.getpid() != self._pid or self._stopping.is_set():
            return
        self._bye = Bye(why[:200])
        self._stopping.set()
        self.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2.0)
        with self._bell_lock:
            if not self._thread.is_alive():
                os.close(self._bell)
                self._bell = -1

    # ---- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
                try:
                    with self._open(socket) as monitor:
                        self._serve(socket, monitor)
                except Exception as error:
                    self._ear.trouble(error)
                socket.disable_monitor()
            if not self._stopping.is_set():  # our own farewell isn't the daemon's end
                self._disconnected()
            self._stopping.wait(1.0)

    def _serve(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        alone_at = time.monotonic() + ALONE_S
        poller = zmq.Poller()
        for source in (socket, monitor, self._bell):
            poller.register(source, zmq.POLLIN)
        while True:
            poller.poll(int(self._pause_s() * 1000) + 1)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
            self._watch(monitor)
            self._take(socket)
            if self._up:
                self._tell(socket, self._ear.due())
            if self._stopping.is_set():
                if self._registers:
                    self._tell(socket, (self._bye,))
                return
            self._beat(socket)
            if not self._up and time.monotonic() > alone_at:
                self._ear.alone(self.path)
                alone_at += 3600.0

    def _open(self, socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        """Connects *socket*; returns its monitor."""
        for option, value in (
            (zmq.IDENTITY, self._identity),
            (zmq.LINGER, BYE_LINGER_MS),
            (zmq.IMMEDIATE, 1),  # with no daemon there is no queue of stale beats
            (zmq.RECONNECT_IVL, RECONNECT_FIRST_MS),
            (zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS),
            (zmq.MAXMSGSIZE, wire.TO_RANK_BYTES),
        ):
            socket.setsockopt(option, value)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        socket.connect(f"ipc://{self.path}")
        return monitor

    def _pause_s(self) -> float:
        now = time.monotonic()
        due = self._ear.next_due() if self._up else None
        ends = min(
            now + POLL_MAX_S, self._beat_at if self._up else now + POLL_MAX_S, due if due is not None else now + 9.0
        )
        return max(0.0, ends - now)

    def _watch(self, monitor: zmq.Socket[bytes]) -> None:
        while monitor.poll(0):
            event = recv_monitor_message(monitor, zmq.NOBLOCK)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._disconnected()
            else:
                self._up, self._known, self._beat_at = True, not self._registers, 0.0
                self._ear.connected(yes=True)

    def _disconnected(self) -> None:
        if self._up:
            self._up, self._known = False, not self._registers
            self._ear.connected(yes=False)

    def _take(self, socket: zmq.Socket[bytes]) -> None:
        for _ in range(TAKE_MAX):
            try:
                message = wire.decode_to_rank(socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            except wire.WireError as error:
                self._ear.trouble(error)
                continue
            if isinstance(message, Welcome):
                self._known = not message.hello
                self._greeted = self._greeted or self._known
                self._ear.hear(message)
            elif self._greeted:
                self._tell(socket, self._ear.hear(message))

    def _beat(self, socket: zmq.Socket[bytes]) -> None:
        """HELLO until it is answered, then a beat a second."""
        now = time.monotonic()
        if not self._up or now < self._beat_at:
            return
        self._beat_at = now + BEAT_S
        self._tell(socket, (self._ear.beat() if self._known else self._ear.hello(),))

    def _tell(self, socket: zmq.Socket[bytes], messages: tuple[Message, ...]) -> None:
        for message in messages:
            try:
                socket.send_multipart(wire.encode(message), zmq.NOBLOCK)
            except zmq.Again:
                return  # nobody is there; what matters is said again
            except wire.WireError as error:
                self._ear.trouble(error)
