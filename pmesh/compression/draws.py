"""Counter-based random numbers: the same key and index give the same value on every machine.

The finalizer of SplitMix64 over a counter (Steele, Lea and Flood 2014, "Fast splittable
pseudorandom number generators", figure 14), which passes BigCrush. Not for secrets.
"""

import numpy as np

from pmesh.compression.blocks import Float32s, Words64

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio, odd
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_PER_WORD = 4
_STEP = np.float32(2.0**-16)


def start_of(key: int) -> int:
    """Return the first counter of a key (its low 64 bits); even keys 1, 2, 3, ... are far apart."""
    return int(_finalize(np.array([key % 2**64], np.uint64))[0])


def draw_words(key: int, first: int, count: int) -> Words64:
    """Return uint64[count]: the random words first, first + 1, ... of that key."""
    words = np.arange(first, first + count, dtype=np.uint64)
    words *= np.uint64(_GOLDEN)
    words += np.uint64(start_of(key))
    return _finalize(words)


def draw_uniform(key: int, first: int, count: int) -> Float32s:
    """Return float32[count], multiples of 2^-16 in [0, 1), from index `first`, a multiple of 4.

    Each word gives four values, the lowest bits first, on machines of any byte order.
    """
    words = draw_words(key, first // _PER_WORD, -(-count // _PER_WORD))
    quarters = words.astype("<u8", copy=False).view("<u2")[:count]
    uniform: Float32s = np.multiply(quarters, _STEP, dtype=np.float32)
    return uniform


def _finalize(words: Words64) -> Words64:
    words ^= words >> np.uint64(30)
    words *= np.uint64(_FIRST)
    words ^= words >> np.uint64(27)
    words *= np.uint64(_SECOND)
    words ^= words >> np.uint64(31)
    return words
