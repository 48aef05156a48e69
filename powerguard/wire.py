"""Messages and frames: `[b"pg1", body]`, the body a MessagePack map whose `type` names the message. No socket here.

Whatever comes in, a decoder answers with a message or raises `WireError`. Limits, both ways:

============================  =================  =====================================================
what                          limit              why
============================  =================  =====================================================
frames                        2                  the sender's identity is the socket's business
body from a rank              64 KiB             the largest is HELLO: three paths and some words
body to a rank                4 MiB              SEAL names every shard: about 150 bytes a rank
REPORT of a node              1 MiB              1,024 ranks
COURSE for a node             16 MiB             the roster of 65,536 ranks, or the shards that its rank is to seal
a string                      4,096 characters   PATH_MAX
a list                        65,536 entries     ranks of a world
a number                      finite, < 2**53    floats that JSON and arithmetic survive
============================  =================  =====================================================

A new field with a default keeps the version; anything else makes it `pg2`, and the error says who is older.

The control socket of a daemon carries JSON instead (`encode_ask` ... `decode_answer`): people look at it, and its
answers grow with the node.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import msgspec

from powerguard.core.between import COURSE_BYTES, REPORT_BYTES, FromPeer, Report
from powerguard.core.messages import FromRank, Message, ToRank

VERSION = b"pg1"
FROM_RANK_BYTES = 64 * 1024
TO_RANK_BYTES = 4 * 1024 * 1024
STRING_CHARS = 4096
LIST_ENTRIES = 65536
NUMBER = 2**53
ASK_BYTES = 64 * 1024
ANSWER_BYTES = 16 * 1024 * 1024
IDENTITY_BYTES = 255
"""ZeroMQ's own limit."""

_encoder = msgspec.msgpack.Encoder()
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)

_peer: msgspec.msgpack.Decoder[FromPeer] = msgspec.msgpack.Decoder(FromPeer)

_UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, MemoryError)
"""All that a decoder may raise over bytes that it can't make sense of."""

M = TypeVar("M")
Frame = bytes | bytearray | memoryview


class WireError(ValueError):
    """Frames that aren't a message; the text says what is wrong with them."""


def encode(message: Message) -> list[bytes]:
    """The frames of *message*; raises `WireError` if its peer would refuse them."""
    _checked(message)
    try:
        body = _encoder.encode(message)
    except UnicodeEncodeError as error:
        raise WireError(f"a string that isn't text: {error}") from None
    limit = FROM_RANK_BYTES if isinstance(message, FromRank) and not isinstance(message, ToRank) else TO_RANK_BYTES
    if len(body) > limit:
        raise WireError(f"{type(message).__name__} of {len(body)} bytes, more than {limit}")
    return [VERSION, body]


def decode_from_rank(frames: Sequence[Frame]) -> FromRank:
    """The message that a rank sent; `WireError` and nothing else for anything that isn't one."""
    return _decode(frames, _from_rank, FROM_RANK_BYTES)


def decode_to_rank(frames: Sequence[Frame]) -> ToRank:
    """The message that the daemon sent; `WireError` and nothing else for anything that isn't one."""
    return _decode(frames, _to_rank, TO_RANK_BYTES)


def encode_peer(message: FromPeer) -> list[bytes]:
    """The frames of a word to another node; raises `WireError` if it would be refused there."""
    _checked(message)
    try:
        body = _encoder.encode(message)
    except UnicodeEncodeError as error:
        raise WireError(f"a string that isn't text: {error}") from None
    _fits(message, len(body))
    return [VERSION, body]


def decode_peer(frames: Sequence[Frame]) -> FromPeer:
    """The word of another node; `WireError` and nothing else for anything that isn't one."""
    message = _decode(frames, _peer, COURSE_BYTES)
    _fits(message, len(frames[1]))
    return message


def _fits(message: FromPeer, size: int) -> None:
    limit = REPORT_BYTES if isinstance(message, Report) else COURSE_BYTES
    if size > limit:
        raise WireError(f"{type(message).__name__} of {size} bytes, more than {limit}")


def _decode(frames: Sequence[Frame], decoder: msgspec.msgpack.Decoder[M], limit: int) -> M:
    body = _body(frames, limit)
    try:
        message = decoder.decode(body)
    except _UNREADABLE as error:
        raise WireError(f"not a message: {str(error)[:200]}") from None
    _checked(message)
    return message


def _body(frames: Sequence[Frame], limit: int) -> Frame:
    """The second frame, once the first is ours and the second isn't too large."""
    if len(frames) != 2:
        raise WireError(f"{len(frames)} frames, not 2")
    version, body = bytes(frames[0][:16]), frames[1]
    if version != VERSION or len(frames[0]) != len(VERSION):
        raise WireError(_strange(version))
    if len(body) > limit:
        raise WireError(f"a body of {len(body)} bytes, more than {limit}")
    return body


def _strange(version: bytes) -> str:
    """What to say of a first frame that isn't ours."""
    match = re.fullmatch(rb"pg(\d{1,4})", version)
    if match is None:
        return f"not powerguard's protocol: it begins with {version!r}"
    age = "newer" if int(match[1]) > int(VERSION[2:]) else "older"
    return f"the peer's powerguard is {age}: it speaks {version.decode()}, this one {VERSION.decode()}"


def _checked(value: Any) -> None:
    """Raises `WireError` for a value beyond the limits, wherever it stands in a message."""
    if isinstance(value, str):
        if len(value) > STRING_CHARS:
            raise WireError(f"a string of {len(value)} characters, more than {STRING_CHARS}")
    elif isinstance(value, (int, float)):
        if not math.isfinite(value) or abs(value) >= NUMBER:
            raise WireError(f"a number out of range: {value}")
    elif isinstance(value, (tuple, list)):
        if len(value) > LIST_ENTRIES:
            raise WireError(f"a list of {len(value)} entries, more than {LIST_ENTRIES}")
        for entry in value:
            _checked(entry)
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            _checked(getattr(value, name))


DEPUTY = b"+"
"""Behind a rank's identity: its deputy's."""


def identity(job: str, rank: int, *, deputy: bool = False) -> bytes:
    """The fixed ZeroMQ identity of a rank (`job/rank`, the job percent-escaped) or of its deputy (`job/rank+`).

    Raises `WireError` if there is none.
    """
    try:
        name = f"{quote(job, safe='')}/{rank}".encode() + (DEPUTY if deputy else b"")
    except UnicodeEncodeError:
        name = b""
    if not job or not name or len(name) > IDENTITY_BYTES or rank < 0:
        raise WireError(
            f"no identity for rank {rank} of job {job[:64]!r}: empty, negative or over {IDENTITY_BYTES} bytes"
        )
    return name


def parse_identity(name: bytes) -> tuple[str, int]:
    """Job and rank of an identity; raises `WireError` for any bytes that `identity` wouldn't have made."""
    match = re.fullmatch(rb"([\x21-\x2e\x30-\x7e]{1,250})/(\d{1,9})(\+?)", name)
    if match is None:
        raise WireError(f"not the identity of a rank: {name[:64]!r}")
    try:
        job = unquote(match[1].decode("ascii"), errors="strict")
        if identity(job, int(match[2]), deputy=is_deputy(name)) == name:
            return job, int(match[2])
    except UnicodeDecodeError:
        pass
    raise WireError(f"not the identity of a rank: {name[:64]!r}")


def is_deputy(name: bytes) -> bool:
    """Whether an identity is one of a rank's deputy."""
    return name.endswith(DEPUTY)


# ---- the control socket ----------------------------------------------------------------------------


class Ask(msgspec.Struct, frozen=True, omit_defaults=True):
    """A question or an order on the control socket: "status", "flush", "park", "resume", "batteries"; also
    "battery-replaced", of the feed *ups* on the ISO date *day*.
    """

    verb: str
    by: str = ""  # who asks, for the log
    ups: str = ""
    day: str = ""
    job: str = ""  # of "drill": this one alone
    for_s: float = 0.0  # of "drill": parked ranks wait so long


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """*ok* False: the order was refused, *text* says why. *data*: the status."""

    ok: bool
    text: str = ""
    data: dict[str, Any] = msgspec.field(default_factory=dict)


_ask: msgspec.json.Decoder[Ask] = msgspec.json.Decoder(Ask)
_answer: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def encode_ask(ask: Ask) -> list[bytes]:
    """The frames of a question."""
    return [VERSION, msgspec.json.encode(ask)]


def encode_answer(answer: Answer) -> list[bytes]:
    """The frames of an answer."""
    return [VERSION, msgspec.json.encode(answer)]


def decode_ask(frames: Sequence[Frame]) -> Ask:
    """A question; `WireError` and nothing else for anything that isn't one."""
    return _json(frames, _ask, ASK_BYTES)


def decode_answer(frames: Sequence[Frame]) -> Answer:
    """An answer; `WireError` and nothing else for anything that isn't one."""
    return _json(frames, _answer, ANSWER_BYTES)


def _json(frames: Sequence[Frame], decoder: msgspec.json.Decoder[M], limit: int) -> M:
    body = _body(frames, limit)
    try:
        return decoder.decode(body)
    except _UNREADABLE as error:
        raise WireError(f"can't be read: {str(error)[:200]}") from None
