"""The ring codecs, compiled: the hops of int8, fp16 and bf16, and the decoders of int8 and fp16.

A hop handles 256 values at a time in buffers that stay in the first level cache, and reads and
writes memory once. Its loops become vector instructions because they run over slices, whose indices
numba knows to be positive, and cast 32-bit results explicitly, which numba would widen to 64.

An optional array in `Codec.hop` is an empty one here.
"""

import numpy as np

from pmesh.compression.blocks import Float32s, Int8s, UInt16s
from pmesh.compression.fast import jit

# These constants are compiled in, and numba checks only this file to see whether its cache is
# stale. So they are repeated here; a test checks that the bits agree.
BLOCK = 256
LEVELS = np.float32(127)
SMALLEST_SCALE = np.float32(2.0**-126)
LARGEST_SCALE = np.nextafter(np.finfo(np.float32).max / LEVELS, np.float32(0))
LARGEST = np.finfo(np.float32).max
INFINITY = np.int32(0x7F800000)  # as bits; larger ones are NaN
MAGNITUDE = np.int32(0x7FFFFFFF)  # all but the sign
GOLDEN = np.uint64(0x9E3779B97F4A7C15)

_TERMS = (
    jit.FLOAT32S_READ,  # own
    jit.FLOAT32,  # own_scale
    jit.FLOAT32,  # divisor
    jit.FLOAT32S_READ,  # residual
    jit.FLOAT32,  # residual_factor
    jit.FLOAT32S,  # residual_out
)


@jit.inlined
def _set_own(total: Float32s, own: Float32s, residual: Float32s, own_scale: np.float32) -> None:
    """Set `total` to own_scale * (own + residual)."""
    if len(residual):
        for i in range(len(total)):
            total[i] = own_scale * (own[i] + residual[i])
    else:
        for i in range(len(total)):
            total[i] = own_scale * own[i]


@jit.inlined
def _add(total: Float32s, arrived: Float32s) -> None:
    for i in range(len(total)):
        total[i] = arrived[i] + total[i]


@jit.inlined
def _divide(total: Float32s, divisor: np.float32) -> None:
    if divisor != np.float32(1):
        for i in range(len(total)):
            total[i] = total[i] / divisor


@jit.inlined
def _multiply(values: Float32s, factor: np.float32) -> None:
    for i in range(len(values)):
        values[i] = values[i] * factor


@jit.inlined
def _keep_residual(kept: Float32s, total: Float32s, image: Float32s, factor: np.float32) -> None:
    """Set `kept` to (total - image) * factor; 0 where that is not finite."""
    for i in range(len(kept)):
        value = (total[i] - image[i]) * factor
        kept[i] = value if abs(value) <= LARGEST else np.float32(0)


@jit.inlined
def _scale_of(total: Float32s) -> np.float32:
    """Return the scale of a block; its magnitudes have the same order as their bits."""
    bits = total.view(np.int32)
    largest = np.int32(0)
    for i in range(len(total)):
        largest = max(largest, np.int32(bits[i] & MAGNITUDE))
    if largest >= INFINITY:
        return np.float32(np.nan)
    magnitude = np.int32(largest)  # numba has no view of a variable that is set twice
    return min(max(magnitude.view(np.float32) / LEVELS, SMALLEST_SCALE), LARGEST_SCALE)


@jit.inlined
def _quantize(image: Float32s, total: Float32s, scale: np.float32) -> None:
    """Set `image` to total / scale, rounded."""
    for i in range(len(total)):
        image[i] = np.rint(total[i] / scale)


@jit.inlined
def _quantize_randomly(
    image: Float32s, total: Float32s, scale: np.float32, uniform: Float32s
) -> None:
    for i in range(len(total)):
        image[i] = max(-LEVELS, min(np.floor(total[i] / scale + uniform[i]), LEVELS))


@jit.inlined
def _draw_uniform(uniform: Float32s, counter: np.uint64) -> None:
    """Compute `draws.draw_uniform` from the counter of the first word."""
    for group in range(len(uniform) // 4):
        word = counter + np.uint64(group) * GOLDEN
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        word = word ^ (word >> np.uint64(31))
        for quarter in range(4):
            half = np.uint64(word >> np.uint64(16 * quarter)) & np.uint64(0xFFFF)
            uniform[4 * group + quarter] = np.float32(half) * np.float32(2.0**-16)


@jit.inlined
def _cast(codes: Int8s, image: Float32s) -> None:
    for i in range(len(codes)):
        codes[i] = np.int8(image[i])


@jit.inlined
def _decode_int8(values: Float32s, codes: Int8s, scale: np.float32) -> None:
    for i in range(len(values)):
        values[i] = np.float32(codes[i]) * scale


@jit.inlined
def _decode_halves(fp16: bool, values: Float32s, halves: UInt16s) -> None:
    if fp16:
        _decode_fp16(values, halves)
    else:
        bits = values.view(np.uint32)
        for i in range(len(bits)):
            bits[i] = np.uint32(np.uint32(halves[i]) << np.uint32(16))


@jit.inlined
def _encode_bf16(halves: UInt16s, values: Float32s) -> None:
    """Round to nearest, ties to even; a NaN keeps its sign and becomes quiet."""
    bits = values.view(np.uint32)
    for i in range(len(bits)):
        word = bits[i]
        upper = np.uint32(word >> np.uint32(16))
        odd = np.uint32(upper & np.uint32(1))
        rounded = np.uint32(np.uint32(word + np.uint32(odd + np.uint32(0x7FFF))) >> np.uint32(16))
        quiet = np.uint32(np.uint32(upper & np.uint32(0x8000)) | np.uint32(0x7FC0))
        nan = np.int32(word & np.uint32(MAGNITUDE)) > INFINITY
        halves[i] = np.uint16(quiet if nan else rounded)


@jit.inlined
def _decode_fp16(values: Float32s, halves: UInt16s) -> None:
    """Multiply by 2^112, the difference of the biases; this is right for denormals, too."""
    bits = values.view(np.uint32)
    for i in range(len(bits)):
        magnitude = np.uint32(np.uint32(halves[i]) & np.uint32(0x7FFF))
        bits[i] = np.uint32(magnitude << np.uint32(13))
    _multiply(values, np.float32(2.0**112))
    for i in range(len(bits)):
        half = np.uint32(halves[i])
        sign = np.uint32(np.uint32(half & np.uint32(0x8000)) << np.uint32(16))
        not_finite = np.uint32(half & np.uint32(0x7C00)) == np.uint32(0x7C00)
        exponent = np.uint32(INFINITY) if not_finite else np.uint32(0)
        bits[i] = np.uint32(np.uint32(bits[i] | exponent) | sign)


@jit.inlined
def _encode_fp16(halves: UInt16s, values: Float32s) -> np.int32:
    """Round to nearest, ties to even; clip and count finite values that round beyond 65504."""
    bits = values.view(np.int32)
    clipped = np.int32(0)
    for i in range(len(bits)):
        magnitude = np.int32(bits[i] & MAGNITUDE)
        sign = np.int32(np.int32(bits[i] >> np.int32(16)) & np.int32(0x8000))
        odd = np.int32(np.int32(magnitude >> np.int32(13)) & np.int32(1))
        # 112 is the difference of the exponents' biases.
        biased = np.int32(magnitude - np.int32((112 << 23) - 0xFFF))
        normal = np.int32(np.int32(biased + odd) >> np.int32(13))
        # 2^-24 is the smallest denormal, 2^-14 the smallest normal; above 1 it could overflow.
        denormal = np.int32(np.rint(min(abs(values[i]), np.float32(1)) * np.float32(2.0**24)))
        half = denormal if magnitude < np.int32(113 << 23) else normal
        beyond = magnitude >= np.int32(0x477FF000)  # 65520, which rounds to 2^16
        half = np.int32(0x7BFF) if beyond else half
        half = np.int32(0x7C00) if magnitude == INFINITY else half
        half = np.int32(0x7E00) if magnitude > INFINITY else half
        halves[i] = np.uint16(np.int32(half | sign))
        clipped += np.int32(1) if beyond and magnitude < INFINITY else np.int32(0)
    return clipped


@jit.compiled(
    jit.NOTHING,
    *(jit.FLOAT32S_READ, jit.INT8S_READ, jit.FLOAT32S, jit.INT8S),
    *_TERMS,
    *(jit.FLAG, jit.UINT64),
)
def hop_int8(
    scales_in: Float32s,
    codes_in: Int8s,
    scales: Float32s,
    codes: Int8s,
    own: Float32s,
    own_scale: np.float32,
    divisor: np.float32,
    residual: Float32s,
    residual_factor: np.float32,
    residual_out: Float32s,
    stochastic: bool,
    counter: np.uint64,
) -> None:
    """Compute a hop of `int8` or `int8-stochastic`, whose counter is `draws.start_of(draw)`."""
    totals, images = np.zeros(BLOCK, np.float32), np.zeros(BLOCK, np.float32)
    uniform = np.zeros(BLOCK, np.float32)
    for block in range(len(scales)):
        part = slice(block * BLOCK, min((block + 1) * BLOCK, len(own)))
        length = part.stop - part.start
        total, image = totals[:length], images[:length]
        _set_own(total, own[part], residual[part], own_scale)
        if len(scales_in):
            _decode_int8(image, codes_in[part], scales_in[block])
            _add(total, image)
        _divide(total, divisor)
        scales[block] = _scale_of(total)
        if np.isnan(scales[block]):
            image[:] = 0
        elif stochastic:
            _draw_uniform(uniform, counter + np.uint64(BLOCK // 4 * block) * GOLDEN)
            _quantize_randomly(image, total, scales[block], uniform)
        else:
            _quantize(image, total, scales[block])
        _cast(codes[part], image)
        if len(residual_out):
            _multiply(image, scales[block])
            _keep_residual(residual_out[part], total, image, residual_factor)


@jit.compiled(jit.NOTHING, jit.FLOAT32S_READ, jit.INT8S_READ, jit.FLOAT32S)
def decode_int8(scales: Float32s, codes: Int8s, out: Float32s) -> None:
    for block in range(len(scales)):
        part = slice(block * BLOCK, min((block + 1) * BLOCK, len(out)))
        _decode_int8(out[part], codes[part], scales[block])


@jit.compiled(jit.COUNT, jit.FLAG, *(jit.UINT16S_READ, jit.UINT16S), *_TERMS)
def hop_halves(
    fp16: bool,
    incoming: UInt16s,
    outgoing: UInt16s,
    own: Float32s,
    own_scale: np.float32,
    divisor: np.float32,
    residual: Float32s,
    residual_factor: np.float32,
    residual_out: Float32s,
) -> np.int64:
    """Compute a hop of `fp16` or `bf16`."""
    totals, images = np.zeros(BLOCK, np.float32), np.zeros(BLOCK, np.float32)
    clipped = np.int64(0)
    for start in range(0, len(own), BLOCK):
        part = slice(start, min(start + BLOCK, len(own)))
        length = part.stop - part.start
        total, image = totals[:length], images[:length]
        _set_own(total, own[part], residual[part], own_scale)
        if len(incoming):
            _decode_halves(fp16, image, incoming[part])
            _add(total, image)
        _divide(total, divisor)
        if fp16:
            clipped += np.int64(_encode_fp16(outgoing[part], total))
        else:
            _encode_bf16(outgoing[part], total)
        if len(residual_out):
            _decode_halves(fp16, image, outgoing[part])
            _keep_residual(residual_out[part], total, image, residual_factor)
    return clipped


@jit.compiled(jit.NOTHING, jit.UINT16S_READ, jit.FLOAT32S)
def decode_fp16(halves: UInt16s, out: Float32s) -> None:
    """Decode fp16 values; bf16 is not compiled, since numpy is as fast."""
    for start in range(0, len(out), BLOCK):
        part = slice(start, min(start + BLOCK, len(out)))
        _decode_fp16(out[part], halves[part])
