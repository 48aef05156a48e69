"""Typed JSON holds Python values exactly."""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict, deque
from enum import IntEnum

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard.errors import CheckpointError, StateError
from powerguard.generations.values import decode, encode

hashable = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(10**60), max_value=10**60)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
values = st.recursive(
    hashable | st.binary().map(bytearray),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.dictionaries(hashable, inner, max_size=3).map(OrderedDict)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=7))
        | st.sets(hashable, max_size=3)
        | st.dictionaries(hashable, st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=25,
)


def refuse(value: object, path: str, depth: int) -> object:
    raise StateError(f"{path}: {type(value)}")


def unknown(kind: str, payload: object) -> object:
    raise CheckpointError(kind)


def through_json(value: object) -> object:
    return decode(msgspec.json.decode(msgspec.json.encode(encode(value, refuse))), unknown)


def same(one: object, other: object) -> bool:
    """Equal, with equal types all the way down, and floats by their bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack(">d", one) == struct.pack(">d", other)
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(k1, k2) and same(v1, v2) for (k1, v1), (k2, v2) in zip(one.items(), other.items(), strict=True)
        )
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@given(values)
def test_any_plain_value_survives(value):
    """Types, order, keys that aren't strings, integers of any size and floats to the bit come back."""
    assert same(value, through_json(value))


@pytest.mark.parametrize("bits", [0x7FF8000000000000, 0xFFF8000000000001, 0x7FF0000000000001])
def test_nan_keeps_its_bits(bits):
    """Every NaN comes back as the same NaN."""
    value = struct.unpack(">d", struct.pack(">Q", bits))[0]
    assert math.isnan(value)
    assert same(value, through_json(value))


def test_lone_surrogates_survive():
    """A string that UTF-8 can't hold, as an undecodable file name, comes back."""
    assert through_json({"\udc80": "a\ud800"}) == {"\udc80": "a\ud800"}


def test_a_maxlen_survives():
    """A deque keeps its bound."""
    assert through_json(deque([1, 2], maxlen=2)).maxlen == 2  # type: ignore[attr-defined]


def test_a_subclass_is_not_its_base():
    """An IntEnum isn't saved as the int that it also is: it would come back as another type."""

    class Colour(IntEnum):
        RED = 1

    with pytest.raises(StateError):
        through_json({"a": [Colour.RED]})


def test_a_cycle_is_refused():
    """A list that holds itself raises a clear error, not a RecursionError."""
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(StateError, match="cycle"):
        encode(loop, refuse)


@pytest.mark.parametrize(
    "node",
    [{"float": "x"}, {"int": []}, {"bytes": "%"}, {"dict": [[1]]}, {"set": [[]]}, {"a": 1, "b": 2}, 1.5, {"what": 1}],
)
def test_a_wrong_node_is_an_error_of_the_checkpoint(node):
    """Whatever a record holds, decoding it raises CheckpointError or gives a value."""
    with pytest.raises(CheckpointError):
        decode(node, unknown)
