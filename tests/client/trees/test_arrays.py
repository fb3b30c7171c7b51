import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pmesh.client.trees.arrays import WIRE_OF, Leaf, describe, flatten
from pmesh.errors import UnsupportedArray

DTYPES = [np.dtype(name) for name in WIRE_OF if name != "bfloat16"]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def leaf_of(x: object) -> Leaf:
    (leaf,) = describe(flatten(x))
    return leaf


def region_for(leaf: Leaf) -> "np.ndarray[Any, Any]":
    return np.full(leaf.values.size, 77, dtype=leaf.wire)


def through_an_arena(x: object, *, weight: float | None = None) -> Any:  # noqa: ANN401 - an array of the same kind as x
    leaf = leaf_of(x)
    region = region_for(leaf)
    leaf.fill(region, weight)
    region.flags.writeable = False  # as an output arena is
    result = leaf.like(region)
    assert not np.shares_memory(np.asarray(result), region)
    return result


ARRAYS: st.SearchStrategy[Any] = st.sampled_from(
    [*DTYPES, np.dtype(">f4"), np.dtype(">i8")]
).flatmap(
    lambda dtype: hnp.arrays(
        dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    )
)


@given(ARRAYS)
def test_an_array_comes_back_as_it_was(x: "np.ndarray[Any, Any]") -> None:
    before = x.tobytes()
    result = through_an_arena(x)
    assert type(result) is np.ndarray
    assert result.dtype == x.dtype
    assert result.dtype.byteorder == x.dtype.byteorder
    assert result.shape == x.shape
    np.testing.assert_array_equal(result, x)
    assert x.tobytes() == before


@given(st.integers(min_value=0, max_value=2**16 - 1))
def test_every_bfloat16_comes_back_with_its_bits(bits: int) -> None:
    x = np.array([bits], np.uint16).view(BFLOAT16)
    result = through_an_arena(x)
    assert result.dtype == BFLOAT16
    with np.errstate(invalid="ignore"):  # asking a signalling NaN whether it is one flags it
        is_nan, stays_nan = np.isnan(x[0]), np.isnan(result[0])
    if is_nan:
        assert stays_nan
    else:
        assert result.view(np.uint16)[0] == bits


@given(hnp.arrays(np.float32, st.sampled_from([(), (0,), (5,), (2, 3)])))
def test_float32_is_narrowed_to_bfloat16_as_ml_dtypes_does(values: "np.ndarray[Any, Any]") -> None:
    leaf = leaf_of(np.zeros(values.shape, BFLOAT16))
    result: Any = leaf.like(values.ravel())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        expected = values.astype(BFLOAT16)
    assert result.shape == values.shape
    np.testing.assert_array_equal(result.astype(np.float32), expected.astype(np.float32))


def test_bfloat16_ties_go_to_even() -> None:
    ties = np.array([0x3F808000, 0x3F818000, 0xBF808000], np.uint32).view(np.float32)
    result: Any = leaf_of(np.zeros(3, BFLOAT16)).like(ties)
    assert result.view(np.uint16).tolist() == [0x3F80, 0x3F82, 0xBF80]


def test_a_nan_whose_low_bits_alone_are_set_stays_nan() -> None:
    nan = np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    result: Any = leaf_of(np.zeros(2, BFLOAT16)).like(nan)
    assert np.isnan(result).all()


def test_narrowing_rounds_to_nearest_even_and_overflows_to_infinity() -> None:
    halves = np.array([2049.0, 2051.0, 1e6, np.nan], np.float32)
    result: Any = leaf_of(np.zeros(4, np.float16)).like(halves)
    np.testing.assert_array_equal(result, np.array([2048, 2052, np.inf, np.nan], np.float16))


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16"])
def test_a_weight_multiplies(name: str) -> None:
    x = np.arange(6.0).reshape(2, 3).astype(BFLOAT16 if name == "bfloat16" else name)
    result = through_an_arena(x, weight=3.0)
    assert result.dtype == x.dtype
    np.testing.assert_array_equal(result.astype(np.float64), x.astype(np.float64) * 3)


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16])
def test_with_weight_0_nan_is_not_looked_at(dtype: "np.dtype[Any]") -> None:
    result = through_an_arena(np.full(3, np.nan, dtype), weight=0.0)
    assert (result == 0).all()


@pytest.mark.parametrize(
    "x",
    [
        np.arange(24.0).reshape(2, 3, 4)[:, ::2, ::-1],
        np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3)),
        np.broadcast_to(np.float32(2), (3, 3)),
        np.arange(6.0).astype(BFLOAT16)[::2],
        np.array(5, BFLOAT16),
    ],
)
def test_any_layout_works(x: "np.ndarray[Any, Any]") -> None:
    result = through_an_arena(x)
    assert result.shape == x.shape
    np.testing.assert_array_equal(result.astype(np.float64), x.astype(np.float64))


@pytest.mark.parametrize("x", [np.float64(1.5), np.int32(3), np.bool_(1), np.float16(2)])
def test_a_numpy_scalar_comes_back_as_one(x: "np.generic[Any]") -> None:
    result = through_an_arena(x)
    assert type(result) is type(x)
    assert result == x


def test_a_0_d_array_comes_back_as_one() -> None:
    result = through_an_arena(np.array(1.5))
    assert type(result) is np.ndarray
    assert result.shape == ()


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (1.5, r"a float is not an array; wrap it, as in numpy.array\(x\)"),
        (True, "a bool is not an array; wrap it"),
        ("text", "a str is not an array$"),
        (np.zeros(3, ml_dtypes.float8_e5m2), "float8_e5m2 is not supported; use float64"),
        (np.zeros(3, np.longdouble), "float128 is not supported"),
        (np.zeros(3, object), "object is not supported"),
        (np.ma.masked_array([1.0], [True]), r"MaskedArray means more .* numpy.asarray"),
        ({"a": [np.zeros(1), 2]}, r"a\.1: a int is not an array"),
        ({"a": {"b": np.zeros(1, "U1")}}, r"a\.b: str32 is not supported"),
    ],
)
def test_what_cannot_travel_is_refused_by_name(x: object, message: str) -> None:
    with pytest.raises(UnsupportedArray, match=message) as caught:
        describe(flatten(x))
    assert isinstance(caught.value, TypeError)
