"""Any state comes back bit for bit."""

from __future__ import annotations

import copy
import math
import random
import shutil
import struct
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:ComplexHalf")]

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e8m0fnu,
    torch.complex64,
    torch.complex128,
    torch.complex32,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


def raw(tensor: Any) -> bytes:
    """The values' bytes, in C order."""
    flat = tensor.detach().contiguous()
    if flat.numel() == 0:
        return b""
    out = torch.empty(0, dtype=torch.uint8)
    size = flat.numel() * flat.element_size()
    out.set_(flat.untyped_storage(), flat.storage_offset() * flat.element_size(), (size,))
    return bytes(out.numpy())


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, with equal types all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.requires_grad == other.requires_grad
            and raw(one) == raw(other)
        )
    if isinstance(one, float):
        return struct.pack(">d", one) == struct.pack(">d", other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def make_tensor(dtype: Any, shape: tuple[int, ...], how: str, seed: int) -> Any:
    """Random bytes as a tensor (NaNs and all), laid out in memory in one of several ways."""
    count = math.prod(shape)
    size = (2 * count + 1) * dtype.itemsize
    data = torch.frombuffer(bytearray(random.Random(seed).randbytes(size)), dtype=torch.uint8)
    if dtype == torch.bool:
        data = data % 2
    flat = data.view(dtype)
    if how == "strided":
        return flat[: 2 * count : 2].view(shape)
    if how == "offset":
        return flat[1 : 1 + count].view(shape)
    if how == "transposed" and len(shape) == 2:
        return flat[:count].view(shape[1], shape[0]).t()
    if how == "parameter" and dtype.is_floating_point:
        return torch.nn.Parameter(flat[:count].clone().view(shape))
    return flat[:count].clone().view(shape)


tensors = st.builds(
    make_tensor,
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.sampled_from(["plain", "strided", "offset", "transposed", "parameter"]),
    st.integers(0, 2**32),
)
plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.sampled_from([torch.bfloat16, torch.Size([2, 3]), torch.device("cpu")])
)


@st.composite
def trees(draw: Any, depth: int = 3) -> Any:
    """Plain values and tensors, nested."""
    kind = draw(st.sampled_from(["leaf", "tensor", "list", "tuple", "dict", "ordered"][: 6 if depth else 2]))
    if kind == "leaf":
        return draw(plain)
    if kind == "tensor":
        return draw(tensors)
    size = draw(st.integers(0, 3))
    items = [draw(trees(depth - 1)) for _ in range(size)]
    if kind in ("list", "tuple"):
        return items if kind == "list" else tuple(items)
    keys = draw(st.lists(st.text(max_size=6) | st.integers(), min_size=size, max_size=size, unique=True))
    return (dict if kind == "dict" else OrderedDict)(zip(keys, items, strict=True))


states = st.dictionaries(st.text(min_size=1, max_size=6), trees(), max_size=4)


@pytest.fixture(scope="module")
def round_trip(tmp_path_factory):
    """round_trip(state, there): saves *state*, loads it anew and over *there*; returns both times' values."""
    from powerguard.generations import generation_name, scan, seal
    from powerguard.train.flush import Flusher

    directory = tmp_path_factory.mktemp("ck")
    flusher = Flusher(directory, rank=0, world_size=1, reserve=False, slots=1)

    def trip(state: dict[str, Any], there: dict[str, Any]) -> list[dict[str, Any]]:
        name = generation_name(1, "h")
        try:
            written = flusher.write(flusher.stage(state, 1), name)
            seal(directory, name, step=1, world_size=1, shards=[written.record])
            generation = scan(directory)[0]
            reports = [flusher.load(generation, onto) for onto in (dict.fromkeys(state), there)]
        finally:
            shutil.rmtree(directory / name, ignore_errors=True)
        return [{key: report.values[key] for key in state} for report in reports]

    yield trip
    flusher.close()


@pytest.mark.slow
@settings(
    deadline=None,
    max_examples=200,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
@given(state=states)
def test_any_state_survives(round_trip, state):
    """Nested values and tensors of any dtype, shape and layout come back with the same bits, also in place.

    In place: over a copy whose tensors were all overwritten, the values are there in the same tensors.
    """
    there = copy.deepcopy(state)
    scrub(there)
    kept = {key: value for key, value in there.items() if isinstance(value, torch.Tensor)}
    anew, in_place = round_trip(state, there)
    assert same(anew, state)
    assert same(in_place, state)
    for key, tensor in kept.items():
        assert raw(tensor) == raw(state[key])


def scrub(value: Any) -> None:
    """Overwrites every tensor in *value*."""
    if isinstance(value, torch.Tensor):
        value.untyped_storage().fill_(0)
    elif isinstance(value, dict):
        for item in value.values():
            scrub(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            scrub(item)
