"""What upsd says: questions to answers, with no socket, after the transcripts of a real upsd 2.8.0.

Written from the server's side and on its own, so that a mistake in powerguard's client isn't repeated here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from powerguard.sim.upsd_grammar import quoted, take_question
from powerguard.sim.upsd_state import USERS, Err, Session, Ups, User

__all__ = ["USERS", "Answers", "Err", "Session", "Ups", "User", "quoted", "take_question"]

VERSION = "Network UPS Tools upsd 2.8.0 (simulated) - http://www.networkupstools.org/"
COMMANDS = "Commands: HELP VER GET LIST SET INSTCMD LOGIN LOGOUT USERNAME PASSWORD STARTTLS"
NO_DESCRIPTION = "Description unavailable"
_READ_ONLY = ("driver.", "device.", "server.")
_NEED_USER = ("LOGIN", "PRIMARY", "MASTER", "FSD", "SET", "INSTCMD")


class Answers:
    """The server's state and its answers; the caller holds the lock."""

    def __init__(self, users: Mapping[str, User]) -> None:
        self.users = dict(users)
        self.upses: dict[str, Ups] = {}
        self.sessions: list[Session] = []
        self.done: list[tuple[str, str]] = []  # (UPS, instant command), as carried out
        self.has_tls = False
        self._tracked = 0

    def ups(self, name: str) -> Ups:
        """Names are case-insensitive."""
        try:
            return self.upses[name.casefold()]
        except KeyError:
            raise Err("UNKNOWN-UPS") from None

    def logins(self, name: str) -> list[Session]:
        """The sessions that are logged in to a UPS."""
        return [session for session in self.sessions if session.login.casefold() == name.casefold()]

    def answer(self, session: Session, question: list[str]) -> list[str]:
        """The lines of the answer, without their ends."""
        try:
            return list(self._answer(session, question))
        except Err as error:
            return [f"ERR {error}"]

    def _answer(self, session: Session, question: list[str]) -> Iterator[str]:
        verb, rest = (question[0].upper() if question else ""), question[1:]
        if verb in _NEED_USER:
            if not session.user:
                raise Err("USERNAME-REQUIRED")
            if session.password is None:
                raise Err("PASSWORD-REQUIRED")
        method = getattr(self, f"_do_{verb.lower()}", None)
        if method is None:
            raise Err("UNKNOWN-COMMAND")
        yield from method(session, rest)

    # ---- who asks --------------------------------------------------------------------------------

    def _do_ver(self, _session: Session, _rest: list[str]) -> Iterator[str]:
        yield VERSION

    def _do_netver(self, _session: Session, _rest: list[str]) -> Iterator[str]:
        yield "1.3"

    _do_protver = _do_netver

    def _do_help(self, _session: Session, _rest: list[str]) -> Iterator[str]:
        yield COMMANDS

    def _do_starttls(self, session: Session, _rest: list[str]) -> Iterator[str]:
        if session.tls:
            raise Err("ALREADY-SSL-MODE")
        if not self.has_tls:
            raise Err("FEATURE-NOT-CONFIGURED")
        session.tls = True
        yield "OK STARTTLS"

    def _do_username(self, session: Session, rest: list[str]) -> Iterator[str]:
        (name,) = _exactly(1, rest)
        if session.user:
            raise Err("ALREADY-SET-USERNAME")
        session.user = name
        yield "OK"

    def _do_password(self, session: Session, rest: list[str]) -> Iterator[str]:
        (password,) = _exactly(1, rest)
        if session.password is not None:
            raise Err("ALREADY-SET-PASSWORD")
        session.password = password
        yield "OK"  # right or wrong: only LOGIN tells

    def _known(self, session: Session) -> User:
        user = self.users.get(session.user)
        if user is None or user.password != session.password:
            raise Err("ACCESS-DENIED")
        return user

    def _do_login(self, session: Session, rest: list[str]) -> Iterator[str]:
        (name,) = _exactly(1, rest)
        if session.login:
            raise Err("ALREADY-LOGGED-IN")
        ups = self.ups(name)
        if not self._known(session).upsmon:
            raise Err("ACCESS-DENIED")
        session.login = ups.name
        yield "OK"

    def _do_logout(self, session: Session, _rest: list[str]) -> Iterator[str]:
        session.ended = True
        session.login = ""
        yield "OK Goodbye"

    def _do_primary(self, session: Session, rest: list[str], word: str = "PRIMARY") -> Iterator[str]:
        (name,) = _exactly(1, rest)
        self.ups(name)
        if self._known(session).upsmon != "primary":
            raise Err("ACCESS-DENIED")
        yield f"OK {word}-GRANTED"

    def _do_master(self, session: Session, rest: list[str]) -> Iterator[str]:
        yield from self._do_primary(session, rest, "MASTER")

    def _do_fsd(self, session: Session, rest: list[str]) -> Iterator[str]:
        (name,) = _exactly(1, rest)
        ups, user = self.ups(name), self._known(session)
        if not (user.may_fsd or user.upsmon == "primary"):
            raise Err("ACCESS-DENIED")
        ups.fsd = True  # sticky: only a restart of upsd clears it
        yield "OK FSD-SET"

    # ---- lists -----------------------------------------------------------------------------------

    def _do_list(self, _session: Session, rest: list[str]) -> Iterator[str]:
        kind, of = (rest[0].upper() if rest else ""), rest[1:]
        lists = {"UPS": 0, "VAR": 1, "RW": 1, "CMD": 1, "CLIENT": 1, "ENUM": 2, "RANGE": 2}
        if kind not in lists:
            raise Err("INVALID-ARGUMENT")
        _exactly(lists[kind], of)
        rows = list(self._rows(kind, of))
        head = " ".join((kind, *of))
        yield f"BEGIN LIST {head}"
        for row in rows:
            yield f"{head} {row}"
        yield f"END LIST {head}"

    def _rows(self, kind: str, of: list[str]) -> Iterator[str]:
        if kind == "UPS":
            for ups in self.upses.values():
                yield f"{ups.name} {quoted(NO_DESCRIPTION if ups.description is None else ups.description)}"
            return
        ups = self.ups(of[0])
        if kind == "CLIENT":
            yield from (session.peer for session in self.logins(ups.name))
            return
        seen = _available(ups)
        if kind == "VAR":
            yield from (f"{name} {quoted(value)}" for name, value in seen.items())
        elif kind == "RW":
            yield from (f"{name} {quoted(value)}" for name, value in seen.items() if _writable(name))
        elif kind == "CMD":
            yield from ups.commands
        elif of[1] not in seen:
            raise Err("VAR-NOT-SUPPORTED")

    # ---- single values -----------------------------------------------------------------------------

    def _do_get(self, session: Session, rest: list[str]) -> Iterator[str]:
        kind, of = (rest[0].upper() if rest else ""), rest[1:]
        if kind == "TRACKING":
            yield ("SUCCESS" if of else ("ON" if session.tracking else "OFF"))
            return
        gets = {"VAR": 2, "TYPE": 2, "DESC": 2, "CMDDESC": 2, "UPSDESC": 1, "NUMLOGINS": 1}
        if kind not in gets:
            raise Err("INVALID-ARGUMENT")
        _exactly(gets[kind], of)
        yield " ".join((kind, *of, self._value(kind, of)))

    def _value(self, kind: str, of: list[str]) -> str:
        ups = self.ups(of[0])
        if kind == "UPSDESC":
            return quoted("Unavailable" if ups.description is None else ups.description)
        seen = _available(ups)
        if kind == "NUMLOGINS":
            return str(len(self.logins(ups.name)))
        if kind in ("DESC", "CMDDESC"):
            return quoted(NO_DESCRIPTION)
        if of[1] not in seen:
            raise Err("VAR-NOT-SUPPORTED")
        if kind == "TYPE":
            kind = "NUMBER" if re.fullmatch(r"-?[0-9.]+", seen[of[1]]) else "STRING:32"
            return f"RW {kind}" if _writable(of[1]) else kind
        return quoted(seen[of[1]])

    # ---- writes ------------------------------------------------------------------------------------

    def _do_set(self, session: Session, rest: list[str]) -> Iterator[str]:
        if [word.upper() for word in rest[:1]] == ["TRACKING"] and len(rest) == 2:
            session.tracking = rest[1].upper() == "ON"
            yield "OK"
            return
        kind, name, var, value = _exactly(4, rest)
        if kind.upper() != "VAR":
            raise Err("INVALID-ARGUMENT")
        ups = self.ups(name)
        if not self._known(session).may_set:
            raise Err("ACCESS-DENIED")
        if var not in _available(ups):
            raise Err("VAR-NOT-SUPPORTED")
        if not _writable(var):
            raise Err("READONLY")
        ups.variables[var] = value
        yield self._accepted(session)

    def _do_instcmd(self, session: Session, rest: list[str]) -> Iterator[str]:
        if len(rest) not in (2, 3):
            raise Err("INVALID-ARGUMENT")
        ups = self.ups(rest[0])
        _available(ups)
        if rest[1] not in ups.commands:
            raise Err("CMD-NOT-SUPPORTED")
        if not self._known(session).instcmds:
            raise Err("ACCESS-DENIED")
        self.done.append((ups.name, rest[1]))
        yield self._accepted(session)

    def _accepted(self, session: Session) -> str:
        if not session.tracking:
            return "OK"
        self._tracked += 1
        return f"OK TRACKING 00000000-0000-4000-8000-{self._tracked:012d}"


def _exactly(count: int, rest: list[str]) -> list[str]:
    if len(rest) < count:
        raise Err("INVALID-ARGUMENT")
    return rest[:count]


def _available(ups: Ups) -> dict[str, str]:
    if ups.state == "stale":
        raise Err("DATA-STALE")
    if ups.state == "driver-gone":
        raise Err("DRIVER-NOT-CONNECTED")
    return ups.seen()


def _writable(name: str) -> bool:
    return not name.startswith(_READ_ONLY)
