"""The text of the NUT protocol: one line's words, and the name of a UPS. No socket here.

Words are split at blanks; a word in double quotes may hold blanks, and in it a backslash takes the next
character as it is. Bytes are UTF-8 with `surrogateescape`: NUT defines no encoding, and one odd byte in a
model name must not cost a reading. (upsd 2.8.0 itself drops what isn't ASCII, on its way in and out.)
"""

from __future__ import annotations

import re
from functools import lru_cache

from msgspec import Struct

from powerguard.errors import ConfigError

PORT = 3493
"""IANA's port of upsd."""

LINE_MAX_BYTES = 8192
"""Longest line believed. upsd's own limits are 256 bytes a value and 512 an argument (server/netlist.c, upsd.c)."""

REMEMBERED = 1024
"""Lines, and texts made printable: most of an answer is what it was a poll ago. 2 UPSes have some 100."""

_WORD = re.compile(r'[ \t]*(?:"([^"\\]*(?:\\.[^"\\]*)*)"|([^ \t"\\]+))(?=[ \t]|\Z)', re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_TO_ESCAPE = re.compile(r'["\\#]')
_PLAIN = re.compile(r"[A-Za-z0-9._:+-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_NAME = re.compile(r"""[!#-&(-?A-\[\]-~]+""")  # printable ASCII but for @ " ' and backslash
_HOST = re.compile(r"""[^\s@"'\\\[\]\x00-\x1f\x7f]+""")
_BRACKETED = re.compile(r"\[([^\[\]]+)\](?::(.*))?")


class MalformedLine(ValueError):
    """A line that isn't NUT's grammar: an open quote, or a quote inside a word."""


def words(line: str) -> list[str]:
    """The words of *line* (without its line end), unquoted and unescaped. Raises MalformedLine."""
    return list(_words(line))


@lru_cache(maxsize=REMEMBERED)
def _words(line: str) -> tuple[str, ...]:
    line = line.rstrip(" \t")
    found: list[str] = []
    at = 0
    while at < len(line):
        match = _WORD.match(line, at)
        if match is None:
            raise MalformedLine(f"not a NUT line at column {at + 1}: {line[:80]!r}")
        quoted, bare = match.groups()
        found.append(bare if quoted is None else _ESCAPED.sub(r"\1", quoted))
        at = match.end()
    return tuple(found)


def quote(word: str) -> str:
    """*word* as the protocol wants it. Raises ValueError for control characters: a newline would be a second command.

    The message doesn't repeat the word, which may be a password.
    """
    if _CONTROL.search(word):
        raise ValueError("a word of the NUT protocol can't hold control characters")
    if _PLAIN.fullmatch(word):
        return word
    # an unescaped # in quotes is a parse error, which upsd 2.8.0 answers with silence
    return '"' + _TO_ESCAPE.sub(r"\\\g<0>", word) + '"'


def decode(line: bytes) -> str:
    """Bytes off the wire to text, without loss."""
    return line.decode("utf-8", "surrogateescape")


def encode(line: str) -> bytes:
    """The reverse of `decode`."""
    return line.encode("utf-8", "surrogateescape")


@lru_cache(maxsize=REMEMBERED)
def printable(text: str) -> str:
    """*text* with bytes that aren't UTF-8 spelled as `\\xff`, so that journals and logs can encode it."""
    return encode(text).decode("utf-8", "backslashreplace")


class UpsAddress(Struct, frozen=True, order=True):
    """Where a UPS is: `ups@host:port`, with an IPv6 literal in brackets. `str()` gives the full form back."""

    ups: str
    host: str = "localhost"
    port: int = PORT

    @classmethod
    def parse(cls, text: str) -> UpsAddress:
        """Reads `ups`, `ups@host`, `ups@host:port`, `ups@[::1]` or `ups@[::1]:port`. Raises ConfigError."""
        ups, at, place = text.strip().partition("@")
        if not _NAME.fullmatch(ups):
            raise _wrong(text, "the name before the @ is empty, or holds blanks, quotes or letters beyond ASCII")
        if not at:
            return cls(ups)
        bracketed = _BRACKETED.fullmatch(place)
        if bracketed:
            host, port = bracketed.group(1), bracketed.group(2)
        elif place.count(":") > 1:
            raise _wrong(text, "an IPv6 address goes in brackets")
        else:
            host, colon, digits = place.partition(":")
            port = digits if colon else None
        if not _HOST.fullmatch(host):
            raise _wrong(text, "the host is empty, or holds blanks, quotes or brackets")
        return cls(ups, host, PORT if port is None else _port(text, port))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.ups}@{host}:{self.port}"


def _port(text: str, digits: str) -> int:
    port = int(digits) if re.fullmatch(r"[0-9]{1,5}", digits) else 0
    if not 0 < port < 65536:
        raise _wrong(text, "the port is not a number from 1 to 65535")
    return port


def _wrong(text: str, why: str) -> ConfigError:
    return ConfigError(
        f"{text!r} is not the address of a UPS: {why}",
        todo="write it as ups@host:port, for example rack@10.0.0.5:3493 or rack@[fd00::5]:3493",
    )
