import math
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.client.collective.bucketed import fill, read
from pmesh.client.collective.buckets import plan_buckets
from pmesh.client.trees.arrays import Leaf, describe, flatten


def leaves_of(*shapes_and_dtypes: tuple[tuple[int, ...], str]) -> list[Leaf]:
    return describe(flatten([np.zeros(shape, dtype) for shape, dtype in shapes_and_dtypes]))


def test_arrays_go_together_by_the_dtype_that_travels_the_widest_first() -> None:
    leaves = leaves_of(((2,), "int32"), ((3,), "float16"), ((1,), "float64"), ((4,), "float32"))
    planned = [(b.wire, b.leaves, b.count) for b in plan_buckets(leaves, bucket_bytes=1000)]
    assert planned == [("float64", (2,), 1), ("float32", (1, 3), 7), ("int32", (0,), 2)]


def test_arrays_that_all_travel_as_one_dtype_stay_in_the_trees_order() -> None:
    leaves = leaves_of(((2,), "float32"), ((3,), "float64"), ((1,), "float16"))
    (bucket,) = plan_buckets(leaves, bucket_bytes=math.inf, wire="float32")
    assert (bucket.wire, bucket.leaves, bucket.count) == ("float32", (0, 1, 2), 6)


def test_a_bucket_is_full_before_the_next_begins_and_arrays_are_not_divided() -> None:
    leaves = leaves_of(*[((n,), "float32") for n in (2, 2, 3, 9, 0, 1)])
    planned = [b.leaves for b in plan_buckets(leaves, bucket_bytes=16)]
    assert planned == [(0, 1), (2,), (3,), (4, 5)]


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from(["float32", "float16", "int64", "bool"]))
    ),
    st.integers(1, 64),
)
def test_every_array_is_in_one_bucket_of_its_dtype_within_the_limit(
    sizes: list[tuple[int, str]], bucket_bytes: int
) -> None:
    leaves = leaves_of(*(((size,), dtype) for size, dtype in sizes))
    buckets = plan_buckets(leaves, bucket_bytes=bucket_bytes)
    assert sorted(i for b in buckets for i in b.leaves) == list(range(len(leaves)))
    for bucket in buckets:
        assert {leaves[i].wire for i in bucket.leaves} == {bucket.wire}
        assert bucket.count == sum(leaves[i].values.size for i in bucket.leaves)
        nonempty = [i for i in bucket.leaves if leaves[i].values.size]
        assert bucket.nbytes <= bucket_bytes or len(nonempty) == 1


def test_what_is_filled_is_read_back_and_the_weight_comes_last() -> None:
    x = [np.arange(3, dtype=np.float32), np.array([[4], [5]], np.float32)]
    leaves = describe(flatten(x))
    (bucket,) = plan_buckets(leaves, bucket_bytes=1000)
    region = np.empty(6, np.float32)
    fill(bucket, leaves, region, 2.0)
    np.testing.assert_array_equal(region, [0, 2, 4, 8, 10, 2])
    found: dict[int, Any] = dict(read(bucket, leaves, region, 2.0))
    np.testing.assert_array_equal(found[0], x[0])
    np.testing.assert_array_equal(found[1], x[1])


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", ml_dtypes.bfloat16])
def test_what_is_read_is_divided_and_of_the_users_dtype(dtype: str) -> None:
    x = [np.arange(6.0).reshape(2, 3).astype(dtype), np.full((), 5).astype(dtype)]
    leaves = describe(flatten(x))
    (bucket,) = plan_buckets(leaves, bucket_bytes=1000)
    region = np.empty(8, bucket.wire)
    fill(bucket, leaves, region, 3.0)
    region.flags.writeable = False  # as an output arena is
    found: dict[int, Any] = dict(read(bucket, leaves, region, 6.0))
    for index, array in enumerate(x):
        assert (found[index].dtype, found[index].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found[index].astype("f8"), array.astype("f8") / 2)


@pytest.mark.parametrize("divisor", [None, 1.0])
def test_the_arrays_of_a_bucket_share_one_block_which_is_not_the_arena(
    divisor: float | None,
) -> None:
    leaves = leaves_of(((2,), "float32"), ((3, 1), "float32"))
    (bucket,) = plan_buckets(leaves, bucket_bytes=1000)
    region = np.arange(5, dtype=np.float32)
    (_, first), (_, second) = cast("list[tuple[int, Any]]", read(bucket, leaves, region, divisor))
    assert first.base is second.base
    assert not np.shares_memory(first, region)
    first[:] = 7
    assert second.tolist() == [[2], [3], [4]]


def test_a_mean_of_nothing_is_nan_without_a_warning() -> None:
    leaves = leaves_of(((2,), "float32"))
    (bucket,) = plan_buckets(leaves, bucket_bytes=1000)
    found: dict[int, Any] = dict(read(bucket, leaves, np.array([0, 1], np.float32), 0.0))
    np.testing.assert_array_equal(found[0], [np.nan, np.inf])
