"""How a torch dtype is named in records and kept in safetensors files.

Readers of safetensors know only some dtypes. A complex tensor is kept as its real and imaginary parts (one more
dimension of 2), everything a reader might not know as bytes; the record tells what it really is.
"""

from __future__ import annotations

import functools
import math

import torch

from powerguard.errors import CheckpointError

_SAFE = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_COMPLEX = {torch.complex128: "F64", torch.complex64: "F32", torch.complex32: "F16"}


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of that name; raises CheckpointError where this torch has none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"this torch has no dtype {name!r}", todo="load with the torch that wrote it, or newer")
    return found


def kept_as(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, list[int]]:
    """(safetensors dtype, safetensors shape) of a tensor."""
    if dtype in _SAFE:
        return _SAFE[dtype], list(shape)
    if dtype in _COMPLEX:
        return _COMPLEX[dtype], [*shape, 2]
    return "U8", [math.prod(shape) * dtype.itemsize]


def copies_as_bytes(dtype: torch.dtype) -> bool:
    """Whether torch may lack a copy kernel for *dtype*, so that its bytes are copied."""
    return dtype not in _SAFE and dtype not in _COMPLEX
