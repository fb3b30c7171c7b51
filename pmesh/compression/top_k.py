"""TopK: the k values of largest magnitude, and where they stand.

Each rank sends its own k; all get all payloads and add them up in rank order, so that they end with
the same bits. What a rank did not send stays in its residual (Lin et al. 2018, Deep Gradient
Compression; Stich et al. 2018, Sparsified SGD with Memory).

    own + residual ──▶ compress ──▶ wire (the same length on every rank) ──▶ accumulate, n times
                          └──▶ residual_out

Two forms on the wire, little-endian, beginning at a multiple of 4 bytes:

- wide: uint32[k] indices, ascending, then float32[k] values; 8 bytes each.
- compact: for each run of 65,536 values but the last, uint32 how many of them are sent; uint16[k]
  positions within their runs, ascending; then bfloat16[k] values, rounded to nearest even; 4 bytes
  each. What rounding takes away goes into the residual. (Runs instead of gaps: the length does not
  depend on the values, as it would with an escape for gaps above 65,535.)
"""

import numpy as np

from pmesh.compression.arrays import Bytes, Float32s
from pmesh.compression.largest import add_and_choose
from pmesh.compression.parts import drop_not_finite
from pmesh.compression.sparse_wire import decode, encode, wire_bytes

__all__ = ["accumulate", "compress", "kept", "wire_bytes"]


def kept(count: int, ratio: float) -> int:
    """How many of `count` values are sent: `ratio` of them, at least one of any.

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

    Exactly k, by the bits of the magnitude: NaN is above infinity, infinity above all numbers; of
    equal ones those with the lowest indices. Zeros are sent only where fewer than k are not zero.
    No value that is not finite is lost in silence: all of them are sent; if there are more than k,
    k of them. In compact form numbers above 3.39e38 are infinity.

    Args:
        own: float32[count]; only read.
        wire: uint8[wire_bytes(count, k)], written.
        k: how many, from 0 to count.
        compact: the form.
        residual: float32[count], as an earlier call left it, only read; None for zeros.
        residual_out: float32[count], written: own + residual - what `accumulate` reads from wire.
            Finite: 0 where own + residual or its image is not. May be `residual` itself. None: no
            feedback; then `residual` is None, too.
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
    """Add the values of one rank's payload, each at its place.

    Args:
        wire: uint8[wire_bytes(count, k)].
        into: float32[count], added to in place.
        k: how many.
        compact: the form.

    Raises:
        ValueError: the indices do not ascend, or not all are below `count`; nothing was added.
    """
    indices, values = decode(wire, len(into), k, compact=compact)
    with np.errstate(over="ignore", invalid="ignore"):
        into[indices] += values
