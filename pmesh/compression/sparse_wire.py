"""Some values of many on the wire, with their indices; see `top_k` for the two forms."""

from typing import NamedTuple

import ml_dtypes
import numpy as np

from pmesh.compression.arrays import Bytes, Float32s, Halves, UInt16s, UInt32s
from pmesh.compression.parts import Indices

_RUN = 1 << 16  # so many values does a 16-bit position tell apart
_END = 1 << 32  # so many a 32-bit index
_WIDE = 8  # bytes of an index and a value
_COMPACT = 4  # likewise


def wire_bytes(count: int, k: int, *, compact: bool = False) -> int:
    """What k of `count` values take on the wire; a multiple of 4.

    Raises:
        ValueError: k is not from 0 to count, or count not below 2**32.
    """
    if not 0 <= k <= count < _END:
        raise ValueError(f"k is from 0 to count, and count below 2**32, not {k} of {count}")
    return 4 * _sized_runs(count) + _COMPACT * k if compact else _WIDE * k


def encode(
    wire: Bytes, count: int, indices: Indices, values: Float32s, *, compact: bool
) -> Float32s:
    """Write values and their indices; returns the values as `decode` reads them."""
    k = len(indices)
    if not compact:
        wide = _Wide.of(wire, k)
        wide.indices[:] = indices
        wide.values[:] = values
        return values
    form = _Compact.of(wire, count, k)
    runs = indices >> 16
    form.sizes[:] = np.bincount(runs, minlength=len(form.sizes) + 1)[: len(form.sizes)]
    form.positions[:] = indices & (_RUN - 1)
    np.copyto(form.values, values, casting="same_kind")
    return form.values.astype(np.float32)


def decode(wire: Bytes, count: int, k: int, *, compact: bool) -> tuple[Indices, Float32s]:
    """The indices, ascending, and the values.

    The bytes come from another machine.

    Raises:
        ValueError: the indices do not ascend, or not all are below `count`.
    """
    if compact:
        form = _Compact.of(wire, count, k)
        values = form.values.astype(np.float32)
        indices = _starts(form.sizes, k) + form.positions
    else:
        wide = _Wide.of(wire, k)
        values = wide.values
        indices = wide.indices.astype(np.int64)
    if k and (indices[-1] >= count or np.less_equal(indices[1:], indices[:-1]).any()):
        raise ValueError(f"indices of {k} of {count} values do not ascend, or go beyond the last")
    return indices, values


def _sized_runs(count: int) -> int:
    """All runs but the last, whose size follows from k."""
    return max(0, count - 1) // _RUN


def _starts(sizes: UInt32s, k: int) -> Indices:
    """For each position the index at which its run begins."""
    ends = np.minimum(np.cumsum(sizes, dtype=np.int64), k)
    last = k - int(ends[-1]) if len(ends) else k
    lengths = np.append(np.diff(ends, prepend=0), last)
    return np.repeat(np.arange(len(lengths), dtype=np.int64) * _RUN, lengths)


class _Wide(NamedTuple):
    indices: UInt32s
    values: Float32s

    @classmethod
    def of(cls, wire: Bytes, k: int) -> "_Wide":
        return cls(wire[: 4 * k].view("<u4"), wire[4 * k :].view("<f4"))


class _Compact(NamedTuple):
    sizes: UInt32s
    positions: UInt16s
    values: Halves

    @classmethod
    def of(cls, wire: Bytes, count: int, k: int) -> "_Compact":
        first = 4 * _sized_runs(count)
        return cls(
            wire[:first].view("<u4"),
            wire[first : first + 2 * k].view("<u2"),
            wire[first + 2 * k :].view(ml_dtypes.bfloat16),
        )
