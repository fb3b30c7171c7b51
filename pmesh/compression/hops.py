"""The common part of all codecs' hops, in numpy: the values to encode and the residual to keep.

It works in parts that fit in a core's cache, so that partial sums never reach memory as fp32.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pmesh.compression.blocks import Bytes, Float32s, drop_not_finite, parts

PART = 64 * 1024
"""Values at a time: two arrays of 256 KiB stay in the second level cache, and Python's 20 us per
part are small against its work (100 us). It is a multiple of every codec's block."""

_NONE = np.empty(0, np.float32)


class Piece(Protocol):
    """The values of one piece on the wire, in the layout of a codec."""

    def load(self, start: int, into: Float32s) -> None:
        """Decode len(into) values, beginning with value `start` of the piece."""
        ...

    def store(self, start: int, values: Float32s, image: Float32s) -> int:
        """Encode values, beginning at value `start` of the piece; return how many were clipped.

        Args:
            start: The index of the first value.
            values: float32[n]; only read.
            image: float32[n], scratch.
        """
        ...

    def load_stored(self, start: int, image: Float32s) -> None:
        """Do what `load` does, just after `store`, with the `image` that it left."""
        ...


@dataclass(frozen=True, slots=True)
class Terms:
    """The arguments of `Codec.hop`, without the wire's bytes."""

    own: Float32s
    own_scale: float
    divisor: int
    residual: Float32s | None
    residual_out: Float32s | None

    def check(self, wire_bytes: int, incoming: Bytes | None, outgoing: Bytes) -> None:
        """Raise ValueError if an array's length does not fit: compiled code checks no bounds."""
        for wire in (incoming, outgoing):
            if wire is not None:
                check_wire(wire, wire_bytes, len(self.own))
        for values in (self.residual, self.residual_out):
            if values is not None and len(values) != len(self.own):
                raise ValueError(f"{len(values)} residuals for {len(self.own)} values")

    @property
    def residual_factor(self) -> np.float32:
        """The factor from an error of the encoded sum to an error of this rank's own values."""
        return np.float32(self.divisor / self.own_scale)

    def for_compiled(
        self,
    ) -> tuple[Float32s, np.float32, np.float32, Float32s, np.float32, Float32s]:
        """Return the arguments of each hop in `fast.rings` that follow the wire's bytes."""
        return (
            self.own,
            np.float32(self.own_scale),
            np.float32(self.divisor),
            _NONE if self.residual is None else self.residual,
            self.residual_factor,
            _NONE if self.residual_out is None else self.residual_out,
        )


def check_wire(wire: Bytes, wire_bytes: int, count: int) -> None:
    """Raise ValueError if these are not the bytes of `count` values."""
    if len(wire) != wire_bytes:
        raise ValueError(f"{count} values are {wire_bytes} bytes on the wire, not {len(wire)}")


def hop_in_parts(incoming: Piece | None, terms: Terms, outgoing: Piece) -> int:
    """Compute `Codec.hop`, with the wire's bytes as pieces."""
    scratch = np.empty((2, min(PART, len(terms.own))), np.float32)
    clipped = 0
    # Infinity and NaN are valid results; each codec states how it encodes them.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for part in parts(len(terms.own), PART):
            values, image = scratch[:, : part.stop - part.start]
            if incoming is not None:
                incoming.load(part.start, image)
            total = _total(image if incoming is not None else None, terms, part, into=values)
            clipped += outgoing.store(part.start, total, image)
            if terms.residual_out is not None:
                outgoing.load_stored(part.start, image)
                _keep_residual(total, image, terms, into=terms.residual_out[part])
    return clipped


def _total(arrived: Float32s | None, terms: Terms, part: slice, *, into: Float32s) -> Float32s:
    """Return the values to encode: `into`, or the rank's own values unchanged."""
    total = terms.own[part]
    if terms.residual is not None:
        total = np.add(total, terms.residual[part], out=into)
    if terms.own_scale != 1:
        total = np.multiply(total, np.float32(terms.own_scale), out=into)
    if arrived is not None:
        total = np.add(arrived, total, out=into)
    if terms.divisor != 1:
        total = np.divide(total, np.float32(terms.divisor), out=into)
    return total


def _keep_residual(values: Float32s, image: Float32s, terms: Terms, *, into: Float32s) -> None:
    """Set `into` to (values - image) * factor; 0 where that is not finite."""
    np.subtract(values, image, out=into)
    if terms.residual_factor != 1:
        np.multiply(into, terms.residual_factor, out=into)
    drop_not_finite(into)
