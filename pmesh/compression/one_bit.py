"""OneBit: of each value its sign, of each block of 1024 the mean magnitude.

Each rank sends its own; all get all payloads and add them up in rank order, so that they end with
the same bits. What a rank rounded away stays in its residual (Seide et al. 2014, 1-bit SGD;
Karimireddy et al. 2019, Error Feedback Fixes SignSGD).

    own + residual ──▶ compress ──▶ wire ──▶ accumulate, n times
                          └──▶ residual_out

On the wire: float32[blocks] mean magnitudes, little-endian, then a bit for each value, the first in
the lowest bit of the first byte, 1 where it is below 0; padded with 0 to a multiple of 4 bytes.
"""

from typing import TypeAlias

import numpy as np

Float32s: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float32]]"
Bytes: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint8]]"

BLOCK = 1024
"""Values with one magnitude: 31 times less than fp32; 256 would be 28 times, 4096 31.8 times."""


def wire_bytes(count: int) -> int:
    """What `count` values take on the wire; a multiple of 4."""
    raise NotImplementedError


def compress(
    own: Float32s,
    wire: Bytes,
    *,
    residual: Float32s | None = None,
    residual_out: Float32s | None = None,
) -> None:
    """Write the signs and mean magnitudes of own + residual, and keep the rest.

    Zeros count as positive; a block of zeros comes out as zeros. A block with a NaN or an infinity
    comes out as NaN or infinity everywhere; so does one whose magnitudes add up to more than fp32
    holds.

    Args:
        own: float32[count]; only read.
        wire: uint8[wire_bytes(count)], written.
        residual: float32[count], as an earlier call left it, only read; None for zeros.
        residual_out: float32[count], written: own + residual - what `accumulate` reads from wire.
            Finite: 0 where own + residual or its image is not. May be `residual` itself. None: no
            feedback; then `residual` is None, too.
    """
    raise NotImplementedError


def accumulate(wire: Bytes, into: Float32s) -> None:
    """Add the values of one rank's payload.

    Args:
        wire: uint8[wire_bytes(count)].
        into: float32[count], added to in place.
    """
    raise NotImplementedError
