"""Arrays of float32 for properties: ties, zeros, the ends of the range and what is not finite."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pmesh.compression.blocks import Float32s

_SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, -1e-39, 3.4028235e38, -3.4028235e38]
_NOT_FINITE = [float("inf"), float("-inf"), float("nan")]


def float32s(sizes: st.SearchStrategy[int], *, finite: bool = True) -> st.SearchStrategy[Float32s]:
    """Arrays of these sizes."""
    special = st.sampled_from(_SPECIAL if finite else _SPECIAL + _NOT_FINITE)
    ordinary = st.floats(-100, 100, width=32)
    return arrays.arrays(np.float32, sizes, elements=special | ordinary)


def gaussian(count: int, *, seed: int) -> Float32s:
    """float32[count], the same each time."""
    return np.random.default_rng(seed).standard_normal(count, np.float32)


def dyadic(count: int, *, seed: int) -> Float32s:
    """float32[count], multiples of 1/64 from -2 to 2, whose sums fp32 holds exactly."""
    return (np.random.default_rng(seed).integers(-128, 129, count) / 64).astype(np.float32)
