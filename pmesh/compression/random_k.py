"""RandomK: k values at places that all ranks draw alike, so that no index travels.

The k values go through an ordinary all-reduce. The draw is a function of a key, computed in
integers: the same on every machine.

    own + residual ──▶ compress ──▶ float32[k] ──▶ all-reduce ──▶ decompress ──▶ float32[count]
                          └──▶ residual_out

With feedback values go as they are (Stich et al. 2018, Sparsified SGD with Memory). Without it they
are scaled by count/k, so that the mean over all draws is the value (Wangni et al. 2018). Both at
once overshoot: what comes out again from the residual has been sent count/k times already.
"""

from typing import TypeAlias

import numpy as np

Float32s: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float32]]"
Indices: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"


def draw_key(seed: int, job: str, op: int, bucket: int) -> int:
    """64 bits that differ for different arguments: what a draw is a function of."""
    raise NotImplementedError


def draw_indices(count: int, k: int, key: int) -> Indices:
    """k distinct indices below `count`; each value is drawn with probability k/count.

    The values are cut into k runs of equal length (but for 1), at a drawn offset, and one is drawn
    from each run: distinct by construction, and in the order in which they lie in memory.

    Returns:
        int64[k].

    Raises:
        ValueError: k is not in 0..count, or count not below 2**32.
    """
    raise NotImplementedError


def compress(
    own: Float32s,
    indices: Indices,
    sent: Float32s,
    *,
    residual: Float32s | None = None,
    residual_out: Float32s | None = None,
) -> None:
    """Take the values at `indices` from own + residual, and keep the rest.

    Without feedback they are scaled by count/k. A value that is not finite and was not drawn makes
    the first that is sent NaN, so that it is not lost in silence.

    Args:
        own: float32[count]; only read.
        indices: int64[k], of `draw_indices`.
        sent: float32[k], written.
        residual: float32[count], as an earlier call left it, only read; None for zeros.
        residual_out: float32[count], written: own + residual, 0 at `indices` and where that is not
            finite. May be `residual` itself. None: no feedback; then `residual` is None, too.
    """
    raise NotImplementedError


def decompress(values: Float32s, indices: Indices, out: Float32s) -> None:
    """Write `values`, say the mean of what all sent, to their places, and 0 elsewhere.

    Args:
        values: float32[k].
        indices: int64[k].
        out: float32[count], written.
    """
    raise NotImplementedError
