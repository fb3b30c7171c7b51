"""Compiled kernels of the schemes that trainers compute: RandomK, OneBit and PowerSGD.

TopK has none, and RandomK only one for the draw: the rest is one pass over memory in numpy, too.
`rings` says how its loops become vector instructions. An optional array is an empty one here.
"""

import numpy as np

from pmesh.compression.blocks import Float32s, Indices, UInt32s
from pmesh.compression.fast import jit

# Repeated here because numba checks only this file to see whether its cache is stale; a test
# compares them.
BLOCK = 1024
LARGEST = np.finfo(np.float32).max

INDICES = jit.FLOAT32S.copy(dtype=jit.COUNT)


@jit.inlined
def _add(own: Float32s, residual: Float32s, into: Float32s) -> None:
    if len(residual):
        for i in range(len(own)):
            into[i] = own[i] + residual[i]
    else:
        for i in range(len(own)):
            into[i] = own[i]


@jit.inlined
def _keep(values: Float32s, image: Float32s, into: Float32s) -> None:
    """Set `into` to values - image; 0 where that is not finite."""
    for i in range(len(into)):
        left = values[i] - image[i]
        into[i] = left if abs(left) <= LARGEST else np.float32(0)


@jit.compiled(jit.NOTHING, jit.UINT64, jit.UINT64, jit.UINT64, INDICES)
def draw_indices(counter: np.uint64, count: np.uint64, offset: np.uint64, indices: Indices) -> None:
    """Draw as in `random_k`, from the first counter, but divide by k only once."""
    k = np.uint64(len(indices))
    shortest, more = count // k, count % k
    start, carry = np.uint64(0), np.uint64(0)
    for i in range(len(indices)):
        word = counter + np.uint64(i) * np.uint64(0x9E3779B97F4A7C15)
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        word = word ^ (word >> np.uint64(31))
        carry += more
        longer = np.uint64(carry >= k)
        carry -= longer * k
        length = shortest + longer
        place = start + ((word >> np.uint64(32)) * length >> np.uint64(32)) + offset
        indices[i] = place - np.uint64(place >= count) * count
        start += length


@jit.inlined
def _mean_magnitude(values: Float32s, sums: Float32s) -> np.float32:
    """Return the mean magnitude, added up by halves in `sums`, float32[BLOCK] of scratch."""
    sums[len(values) :] = 0
    for i in range(len(values)):
        sums[i] = abs(values[i])
    half = BLOCK // 2
    while half:
        lower, upper = sums[:half], sums[half : 2 * half]
        for i in range(half):
            lower[i] += upper[i]
        half //= 2
    mean: np.float32 = sums[0] / np.float32(len(values))
    return mean


@jit.inlined
def _pack_signs(bits: UInt32s, signs: UInt32s) -> None:
    for w in range(len(signs)):
        group = bits[32 * w : min(32 * w + 32, len(bits))]
        word = np.uint32(0)
        for i in range(len(group)):
            word |= np.uint32(np.uint32(group[i] >> np.uint32(31)) << np.uint32(i))
        signs[w] = word


@jit.inlined
def _unpack_signs(signs: UInt32s, bits: UInt32s) -> None:
    for w in range(len(signs)):
        word, group = signs[w], bits[32 * w : 32 * w + 32]
        for i in range(32):
            group[i] = np.uint32(np.uint32(word >> np.uint32(i)) << np.uint32(31))


@jit.compiled(
    jit.NOTHING,
    *(jit.FLOAT32S_READ, jit.FLOAT32S_READ, jit.FLOAT32S),
    *(jit.FLOAT32S, jit.FLOAT32S),
)
def compress_one_bit(
    own: Float32s,
    residual: Float32s,
    residual_out: Float32s,
    means: Float32s,
    signs_as_floats: Float32s,
) -> None:
    """Compress as in `one_bit`, with the two parts of the wire as float32s."""
    buffers, mean = np.zeros((2, BLOCK), np.float32), np.zeros(1, np.float32)
    signs = signs_as_floats.view(np.uint32)
    for block in range(len(means)):
        part = slice(block * BLOCK, min((block + 1) * BLOCK, len(own)))
        values, image = buffers[0, : part.stop - part.start], buffers[1, : part.stop - part.start]
        _add(own[part], residual[part], values)
        mean[0] = _mean_magnitude(values, buffers[1])
        means[block] = mean[0]
        bits, magnitude = values.view(np.uint32), mean.view(np.uint32)[0]
        words = block * (BLOCK // 32)
        _pack_signs(bits, signs[words : words + (len(bits) + 31) // 32])
        if len(residual_out):
            image_bits = image.view(np.uint32)
            for i in range(len(bits)):
                image_bits[i] = np.uint32(bits[i] & np.uint32(0x80000000)) | magnitude
            _keep(values, image, residual_out[part])


@jit.compiled(jit.NOTHING, jit.FLOAT32S_READ, jit.FLOAT32S_READ, jit.FLOAT32S)
def accumulate_one_bit(means: Float32s, signs_as_floats: Float32s, into: Float32s) -> None:
    image = np.zeros(BLOCK, np.float32)
    signs, bits = signs_as_floats.view(np.uint32), image.view(np.uint32)
    for block in range(len(means)):
        values = into[block * BLOCK : min((block + 1) * BLOCK, len(into))]
        words = block * (BLOCK // 32)
        _unpack_signs(signs[words : words + (len(values) + 31) // 32], bits)
        magnitude = means[block : block + 1].view(np.uint32)[0]
        for i in range(len(values)):
            bits[i] = np.uint32(bits[i] | magnitude)
        for i in range(len(values)):
            values[i] = values[i] + image[i]


@jit.compiled(
    jit.NOTHING,
    *(jit.FLOAT32S_READ, jit.FLOAT32S_READ, jit.COUNT),
    *(jit.FLOAT32S, jit.FLOAT32S),
)
def multiply(
    thin_p: Float32s, thin_q: Float32s, rank: int, out: Float32s, residual_out: Float32s
) -> None:
    """Set `out` to P Q^T of one matrix, and subtract it from the residual, if any."""
    rows, columns = len(thin_p) // rank, len(thin_q) // rank
    for row in range(rows):
        for start in range(0, columns, BLOCK):
            end = min(start + BLOCK, columns)
            part = slice(row * columns + start, row * columns + end)
            values = out[part]
            factor, column = thin_p[row], thin_q[start:end]
            for j in range(len(values)):
                values[j] = factor * column[j]
            for i in range(1, rank):
                factor, column = (
                    thin_p[i * rows + row],
                    thin_q[i * columns + start : i * columns + end],
                )
                for j in range(len(values)):
                    values[j] = values[j] + factor * column[j]
            if len(residual_out):
                _keep(residual_out[part], values, residual_out[part])
