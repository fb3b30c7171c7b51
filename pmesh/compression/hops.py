"""What every codec's hop has in common, in numpy: which values are encoded, and what is kept.

In parts that fit in a core's cache, so that no partial sum is ever in memory as fp32.
"""

from typing import Protocol

import numpy as np

from pmesh.compression.arrays import Float32s

PART = 16 * 1024
"""Values at a time: two arrays of 64 KiB stay in the second level cache, and what calling a ufunc
costs (0.5 us) is small against its work (5 us). A multiple of every codec's block."""


class Piece(Protocol):
    """The values of one piece on the wire, as a codec lays them out."""

    def load(self, start: int, into: Float32s) -> None:
        """Decode the values from `start` on, as many as the array takes."""
        ...

    def store(self, start: int, values: Float32s, image: Float32s) -> int:
        """Encode values, those from `start` on, and set `image` to what they decode to.

        Returns:
            How many were clipped.
        """
        ...


def hop_in_parts(
    incoming: Piece | None,
    own: Float32s,
    outgoing: Piece,
    *,
    own_scale: float,
    divisor: int,
    residual: Float32s | None,
    residual_out: Float32s | None,
) -> int:
    """`Codec.hop`, given the wire's bytes as pieces."""
    count = len(own)
    scratch = np.empty((2, min(PART, count)), np.float32)
    scale, factor = np.float32(own_scale), residual_factor(own_scale, divisor)
    clipped = 0
    # Infinity and NaN are results; what a codec makes of them is stated there.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for start in range(0, count, PART):
            part = slice(start, min(start + PART, count))
            values, image = scratch[:, : part.stop - start]
            kept = None if residual is None else residual[part]
            _scale_own(own[part], kept, scale, into=values)
            if incoming is not None:
                incoming.load(start, image)
                np.add(image, values, out=values)
            if divisor != 1:
                np.divide(values, np.float32(divisor), out=values)
            clipped += outgoing.store(start, values, image)
            if residual_out is not None:
                _keep_residual(values, image, factor, into=residual_out[part])
    return clipped


def residual_factor(own_scale: float, divisor: int) -> np.float32:
    """What makes an error of the encoded sum an error of this rank's own values."""
    return np.float32(divisor / own_scale)


def _scale_own(
    own: Float32s, residual: Float32s | None, scale: np.float32, *, into: Float32s
) -> None:
    """Set `into` to scale * (own + residual)."""
    if residual is not None:
        own = np.add(own, residual, out=into)
    if scale != 1:
        np.multiply(own, scale, out=into)
    elif own is not into:
        np.copyto(into, own)


def _keep_residual(
    values: Float32s, image: Float32s, factor: np.float32, *, into: Float32s
) -> None:
    """Set `into` to (values - image) * factor; 0 where that is not finite."""
    np.subtract(values, image, out=into)
    if factor != 1:
        np.multiply(into, factor, out=into)
    # One sum tells of a whole part: only where something is not finite is more to be done.
    if not np.isfinite(np.add.reduce(into)):
        into[~np.isfinite(into)] = 0
