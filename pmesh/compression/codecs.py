"""Ring codecs: the protocol of a hop of a compressed all-reduce, and fp16, bf16 and int8.

In the scatter phase each rank adds its own values to the partial sum that arrives and sends it on,
encoded. The owner of a chunk encodes the final values once; in the gather phase those bytes are
forwarded verbatim. So partial sums exist as fp32 only inside `Codec.hop`, and all ranks decode the
same bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np

from pmesh.compression.blocks import (
    Bytes,
    Float32s,
    FloatRows,
    Halves,
    Int8s,
    drop_not_finite,
    parts,
)
from pmesh.compression.compiled import Kernels, kernels
from pmesh.compression.draws import draw_uniform, start_of


class Codec(Protocol):
    """Converts fp32 values to bytes and back. Thread-safe: a call leaves no state.

    One call handles a *piece*: `count` consecutive values of a tensor, and their
    `wire_bytes(count)` bytes. Every array is contiguous; bytes aligned to 4 are faster.
    """

    @property
    def name(self) -> str:
        """As in `Call.compression`."""
        ...

    @property
    def block(self) -> int:
        """Each piece begins at a multiple of this in its chunk; only the last may be shorter."""
        ...

    @property
    def divides_first(self) -> bool:
        """True if for a mean each rank scales its own values by 1/n and the owner never divides."""
        ...

    def wire_bytes(self, count: int) -> int:
        """Return the bytes of a piece of `count` values; a multiple of 4."""
        ...

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
        """Add this rank's values to a partial sum, and encode the sum.

        With v = (decode(incoming) + own_scale * (own + residual)) / divisor, in fp32:

            outgoing = encode(v)
            residual_out = (v - decode(outgoing)) * divisor / own_scale

        so that the rounding error has the same weight when it is added to this rank's values next
        time (Seide et al. 2014, error feedback). It is finite: 0 where v or its image is not.

        Args:
            incoming: uint8[wire_bytes(count)], or None at the first hop.
            own: float32[count]; only read.
            outgoing: uint8[wire_bytes(count)], written.
            own_scale: The factor for this rank's values; not 0.
            divisor: The divisor of the sum; at least 1.
            residual: float32[count], from an earlier call; only read.
            residual_out: float32[count], written; may be the same memory as `residual`.
            draw: A 64-bit seed for stochastic codecs: equal seeds give equal bytes. The hops of one
                chunk need different seeds, or their errors add up.

        Returns:
            The number of finite values that were clipped.

        Raises:
            ValueError: An array does not have the length given here.
        """
        ...

    def decode(self, wire: Bytes, out: Float32s) -> None:
        """Write the values of a piece: uint8[wire_bytes(count)] to float32[count].

        The bytes come from another machine: any bytes decode to some values.
        """
        ...


@cache
def codec_of(name: str) -> Codec:
    """Return the codec of that name; the same object each time.

    Raises ValueError with the known names if there is none.
    """
    make = _CODECS.get(name)
    if make is None:
        raise ValueError(f"no ring codec {name!r}; there are: {', '.join(_CODECS)}")
    codec: Codec = make()
    return codec


# --- a hop in numpy: the values to encode and the residual to keep

PART = 64 * 1024
"""Values at a time, so that partial sums never reach memory as fp32: two arrays of 256 KiB stay in
the second level cache, and Python's 20 us per part are small against its work (100 us). It is a
multiple of every codec's block."""


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
class HopInput:
    """The arguments of `Codec.hop`, without the wire's bytes."""

    own: Float32s
    own_scale: float
    divisor: int
    residual: Float32s | None
    residual_out: Float32s | None

    def check(self, wire_bytes: int, incoming: Bytes | None, outgoing: Bytes) -> None:
        """Raise ValueError if an array's length does not fit."""
        for wire in (incoming, outgoing):
            if wire is not None:
                check_wire(wire, wire_bytes, len(self.own))
        for values in (self.residual, self.residual_out):
            if values is not None and len(values) != len(self.own):
                raise ValueError(f"{len(values)} residuals for {len(self.own)} values")

    @property
    def residual_factor(self) -> np.float32:
        """See `residual_factor`."""
        return residual_factor(self.own_scale, self.divisor)

    def run(
        self,
        compiled: Kernels,
        codec: str,
        incoming: Bytes | None,
        outgoing: Bytes,
        *,
        counter: int = 0,
    ) -> int:
        """Run the hop of this codec in C; return how many values were clipped."""
        return compiled.hop(
            codec,
            incoming,
            self.own,
            outgoing,
            own_scale=self.own_scale,
            divisor=self.divisor,
            residual=self.residual,
            residual_out=self.residual_out,
            residual_factor=float(self.residual_factor),
            counter=counter,
        )


def residual_factor(own_scale: float, divisor: int) -> np.float32:
    """Return the factor from an error of the encoded sum to an error of a rank's own values."""
    return np.float32(divisor / own_scale)


def check_wire(wire: Bytes, wire_bytes: int, count: int) -> None:
    """Raise ValueError if these are not the bytes of `count` values."""
    if len(wire) != wire_bytes:
        raise ValueError(f"{count} values are {wire_bytes} bytes on the wire, not {len(wire)}")


def hop_in_parts(incoming: Piece | None, terms: HopInput, outgoing: Piece) -> int:
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


def _total(arrived: Float32s | None, terms: HopInput, part: slice, *, into: Float32s) -> Float32s:
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


def _keep_residual(values: Float32s, image: Float32s, terms: HopInput, *, into: Float32s) -> None:
    """Set `into` to (values - image) * factor; 0 where that is not finite."""
    np.subtract(values, image, out=into)
    if terms.residual_factor != 1:
        np.multiply(into, terms.residual_factor, out=into)
    drop_not_finite(into)


# --- two bytes a value

_FP16_MAX = np.float32(65504)
_ROUNDS_BEYOND = np.float32(65520)  # from here on the nearest even is 2^16, which fp16 lacks


class Cast:
    """The codecs `fp16` and `bf16`: two bytes per value, rounded to nearest, ties to even.

    As IEEE 754 does; but at the ends of the range:

    | | fp16 | bf16 |
    |---|---|---|
    | denormal | rounded to a multiple of 2^-24 | rounded to a multiple of 2^-133 |
    | rounds beyond the largest | clipped to ±65504, and counted | infinity, as in IEEE 754 |
    | infinity, NaN | unchanged | unchanged |

    The residual keeps the part that clipping cut off.
    """

    block = 1

    def __init__(self, name: Literal["fp16", "bf16"]) -> None:
        self.name = name
        self.divides_first = name == "fp16"
        """True for fp16: a sum of n values exceeds its range n times as early as their mean."""

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
        terms = HopInput(own, own_scale, divisor, residual, residual_out)
        terms.check(self.wire_bytes(len(own)), incoming, outgoing)
        if (compiled := kernels()) is not None:
            return terms.run(compiled, self.name, incoming, outgoing)
        outgoing[2 * len(own) :] = 0
        arrived = None if incoming is None else self._halves(incoming, len(own))
        return hop_in_parts(arrived, terms, self._halves(outgoing, len(own)))

    def decode(self, wire: Bytes, out: Float32s) -> None:
        check_wire(wire, self.wire_bytes(len(out)), len(out))
        if (compiled := kernels()) is not None:
            compiled.decode(self.name, wire, out)
            return
        with np.errstate(invalid="ignore"):  # forged bytes may hold a signalling NaN
            self._halves(wire, len(out)).load(0, out)

    def _halves(self, wire: Bytes, count: int) -> "_Halves":
        return (_Fp16s if self.name == "fp16" else _Halves)(wire.view(_dtype_of(self.name))[:count])


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


# --- a byte a value

BLOCK = 256
LEVELS = np.float32(127)  # -128 would make the range asymmetric, and bias a mean of many ranks
SMALLEST_SCALE = np.float32(2.0**-126)  # smaller scales are denormal, so imprecise
LARGEST_SCALE = np.nextafter(np.finfo(np.float32).max / LEVELS, np.float32(0))
"""127 times the next larger float would be infinity."""


class Int8:
    """The codecs `int8` and `int8-stochastic`: blocks of 256 values with one fp32 scale; symmetric.

    A piece has ceil(count / 256) scales, little-endian fp32, then count int8 codes, then up to 3
    zeros. With `largest` as the largest magnitude of a block (Dettmers et al. 2022, block-wise
    quantization):

        scale = max(largest / 127, 2^-126)
        code = round(value / scale)            -127 to 127, ties to even
        decoded = code * scale                 an error of at most scale / 2

    | a block that holds | decodes to |
    |---|---|
    | zeros | +0 |
    | nothing above 127 * 2^-126 (denormals, and a little more) | multiples of 2^-126 |
    | an infinity or a NaN | NaN everywhere |

    Stochastic rounding takes floor(value / scale + u), with u from `draws`: its error is up to
    `scale`, but on average it decodes to the value.
    """

    block = BLOCK
    divides_first = False

    def __init__(self, *, stochastic: bool) -> None:
        self.name = "int8-stochastic" if stochastic else "int8"
        self._stochastic = stochastic

    def wire_bytes(self, count: int) -> int:
        """Return one byte for each value and four for each block, padded to a multiple of 4."""
        return 4 * _blocks(count) + (count + 3) // 4 * 4

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
        """See `Codec.hop`; nothing is clipped."""
        terms = HopInput(own, own_scale, divisor, residual, residual_out)
        terms.check(self.wire_bytes(len(own)), incoming, outgoing)
        if (compiled := kernels()) is not None:
            if self._stochastic:
                counter = start_of(draw)
                terms.run(compiled, "int8_stochastic", incoming, outgoing, counter=counter)
            else:
                terms.run(compiled, "int8", incoming, outgoing)
            return 0
        arrived = None if incoming is None else _Int8Piece(incoming, len(own))
        sent = _Int8Piece(outgoing, len(own), draw=draw if self._stochastic else None)
        sent.rest[:] = 0
        return hop_in_parts(arrived, terms, sent)

    def decode(self, wire: Bytes, out: Float32s) -> None:
        check_wire(wire, self.wire_bytes(len(out)), len(out))
        if (compiled := kernels()) is not None:
            compiled.decode("int8", wire, out)
            return
        blocks = _Int8Piece(wire, len(out))
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # scales may be forged
            for part in parts(len(out), PART):
                blocks.load(part.start, out[part])


class _Int8Piece:
    """A piece; its parts begin at multiples of a block."""

    def __init__(self, wire: Bytes, count: int, *, draw: int | None = None) -> None:
        codes_from = 4 * _blocks(count)
        self.scales: Float32s = wire[:codes_from].view("<f4")
        self.codes: Int8s = wire[codes_from : codes_from + count].view(np.int8)
        self.rest = wire[codes_from + count :]
        self._draw = draw

    def load(self, start: int, into: Float32s) -> None:
        np.copyto(into, self.codes[start : start + len(into)])
        self._multiply_by_scales(start, into)

    def store(self, start: int, values: Float32s, image: Float32s) -> int:
        block = start // BLOCK
        for rows, quotients in zip(_rows(values), _rows(image), strict=True):
            _divide_by_scales(rows, quotients, self.scales[block : block + len(rows)])
            block += len(rows)
        if self._draw is None:
            np.rint(image, out=image)
        else:
            np.add(image, draw_uniform(self._draw, start, len(image)), out=image)
            np.floor(image, out=image)
            np.clip(image, -LEVELS, LEVELS, out=image)  # a quotient may be 127.00001
        np.copyto(self.codes[start : start + len(image)], image, casting="unsafe")
        return 0

    def load_stored(self, start: int, image: Float32s) -> None:
        self._multiply_by_scales(start, image)

    def _multiply_by_scales(self, start: int, values: Float32s) -> None:
        block = start // BLOCK
        for rows in _rows(values):
            np.multiply(rows, self.scales[block : block + len(rows), None], out=rows)
            block += len(rows)


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


def _rows(values: Float32s) -> Iterator[FloatRows]:
    """Yield the whole blocks, then the rest: float32[blocks, 256], float32[1, rest]."""
    whole = len(values) // BLOCK * BLOCK
    if whole:
        yield values[:whole].reshape(-1, BLOCK)
    if whole < len(values):
        yield values[None, whole:]


def _divide_by_scales(rows: FloatRows, quotients: FloatRows, scales: Float32s) -> None:
    """Choose each row's scale; quotients = rows / scale, 0 where the scale is NaN."""
    # The magnitudes of floats have the same order as their bits, and integers compare faster.
    bits = quotients.view(np.uint32)
    np.bitwise_and(rows.view(np.uint32), 0x7FFFFFFF, out=bits)
    np.maximum.reduce(bits, axis=1, out=scales.view(np.uint32))
    np.divide(scales, LEVELS, out=scales)
    finite = np.isfinite(scales)
    np.clip(scales, SMALLEST_SCALE, LARGEST_SCALE, out=scales)
    np.divide(rows, scales[:, None], out=quotients)
    if not finite.all():
        scales[~finite] = np.nan
        quotients[~finite] = 0


_CODECS = MappingProxyType[str, Any](
    {
        "fp16": lambda: Cast("fp16"),
        "bf16": lambda: Cast("bf16"),
        "int8": lambda: Int8(stochastic=False),
        "int8-stochastic": lambda: Int8(stochastic=True),
    }
)
