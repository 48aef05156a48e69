"""The control socket: people and the command line ask, the daemon answers. JSON, so that it can be looked at.

`ask` is the client's side. `Control` is the daemon's: a thread of its own, so that a slow answer keeps no rank waiting.
Who may use it is the business of the socket's mode and group; the kernel's word on who asked goes into `Ask.by`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import zmq
from msgspec.structs import replace

from powerguard import wire
from powerguard.errors import DaemonUnreachable
from powerguard.node.peers_seen import Credentials
from powerguard.node.socket_file import SocketFile
from powerguard.wire import Answer, Ask

__all__ = ["CONTROL_SOCKET", "Answer", "Ask", "Control", "ask", "served"]

CONTROL_SOCKET = "control.sock"
ANSWER_WAIT_S = 5.0
LOOK_AGAIN_MS = 60_000
"""Nothing but a question or `close` has to wake the thread; this is only the bound."""


def ask(path: str | Path, question: Ask, wait_s: float = ANSWER_WAIT_S) -> Answer:
    """The daemon's answer. Raises DaemonUnreachable, with what to do, if none comes within *wait_s*."""
    try:
        os.stat(path)
        usable = os.access(path, os.R_OK | os.W_OK)
    except PermissionError:  # a folder on the way is closed to this user
        usable = False
    except OSError:
        raise _nobody(path) from None
    if not usable:
        raise DaemonUnreachable(f"this user may not use {path}", todo="use sudo, or join the socket's group")
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(os.fspath(path)) == errno.ECONNREFUSED:
            raise _nobody(path)  # a killed daemon leaves its socket behind
    context = zmq.Context()
    try:
        client: zmq.Socket[bytes] = context.socket(zmq.REQ)
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.IMMEDIATE, 1)
        client.setsockopt(zmq.MAXMSGSIZE, wire.ANSWER_BYTES)
        client.setsockopt(zmq.SNDTIMEO, int(wait_s * 1000))
        client.connect(f"ipc://{path}")
        try:
            client.send_multipart(wire.encode_ask(question))
            answered = client.poll(int(wait_s * 1000))
        except zmq.Again:
            answered = 0
        if not answered:
            raise DaemonUnreachable(
                f"the daemon at {path} doesn't answer within {wait_s:g} s", todo="see: systemctl status powerguard"
            )
        return wire.decode_answer(client.recv_multipart(zmq.NOBLOCK))
    except wire.WireError as error:
        raise DaemonUnreachable(f"the daemon at {path} answers strangely: {error}", todo="update both sides") from error
    finally:
        context.destroy(linger=0)


def served(path: str | Path) -> bool:
    """Whether a daemon may be behind *path*: one that refuses to be spoken to counts."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(os.fspath(path)) not in (errno.ENOENT, errno.ECONNREFUSED)


def _nobody(path: str | Path) -> DaemonUnreachable:
    return DaemonUnreachable(f"no daemon serves {path}", todo="start it: systemctl start powerguard")


class Control:
    """Serves *path* from construction to `close`: every question is answered with what *serve* says, on a thread here.

    *serve* may take its time (others wait); what it raises becomes a refusal. Raises DirectoryError where the socket
    can't be made.
    """

    def __init__(self, path: str | Path, *, serve: Callable[[Ask], Answer], mode: int = 0o660, group: str = "") -> None:
        self._serve = serve
        self._file = SocketFile(path, mode=mode, group=group)
        self._context = zmq.Context()
        self._closing = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # a poll that looks five times a second costs CPU
        self._trouble = ""
        try:
            self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.MAXMSGSIZE, wire.ASK_BYTES)
            self._socket.bind(self._file.endpoint)
            self._file.open_up()
        except BaseException:
            self._context.destroy(linger=0)
            self._file.close()
            os.close(self._wake)
            raise
        self._thread = self._start()

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="powerguard-control", daemon=True)
        thread.start()
        return thread

    def care(self) -> str:
        """Starts the thread anew if it has ended; says why it had, or ""."""
        if self._thread.is_alive() or self._closing.is_set():
            return ""
        self._thread = self._start()
        return f"the control socket had ended: {self._trouble or 'no reason known'}"

    def close(self) -> None:
        """Ends. A repeat is nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join(5.0)
        self._context.destroy(linger=200)
        self._file.close()
        os.close(self._wake)

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            for source in (self._socket, self._wake):
                poller.register(source, zmq.POLLIN)
            while not self._closing.is_set():
                if self._socket in dict(poller.poll(LOOK_AGAIN_MS)):
                    self._one(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
        except Exception as error:
            self._trouble = f"{type(error).__name__}: {error}"

    def _one(self, parts: list[zmq.Frame]) -> None:
        """One question: REQ puts an empty frame before it."""
        envelope, frames = [part.bytes for part in parts[:2]], [part.bytes for part in parts[2:]]
        try:
            question = wire.decode_ask(frames)
            answer = self._serve(replace(question, by=_asker(question.by, parts[-1])))
        except wire.WireError as error:
            answer = Answer(False, str(error))
        except Exception as error:
            answer = Answer(False, f"the daemon couldn't answer: {type(error).__name__}: {error}")
        with contextlib.suppress(zmq.ZMQError):  # whoever asked has gone
            self._socket.send_multipart([*envelope, *wire.encode_answer(answer)], zmq.NOBLOCK)


def _asker(said: str, frame: zmq.Frame) -> str:
    """Who asks, in words: the user by the kernel's word, and what they say of themselves."""
    try:
        uid = Credentials(str(frame.get("Peer-Address"))).uid
    except zmq.ZMQError:
        uid = -1
    if uid < 0:
        return said
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    return f"{said} (user {user})" if said else f"user {user}"
