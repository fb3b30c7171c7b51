"""The library reduces to numpy's bits."""

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pmesh import native
from pmesh.core.ops.reductions import (
    REDUCTIONS,
    WIRE_DTYPES,
    Values,
    accumulate,
    check_reduction,
    finish,
    is_exact,
    make_nan_equal,
)

DTYPES = list(WIRE_DTYPES)


def is_allowed(reduction: str, dtype: str) -> bool:
    try:
        check_reduction(reduction, dtype)
    except ValueError:
        return False
    return True


def library() -> ctypes.CDLL:
    loaded = native.library()
    assert loaded is not None
    return loaded


def address(values: Values) -> ctypes.c_void_p:
    return ctypes.c_void_p(values.ctypes.data)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[str, str, Values, Values]:
    dtype = draw(st.sampled_from(DTYPES))
    reduction = draw(st.sampled_from([r for r in REDUCTIONS if is_allowed(r, dtype)]))
    if dtype.startswith("complex"):
        reduction = draw(st.sampled_from(["sum", "mean"]))  # see the next test
    shape = draw(st.integers(0, 70))
    values = arrays.arrays(np.dtype(dtype), shape, elements=arrays.from_dtype(np.dtype(dtype)))
    return dtype, reduction, draw(values), draw(values)


@given(pairs(), st.integers(1, 64))
def test_reductions_and_means_have_the_bits_of_numpy(
    case: tuple[str, str, Values, Values], contributors: int
) -> None:
    dtype, reduction, into, other = case
    wanted, got = into.copy(), into.copy()
    with np.errstate(all="ignore"):
        accumulate(reduction, wanted, other)
        finish(reduction, wanted, contributors)
    make_nan_equal(wanted)
    what = DTYPES.index(dtype), REDUCTIONS.index(reduction)
    library().pmesh_accumulate(*what, address(got), address(other), len(got))
    library().pmesh_finish(*what, address(got), len(got), contributors)
    library().pmesh_make_nan_equal(what[0], address(got), len(got))
    if is_exact(reduction, dtype):
        assert got.tobytes() == wanted.tobytes()
    else:  # the greater of 0 and -0 may be either
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_what_is_no_reduction_of_a_dtype_is_refused(reduction: str, dtype: str) -> None:
    """A product of complex numbers is numpy's: only it knows which of its operations are fused."""
    left_to_numpy = dtype.startswith("complex") and reduction == "prod"
    allowed = is_allowed(reduction, dtype) and not left_to_numpy
    itemsize = library().pmesh_itemsize(DTYPES.index(dtype), REDUCTIONS.index(reduction))
    assert itemsize == (WIRE_DTYPES[dtype].itemsize if allowed else 0)


@pytest.mark.parametrize(("dtype", "reduction"), [(-1, 0), (13, 0), (0, -1), (0, 8)])
def test_what_does_not_exist_is_refused(dtype: int, reduction: int) -> None:
    assert library().pmesh_itemsize(dtype, reduction) == 0


def test_a_bool_is_any_byte_that_is_not_0() -> None:
    into, other = np.array([0, 0, 2, 4], np.uint8), np.array([0, 8, 0, 3], np.uint8)
    for reduction, wanted in (
        ("sum", [0, 1, 1, 1]),
        ("prod", [0, 0, 0, 1]),
        ("bxor", [0, 1, 1, 0]),
    ):
        got = into.copy()
        what = DTYPES.index("bool"), REDUCTIONS.index(reduction)
        library().pmesh_accumulate(*what, address(got), address(other), len(got))
        assert got.tolist() == wanted
