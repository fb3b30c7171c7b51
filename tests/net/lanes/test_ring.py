import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from pmesh.core.ops.plan import IN_LINE_BYTES, SEGMENT_BYTES
from pmesh.core.ops.reductions import WIRE_DTYPES, check_reduction
from pmesh.core.wire.records import OVERHEAD_BYTES
from pmesh.net.lanes.ring import RingPosition, all_reduce, broadcast
from tests.worlds.examples import examples
from tests.worlds.lanes import (
    EMPTY,
    at_every_rank,
    bytes_of,
    inputs_of,
    reduce_all,
    ring_of,
)

ORACLES: dict[str, Callable[..., Any]] = {
    "sum": np.sum,
    "mean": np.mean,
    "max": np.max,
    "min": np.min,
    "prod": np.prod,
}


def allowed(reduction: str, dtype: str) -> bool:
    try:
        check_reduction(reduction, dtype)
    except ValueError:
        return False
    return True


KINDS = [(r, d) for d in WIRE_DTYPES for r in ORACLES if allowed(r, d)]


async def check_all_reduce(size: int, count: int, reduction: str, dtype: str) -> None:
    inputs = inputs_of(size, count, dtype)
    with ring_of(size) as ring:
        results = await reduce_all(ring, inputs, reduction=reduction)
    assert len({result.tobytes() for result in results}) == 1  # I3: bit for bit
    expected = ORACLES[reduction](np.stack(inputs), axis=0).astype(dtype)
    exact = {"max", "min"} if np.dtype(dtype).kind in "fc" else set(ORACLES)
    wide = {"float64", "complex128"}
    tolerance = 0 if reduction in exact else (1e-14 if dtype in wide else 1e-5) * size
    np.testing.assert_allclose(results[0], expected, rtol=tolerance, atol=tolerance)


@examples(120, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 8), st.integers(0, 40), st.sampled_from(KINDS))
async def test_all_ranks_get_the_same_bits_and_the_right_ones(
    size: int, count: int, kind: tuple[str, str]
) -> None:
    await check_all_reduce(size, count, *kind)


@pytest.mark.unmeasured
@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize(
    ("reduction", "dtype"),
    [("sum", "float32"), ("mean", "float64"), ("sum", "complex128"), ("max", "uint8")],
)
async def test_so_they_do_when_chunks_take_several_odd_segments(
    size: int, reduction: str, dtype: str
) -> None:
    itemsize = np.dtype(dtype).itemsize
    await check_all_reduce(size, size * 5 * SEGMENT_BYTES // (2 * itemsize) + 1, reduction, dtype)


@pytest.mark.parametrize(
    "nbytes", [3 * IN_LINE_BYTES - 4, 3 * IN_LINE_BYTES, 3 * IN_LINE_BYTES + 4]
)
async def test_the_line_and_the_two_tasks_agree_where_they_meet(nbytes: int) -> None:
    await check_all_reduce(3, nbytes // 4, "sum", "float32")


async def test_nan_reaches_every_rank() -> None:
    inputs = [np.zeros(9, np.float32) for _ in range(3)]
    inputs[1][4] = np.nan
    for reduction in ORACLES:
        with ring_of(3) as ring:
            for result in await reduce_all(ring, inputs, reduction=reduction):
                assert np.isnan(result).tolist() == [i == 4 for i in range(9)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("reduction", ["sum", "mean", "prod"])
async def test_two_ranks_that_both_add_agree_on_every_bit_of_a_nan(
    reduction: str, dtype: str
) -> None:
    """Processors differ in the sign and payload of what they make of inf - inf or of two NaN."""
    inf, nan = np.inf, np.nan
    pairs = [(inf, -inf), (0.0, inf), (nan, -nan), (-nan, 1.0), (1.0, -nan), (inf, inf)]
    inputs = [np.array(row).astype(dtype) for row in zip(*pairs, strict=True)]
    with ring_of(2) as ring:
        one, other = await reduce_all(ring, inputs, reduction=reduction)
    assert one.tobytes() == other.tobytes()
    nans = one[np.isnan(one)]
    assert nans.tobytes() == np.full(4, np.nan, dtype).tobytes()


@pytest.mark.parametrize("reduction", ["max", "min"])
async def test_of_two_zeros_one_rank_takes_the_greater_for_both(reduction: str) -> None:
    """0 and -0 are equal, so processors take either: the other rank must get the same bits."""
    inputs = [np.array([0.0, -0.0], np.float32), np.array([-0.0, 0.0], np.float32)]
    with ring_of(2) as ring:
        await reduce_all(ring, inputs, reduction=reduction)
        assert [p.to_next.bytes_sent for p in ring if p.to_next] == [8 + 2 * OVERHEAD_BYTES] * 2


async def test_what_has_no_meaning_is_refused_before_anything_is_sent() -> None:
    with ring_of(2) as ring:
        with pytest.raises(ValueError, match="no 'mean' of int32; these are allowed"):
            await all_reduce(
                ring[0],
                op=0,
                fingerprint=9,
                completed=-1,
                source=EMPTY,
                result=EMPTY,
                dtype="int32",
                reduction="mean",
            )
        assert ring[0].to_next
        assert ring[0].to_next.bytes_sent == 0


async def test_a_ring_without_its_lanes_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="needs its lanes"):
        await broadcast(
            RingPosition(rank=0, size=2, roster=1),
            op=0,
            fingerprint=9,
            completed=-1,
            root=0,
            buffer=EMPTY,
        )


async def test_an_op_of_64_mib_needs_no_memory_of_its_own() -> None:
    """No scratch, no copy (O1): the lanes' buffers exist before, and nothing grows with the op."""
    inputs = [np.ones(16 << 20, np.float32) for _ in range(2)]
    results = [np.zeros_like(x) for x in inputs]

    async def call(position: RingPosition) -> None:
        await all_reduce(
            position,
            op=0,
            fingerprint=9,
            completed=-1,
            source=bytes_of(inputs[position.rank]).toreadonly(),
            result=bytes_of(results[position.rank]),
            dtype="float32",
            reduction="sum",
        )

    with ring_of(2) as ring:
        await at_every_rank(ring, call)  # from the first op on a lane has memory for a record
        tracemalloc.start()
        try:
            await at_every_rank(ring, call)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < SEGMENT_BYTES
    assert all((result == 2).all() for result in results)
