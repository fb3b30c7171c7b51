"""What every codec's hop has in common, in numpy: which values are encoded, and what is kept.

In parts that fit in a core's cache, so that no partial sum is ever in memory as fp32.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pmesh.compression.blocks import Bytes, Float32s, drop_not_finite, parts

PART = 64 * 1024
"""Values at a time: two arrays of 256 KiB stay in the second level cache, and Python's 20 us for a
part are small against its work (100 us). A multiple of every codec's block."""

_NONE = np.empty(0, np.float32)


class Piece(Protocol):
    """The values of one piece on the wire, as a codec lays them out."""

    def load(self, start: int, into: Float32s) -> None:
        """Decode the values from `start` on, as many as the array takes."""
        ...

    def store(self, start: int, values: Float32s, image: Float32s) -> int:
        """Encode values, those from `start` on; only read.

        Args:
            start: at which value of the piece.
            values: float32[n].
            image: float32[n], to work in.

        Returns:
            How many were clipped.
        """
        ...

    def load_stored(self, start: int, image: Float32s) -> None:
        """The same as `load` just after `store`, given the `image` that it left."""
        ...


@dataclass(frozen=True, slots=True)
class Terms:
    """What `Codec.hop` is given, but for the wire's bytes."""

    own: Float32s
    own_scale: float
    divisor: int
    residual: Float32s | None
    residual_out: Float32s | None

    def check(self, wire_bytes: int, incoming: Bytes | None, outgoing: Bytes) -> None:
        """Raises ValueError if an array's length does not fit: a twin would go beyond its end."""
        for wire in (incoming, outgoing):
            if wire is not None:
                check_wire(wire, wire_bytes, len(self.own))
        for values in (self.residual, self.residual_out):
            if values is not None and len(values) != len(self.own):
                raise ValueError(f"{len(values)} residuals for {len(self.own)} values")

    @property
    def residual_factor(self) -> np.float32:
        """What makes an error of the encoded sum an error of this rank's own values."""
        return np.float32(self.divisor / self.own_scale)

    def for_twin(self) -> tuple[Float32s, np.float32, np.float32, Float32s, np.float32, Float32s]:
        """The arguments that each hop in `fast.rings` has after the wire's bytes."""
        return (
            self.own,
            np.float32(self.own_scale),
            np.float32(self.divisor),
            _NONE if self.residual is None else self.residual,
            self.residual_factor,
            _NONE if self.residual_out is None else self.residual_out,
        )


def check_wire(wire: Bytes, wire_bytes: int, count: int) -> None:
    """Raises ValueError if these are not the bytes of `count` values."""
    if len(wire) != wire_bytes:
        raise ValueError(f"{count} values are {wire_bytes} bytes on the wire, not {len(wire)}")


def hop_in_parts(incoming: Piece | None, terms: Terms, outgoing: Piece) -> int:
    """`Codec.hop`, given the wire's bytes as pieces."""
    scratch = np.empty((2, min(PART, len(terms.own))), np.float32)
    clipped = 0
    # Infinity and NaN are results; what a codec makes of them is stated there.
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
    """What is to be encoded: in `into`, or the rank's own values themselves."""
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
