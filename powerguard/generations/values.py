"""Python values as typed JSON, exactly, and back: what `record.json` holds of a state beside its tensors.

null, true, false, strings, arrays (for lists) and integers of at most 53 bits stand for themselves. Everything else is
an object with one member, whose name is the type: ``{"float": "0.1"}``, ``{"tuple": [...]}``,
``{"dict": [[key, value], ...]}``. No type is ever guessed, nothing is pickled, and decoding runs no code of anybody.
The table is in docs/format.md.

What JSON can't hold (tensors, arrays, objects with a state) is left to a *leaf* function of the caller.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from powerguard.errors import CheckpointError, StateError

Node: TypeAlias = Any  # None | bool | int | str | list[Node] | dict[str, Any] with one member
Leaf: TypeAlias = Callable[[object, str, int], Node]
Build: TypeAlias = Callable[[str, Any], object]

DEPTH_MAX = 200
"""Nesting beyond this is a cycle, or would be one for the reader's stack."""

_SAFE_INT = 2**53


def join(path: str, key: object) -> str:
    """The path of an element, for messages and tensor names."""
    return f"{path}.{key}" if path else str(key)


def encode(value: object, leaf: Leaf, path: str = "", depth: int = 0) -> Node:
    """The node of *value*. Types are compared exactly: a subclass is another type and goes to *leaf*.

    Raises StateError for nesting deeper than `DEPTH_MAX`, and what *leaf* raises.
    """
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return _encode_str(value)  # type: ignore[arg-type]
    if kind is int:
        return value if -_SAFE_INT <= value <= _SAFE_INT else {"int": hex(value)}  # type: ignore[operator, arg-type]
    if kind is float:
        return {"float": _encode_float(value)}  # type: ignore[arg-type]
    container = _CONTAINERS.get(kind)
    if container is None:
        return _encode_plain(value, leaf, path, depth)
    if depth >= DEPTH_MAX:
        raise StateError(f"{path[:80]}...: nested deeper than {DEPTH_MAX}", todo="is there a cycle in the state?")
    return container(value, leaf, path, depth + 1)


def _encode_plain(value: object, leaf: Leaf, path: str, depth: int) -> Node:
    kind = type(value)
    if kind is complex:
        return {"complex": [_encode_float(value.real), _encode_float(value.imag)]}  # type: ignore[attr-defined]
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}  # type: ignore[arg-type]
    if kind is bytearray:
        return {"bytearray": base64.b64encode(value).decode()}  # type: ignore[arg-type]
    if kind is range:
        return {"range": [hex(value.start), hex(value.stop), hex(value.step)]}  # type: ignore[attr-defined]
    if kind is slice:
        parts = (value.start, value.stop, value.step)  # type: ignore[attr-defined]
        return {"slice": [encode(part, leaf, path, depth + 1) for part in parts]}
    return leaf(value, path, depth)


def _encode_float(value: float) -> str:
    """The shortest text that reads back as the same bits; a NaN carries its bits."""
    if math.isnan(value):
        return "nan:" + struct.pack(">d", value).hex()
    return repr(value)


def _encode_str(value: str) -> Node:
    try:
        value.encode()
    except UnicodeEncodeError:  # lone surrogates, as in undecodable file names
        return {"str": base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()}
    return value


def _items(values: Iterable[object], leaf: Leaf, path: str, depth: int) -> list[Node]:
    return [encode(value, leaf, join(path, index), depth) for index, value in enumerate(values)]


def _pairs(value: Any, leaf: Leaf, path: str, depth: int) -> list[Node]:
    return [
        [encode(key, leaf, f"{path}[key]", depth), encode(item, leaf, join(path, key), depth)]
        for key, item in value.items()
    ]


def _encode_deque(value: Any, leaf: Leaf, path: str, depth: int) -> Node:
    return {"deque": [_items(value, leaf, path, depth), value.maxlen]}


_CONTAINERS: dict[type, Callable[[Any, Leaf, str, int], Node]] = {
    list: _items,
    tuple: lambda *a: {"tuple": _items(*a)},
    set: lambda *a: {"set": _items(*a)},
    frozenset: lambda *a: {"frozenset": _items(*a)},
    dict: lambda *a: {"dict": _pairs(*a)},
    OrderedDict: lambda *a: {"ordered": _pairs(*a)},
    Counter: lambda *a: {"counter": _pairs(*a)},
    deque: _encode_deque,
}


def decode(node: Node, build: Build, depth: int = 0) -> Any:
    """The value of *node*. *build(type, payload)* makes what *leaf* encoded.

    Raises CheckpointError where *node* isn't one that `encode` writes, and what *build* raises.
    """
    if node is None or isinstance(node, (bool, int, str)):
        return node
    if depth > 2 * DEPTH_MAX:
        raise CheckpointError("a record is nested too deep")
    if isinstance(node, list):
        return [decode(item, build, depth + 1) for item in node]
    if not isinstance(node, dict) or len(node) != 1:
        raise CheckpointError(f"a record holds {str(node)[:60]!r}, which is no typed value")
    ((kind, payload),) = node.items()
    try:
        if kind in _SCALARS:
            return _SCALARS[kind](payload)
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](decode(item, build, depth + 1) for item in payload)
        if kind in _MAPPINGS:
            return _MAPPINGS[kind](
                [(decode(key, build, depth + 1), decode(item, build, depth + 1)) for key, item in payload]
            )
        if kind == "deque":
            return deque((decode(item, build, depth + 1) for item in payload[0]), maxlen=payload[1])
        if kind == "slice":
            return slice(*(decode(item, build, depth + 1) for item in payload))
    except (TypeError, ValueError, KeyError, IndexError, struct.error) as error:
        raise CheckpointError(f"a record holds a {kind} that can't be read: {error}") from error
    return build(kind, payload)


def _decode_float(text: str) -> float:
    if text.startswith("nan:"):
        return float(struct.unpack(">d", bytes.fromhex(text[4:]))[0])
    return float(text)


def _counter(pairs: list[tuple[Any, Any]]) -> Counter[Any]:
    counter: Counter[Any] = Counter()
    dict.update(counter, pairs)
    return counter


_SCALARS: dict[str, Callable[[Any], object]] = {
    "int": lambda text: int(text, 16),
    "float": _decode_float,
    "complex": lambda parts: complex(_decode_float(parts[0]), _decode_float(parts[1])),
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "bytearray": lambda text: bytearray(base64.b64decode(text, validate=True)),
    "range": lambda parts: range(*(int(part, 16) for part in parts)),
    "str": lambda text: base64.b64decode(text, validate=True).decode("utf-8", "surrogatepass"),
}
_SEQUENCES: dict[str, Callable[[Iterable[Any]], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, Callable[[list[tuple[Any, Any]]], Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": _counter,
}
