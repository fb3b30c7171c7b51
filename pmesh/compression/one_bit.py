"""OneBit: the sign of each value and the mean magnitude of each block of 1024.

All ranks get the payloads of all and add them up in rank order, so that they end with the same
bits. A rank's rounding errors stay in its residual (Seide et al. 2014, 1-bit SGD; Karimireddy et
al. 2019, Error Feedback Fixes SignSGD).

    own + residual ──▶ compress ──▶ wire ──▶ accumulate, n times
                          └──▶ residual_out

On the wire: float32[blocks] mean magnitudes, little-endian, then one bit per value, the first in
the lowest bit of the first byte, 1 if it is negative or -0; padded with 0 to a multiple of 4 bytes.
"""

import numpy as np

from pmesh.compression.blocks import (
    PART,
    Bytes,
    Float32s,
    UInt32s,
    add_residual,
    drop_not_finite,
    parts,
)
from pmesh.compression.compiled import kernels

BLOCK = 1024
"""Values per magnitude: 31 times smaller than fp32; with 256 it is 28 times, with 4096 31.8."""

_SIGN = np.uint32(1 << 31)


def wire_bytes(count: int) -> int:
    """Return the bytes of `count` values on the wire; a multiple of 4."""
    return 4 * _blocks(count) + 4 * -(-count // 32)


def compress(
    own: Float32s,
    wire: Bytes,
    *,
    residual: Float32s | None = None,
    residual_out: Float32s | None = None,
) -> None:
    """Write the signs and mean magnitudes of own + residual, and keep the rest.

    A block of zeros decodes to zeros. A block with a NaN or an infinity decodes to NaN or infinity
    everywhere; so does one whose magnitudes add up to more than fp32 holds.

    Args:
        own: float32[count]; only read.
        wire: uint8[wire_bytes(count)], written.
        residual: float32[count], from an earlier call, only read; None for zeros.
        residual_out: float32[count], written: own + residual - what `accumulate` reads from wire.
            Finite: 0 where own + residual or its image is not. May be `residual` itself. None for
            no feedback; then `residual` is None, too.
    """
    if (compiled := kernels()) is not None:
        compiled.compress_one_bit(own, wire, residual, residual_out)
        return
    means, signs = _fields(wire, len(own))
    signs[-(-len(own) // 8) :] = 0
    scratch = np.empty(2 * min(PART, _blocks(len(own)) * BLOCK), np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for part in parts(len(own)):
            values = add_residual(own, residual, residual_out, part)
            means_here = means[part.start // BLOCK : _blocks(part.stop)]
            _mean_magnitudes(values, means_here, scratch=scratch)
            bits = np.packbits(values.view(np.int32) < 0, bitorder="little")
            signs[part.start // 8 : part.start // 8 + len(bits)] = bits
            if residual_out is not None:
                image = scratch[: len(values)]
                np.bitwise_and(values.view(np.uint32), _SIGN, out=image.view(np.uint32))
                _with_magnitudes(image.view(np.uint32), means_here)
                drop_not_finite(np.subtract(values, image, out=values))


def accumulate(wire: Bytes, into: Float32s) -> None:
    """Add the values of one rank's payload.

    Args:
        wire: uint8[wire_bytes(count)].
        into: float32[count], added to in place.
    """
    if (compiled := kernels()) is not None:
        compiled.accumulate_one_bit(wire, into)
        return
    means, signs = _fields(wire, len(into))
    image = np.empty((min(PART, len(into)) + 7) // 8 * 8, np.uint32)
    with np.errstate(over="ignore", invalid="ignore"):
        for part in parts(len(into)):
            bits = signs[part.start // 8 : -(-part.stop // 8)]
            np.take(_SIGNS_OF, bits, axis=0, out=image[: 8 * len(bits)].reshape(-1, 8), mode="clip")
            values = image[: part.stop - part.start]
            _with_magnitudes(values, means[part.start // BLOCK : _blocks(part.stop)])
            np.add(into[part], values.view(np.float32), out=into[part])


_BITS_OF = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_SIGNS_OF = _BITS_OF.astype(np.uint32) << np.uint32(31)
"""The sign bits of the eight values of each byte, as uint32[256, 8]."""


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


def _fields(wire: Bytes, count: int) -> tuple[Float32s, Bytes]:
    """Return views of the mean magnitudes and of the bytes of signs."""
    return wire[: 4 * _blocks(count)].view("<f4"), wire[4 * _blocks(count) :]


def _mean_magnitudes(values: Float32s, means: Float32s, *, scratch: Float32s) -> None:
    """Write the mean magnitude of each block to `means`; add up by halves, as compiled.

    Only the last block may be shorter. `scratch` has room for twice the values of whole blocks.
    """
    filled = len(means) * BLOCK
    sums, free = scratch[:filled].reshape(-1, BLOCK), scratch[filled:]
    np.abs(values, out=scratch[: len(values)])
    scratch[len(values) : filled] = 0
    half = BLOCK // 2
    while half:  # each sum has its own memory: numpy would copy overlapping arrays
        halves = free[: half * len(means)].reshape(-1, half)
        sums, free = np.add(sums[:, :half], sums[:, half:], out=halves), free[halves.size :]
        half //= 2
    np.divide(sums[:, 0], np.float32(BLOCK), out=means)
    if len(values) < filled:
        means[-1] = sums[-1, 0] / np.float32(BLOCK - (filled - len(values)))


def _with_magnitudes(signs: UInt32s, means: Float32s) -> None:
    """Combine sign bits and magnitudes to values, in place."""
    bits = means.view(np.uint32)
    whole = len(signs) // BLOCK
    blocks = signs[: whole * BLOCK].reshape(whole, BLOCK)
    np.bitwise_or(blocks, bits[:whole, None], out=blocks)
    if whole < len(means):
        signs[whole * BLOCK :] |= bits[whole]
