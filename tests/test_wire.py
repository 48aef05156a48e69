"""Frames: every message there and back, and whatever bytes come in, a message or `WireError`."""

import contextlib
import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard import wire
from powerguard.core import messages as m

RECORD = m.ShardRecord(rank=0, path="rank-00000", bytes=10, digest="d1")

EXAMPLES = [
    m.Hello(job="j", rank=1, local_rank=1, world_size=2, pid=7, directory="/d", pace=m.Pace(step_s=0.5)),
    m.Promise(seq=3, edge=8),
    m.Shard(seq=3, step=8, generation="step-0000000008.e-3", record=RECORD, write_s=1.5),
    m.Failed(seq=3, step=8, why="no space"),
    m.Prepare(seq=3, event="e", purpose=m.Purpose.STOP, hold_max_s=15.0, tag="e-3"),
    m.Decide(seq=3, purpose=m.Purpose.SNAPSHOT, plan=m.Plan.FRESH, step=8, generation="g", budget_s=12.0),
    m.Seal(seq=3, step=8, generation="g", world_size=1, shards=(RECORD,)),
    m.Notice(seq=3, remaining_s=None, reason="on battery"),
    m.Exit(seq=3, code=75, reason="halt"),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_there_and_back(message):
    """A message survives the frames unchanged."""
    from_rank = isinstance(message, typing.get_args(m.FromRank)) and not isinstance(message, m.Ack)
    decode = wire.decode_from_rank if from_rank else wire.decode_to_rank

    assert message == decode(wire.encode(message))


def test_unknown_fields_are_skipped():
    """A newer peer of the same protocol may say more."""
    body = msgspec.msgpack.encode({"type": "Promise", "seq": 1, "edge": 2, "mood": "good"})

    assert m.Promise(seq=1, edge=2) == wire.decode_from_rank([b"pg1", body])


def test_a_rank_cannot_speak_as_a_daemon():
    """EXIT from a rank isn't a message."""
    with pytest.raises(wire.WireError):
        wire.decode_from_rank(wire.encode(m.Exit(seq=1, code=75, reason="")))


@pytest.mark.parametrize(
    ("frames", "word"),
    [
        ([], "2 frames"),
        ([b"pg1"], "2 frames"),
        ([b"pg1", b"", b""], "2 frames"),
        ([b"pg9", b""], "speaks b'pg9'"),
        ([b"GET /", b""], "not a message of powerguard"),
        ([b"pg1", b"x" * (wire.BODY_MAX + 1)], "over the limit"),
        ([b"pg1", b"\xc1"], "not a message"),
        ([b"pg1", msgspec.msgpack.encode({"type": "Promise", "seq": "one", "edge": 2})], "not a message"),
        ([b"pg1", msgspec.msgpack.encode({"type": "Bye", "why": "x" * 5000})], "longer than"),
        ([b"pg1", msgspec.msgpack.encode({"type": "Bye", "why": "a\0b"})], "NUL"),
        (
            [
                b"pg1",
                msgspec.msgpack.encode({"type": "Promise", "seq": 1, "edge": 2, "pace": {"step_s": float("nan")}}),
            ],
            "number",
        ),
    ],
)
def test_what_is_off_is_said(frames, word):
    """The error says what is wrong."""
    with pytest.raises(wire.WireError, match=word):
        wire.decode_from_rank(frames)


def test_impossible_ranks_are_refused():
    """A rank outside its world isn't one."""
    hello = {"type": "Hello", "job": "j", "rank": 0, "local_rank": 0, "world_size": 0, "pid": 1, "directory": "/"}
    with pytest.raises(wire.WireError, match="can't be"):
        wire.decode_from_rank([b"pg1", msgspec.msgpack.encode(hello)])


def test_too_large_to_send():
    """The limit holds for the sender as well."""
    shards = tuple(m.ShardRecord(rank=n, path="p" * 100, bytes=1, digest="d" * 60) for n in range(9000))
    with pytest.raises(wire.WireError, match="over the limit"):
        wire.encode(m.Seal(seq=1, step=1, generation="g", world_size=9000, shards=shards))


JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
TYPED = st.builds(
    lambda tag, fields: {"type": tag, **fields},
    st.sampled_from([t.__name__ for t in typing.get_args(m.FromRank)]),
    st.dictionaries(st.sampled_from(["seq", "step", "edge", "job", "rank", "pace", "record", "why"]), JSONISH),
)


@given(st.lists(st.binary(max_size=200), max_size=3) | st.binary(max_size=300).map(lambda body: [b"pg1", body]))
def test_any_bytes(frames):
    """Bytes are a message or a WireError, nothing else, for every decoder."""
    for decode in (wire.decode_from_rank, wire.decode_to_rank, wire.decode_ask, wire.decode_answer):
        with contextlib.suppress(wire.WireError):
            decode(frames)


@given(JSONISH | TYPED)
def test_any_values(value):
    """Well-formed bodies with wrong contents are a message or a WireError, nothing else."""
    for frames, decode in (
        ([b"pg1", msgspec.msgpack.encode(value)], wire.decode_from_rank),
        ([b"pg1", msgspec.msgpack.encode(value)], wire.decode_to_rank),
    ):
        with contextlib.suppress(wire.WireError):
            decode(frames)


def test_control_there_and_back():
    """A question and its answer survive the frames."""
    ask, answer = wire.Ask("flush", by="root"), wire.Answer(ok=False, text="no job", data={"phase": "online"})

    assert (ask, answer) == (
        wire.decode_ask(wire.encode_ask(ask)),
        wire.decode_answer(wire.encode_answer(answer)),
    )
