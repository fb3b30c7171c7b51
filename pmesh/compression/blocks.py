"""The arrays of the kernels: contiguous, of one dtype, processed in pieces that fit in a cache."""

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

Float32s: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float32]]
Int8s: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int8]]
Bytes: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint8]]
Words64: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint64]]
UInt16s: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint16]]
UInt32s: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint32]]
Halves: TypeAlias = np.ndarray[tuple[int], np.dtype[Any]]
"""Values of two bytes: float16, or bfloat16, for which numpy has no type."""

FloatRows: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.float32]]

Indices: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]

PART = 32 * 1024
"""Values at a time: three arrays of 128 KiB stay in the second level cache, and the cost of a ufunc
call (0.5 us) is small against its work (5 us)."""


def parts(count: int, length: int = PART) -> Iterator[slice]:
    """Yield the consecutive parts of `count` values; all but the last have `length` values."""
    for start in range(0, count, length):
        yield slice(start, min(start + length, count))


def add_residual(
    own: Float32s, residual: Float32s | None, into: Float32s | None, part: slice
) -> Float32s:
    """Return a part of this rank's values plus its residual, in `into` if there is feedback."""
    if into is None:
        return own[part]
    if residual is None:
        np.copyto(into[part], own[part])
    else:
        np.add(own[part], residual[part], out=into[part])
    return into[part]


def drop_not_finite(residual: Float32s) -> None:
    """Set values that are not finite to 0: a residual must not carry a NaN from step to step."""
    # One sum checks all values; only if it is not finite is there more to do.
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.add.reduce(residual)
    if not np.isfinite(total):
        residual[~np.isfinite(residual)] = 0
