"""A NUT server that isn't there: upsd's protocol on a real socket, with any UPS and any fault you like.

    with SimUpsd() as upsd:
        upsd.set("demo", {"ups.status": "OB DISCHRG", "battery.charge": "71"})
        upsd.fault("cut", ups="demo", after=40, times=1)
        ... UpsAddress.parse(upsd.address("demo")) ...

`python -m powerguard.sim.upsd --ups demo --port 3493` serves one by hand: type `ups.status: OB DISCHRG`.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType

from powerguard.sim.upsd_answers import Answers
from powerguard.sim.upsd_faults import HITCHES, STATES, Fault
from powerguard.sim.upsd_grammar import take_question
from powerguard.sim.upsd_hitches import Hitches, send
from powerguard.sim.upsd_state import HEALTHY, USERS, Session, Ups, User

__all__ = ["HEALTHY", "SimUpsd"]

SESSIONS_MAX = 256
QUESTION_MAX_BYTES = 1 << 16


class SimUpsd:
    """The server. Threads of its own; every method may be called from any thread, and shows at the next question."""

    def __init__(
        self,
        port: int = 0,
        *,
        host: str = "127.0.0.1",
        users: Mapping[str, User] = USERS,
        tls: ssl.SSLContext | None = None,
        idle_s: float = 60.0,
    ) -> None:
        self.host = host
        self.port = port  # 0: chosen by the kernel at start
        self.asked: deque[str] = deque(maxlen=10_000)  # questions in order, passwords masked
        self.connections = 0  # accepted since the start
        self._tls = tls
        self._idle_s = idle_s
        self._answers = Answers(users)
        self._answers.has_tls = tls is not None
        self._hitches = Hitches()
        self._changed = threading.Condition(threading.RLock())
        self._stopping = threading.Event()
        self._serving = threading.Event()  # cleared: half-open
        self._listener: socket.socket | None = None
        self._sockets: dict[threading.Thread, socket.socket] = {}
        self._threads: list[threading.Thread] = []

    # ---- life ------------------------------------------------------------------------------------

    def start(self) -> SimUpsd:
        """Listens; returns itself."""
        self._stopping.clear()
        self._serving.set()
        self._listen()
        return self

    def close(self) -> None:
        """Ends every connection and thread."""
        self._stopping.set()
        self._serving.set()
        self._unlisten()
        self.drop()
        for thread in self._threads:
            thread.join(5.0)

    def __enter__(self) -> SimUpsd:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- what there is to see --------------------------------------------------------------------

    def set(self, ups: str, variables: Mapping[str, str | None]) -> None:
        """Changes variables of *ups* (made if new, with no other variables); None takes one away."""
        with self._changed:
            kept = self._ups(ups).variables
            for name, value in variables.items():
                if value is None:
                    kept.pop(name, None)
                else:
                    kept[name] = value
            self._changed.notify_all()

    def replace(self, ups: str, variables: Mapping[str, str]) -> None:
        """All variables of *ups* at once."""
        with self._changed:
            self._ups(ups).variables = dict(variables)
            self._changed.notify_all()

    def describe(self, ups: str, description: str | None) -> None:
        """The `desc` of ups.conf."""
        with self._changed:
            self._ups(ups).description = description

    def remove(self, ups: str) -> None:
        """Forgets *ups*."""
        with self._changed:
            self._answers.upses.pop(ups.casefold(), None)

    def _ups(self, name: str) -> Ups:
        return self._answers.upses.setdefault(name.casefold(), Ups(name))

    def variables(self, ups: str) -> dict[str, str]:
        """As a client sees them now."""
        with self._changed:
            return self._ups(ups).seen()

    def fsd(self, ups: str) -> None:
        """As if a primary had commanded FSD; it stays until `restart`."""
        with self._changed:
            self._ups(ups).fsd = True

    def address(self, ups: str) -> str:
        """`ups@host:port`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{ups}@{host}:{self.port}"

    def numlogins(self, ups: str) -> int:
        """Connections that are logged in to *ups*."""
        with self._changed:
            return len(self._answers.logins(ups))

    @property
    def commands(self) -> tuple[tuple[str, str], ...]:
        """Instant commands carried out: (UPS, command)."""
        with self._changed:
            return tuple(self._answers.done)

    def wait_for(self, condition: Callable[[SimUpsd], bool], within_s: float = 5.0) -> bool:
        """Waits until *condition* holds, looked at after every question and every end of a connection."""
        with self._changed:
            return self._changed.wait_for(lambda: condition(self), within_s)

    # ---- faults ----------------------------------------------------------------------------------

    def fault(
        self,
        kind: str,
        *,
        ups: str = "",
        on: str = "",
        times: int | None = None,
        after: int = 0,
        seconds: float = 0.0,
        data: bytes = b"",
    ) -> None:
        """Something goes wrong from now on (`upsd_faults` has the kinds). No *ups*: all of them."""
        self.inject(Fault(kind, ups, on, times, after, seconds, data))

    def inject(self, fault: Fault) -> None:
        """The same, of a value."""
        with self._changed:
            if fault.kind in STATES:
                for each in [self._ups(fault.ups)] if fault.ups else self._answers.upses.values():
                    each.state = fault.kind
            elif fault.kind in HITCHES:
                self._hitches.add(fault)
        if fault.kind == "half-open":
            self._serving.clear()
        elif fault.kind == "refuse":
            self._unlisten()
            self.drop()

    def clear(self, ups: str = "") -> None:
        """Ends the faults of *ups*; without a name, all faults. FSD stays."""
        with self._changed:
            self._hitches.end(ups)
            for each in [self._ups(ups)] if ups else self._answers.upses.values():
                each.state = "ok"
        if not ups:
            self._serving.set()
            self._listen()

    def drop(self) -> None:
        """Ends every connection that is open now."""
        with self._changed:
            sockets = list(self._sockets.values())
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def restart(self) -> None:
        """upsd anew: no connection, no LOGIN and no FSD is left."""
        self._unlisten()
        self.drop()
        with self._changed:
            for ups in self._answers.upses.values():
                ups.fsd = False
        self.wait_for(lambda _: not self._sockets)
        self._listen()

    # ---- sockets ---------------------------------------------------------------------------------

    def _listen(self) -> None:
        with self._changed:
            if self._listener is not None or self._stopping.is_set():
                return
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            self._listener = socket.create_server((self.host, self.port), family=family, backlog=64)
            self.port = self._listener.getsockname()[1]
            self._spawn(self._accept, self._listener)

    def _unlisten(self) -> None:
        with self._changed:
            listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes accept
            listener.close()

    def _spawn(self, target: Callable[[socket.socket], None], on: socket.socket) -> None:
        thread = threading.Thread(target=target, args=(on,), name="simulated upsd", daemon=True)
        with self._changed:
            self._threads = [each for each in self._threads if each.is_alive()] + [thread]
            if target == self._serve:
                self._sockets[thread] = on
            thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while not self._stopping.is_set():
            self._serving.wait()
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            if self._stopping.is_set() or len(self._sockets) >= SESSIONS_MAX:
                connection.close()
                continue
            self.connections += 1
            self._spawn(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        me = threading.current_thread()
        session = Session(peer=connection.getpeername()[0] if _connected(connection) else "?")
        with self._changed:
            self._answers.sessions.append(session)
        try:
            self._converse(connection, session, me)
        except OSError:
            pass  # the other end, or `drop`, closed it
        finally:
            with self._changed:
                self._answers.sessions.remove(session)
                self._sockets.pop(me).close()
                self._changed.notify_all()

    def _converse(self, connection: socket.socket, session: Session, me: threading.Thread) -> None:
        buffer = bytearray()
        connection.settimeout(self._idle_s)
        while not session.ended:
            data = connection.recv(4096)
            self._serving.wait()
            buffer += data
            if not data or len(buffer) > QUESTION_MAX_BYTES:
                return
            while not session.ended and (question := take_question(buffer)) is not None:
                was_plain = not session.tls
                with self._changed:
                    self.asked.append(_masked(question))
                    lines = self._answers.answer(session, question)
                    hitch = self._hitches.due(question)
                    self._changed.notify_all()
                about = next((word for word in question[1:] if word.casefold() in self._answers.upses), "")
                if not send(connection, lines, hitch, about, self._stopping.wait):
                    return
                if was_plain and session.tls and self._tls is not None:
                    buffer.clear()  # what was said in plain text isn't part of the secure session
                    secure = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                    with self._changed:
                        self._sockets[me] = secure
                    secure.do_handshake()
                    connection = secure


def _connected(connection: socket.socket) -> bool:
    try:
        connection.getpeername()
    except OSError:
        return False
    return True


def _masked(question: list[str]) -> str:
    secret = question[:1] and question[0].upper() == "PASSWORD"
    return "PASSWORD ***" if secret else " ".join(question)


if __name__ == "__main__":
    from powerguard.sim.upsd_main import main

    main()
