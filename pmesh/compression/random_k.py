"""RandomK: k values at random indices that are equal on all ranks, so that no index is sent.

The k values go through an ordinary all-reduce. The indices are an integer function of a key, so
they are the same on every machine.

    own + residual ──▶ compress ──▶ float32[k] ──▶ all-reduce ──▶ decompress ──▶ float32[count]
                          └──▶ residual_out

With feedback, values are sent unchanged (Stich et al. 2018, Sparsified SGD with Memory). Without
it, they are scaled by count/k, so that the mean over all draws is the value (Wangni et al. 2018).
Both together overshoot: a value from the residual has already been sent count/k times.
"""

import hashlib

import numpy as np

from pmesh.compression.blocks import Float32s, Indices, add_residual, drop_not_finite, parts
from pmesh.compression.compiled import kernels
from pmesh.compression.draws import draw_words, start_of

_END = 1 << 32  # products of two numbers below it fit in 64 bits
_KEY_BYTES = 8


def draw_key(seed: int, job: str, op: int, bucket: int) -> int:
    """Return the 64-bit key of a draw: a hash of all arguments."""
    named = f"{seed}/{op}/{bucket}/{job}".encode()
    return int.from_bytes(hashlib.blake2b(named, digest_size=_KEY_BYTES).digest(), "little")


def draw_indices(count: int, k: int, key: int) -> Indices:
    """Draw distinct indices below `count`; each is drawn with probability k/count.

    The values are cut into k runs, whose lengths differ by at most 1, at a random offset, and one
    index is drawn from each run: so they are distinct and in memory order.

    Args:
        count: The number of values.
        k: The number of indices, from 0 to count.
        key: The 64-bit key.

    Returns:
        int64[k], ascending except where the last run wraps around to the beginning.

    Raises:
        ValueError: k is not from 0 to count, or count is not below 2**32.
    """
    if not 0 <= k <= count < _END:
        raise ValueError(f"k must be from 0 to count, and count below 2**32, not {k} of {count}")
    if k == 0:
        return np.empty(0, np.int64)
    # Without an offset, values of longer runs would be drawn slightly less often.
    offset = (int(draw_words(key, k, 1)[0]) >> 32) * count >> 32
    if (compiled := kernels()) is not None:
        indices = np.empty(k, np.int64)
        compiled.draw_indices(start_of(key), count, offset, indices)
        return indices
    words = draw_words(key, 0, k) >> np.uint64(32)
    starts = np.arange(k + 1, dtype=np.uint64) * np.uint64(count) // np.uint64(k)
    lengths = np.diff(starts)
    drawn = starts[:-1] + (words * lengths >> np.uint64(32))
    indices = drawn.view(np.int64) + offset
    indices[indices >= count] -= count
    return indices


def compress(
    own: Float32s,
    indices: Indices,
    sent: Float32s,
    *,
    residual: Float32s | None = None,
    residual_out: Float32s | None = None,
) -> None:
    """Take the values at `indices` from own + residual, and keep the rest.

    Without feedback they are scaled by count/k. If a value that was not drawn is not finite, the
    first one sent becomes NaN, so that it is not lost silently.

    Args:
        own: float32[count]; only read.
        indices: int64[k], from `draw_indices`.
        sent: float32[k], written.
        residual: float32[count], from an earlier call, only read; None for zeros.
        residual_out: float32[count], written: own + residual, 0 at `indices` and where that is not
            finite. May be `residual` itself. None for no feedback; then `residual` is None, too.
    """
    clean = _add_and_take(own, indices, sent, residual, residual_out)
    if not clean:
        values = own if residual_out is None else residual_out
        if _count_not_finite(values) > _count_not_finite(sent):
            sent[:1] = np.nan
    if residual_out is None:
        with np.errstate(over="ignore", invalid="ignore"):
            sent *= np.float32(len(own) / max(1, len(sent)))
        return
    residual_out[indices] = 0
    if not clean:
        drop_not_finite(residual_out)


def decompress(values: Float32s, indices: Indices, out: Float32s) -> None:
    """Write float32[k] values, such as the mean over ranks, to their indices in `out`, else 0."""
    out.fill(0)
    out[indices] = values


def _add_and_take(
    own: Float32s,
    indices: Indices,
    sent: Float32s,
    residual: Float32s | None,
    residual_out: Float32s | None,
) -> bool:
    """Take from own + residual; return False if that may have values that are not finite."""
    clean = True
    with np.errstate(over="ignore", invalid="ignore"):
        for part in parts(len(own)):
            values = add_residual(own, residual, residual_out, part)
            # One sum checks a whole part.
            clean = clean and bool(np.isfinite(np.add.reduce(values)))
    values = own if residual_out is None else residual_out
    sent[:] = values[indices]
    return clean


def _count_not_finite(values: Float32s) -> int:
    return len(values) - int(np.count_nonzero(np.isfinite(values)))
