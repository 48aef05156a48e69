"""Who may connect: ZeroMQ asks (ZAP, RFC 27), a table of public keys answers. Frames in, frames out; no socket here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"powerguard"
VERSION = b"1.0"
LATER = b"300"
"""The connection ends without a word. A 400 would make the other side give up for good, and this key may be believed
after the next reload.
"""
CREDENTIALS_AT = 6
"""Frames of a request: version, id, domain, address, identity, mechanism, then the credentials: 32 bytes of key."""


def answer(frames: Sequence[bytes], names: Mapping[bytes, str]) -> tuple[list[bytes], str]:
    """The answer to a request, and why it was refused ("" = it wasn't). A connection's user id is its node's name."""
    request = frames[1] if len(frames) > 1 else b""
    why = _refused(frames, names)
    if why:
        return [VERSION, request, LATER, b"refused", b"", b""], why
    return [VERSION, request, b"200", b"OK", names[frames[CREDENTIALS_AT]].encode(), b""], ""


def _refused(frames: Sequence[bytes], names: Mapping[bytes, str]) -> str:
    if len(frames) <= CREDENTIALS_AT or frames[0] != VERSION or frames[2] != DOMAIN:
        return "a request that isn't understood"
    where = frames[3].decode(errors="replace")[:64]
    if frames[5] != b"CURVE":
        return f"a connection from {where} without a key"
    if frames[CREDENTIALS_AT] not in names:
        return f"a key from {where} that isn't trusted here"
    return ""
