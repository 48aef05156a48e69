"""Frames: every message there and back, and a `WireError` for anything else."""

from __future__ import annotations

import math
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard import wire
from powerguard.core.between import Course, RankState, Report
from powerguard.core.messages import (
    Ack,
    Beat,
    Decide,
    Exit,
    FromRank,
    Hello,
    Message,
    Pace,
    Plan,
    Purpose,
    Seal,
    Shard,
    ShardRecord,
    ToRank,
    Welcome,
)

finite = st.floats(-1e12, 1e12)
words = st.text(max_size=50)
steps = st.integers(-1, 2**40)


def values(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Random messages of one kind."""
    return st.from_type(kind)


st.register_type_strategy(float, finite)
st.register_type_strategy(str, words)
st.register_type_strategy(int, steps)
from_rank = st.one_of(*(values(kind) for kind in get_args(FromRank)))
to_rank = st.one_of(*(values(kind) for kind in get_args(ToRank)))


@given(from_rank)
def test_what_a_rank_says_arrives_as_it_was(message):
    """Encoding and decoding is the identity, for every message of a rank."""
    assert wire.decode_from_rank(wire.encode(message)) == message


@given(to_rank)
def test_what_the_daemon_says_arrives_as_it_was(message):
    """Encoding and decoding is the identity, for every message of the daemon."""
    assert wire.decode_to_rank(wire.encode(message)) == message


anything = st.one_of(
    st.lists(st.binary(max_size=80), max_size=4),
    st.binary(max_size=400).map(lambda body: [b"pg1", body]),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ).map(lambda value: [b"pg1", msgspec.msgpack.encode(value)]),
)


@given(anything)
def test_any_bytes_are_a_message_or_a_wire_error(frames):
    """Nothing but `WireError` ever comes out of the decoders."""
    for decode in (wire.decode_from_rank, wire.decode_to_rank):
        try:
            message = decode(frames)
        except wire.WireError:
            continue
        assert isinstance(message, Message)


@given(st.one_of(from_rank, to_rank), st.data())
def test_a_damaged_message_is_a_message_or_a_wire_error(message, data):
    """The same for a real message with bytes cut out or changed."""
    body = bytearray(wire.encode(message)[1])
    at = data.draw(st.integers(0, len(body) - 1))
    body[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    for decode in (wire.decode_from_rank, wire.decode_to_rank):
        try:
            decode([b"pg1", bytes(body)])
        except wire.WireError:
            continue


@pytest.mark.parametrize("frames", [[], [b"pg1"], [*wire.encode(Beat(1)), b""], [b"", *wire.encode(Beat(1))]])
def test_two_frames_it_must_be(frames):
    """A frame more or less is refused, even around a good message."""
    with pytest.raises(wire.WireError, match="frames, not 2"):
        wire.decode_from_rank(frames)


@pytest.mark.parametrize("name", [b"a%62/0", b"job/007", b"job/", b"/0", b"job", b"a/b/0", b"\0abcd", b"job/-1"])
def test_only_the_canonical_identity_parses(name):
    """No two identities stand for one rank."""
    with pytest.raises(wire.WireError):
        wire.parse_identity(name)


def test_deep_nesting_is_a_wire_error():
    """An unknown field nested a hundred thousand deep neither crashes nor escapes."""
    body = b"\x82\xa4type\xa4Beat\xa1x" + b"\x91" * 60000 + b"\xc0"

    with pytest.raises(wire.WireError):
        wire.decode_from_rank([b"pg1", body])


@pytest.mark.parametrize(
    ("version", "says"),
    [
        (b"pg2", "the peer's powerguard is newer: it speaks pg2, this one pg1"),
        (b"pg0", "the peer's powerguard is older: it speaks pg0, this one pg1"),
        (b"HTTP", "not powerguard's protocol"),
        (b"", "not powerguard's protocol"),
        (b"pg1" + b"\0" * 100, "not powerguard's protocol"),
    ],
)
def test_another_version_is_said_clearly(version, says):
    """The error tells which side is to be updated."""
    body = wire.encode(Beat(1))[1]

    with pytest.raises(wire.WireError, match=says):
        wire.decode_from_rank([version, body])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_numbers_that_poison_arithmetic_are_refused(bad):
    """NaN and infinities never reach the core."""
    body = msgspec.msgpack.encode(Beat(1, Pace(step_s=bad)))

    with pytest.raises(wire.WireError, match="number"):
        wire.decode_from_rank([b"pg1", body])


def test_sizes_are_limited_both_ways():
    """A body, a string or a list beyond its limit is refused, at the sender and at the receiver."""
    long = "x" * (wire.STRING_CHARS + 1)
    hello = Hello("j", 0, 0, 1, 1, long)
    with pytest.raises(wire.WireError, match="string"):
        wire.encode(hello)
    with pytest.raises(wire.WireError, match="string"):
        wire.decode_from_rank([b"pg1", msgspec.msgpack.encode(hello)])
    with pytest.raises(wire.WireError, match="bytes, more than"):
        wire.decode_from_rank([b"pg1", b"\0" * (wire.FROM_RANK_BYTES + 1)])
    with pytest.raises(wire.WireError, match="bytes, more than"):
        wire.decode_to_rank([b"pg1", b"\0" * (wire.TO_RANK_BYTES + 1)])


def test_a_world_of_16384_ranks_can_be_sealed():
    """SEAL over a big world is within the limit to ranks."""
    shards = tuple(ShardRecord(rank, f"rank-{rank:05d}", 2**40, "0123456789abcdef" * 2) for rank in range(16384))
    seal = Seal(7, 10**9, "step-1000000000.20251130T032401Z-1-7", 16384, shards)

    assert wire.decode_to_rank(wire.encode(seal)) == seal


def test_unknown_fields_are_ignored():
    """A newer peer may say more."""
    body = msgspec.msgpack.encode({"type": "Exit", "seq": 3, "code": 75, "reason": "r", "colour": "blue"})

    assert wire.decode_to_rank([b"pg1", body]) == Exit(3, 75, "r")


@pytest.mark.parametrize("message", [Welcome("n", "online", 3), Decide(1, Purpose.STOP, Plan.FRESH, 5, "g")])
def test_directions_are_kept_apart(message):
    """What only the daemon may say isn't taken from a rank."""
    with pytest.raises(wire.WireError):
        wire.decode_from_rank(wire.encode(message))


@given(
    st.builds(wire.Ask, words, words),
    st.builds(wire.Answer, st.booleans(), words, st.dictionaries(words, st.integers(0, 9))),
)
def test_questions_and_answers_arrive_as_they_were(ask, answer):
    """The control socket's JSON there and back."""
    assert wire.decode_ask(wire.encode_ask(ask)) == ask
    assert wire.decode_answer(wire.encode_answer(answer)) == answer


@given(st.one_of(anything, st.binary(max_size=100).map(lambda body: [b"pg1", b'{"verb":' + body])))
def test_any_bytes_are_a_question_or_a_wire_error(frames):
    """The control socket's decoders raise nothing else either."""
    for decode in (wire.decode_ask, wire.decode_answer):
        try:
            decode(frames)
        except wire.WireError:
            continue


def test_ack_goes_both_ways():
    """Either side acknowledges."""
    frames = wire.encode(Ack(3, "Decide"))

    assert wire.decode_from_rank(frames) == wire.decode_to_rank(frames) == Ack(3, "Decide")


def test_a_shard_is_small():
    """A message of the busy path stays around a hundred bytes."""
    frames = wire.encode(Shard(7, 5, "step-0000000005.ev-7", ShardRecord(1, "rank-00001", 10, "d" * 32), 1.0, 0.1))

    assert len(frames[1]) < 250


@given(st.text(min_size=1, max_size=60), st.integers(0, 10**9 - 1))
def test_identities_go_there_and_back(job, rank):
    """Any job name makes an identity that parses back to it."""
    try:
        name = wire.identity(job, rank)
    except wire.WireError:
        assert len(job.encode("utf-8", "surrogatepass")) * 3 > 200
        return

    assert wire.parse_identity(name) == (job, rank)
    assert name[0] != 0


def test_what_is_not_text_is_a_wire_error():
    """Lone surrogates, as an odd path may bring them, are refused, not raised through."""
    with pytest.raises(wire.WireError):
        wire.identity("\ud800", 0)
    with pytest.raises(wire.WireError):
        wire.encode(Hello("\ud800", 0, 0, 1, 1, "/c"))


@given(st.binary(max_size=300))
def test_any_bytes_are_an_identity_or_a_wire_error(name):
    """A peer's identity is its own word: it parses to what makes it again, or not at all."""
    try:
        job, rank = wire.parse_identity(name)
    except wire.WireError:
        return

    assert wire.identity(job, rank) == name


word_of_a_node = st.builds(
    Report,
    node=st.text(min_size=1, max_size=20),
    boot=st.text(max_size=20),
    n=st.integers(0, 2**50),
    job=st.text(min_size=1, max_size=20),
    term=st.integers(0, 2**30),
    world_size=st.integers(1, 65536),
    ranks=st.lists(st.builds(RankState, rank=st.integers(0, 65535), pid=st.integers(1, 2**22)), max_size=4).map(tuple),
) | st.builds(
    Course,
    node=st.just("n"),
    boot=st.just("b"),
    n=st.integers(0, 2**50),
    job=st.just("j"),
    term=st.integers(0, 2**30),
    world_size=st.integers(1, 65536),
)


@given(word_of_a_node)
def test_what_a_node_says_arrives_as_it_was(message):
    """Encoding and decoding is the identity, for both words between nodes."""
    assert wire.decode_peer(wire.encode_peer(message)) == message


@given(anything)
def test_any_bytes_are_a_word_of_a_node_or_a_wire_error(frames):
    """Nothing but `WireError` comes out, and no message of a rank passes for a word of a node."""
    try:
        message = wire.decode_peer(frames)
    except wire.WireError:
        return
    assert isinstance(message, (Report, Course))


def test_a_report_is_smaller_than_a_course_may_be():
    """A follower's word has its own limit, both ways; so have strings, numbers and lists in it."""
    ranks = tuple(RankState(rank, 1, gone="x" * 1000) for rank in range(1200))
    big = Report(node="n", boot="b", n=1, job="j", term=0, world_size=2, ranks=ranks)
    with pytest.raises(wire.WireError, match=r"Report of .* bytes, more than"):
        wire.encode_peer(big)
    with pytest.raises(wire.WireError, match=r"Report of .* bytes, more than"):
        wire.decode_peer([b"pg1", msgspec.msgpack.encode(big)])
    with pytest.raises(wire.WireError, match="not a message"):
        wire.decode_peer(wire.encode(Beat(3)))
