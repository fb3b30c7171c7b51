"""fp16 and bf16 on the wire: two bytes per value, rounded to nearest, ties to even (IEEE 754).

Values at the ends of the range:

| | fp16 | bf16 |
|---|---|---|
| denormal | rounded to a multiple of 2^-24 | rounded to a multiple of 2^-133 |
| rounds beyond the largest | clipped to ±65504, and counted | infinity, as in IEEE 754 |
| infinity, NaN | unchanged | unchanged |

The residual keeps the part that clipping cut off.
"""

from functools import cache
from types import ModuleType
from typing import Any, Literal

import numpy as np

from pmesh.compression import fast
from pmesh.compression.blocks import Bytes, Float32s, Halves
from pmesh.compression.hops import Terms, check_wire, hop_in_parts

_FP16_MAX = np.float32(65504)
_ROUNDS_BEYOND = np.float32(65520)  # from here on the nearest even is 2^16, which fp16 lacks


class Cast:
    """The codec `fp16` or `bf16`."""

    block = 1

    def __init__(self, name: Literal["fp16", "bf16"]) -> None:
        self.name = name
        self.divides_first = name == "fp16"
        """True for fp16: a sum of n values exceeds its range n times as early as their mean."""
        self._compiled: ModuleType | None = None

    def prepare(self) -> bool:
        self._compiled = fast.load("rings")
        return self._compiled is not None

    def wire_bytes(self, count: int) -> int:
        """Return two bytes for each value, padded to a multiple of 4."""
        return (2 * count + 3) // 4 * 4

    def hop(
        self,
        incoming: Bytes | None,
        own: Float32s,
        outgoing: Bytes,
        *,
        own_scale: float = 1.0,
        divisor: int = 1,
        residual: Float32s | None = None,
        residual_out: Float32s | None = None,
        draw: int = 0,
    ) -> int:
        """See `Codec.hop`; `draw` is not used."""
        del draw
        terms = Terms(own, own_scale, divisor, residual, residual_out)
        terms.check(self.wire_bytes(len(own)), incoming, outgoing)
        outgoing[2 * len(own) :] = 0
        if self._compiled is None:
            arrived = None if incoming is None else self._halves(incoming, len(own))
            return hop_in_parts(arrived, terms, self._halves(outgoing, len(own)))
        words = outgoing.view(np.uint16)
        clipped: int = self._compiled.hop_halves(
            self.name == "fp16",
            words[:0] if incoming is None else incoming.view(np.uint16),
            words,
            *terms.for_compiled(),
        )
        return clipped

    def decode(self, wire: Bytes, out: Float32s) -> None:
        check_wire(wire, self.wire_bytes(len(out)), len(out))
        if self._compiled is not None and self.name == "fp16":  # for bf16 compiling gains nothing
            self._compiled.decode_fp16(wire.view(np.uint16), out)
        else:
            with np.errstate(invalid="ignore"):  # forged bytes may hold a signalling NaN
                self._halves(wire, len(out)).load(0, out)

    def _halves(self, wire: Bytes, count: int) -> "_Halves":
        return (_Fp16s if self.name == "fp16" else _Halves)(wire.view(_dtype_of(self.name))[:count])


@cache
def _dtype_of(name: str) -> np.dtype[Any]:
    if name == "fp16":
        return np.dtype(np.float16)
    import ml_dtypes  # noqa: PLC0415 - 28 ms; importing pmesh need not wait for it

    bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return bfloat16


class _Halves:
    """A piece of bf16."""

    def __init__(self, halves: Halves) -> None:
        self._halves = halves

    def load(self, start: int, into: Float32s) -> None:
        np.copyto(into, self._halves[start : start + len(into)])

    def store(self, start: int, values: Float32s, image: Float32s) -> int:
        del image
        halves = self._halves[start : start + len(values)]
        np.copyto(halves, values, casting="same_kind")
        return 0

    def load_stored(self, start: int, image: Float32s) -> None:
        self.load(start, image)


class _Fp16s(_Halves):
    """A piece of fp16."""

    def store(self, start: int, values: Float32s, image: Float32s) -> int:
        """Clip finite values; if there is nothing to clip, that costs one more pass."""
        np.abs(values, out=image)
        if np.maximum.reduce(image) < _ROUNDS_BEYOND:  # False if it is NaN
            return super().store(start, values, image)
        clipped = np.isfinite(values) & (image >= _ROUNDS_BEYOND)
        clamped = np.where(clipped, np.copysign(_FP16_MAX, values), values)
        super().store(start, clamped, image)
        return int(np.count_nonzero(clipped))
