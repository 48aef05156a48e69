"""Messages to frames and back. Bytes only: no socket, no clock, no thread.

A message is two frames: the protocol's name, and a MessagePack body::

    b"pg1"  {"type": "Promise", "seq": 17, "edge": 1204, ...}

What a peer of another version sends is refused with a sentence that says so; unknown fields are skipped, so that a
field may be added within a version. Whatever bytes come in, the answer is a message or `WireError`, never anything else,
and nothing larger than `BODY_MAX` is looked at.

The control socket of a daemon carries JSON instead (`encode_ask` ... `decode_answer`): people look at it, and its
answers grow with the node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from powerguard.core.messages import FromRank, Message, ToRank

T = TypeVar("T")

PROTOCOL = b"pg1"
BODY_MAX = 1 << 20
"""Bytes of a body. The largest message is SEAL, about 120 bytes a rank of the node: 8,000 ranks."""
TEXT_MAX = 4096
"""Characters of any text in a message; longer ones are refused: paths and reasons are shorter."""
WORLD_MAX = 1 << 20
"""Ranks of a job."""
ASK_MAX = 64 << 10
"""Bytes of a question on the control socket."""
ANSWER_MAX = 16 << 20
"""Bytes of an answer on the control socket."""


class WireError(Exception):
    """What came in isn't a message of this protocol; the text says what is wrong with it."""


_encoder = msgspec.msgpack.Encoder()
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)


def encode(message: Message) -> list[bytes]:
    """The frames of *message*. Raises `WireError` if it is too large to be sent."""
    body = _encoder.encode(message)
    if len(body) > BODY_MAX:
        raise WireError(f"{type(message).__name__} of {len(body)} bytes is over the limit of {BODY_MAX}")
    return [PROTOCOL, body]


def decode_from_rank(frames: Sequence[bytes]) -> FromRank:
    """What a rank says. Raises `WireError`."""
    return _checked(_decoded(frames, _from_rank))


def decode_to_rank(frames: Sequence[bytes]) -> ToRank:
    """What a daemon says. Raises `WireError`."""
    return _checked(_decoded(frames, _to_rank))


def _decoded(frames: Sequence[bytes], decoder: msgspec.msgpack.Decoder[T]) -> T:
    if len(frames) != 2:
        raise WireError(f"a message has 2 frames, not {len(frames)}")
    protocol, body = bytes(frames[0]), frames[1]
    if protocol != PROTOCOL:
        if len(protocol) <= 8 and protocol.startswith(b"pg"):
            raise WireError(f"the peer speaks {protocol!r}, this is {PROTOCOL!r}: install the same powerguard on both")
        raise WireError("not a message of powerguard")
    if len(body) > BODY_MAX:
        raise WireError(f"a body of {len(body)} bytes is over the limit of {BODY_MAX}")
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as err:
        raise WireError(f"not a message: {str(err)[:200]}") from err


def _checked(message: T) -> T:
    """Text and ranks within limits, all the way down."""
    for name, value in _leaves(message, ""):
        if isinstance(value, str):
            if len(value) > TEXT_MAX:
                raise WireError(f"{name} is longer than {TEXT_MAX} characters")
            if "\0" in value:
                raise WireError(f"{name} has a NUL in it")
        elif isinstance(value, float) and math.isnan(value):
            raise WireError(f"{name} isn't a number")
    world, rank = getattr(message, "world_size", 1), getattr(message, "rank", 0)
    if not (0 < world <= WORLD_MAX and 0 <= rank < WORLD_MAX):
        raise WireError(f"rank {rank} of {world} can't be")
    return message


def _leaves(value: Any, name: str) -> list[tuple[str, Any]]:
    if isinstance(value, msgspec.Struct):
        return [leaf for field in value.__struct_fields__ for leaf in _leaves(getattr(value, field), field)]
    if isinstance(value, tuple):
        return [leaf for item in value for leaf in _leaves(item, name)]
    return [(name, value)]


# ---- the control socket ----------------------------------------------------------------------------


class Ask(msgspec.Struct, frozen=True, omit_defaults=True):
    """A question or an order on the control socket: "status", "flush", "park", "resume"."""

    verb: str
    by: str = ""  # who asks, for the log


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """*ok* False: the order was refused; *text* says why. *data*: the status."""

    ok: bool
    text: str = ""
    data: dict[str, Any] = msgspec.field(default_factory=dict)


_ask: msgspec.json.Decoder[Ask] = msgspec.json.Decoder(Ask)
_answer: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def encode_ask(ask: Ask) -> list[bytes]:
    """The frames of a question."""
    return [PROTOCOL, msgspec.json.encode(ask)]


def encode_answer(answer: Answer) -> list[bytes]:
    """The frames of an answer."""
    return [PROTOCOL, msgspec.json.encode(answer)]


def decode_ask(frames: Sequence[bytes]) -> Ask:
    """A question. Raises `WireError`."""
    return _json(frames, _ask, ASK_MAX)


def decode_answer(frames: Sequence[bytes]) -> Answer:
    """An answer. Raises `WireError`."""
    return _json(frames, _answer, ANSWER_MAX)


def _json(frames: Sequence[bytes], decoder: msgspec.json.Decoder[T], most: int) -> T:
    if len(frames) != 2 or bytes(frames[0]) != PROTOCOL:
        raise WireError("not of this protocol: install the same powerguard on both sides")
    if len(frames[1]) > most:
        raise WireError(f"{len(frames[1])} bytes are over the limit of {most}")
    try:
        return decoder.decode(frames[1])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as err:
        raise WireError(f"can't be read: {str(err)[:200]}") from err
