"""The k values of largest magnitude of many, exactly, in about the time of reading them once.

A threshold is taken from a sample, a little low, so that a few more than k values reach it, and
of those the k largest are chosen. Whatever the sample says, the choice is the same.
"""

import math

import numpy as np

from pmesh.compression.arrays import Float32s, UInt32s
from pmesh.compression.draws import draw_words
from pmesh.compression.parts import PART, Indices, add_residual, parts

_MAGNITUDE = np.uint32(0x7FFFFFFF)  # of the bits of an fp32 all but the sign; as integers they
# ascend with the magnitude, infinity is above all numbers, and NaN above infinity
_INFINITE = np.uint32(0x7F800000)
_NONE = np.uint32(0xFFFFFFFF)  # above all
_NOT_ZERO = np.uint32(1)
_SAMPLE = 1 << 15  # values: of 1 % of them 328 are above the threshold, give or take 18
_SPREADS = 4  # standard deviations: one array in 30,000 has to be read again


def add_and_choose(
    own: Float32s, k: int, residual: Float32s | None, residual_out: Float32s | None
) -> tuple[Float32s, Indices, bool]:
    """Add the residual, and find the k of largest magnitude; of equal ones the first.

    Args:
        own: float32[count]; only read.
        k: from 0 to count.
        residual: float32[count]; only read; None for zeros.
        residual_out: float32[count], set to their sum; None: there is no residual.

    Returns:
        The sum (`residual_out` or `own`), int64[k] ascending indices, and whether values that are
        not finite may be left besides those k.
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
    """Where the sample is taken: at random, as what is laid out in rows may have a period."""
    lots = draw_words(0, 0, _SAMPLE) >> np.uint64(32)
    return (lots * np.uint64(count) >> np.uint64(32)).astype(np.int64)


def _sampled_threshold(own: Float32s, residual: Float32s | None, k: int) -> np.uint32:
    """A magnitude that very likely at least k values reach, and not many more."""
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
    # Whatever is not finite reaches it, so that none of these is overlooked.
    return min(max(keys[_SAMPLE - above], _NOT_ZERO), _INFINITE)


def _reaching(
    threshold: np.uint32,
    own: Float32s,
    residual: Float32s | None,
    residual_out: Float32s | None,
) -> tuple[Indices, UInt32s]:
    """Add the residual; where the sum reaches the threshold, and the magnitudes there."""
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
    """So many indices, those found and the first of the others, in order."""
    free = np.ones(k, np.bool_)  # among the first k are enough, even if all found are among them
    free[found[found < k]] = False
    return np.sort(np.concatenate([found, np.flatnonzero(free)[: k - len(found)]]))
