import tracemalloc
from typing import Any, get_args

import numpy as np
import pytest

from pmesh.core.ops.reductions import (
    WIRE_DTYPES,
    Values,
    accumulate,
    check_reduction,
    finish,
    is_exact,
    make_nan_equal,
)
from pmesh.core.wire.trainer import WireDtype

REDUCTIONS = ("sum", "mean", "max", "min", "prod")
ORACLE: dict[str, Any] = {
    "sum": np.sum,
    "mean": np.mean,
    "max": np.max,
    "min": np.min,
    "prod": np.prod,
}
FOR_KIND = {
    "f": set(REDUCTIONS),
    "c": {"sum", "mean", "prod"},
    "i": {"sum", "max", "min", "prod"},
    "u": {"sum", "max", "min", "prod"},
    "b": {"sum", "max", "min", "prod"},
}


def reduced(reduction: str, *rows: Values) -> Values:
    into = rows[0].copy()
    for row in rows[1:]:
        row.flags.writeable = False
        accumulate(reduction, into, row)
    finish(reduction, into, len(rows))
    return into


@pytest.mark.parametrize("dtype", WIRE_DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_what_is_allowed_is_reduced_and_the_rest_refused(dtype: str, reduction: str) -> None:
    if reduction not in FOR_KIND[np.dtype(dtype).kind]:
        with pytest.raises(ValueError, match=f"no '{reduction}' of {dtype}; these are allowed: "):
            check_reduction(reduction, dtype)
        return
    check_reduction(reduction, dtype)
    rows = np.array([[0, 1, 2, 3], [1, 1, 0, 2], [2, 1, 4, 1]]).astype(dtype)
    result = reduced(reduction, *rows)
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, ORACLE[reduction](rows, axis=0).astype(dtype))


def test_every_wire_dtype_may_be_named_in_a_request() -> None:
    assert tuple(WIRE_DTYPES) == get_args(WireDtype)


def test_unknown_dtypes_and_reductions_are_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match="float16 does not travel; these do: complex128, float64"):
        check_reduction("sum", "float16")
    with pytest.raises(ValueError, match=r"no 'median' of int32; .*: sum, max, min, prod"):
        check_reduction("median", "int32")


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("first", [True, False])
def test_nan_is_never_swallowed(reduction: str, first: bool) -> None:  # noqa: FBT001 - a parameter
    rows = [np.array([np.nan]), np.array([1.0])]
    assert np.isnan(reduced(reduction, *(rows if first else rows[::-1]))).all()


@pytest.mark.parametrize("reduction", ["sum", "prod"])
def test_an_overflow_is_infinity_and_no_warning(reduction: str) -> None:
    large = np.array([3e38], np.float32)
    assert np.isposinf(reduced(reduction, large, large)).all()


def test_infinities_of_both_signs_sum_to_nan_without_a_warning() -> None:
    assert np.isnan(reduced("sum", np.array([np.inf]), np.array([-np.inf]))).all()


def test_integers_wrap_around() -> None:
    most = np.array([2**31 - 1], np.int32)
    assert reduced("sum", most, np.array([1], np.int32)) == -(2**31)


def test_a_sum_of_bools_is_any_and_a_product_all() -> None:
    rows = [np.array([False, False, True]), np.array([False, True, True])]
    assert reduced("sum", *rows).tolist() == [False, True, True]
    assert reduced("prod", *rows).tolist() == [False, False, True]


def test_the_parts_of_a_complex_mean_do_not_spoil_each_other() -> None:
    rows = [np.array([complex(np.inf, 3)]), np.array([1 + 1j])]
    assert reduced("mean", *rows).tolist() == [complex(np.inf, 2)]


@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_nan_are_made_equal_in_every_part(dtype: str) -> None:
    x = np.array([-np.nan, 1.0, np.inf]).astype(dtype)
    parts = x.view(x.real.dtype)
    equal = np.where(np.isnan(parts), np.nan, parts).astype(parts.dtype)
    make_nan_equal(x)
    assert x.tobytes() == equal.tobytes()


@pytest.mark.parametrize(
    ("reduction", "dtype", "exact"),
    [
        ("sum", "complex64", True),
        ("prod", "complex64", False),
        ("prod", "float32", True),
        ("max", "float64", False),
        ("max", "uint8", True),
    ],
)
def test_only_what_all_processors_compute_alike_is_exact(
    reduction: str,
    dtype: str,
    exact: bool,  # noqa: FBT001 - a parameter
) -> None:
    assert is_exact(reduction, dtype) == exact


def test_what_has_no_nan_is_left_alone() -> None:
    x = np.array([1, 2], np.uint8)
    make_nan_equal(x)
    assert x.tolist() == [1, 2]


def test_accumulating_allocates_nothing() -> None:
    into, other = np.ones(1 << 18), np.ones(1 << 18)
    accumulate("sum", into, other)
    tracemalloc.start()
    try:
        for reduction in REDUCTIONS:
            accumulate(reduction, into, other)
            finish(reduction, into, 2)
        assert tracemalloc.get_traced_memory()[1] < into.nbytes / 16
    finally:
        tracemalloc.stop()
