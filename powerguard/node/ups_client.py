"""pynut2's client with its measured defects mended: the right answer, or one kind of error.

pynut2 2.1.2 believes an answer that was cut, late or meant for another question, knows no LOGIN, no STARTTLS
and no reconnect, misses escapes, and logs the password. Here its primitives (`_write`, `_read_until`) go
through a checked `Exchange`, and every parser is replaced. Nothing of telnet is left.
"""

from __future__ import annotations

import ssl
import time
from types import TracebackType

from powerguard.errors import ConfigError
from powerguard.node.ups_exchange import Exchange, NutError, Refused
from powerguard.node.ups_line import PORT
from powerguard.node.ups_pynut2 import PyNUTClient

_GRANTED = ("OK PRIMARY-GRANTED", "OK MASTER-GRANTED")


class CheckedClient(PyNUTClient):  # type: ignore[misc]  # pynut2 has no annotations
    """One connection to upsd, for one thread. Connected when made; raises `NutError`, and ConfigError for a name
    or password that can't be sent at all.

    A closed client stays closed: LOGIN belongs to the connection, so its owner makes a new one and knows it.
    *until* is the instant (`time.monotonic`) beyond which nothing waits; the owner moves it before each go.
    With *tls* the server must speak STARTTLS with a certificate that *tls* accepts for *host*.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = PORT,
        login: str | None = None,
        password: str | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        connect_s: float = 3.0,
        answer_s: float = 2.0,
        exchange_s: float = 4.0,
        until: float | None = None,
    ) -> None:
        # pynut2's own constructor isn't called: it logs the password
        self._exchange: Exchange | None = None
        self._where = f"{host} port {port}"
        opening = until if until is not None else time.monotonic() + connect_s + exchange_s
        self._exchange = Exchange(
            host, port, connect_s=connect_s, answer_s=answer_s, exchange_s=exchange_s, until=opening
        )
        try:
            if tls is not None:
                self._exchange.start_tls(tls)
            if login is not None:
                self.authenticate(login, password or "")
        except BaseException:
            del password  # as in `authenticate`
            self.close()
            raise
        self._exchange.until = until

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._where}{'' if self.connected else ', closed'}>"

    @property
    def _x(self) -> Exchange:
        assert self._exchange is not None
        return self._exchange

    @property
    def connected(self) -> bool:
        """Whether the next question can be asked."""
        return self._exchange is not None and self._exchange.connected

    @property
    def tls(self) -> str:
        """The TLS version spoken, or ""."""
        return self._x.tls

    @property
    def until(self) -> float | None:
        """The instant (`time.monotonic`) beyond which nothing waits."""
        return self._x.until

    @until.setter
    def until(self, instant: float | None) -> None:
        self._x.until = instant

    def close(self) -> None:
        """Drops the connection (upsd counts that as a logout). Never raises, never waits."""
        if self._exchange is not None:
            self._exchange.close()

    # ---- who we are ------------------------------------------------------------------------------

    def authenticate(self, user: str, password: str) -> None:
        """USERNAME and PASSWORD. upsd says OK to a wrong password: only `login` shows it."""
        self._x.expect(("OK",), "USERNAME", user)
        failed: NutError | ConfigError | None = None
        try:
            self._x.expect(("OK",), "PASSWORD", password, shown="PASSWORD")
        except (NutError, ConfigError) as error:
            failed = error
        if failed is not None:
            # a traceback may be printed with its variables: the frames that held the password are dropped
            del password
            failed.__cause__ = failed.__context__ = None
            raise failed.with_traceback(None)

    def login(self, ups: str) -> None:
        """LOGIN: from now on a primary waits for this host, until the connection ends. Once a connection."""
        self._x.expect(("OK",), "LOGIN", ups)

    def logout(self) -> None:
        """Says goodbye and closes. Never raises: the connection ends either way."""
        try:
            self._x.expect(("OK Goodbye",), "LOGOUT")
        except NutError:
            pass
        finally:
            self.close()

    def is_primary(self, ups: str) -> bool:
        """Whether this user may act as primary (and command FSD). Changes nothing."""
        try:
            self._x.expect(_GRANTED, "PRIMARY", ups)
        except Refused as error:
            if error.code != "UNKNOWN-COMMAND":
                return _no(error)
        else:
            return True
        try:
            self._x.expect(_GRANTED, "MASTER", ups)  # upsd before 2.8.0 knows no other word
        except Refused as error:
            return _no(error)
        return True

    def fsd(self, ups: str) -> None:
        """Commands the forced shutdown of everything that hangs on *ups*. It can't be taken back."""
        if not self.is_primary(ups):
            raise Refused("ACCESS-DENIED", f"this user is not a primary of {ups}")
        self._x.expect(("OK FSD-SET",), "FSD", ups)

    # ---- what pynut2 offers, checked ---------------------------------------------------------------

    def ver(self) -> str:
        """upsd's version line."""
        return " ".join(self._x.ask("VER"))

    def help(self) -> str:
        """upsd's list of commands."""
        return " ".join(self._x.ask("HELP"))

    def protocol(self) -> str:
        """The version of the network protocol."""
        return " ".join(self._x.ask("NETVER"))

    def list_ups(self) -> dict[str, str]:
        """Names and descriptions."""
        return self._x.table("UPS")

    def description(self, ups: str) -> str:
        """Of one UPS."""
        return self._x.one("UPSDESC", ups)

    def list_vars(self, ups: str) -> dict[str, str]:
        """All variables; {} where there are none."""
        return self._x.table("VAR", ups)

    def list_rw_vars(self, ups: str) -> dict[str, str]:
        """Those that can be set."""
        return self._x.table("RW", ups)

    def list_commands(self, ups: str) -> dict[str, str]:
        """Instant commands and their descriptions."""
        names = [name for (name,) in self._x.list("CMD", ups, width=1)]
        return {name: self.command_description(ups, name) for name in names}

    def list_clients(self, ups: str | None = None) -> dict[str, list[str]]:
        """UPS → hosts that are logged in to it; of every UPS if none is named."""
        of = self.list_ups() if ups is None else (ups,)
        return {name: [host for (host,) in self._x.list("CLIENT", name, width=1)] for name in of}

    def list_enum(self, ups: str, var: str) -> list[str]:
        """Values that *var* may take."""
        return [value for (value,) in self._x.list("ENUM", ups, var, width=1)]

    def list_range(self, ups: str, var: str) -> list[tuple[str, str]]:
        """Ranges (least, most) in which *var* may lie."""
        return [(least, most) for least, most in self._x.list("RANGE", ups, var, width=2)]

    def get_var(self, ups: str, var: str) -> str:
        """One value."""
        return self._x.one("VAR", ups, var)

    def still(self, ups: str, var: str, value: str) -> bool:
        """Whether the value is *value*; asked for again and again, this takes least."""
        return self._x.repeats(value, "VAR", ups, var)

    def var_description(self, ups: str, var: str) -> str:
        """What *var* means."""
        return self._x.one("DESC", ups, var)

    def var_type(self, ups: str, var: str) -> str:
        """For example "RW STRING:32"."""
        return " ".join(self._x.get("TYPE", ups, var))

    def command_description(self, ups: str, command: str) -> str:
        """What *command* does."""
        return self._x.one("CMDDESC", ups, command)

    def num_logins(self, ups: str) -> int:
        """How many connections are logged in to *ups*."""
        count = self._x.one("NUMLOGINS", ups)
        if not (count.isascii() and count.isdigit()):
            raise self._x.doubt(f"NUMLOGINS is {count[:40]!r}")
        return int(count)

    def set_var(self, ups: str, var: str, value: str) -> None:
        """upsd's OK means that the driver was told, not that it took effect."""
        self._x.expect(("OK",), "SET", "VAR", ups, var, value)

    def run_command(self, ups: str, command: str) -> None:
        """An instant command; as with `set_var`, watch for the effect."""
        self._x.expect(("OK",), "INSTCMD", ups, command)

    # ---- pynut2's primitives and life cycle --------------------------------------------------------

    def _write(self, string: str) -> None:
        self._x.write(string)

    def _read_until(self, string: str) -> str:
        answer = ""
        while not answer.endswith(string):
            answer += self._x.line() + "\n"
        return answer

    def _connect(self) -> None:
        raise self._x.doubt("not connected")

    def _disconnect(self) -> None:
        self.close()

    def __enter__(self) -> CheckedClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.logout()

    def __del__(self) -> None:
        self.close()


def _no(error: Refused) -> bool:
    """False for "you may not"; anything else that upsd says isn't an answer to that."""
    if error.code == "ACCESS-DENIED" or error.code.endswith("-REQUIRED"):
        return False
    raise error
