"""One question, one answer that is proven to be its own: the trust of the UPS client lives here.

An answer is believed if it is whole (every line ended, every list closed), in NUT's grammar, in time, and
repeats what was asked. At anything else the connection is closed, so that no later answer is read off by one.

::

    NutError                  a PyNUTError, so that pynut2's callers know it
    ├── Unreadable            no answer that can be believed; the connection is closed
    └── Refused               upsd said ERR; the connection is good
"""

from __future__ import annotations

import ssl
import time

from powerguard.core.types import Comm
from powerguard.errors import ConfigError
from powerguard.node.ups_line import MalformedLine, decode, encode, quote, words
from powerguard.node.ups_pynut2 import PyNUTError
from powerguard.node.ups_socket import CertificateRefused, LineSocket, LinkError

ROWS_MAX = 4096
"""Most lines of one list; NUT's largest published device dump has some 300 variables."""

_STATES = {"DATA-STALE": Comm.STALE, "DRIVER-NOT-CONNECTED": Comm.DRIVER_GONE}


class NutError(PyNUTError):  # type: ignore[misc]  # pynut2 has no annotations
    """A question without a usable answer; *comm* is what that says of the UPS."""

    comm: Comm = Comm.UNREACHABLE


class Unreadable(NutError):
    """No connection, no answer in time, or one that makes no sense. *gone*: the other end closed the connection."""

    def __init__(self, what: str, *, gone: bool = False) -> None:
        super().__init__(what)
        self.gone = gone


class Refused(NutError):
    """upsd's own `ERR`; *code* is its word, for example "ACCESS-DENIED". DATA-STALE is a state, not a refusal."""

    def __init__(self, code: str, what: str) -> None:
        super().__init__(what)
        self.code = code
        self.comm = _STATES.get(code, Comm.REFUSED)


def _line(question: tuple[str, ...], shown: str) -> str:
    try:
        return " ".join((question[0], *(quote(word) for word in question[1:])))
    except ValueError as error:
        raise ConfigError(f"can't ask upsd {shown or question[0]}: {error}") from None


class Exchange:
    """A connection to upsd, connected when made, for one thread. Closed at the first doubt, and then for good.

    *until* is the instant (`time.monotonic`) beyond which nothing waits; None: each question has *exchange_s*.
    """

    def __init__(
        self, host: str, port: int, *, connect_s: float, answer_s: float, exchange_s: float, until: float | None
    ) -> None:
        self.host, self.exchange_s, self.until = host, exchange_s, until
        opened_by = time.monotonic() + connect_s if until is None else until
        self._link: LineSocket | None = None
        try:
            self._link = LineSocket(host, port, connect_s=connect_s, answer_s=answer_s, until=opened_by)
        except LinkError as error:
            raise Unreadable(f"{host} port {port}: {error}") from None

    @property
    def connected(self) -> bool:
        """Whether the next question can be asked."""
        return self._link is not None

    @property
    def tls(self) -> str:
        """The TLS version spoken, or ""."""
        return self._link.tls if self._link else ""

    def close(self) -> None:
        """Drops the connection. Never raises, never waits."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _lost(self, error: LinkError) -> Unreadable:
        self.close()
        return Unreadable(str(error), gone=error.gone)

    def doubt(self, what: str) -> Unreadable:
        """Closes; to be raised."""
        self.close()
        return Unreadable(what)

    def _bounded(self) -> LineSocket:
        """The connection, for one question that ends in time."""
        if self._link is None:
            raise Unreadable("not connected")
        self._link.until = self.until if self.until is not None else time.monotonic() + self.exchange_s
        return self._link

    def write(self, question: str, *, pieces: bool = False) -> None:
        """Sends one question, newline included; *pieces*: a long answer is awaited."""
        link = self._bounded()
        try:
            link.send(encode(question), pieces=pieces)
        except LinkError as error:
            raise self._lost(error) from None

    def line(self) -> str:
        """One whole line of the answer."""
        if self._link is None:
            raise Unreadable("not connected")
        try:
            return decode(self._link.read_line())
        except LinkError as error:
            raise self._lost(error) from None

    def words(self) -> list[str]:
        """One line's words."""
        try:
            return words(self.line())
        except MalformedLine as error:
            raise self.doubt(str(error)) from None

    def ask(self, *question: str, shown: str = "") -> list[str]:
        """The words of a one-line answer, or the first line of a longer one. Raises Unreadable, Refused, and
        ConfigError for a word that can't be sent. *shown* replaces a question that holds a secret in messages.
        """
        line = _line(question, shown)
        self.write(line + "\n", pieces=question[0] == "LIST")
        return self._answer(shown or line)

    def _answer(self, asked: str) -> list[str]:
        answer = self.words()
        if answer[:1] == ["ERR"]:
            if len(answer) < 2:
                raise self.doubt("ERR without a word")
            raise Refused(answer[1], f"{answer[1].lower().replace('-', ' ')} (asked: {asked})")
        return answer

    def repeats(self, value: str, kind: str, *of: str) -> bool:
        """Whether GET *kind* *of*… says *value*; raises what `one` does.

        Where upsd spells its answer as NUT does, nothing is taken apart: asked once a second for years, that is most
        of what a question costs.
        """
        line, link = _line(("GET", kind, *of), ""), self._bounded()
        try:
            if link.answers(encode(line + "\n"), encode(f'{line[4:]} "{value}"\n')):
                return True
        except LinkError as error:
            raise self._lost(error) from None
        return self._after(self._answer(line), (kind, *of)) == [value]

    def expect(self, allowed: tuple[str, ...], *question: str, shown: str = "") -> None:
        """Asks, and insists on one of the *allowed* answers."""
        answer = " ".join(self.ask(*question, shown=shown))
        if answer not in allowed:
            raise self.doubt(f"{shown or ' '.join(question)} was answered with {answer[:80]!r}")

    def _after(self, answer: list[str], echo: tuple[str, ...]) -> list[str]:
        if [word.casefold() for word in answer[: len(echo)]] != [word.casefold() for word in echo]:
            raise self.doubt(f"asked for {' '.join(echo)}, was answered {' '.join(answer)[:80]!r}")
        return answer[len(echo) :]

    def get(self, kind: str, *of: str) -> list[str]:
        """GET *kind* *of*…: what the answer says after repeating the question."""
        return self._after(self.ask("GET", kind, *of), (kind, *of))

    def list(self, kind: str, *of: str, width: int) -> list[list[str]]:
        """LIST *kind* *of*…: of each line the *width* words after `KIND of…`. An empty list is a list."""
        if self._after(self.ask("LIST", kind, *of), ("BEGIN", "LIST", kind, *of)):
            raise self.doubt(f"LIST {kind} begins with too many words")
        rows: list[list[str]] = []
        while (answer := self.words())[:1] != ["END"]:
            row = self._after(answer, (kind, *of))
            if len(row) != width:
                raise self.doubt(f"LIST {kind}: a line has {len(row)} words where {width} belong")
            rows.append(row)
            if len(rows) > ROWS_MAX:
                raise self.doubt(f"LIST {kind} has over {ROWS_MAX} lines")
        if self._after(answer, ("END", "LIST", kind, *of)):
            raise self.doubt(f"LIST {kind} ends with too many words")
        return rows

    def one(self, kind: str, *of: str) -> str:
        """GET *kind* *of*…, of which one value comes."""
        rest = self.get(kind, *of)
        if len(rest) != 1:
            raise self.doubt(f"GET {kind}: one value belongs there, not {len(rest)}")
        return rest[0]

    def table(self, kind: str, *of: str) -> dict[str, str]:
        """A list of names and values; a name with two different values is a doubt."""
        table: dict[str, str] = {}
        for name, value in self.list(kind, *of, width=2):
            if table.setdefault(name, value) != value:
                raise self.doubt(f"LIST {kind}: {name} has two values")
        return table

    def start_tls(self, context: ssl.SSLContext) -> None:
        """STARTTLS, or an error: there is no way back to plain text."""
        self.expect(("OK STARTTLS",), "STARTTLS")
        if self._link is None:
            raise Unreadable("not connected")
        try:
            self._link.start_tls(context, self.host)
        except CertificateRefused as error:
            self.close()
            raise Refused("CERTIFICATE", f"the certificate of {self.host} was refused: {error}") from None
        except LinkError as error:
            raise self._lost(error) from None
