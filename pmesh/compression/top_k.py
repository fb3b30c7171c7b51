"""TopK: the k values of largest magnitude, with their indices.

All ranks get the payloads of all and add them up in rank order, so that they end with the same
bits. The values that a rank did not send stay in its residual (Lin et al. 2018, Deep Gradient
Compression; Stich et al. 2018, Sparsified SGD with Memory).

    own + residual ──▶ compress ──▶ wire (the same length on every rank) ──▶ accumulate, n times
                          └──▶ residual_out

The choice is exact, in about the time of one pass over the values. A sample gives a threshold that
slightly more than k values reach, and the k largest of those are chosen. The sample does not
affect the result.

There are two forms on the wire, little-endian, aligned to 4 bytes:

- wide: uint32[k] indices, ascending, then float32[k] values; 8 bytes each.
- compact: for each run of 65,536 values but the last, a uint32 with the number of values sent from
  it; uint16[k] positions within their runs, ascending; then bfloat16[k] values, rounded to nearest
  even; 4 bytes each. Rounding errors go into the residual. (With runs, unlike with gaps and an
  escape for those above 65,535, the length does not depend on the values.)
"""

import math
from typing import NamedTuple

import ml_dtypes
import numpy as np

from pmesh.compression.blocks import (
    PART,
    Bytes,
    Float32s,
    Halves,
    Indices,
    UInt16s,
    UInt32s,
    add_residual,
    drop_not_finite,
    parts,
)
from pmesh.compression.draws import draw_words

__all__ = ["accumulate", "compress", "kept", "wire_bytes"]


def kept(count: int, ratio: float) -> int:
    """Return how many of `count` values are sent: the part `ratio` of them, at least one.

    >>> kept(1000, 0.01), kept(10, 0.01), kept(0, 0.01)
    (10, 1, 0)
    """
    return min(count, max(1, round(count * ratio)))


def compress(
    own: Float32s,
    wire: Bytes,
    *,
    k: int,
    compact: bool = False,
    residual: Float32s | None = None,
    residual_out: Float32s | None = None,
) -> None:
    """Write the k largest of own + residual, and keep the rest.

    Exactly k are sent, ordered by the bits of the magnitude: NaN is above infinity, infinity above
    all numbers; of equal values the lowest indices come first. Zeros are sent only if fewer than k
    values are not zero. Values that are not finite are never lost silently: all of them are sent,
    or k of them if there are more. In compact form, numbers above 3.39e38 become infinity.

    Args:
        own: float32[count]; only read.
        wire: uint8[wire_bytes(count, k)], written.
        k: The number of values, from 0 to count.
        compact: True for the compact form.
        residual: float32[count], from an earlier call, only read; None for zeros.
        residual_out: float32[count], written: own + residual - what `accumulate` reads from wire.
            Finite: 0 where own + residual or its image is not. May be `residual` itself. None for
            no feedback; then `residual` is None, too.
    """
    values, indices, more_not_finite = add_and_choose(own, k, residual, residual_out)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        sent = values[indices]
        image = encode(wire, len(own), indices, sent, compact=compact)
        if residual_out is None:
            return
        left = np.subtract(sent, image, out=sent)
    drop_not_finite(left)
    residual_out[indices] = left
    if more_not_finite:
        drop_not_finite(residual_out)


def accumulate(wire: Bytes, into: Float32s, *, k: int, compact: bool = False) -> None:
    """Add the values of one rank's payload at their indices.

    Args:
        wire: uint8[wire_bytes(count, k)].
        into: float32[count], added to in place.
        k: The number of values.
        compact: True for the compact form.

    Raises:
        ValueError: The indices do not ascend, or not all are below `count`; nothing was added.
    """
    indices, values = decode(wire, len(into), k, compact=compact)
    with np.errstate(over="ignore", invalid="ignore"):
        into[indices] += values


_MAGNITUDE = np.uint32(0x7FFFFFFF)  # all bits of an fp32 but the sign; as integers they ascend with
# the magnitude, infinity is above all numbers, and NaN above infinity
_INFINITE = np.uint32(0x7F800000)
_NONE = np.uint32(0xFFFFFFFF)  # above all
_NOT_ZERO = np.uint32(1)
_SAMPLE = 1 << 15  # values: for the largest 1 %, 328 ± 18 of them are above the threshold
_SPREADS = 4  # standard deviations: one array in 30,000 is read twice


def add_and_choose(
    own: Float32s, k: int, residual: Float32s | None, residual_out: Float32s | None
) -> tuple[Float32s, Indices, bool]:
    """Add the residual, and find the k values of largest magnitude; of equal ones the first.

    Args:
        own: float32[count]; only read.
        k: The number of values, from 0 to count.
        residual: float32[count]; only read; None for zeros.
        residual_out: float32[count], set to their sum; None if there is no residual.

    Returns:
        The sum (`residual_out` or `own`), int64[k] ascending indices, and True if values besides
        those k may not be finite.
    """
    threshold = _sampled_threshold(own, residual, k)
    found, keys = _reaching(threshold, own, residual, residual_out)
    values = own if residual_out is None else residual_out
    if len(found) < k and threshold > _NOT_ZERO:
        found, keys = _reaching(_NOT_ZERO, values, None, None)
    if len(found) <= k:
        return values, _filled(found, k), False
    least = np.partition(keys, len(keys) - k)[len(keys) - k] if k else _NONE
    chosen = keys > least
    ties = np.flatnonzero(keys == least)
    chosen[ties[: k - np.count_nonzero(chosen)]] = True
    return values, found[chosen], bool(least >= _INFINITE)


def sampled_places(count: int) -> Indices:
    """Return the random indices of the sample: with regular ones, rows could have a period."""
    drawn = draw_words(0, 0, _SAMPLE) >> np.uint64(32)
    return (drawn * np.uint64(count) >> np.uint64(32)).astype(np.int64)


def _sampled_threshold(own: Float32s, residual: Float32s | None, k: int) -> np.uint32:
    """Return a magnitude that very likely at least k values reach, and not many more."""
    count = len(own)
    if count <= 4 * _SAMPLE:
        return _NOT_ZERO
    places = sampled_places(count)
    with np.errstate(over="ignore", invalid="ignore"):
        sample = own[places] if residual is None else own[places] + residual[places]
    expected = _SAMPLE * k / count
    above = int(expected + _SPREADS * math.sqrt(expected) + _SPREADS)
    if above > _SAMPLE:
        return _NOT_ZERO
    keys = sample.view(np.uint32) & _MAGNITUDE
    keys.partition(_SAMPLE - above)
    # Every value that is not finite reaches it, so that none is missed.
    return min(max(keys[_SAMPLE - above], _NOT_ZERO), _INFINITE)


def _reaching(
    threshold: np.uint32,
    own: Float32s,
    residual: Float32s | None,
    residual_out: Float32s | None,
) -> tuple[Indices, UInt32s]:
    """Add the residual; return the indices that reach the threshold, and their magnitudes."""
    bits = np.empty(min(PART, len(own)), np.uint32)
    reaches = np.empty(len(bits), np.bool_)
    found: list[Indices] = [np.empty(0, np.int64)]
    keys: list[UInt32s] = [np.empty(0, np.uint32)]
    with np.errstate(over="ignore", invalid="ignore"):
        for part in parts(len(own)):
            values = add_residual(own, residual, residual_out, part)
            magnitudes = np.bitwise_and(values.view(np.uint32), _MAGNITUDE, out=bits[: len(values)])
            np.greater_equal(magnitudes, threshold, out=reaches[: len(values)])
            here = np.flatnonzero(reaches[: len(values)])
            keys.append(magnitudes[here])
            found.append(np.add(here, part.start, out=here))
    return np.concatenate(found), np.concatenate(keys)


def _filled(found: Indices, k: int) -> Indices:
    """Return k indices in order: those found and the first of the others."""
    free = np.ones(k, np.bool_)  # the first k have enough, even if all found are among them
    free[found[found < k]] = False
    return np.sort(np.concatenate([found, np.flatnonzero(free)[: k - len(found)]]))


_RUN = 1 << 16  # values that a 16-bit position distinguishes
_END = 1 << 32  # values that a 32-bit index distinguishes
_WIDE = 8  # bytes of an index and a value
_COMPACT = 4  # the same


def wire_bytes(count: int, k: int, *, compact: bool = False) -> int:
    """Return the bytes of k of `count` values on the wire; a multiple of 4.

    Raises ValueError if k is not from 0 to count, or count is not below 2**32.
    """
    if not 0 <= k <= count < _END:
        raise ValueError(f"k must be from 0 to count, and count below 2**32, not {k} of {count}")
    return 4 * _sized_runs(count) + _COMPACT * k if compact else _WIDE * k


def encode(
    wire: Bytes, count: int, indices: Indices, values: Float32s, *, compact: bool
) -> Float32s:
    """Write values and their indices; return the values as `decode` reads them."""
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
    """Return the ascending indices and the values from the bytes of another machine.

    Raises ValueError if the indices do not ascend, or not all are below `count`.
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
        raise ValueError(f"indices of {k} of {count} values do not ascend, or exceed the last")
    return indices, values


def _sized_runs(count: int) -> int:
    """Return the number of runs but the last, whose size follows from k."""
    return max(0, count - 1) // _RUN


def _starts(sizes: UInt32s, k: int) -> Indices:
    """Return for each position the index at which its run begins."""
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
