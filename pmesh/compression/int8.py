"""int8 on the wire: blocks of 256 values, one fp32 scale each; symmetric.

A piece has ceil(count / 256) scales, little-endian fp32, then count int8 codes, then up to 3 zeros.
With `largest` as the largest magnitude of a block (Dettmers et al. 2022, block-wise quantization):

    scale = max(largest / 127, 2^-126)
    code = round(value / scale)            -127 to 127, ties to even
    decoded = code * scale                 an error of at most scale / 2

| a block that holds | decodes to |
|---|---|
| zeros | +0 |
| nothing above 127 * 2^-126 (denormals, and a little more) | multiples of 2^-126 |
| an infinity or a NaN | NaN everywhere |

Stochastic rounding takes floor(value / scale + u), with u from `draws`: its error is up to `scale`,
but on average it decodes to the value.
"""

from collections.abc import Iterator
from types import ModuleType

import numpy as np

from pmesh.compression import fast
from pmesh.compression.blocks import Bytes, Float32s, Int8s, Rows, parts
from pmesh.compression.draws import draw_uniform, start_of
from pmesh.compression.hops import PART, Terms, check_wire, hop_in_parts

BLOCK = 256
LEVELS = np.float32(127)  # -128 would make the range asymmetric, and bias a mean of many ranks
SMALLEST_SCALE = np.float32(2.0**-126)  # smaller scales are denormal, so imprecise
LARGEST_SCALE = np.nextafter(np.finfo(np.float32).max / LEVELS, np.float32(0))
"""127 times the next larger float would be infinity."""


class Int8:
    """The codec `int8` or `int8-stochastic`."""

    block = BLOCK
    divides_first = False

    def __init__(self, *, stochastic: bool) -> None:
        self.name = "int8-stochastic" if stochastic else "int8"
        self._stochastic = stochastic
        self._compiled: ModuleType | None = None

    def prepare(self) -> bool:
        self._compiled = fast.load("rings")
        return self._compiled is not None

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
        terms = Terms(own, own_scale, divisor, residual, residual_out)
        terms.check(self.wire_bytes(len(own)), incoming, outgoing)
        arrived = None if incoming is None else _Blocks(incoming, len(own))
        sent = _Blocks(outgoing, len(own), draw=draw if self._stochastic else None)
        sent.rest[:] = 0
        if self._compiled is None:
            return hop_in_parts(arrived, terms, sent)
        self._compiled.hop_int8(
            sent.scales[:0] if arrived is None else arrived.scales,
            sent.codes[:0] if arrived is None else arrived.codes,
            sent.scales,
            sent.codes,
            *terms.for_compiled(),
            self._stochastic,
            np.uint64(start_of(draw) if self._stochastic else 0),
        )
        return 0

    def decode(self, wire: Bytes, out: Float32s) -> None:
        check_wire(wire, self.wire_bytes(len(out)), len(out))
        blocks = _Blocks(wire, len(out))
        if self._compiled is not None:
            self._compiled.decode_int8(blocks.scales, blocks.codes, out)
            return
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # scales may be forged
            for part in parts(len(out), PART):
                blocks.load(part.start, out[part])


class _Blocks:
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


def _rows(values: Float32s) -> Iterator[Rows]:
    """Yield the whole blocks, then the rest: float32[blocks, 256], float32[1, rest]."""
    whole = len(values) // BLOCK * BLOCK
    if whole:
        yield values[:whole].reshape(-1, BLOCK)
    if whole < len(values):
        yield values[None, whole:]


def _divide_by_scales(rows: Rows, quotients: Rows, scales: Float32s) -> None:
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
