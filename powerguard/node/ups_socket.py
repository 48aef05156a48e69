"""A TCP connection of lines in which nothing waits for ever.

Every wait is bounded twice: by *answer_s* for each read, and by the instant *until* for everything the
owner does in one go (connect, TLS, LOGIN, list). After a `LinkError` the connection is closed: the rest of
a late or cut answer must never be taken for the next one.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time

from powerguard.node.ups_line import LINE_MAX_BYTES

ANSWER_MAX_BYTES = 1 << 20
"""Most that one answer may hold; the largest of NUT's published device dumps is some 20 kB."""

PIECES_S = 0.001
"""upsd writes a list line by line. Left alone for so long, it is taken in 2 receives where there were up to 22 (LIST
VAR on loopback, upsd 2.8.0): each is a switch of threads, and those are most of what a poll costs."""

_QUICKACK = getattr(socket, "TCP_QUICKACK", None)

Place = tuple[socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]]


class LinkError(Exception):
    """The connection can't be trusted any more; *gone* = the other end closed it (no answer was awaited in vain)."""

    def __init__(self, what: str, *, gone: bool = False) -> None:
        super().__init__(what)
        self.gone = gone


class CertificateRefused(LinkError):
    """The server's certificate doesn't prove that it is the host we mean."""


class Resolver:
    """Names to addresses within a bound, remembering the last good answer: name servers lose power too."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], list[Place]] = {}
        self._asking: dict[tuple[str, int], threading.Thread] = {}
        self._failed: dict[tuple[str, int], str] = {}

    def resolve(self, host: str, port: int, within_s: float) -> list[Place]:
        """The places of *host*, fresh if the answer comes within *within_s*, else the last known. Raises LinkError."""
        with contextlib.suppress(OSError, UnicodeError):
            return _lookup(host, port, socket.AI_NUMERICHOST)  # a literal asks nobody
        key = (host, port)
        asking = self._asking.get(key)
        if asking is None or not asking.is_alive():
            asking = threading.Thread(target=self._ask, args=key, name=f"resolve {host}", daemon=True)
            self._asking[key] = asking
            self._failed.pop(key, None)
            asking.start()
        asking.join(min(within_s, 0.5) if key in self._known else within_s)
        if key in self._known:
            return self._known[key]
        why = self._failed.get(key, f"no answer within {within_s:.1f} s")
        raise LinkError(f"can't find the address of {host}: {why}")

    def _ask(self, host: str, port: int) -> None:
        try:
            self._known[(host, port)] = _lookup(host, port)
        except (OSError, UnicodeError) as error:
            self._failed[(host, port)] = getattr(error, "strerror", None) or str(error)


def _lookup(host: str, port: int, flags: int = 0) -> list[Place]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, place) for family, _, _, _, place in found]


RESOLVER = Resolver()


class LineSocket:
    """One connection; made connected, used by one thread, closed for good at the first doubt."""

    def __init__(
        self, host: str, port: int, *, connect_s: float, answer_s: float, until: float, resolver: Resolver = RESOLVER
    ) -> None:
        self.answer_s = answer_s
        self.until = until
        self._buffer = bytearray()
        self._taken = 0  # bytes of the answer being read
        self._arrived = select.poll()
        self._socket = self._connect(resolver.resolve(host, port, self._left(connect_s)), connect_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._arrived.register(self._socket, select.POLLIN)

    def _connect(self, places: list[Place], connect_s: float) -> socket.socket:
        why = "no address"
        for index, (family, place) in enumerate(places):
            candidate = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            try:
                # one black hole among several addresses must not eat the time of the others
                candidate.settimeout(self._left(connect_s / (len(places) - index)))
                candidate.connect(place)
            except OSError as error:
                candidate.close()
                why = "no answer to connect" if isinstance(error, TimeoutError) else (error.strerror or str(error))
            else:
                return candidate
        raise LinkError(why[:1].lower() + why[1:])

    def _left(self, at_most_s: float) -> float:
        """What the next wait may take; never 0, which would mean a socket that doesn't wait at all."""
        return max(0.001, min(at_most_s, self.until - time.monotonic()))

    def send(self, data: bytes, *, pieces: bool = False) -> None:
        """Asks. An answer to nothing that is already there is a doubt of its own.

        *pieces*: the answer is a long one, and the other end is left a moment for it.
        """
        self._check_quiet()
        self._taken = 0
        try:
            self._socket.settimeout(self._left(self.answer_s))
            self._socket.sendall(data)
            if pieces:
                time.sleep(min(PIECES_S, self._left(self.answer_s)))
        except TimeoutError:
            raise self._doubt("the server doesn't read") from None
        except OSError as error:
            raise self._doubt(f"connection lost ({error.strerror or error})", gone=True) from None

    def _check_quiet(self) -> None:
        if self._buffer or (isinstance(self._socket, ssl.SSLSocket) and self._socket.pending()):
            raise self._doubt("more was answered than asked")
        if isinstance(self._socket, ssl.SSLSocket):
            return  # session tickets wake the raw socket
        if not self._arrived.poll(0):
            return
        try:
            self._socket.settimeout(0)
            ahead = self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._doubt(f"connection lost ({error.strerror or error})", gone=True) from None
        if ahead:
            raise self._doubt("more was answered than asked")
        raise self._doubt("connection closed by the server", gone=True)

    def answers(self, question: bytes, expected: bytes) -> bool:
        """Asks, and tells whether *expected* is all that comes. Anything else is there to be read, line by line."""
        self.send(question)
        self._receive()
        if self._buffer != expected:
            return False
        self._buffer.clear()
        return True

    def read_line(self) -> bytes:
        """The next whole line without its end. A line that was cut is an error, never a value."""
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > LINE_MAX_BYTES:
                raise self._doubt(f"a line of over {LINE_MAX_BYTES} bytes")
            self._receive()
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line[:-1] if line.endswith(b"\r") else line

    def _receive(self) -> None:
        try:
            self._socket.settimeout(self._left(self.answer_s))
            data = self._socket.recv(65536)
            # upsd writes a list in many small pieces under Nagle's rule: each waits for our acknowledgement,
            # which the kernel delays by 40 ms. Acknowledging after every read brings LIST VAR from 44 ms to
            # 0.07 ms (median of 60 on loopback, upsd 2.8.0, Linux 6.18). The option is one-shot, hence here.
            if _QUICKACK is not None:
                self._socket.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)
        except (TimeoutError, ssl.SSLWantReadError):
            raise self._doubt("no answer in time") from None
        except OSError as error:
            raise self._doubt(f"connection lost ({error.strerror or error})", gone=True) from None
        if not data:
            raise self._doubt("connection closed by the server", gone=True)
        self._taken += len(data)
        if self._taken > ANSWER_MAX_BYTES:
            raise self._doubt(f"an answer of over {ANSWER_MAX_BYTES} bytes")
        self._buffer += data

    def start_tls(self, context: ssl.SSLContext, host: str) -> None:
        """Goes on encrypted, as *context* demands. Raises CertificateRefused or LinkError."""
        if self._buffer:
            raise self._doubt("plain text after STARTTLS was answered")
        try:
            self._socket.settimeout(self._left(self.answer_s))
            wrapped = context.wrap_socket(self._socket, server_hostname=host, do_handshake_on_connect=False)
            self._socket = wrapped
            wrapped.do_handshake()
        except ssl.SSLCertVerificationError as error:
            self.close()
            raise CertificateRefused(error.verify_message or str(error)) from None
        except TimeoutError:
            raise self._doubt("no TLS handshake in time") from None
        except (OSError, ValueError) as error:
            raise self._doubt(f"TLS failed ({error})") from None

    @property
    def tls(self) -> str:
        """The TLS version spoken, or ""."""
        return (self._socket.version() or "") if isinstance(self._socket, ssl.SSLSocket) else ""

    def _doubt(self, what: str, *, gone: bool = False) -> LinkError:
        self.close()
        return LinkError(what, gone=gone)

    def close(self) -> None:
        """Never raises, never waits."""
        self._socket.close()
