"""Quantised tensors: their integers as a plain tensor over the same memory, and the numbers that say what they mean."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from powerguard.errors import CheckpointError, StateError
from powerguard.generations.values import decode, encode

_INTEGERS = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}
_BY_INTEGER = {str(plain).removeprefix("torch."): quantised for quantised, plain in _INTEGERS.items()}
_ONE = "per_tensor_affine"
_MANY = ("per_channel_affine", "per_channel_affine_float_qparams")


def describe(value: torch.Tensor, path: str) -> tuple[torch.Tensor, dict[str, Any]]:
    """(the integers, sharing memory; scheme, scales, zero points and axis). Raises StateError for packed types."""
    scheme = str(value.qscheme()).removeprefix("torch.")
    if value.dtype not in _INTEGERS or scheme not in (_ONE, *_MANY):
        raise StateError(
            f"{path} is a quantized tensor of {value.dtype}, {scheme}",
            todo="only qint8, quint8 and qint32 are known: save its integers and scales as plain tensors",
        )
    if scheme == _ONE:
        facts = {"scales": [value.q_scale()], "zero_points": [value.q_zero_point()]}
    else:
        scales, zero_points = value.q_per_channel_scales(), value.q_per_channel_zero_points()
        facts = {"scales": scales.tolist(), "zero_points": zero_points.tolist(), "axis": value.q_per_channel_axis()}
    return integers(value), {"scheme": scheme, **{key: encode(item, _no_leaf) for key, item in facts.items()}}


def _no_leaf(value: object, _path: str, _depth: int) -> Any:
    raise AssertionError(value)


def integers(value: torch.Tensor) -> torch.Tensor:
    """The integers of a quantised tensor: a plain tensor over the same memory."""
    plain = torch.empty(0, dtype=_INTEGERS[value.dtype], device=value.device)
    plain.set_(value.untyped_storage(), value.storage_offset(), value.size(), value.stride())
    return plain


def numbers(facts: dict[str, Any]) -> dict[str, Any]:
    """*facts* with its numbers as tensors, for formats that know plain tensors only."""
    scales, zero_points = (decode(facts[key], _no_kind) for key in ("scales", "zero_points"))
    return {**facts, "scales": torch.tensor(scales, dtype=torch.float64), "zero_points": torch.tensor(zero_points)}


def empty(facts: dict[str, Any], dtype: str, shape: list[int], device: torch.device) -> torch.Tensor:
    """A packed quantised tensor with the scales of *facts* and no values yet; *dtype* is its integers'.

    Raises CheckpointError where this torch can't make one.
    """
    scales = torch.tensor(decode(facts["scales"], _no_kind), dtype=torch.float64)
    zero_points = decode(facts["zero_points"], _no_kind)
    quantised = _BY_INTEGER.get(dtype)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that they will go from torch some day
            if facts["scheme"] == _ONE:
                return torch._empty_affine_quantized(
                    shape, scale=scales.item(), zero_point=zero_points[0], dtype=quantised, device=device
                )
            real = facts["scheme"] == _MANY[1]
            return torch._empty_per_channel_affine_quantized(
                shape,
                scales=scales.float() if real else scales,
                zero_points=torch.tensor(zero_points, dtype=torch.float32 if real else torch.int64),
                axis=facts["axis"],
                dtype=quantised,
                device=device,
            )
    except (AttributeError, RuntimeError, TypeError, IndexError) as error:
        raise CheckpointError(f"this torch can't make a quantized tensor: {error}") from error


def _no_kind(kind: str, _payload: Any) -> object:
    raise CheckpointError(f"a quantized tensor's numbers hold a {kind!r}")


def alike(one: object, other: torch.Tensor) -> bool:
    """Whether *one* is a quantised tensor that can take *other*'s values and scales."""
    return (
        isinstance(one, torch.Tensor)
        and one.is_quantized
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.qscheme() == other.qscheme()
    )
