import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from pmesh.core.ops.reductions import WIRE_DTYPES, check_reduction
from pmesh.core.ops.schedule import IN_LINE_BYTES, SEGMENT_BYTES, SMALL_BYTES, plan_all_reduce
from pmesh.core.wire.records import OVERHEAD_BYTES
from pmesh.net.lanes.collectives import RingPosition, all_reduce, broadcast
from tests.worlds.lanes import (
    EMPTY,
    at_every_rank,
    bytes_of,
    header,
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
    exact = {"max", "min"} if np.dtype(dtype).kind == "f" else set(ORACLES)
    tolerance = 0 if reduction in exact else {"float32": 1e-5, "float64": 1e-14}[dtype] * size
    np.testing.assert_allclose(results[0], expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 8), st.integers(0, 40), st.sampled_from(KINDS))
async def test_all_ranks_get_the_same_bits_and_the_right_ones(
    size: int, count: int, kind: tuple[str, str]
) -> None:
    await check_all_reduce(size, count, *kind)


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize(("reduction", "dtype"), [("sum", "float32"), ("mean", "float64")])
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


@pytest.mark.parametrize("count", [6 * 1024, 300_001])
@pytest.mark.parametrize("size", [2, 3, 5])
async def test_a_slow_network_changes_nothing(size: int, count: int) -> None:
    """With small socket buffers even a small record does not fit: no rank may wait for room."""
    inputs = inputs_of(size, count, "int32")
    with ring_of(size, buffer_bytes=2048) as ring, trio.fail_after(20):
        for op in range(2):
            results = await reduce_all(ring, inputs, op=op)
            for result in results:
                np.testing.assert_array_equal(result, np.sum(inputs, axis=0, dtype=np.int32))


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


@pytest.mark.parametrize("size", [2, 3, 8])
async def test_no_rank_leaves_a_barrier_before_the_last_has_come(size: int) -> None:
    left: list[int] = []
    with ring_of(size) as ring:

        async def barrier(position: RingPosition) -> None:
            await all_reduce(
                position,
                op=0,
                fingerprint=9,
                completed=-1,
                source=EMPTY,
                result=EMPTY,
                dtype="bool",
                reduction="max",
            )
            left.append(position.rank)

        async with trio.open_nursery() as nursery:
            for position in ring[1:]:
                nursery.start_soon(barrier, position)
            await wait_all_tasks_blocked()
            assert left == []
            nursery.start_soon(barrier, ring[0])
        assert sorted(left) == list(range(size))


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("nbytes", [8 * 840, 6_720_000])
async def test_each_byte_crosses_an_edge_as_often_as_the_design_says(
    size: int, nbytes: int
) -> None:
    inputs = inputs_of(size, nbytes // 4, "float32")
    with ring_of(size) as ring:
        await reduce_all(ring, inputs)
        for position in ring:
            plan = plan_all_reduce(rank=position.rank, size=size, count=nbytes // 4, itemsize=4)
            records = 1 if size == 2 and nbytes <= SMALL_BYTES else len(plan.sends)
            overhead = OVERHEAD_BYTES * records
            assert position.to_next
            assert position.from_previous
            assert position.to_next.bytes_sent == 2 * (size - 1) * nbytes // size + overhead
            assert position.from_previous.bytes_received == position.to_next.bytes_sent


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
        tracemalloc.start()
        try:
            await at_every_rank(ring, call)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < SEGMENT_BYTES
    assert all((result == 2).all() for result in results)


async def test_a_segment_is_forwarded_while_the_next_has_not_been_sent() -> None:
    size = 3
    count = size * 3 * SEGMENT_BYTES // 4  # three segments a chunk
    own, result = np.ones(count, np.float32), np.zeros(count, np.float32)
    with ring_of(size) as ring:
        middle = ring[1]
        previous, following = ring[0].to_next, ring[2].from_previous
        assert previous
        assert following
        plan = plan_all_reduce(rank=1, size=size, count=count, itemsize=4)
        into = memoryview(bytearray(SEGMENT_BYTES))
        async with trio.open_nursery() as nursery:

            async def reduce_in_the_middle() -> None:
                await all_reduce(
                    middle,
                    op=0,
                    fingerprint=9,
                    completed=-1,
                    source=bytes_of(own).toreadonly(),
                    result=bytes_of(result),
                    dtype="float32",
                    reduction="sum",
                )

            nursery.start_soon(reduce_in_the_middle)
            for segment in range(plan.own):  # its own chunk waits for nobody
                await following.receive(header(SEGMENT_BYTES, segment=segment), into)
            twos = np.full(SEGMENT_BYTES // 4, 2, np.float32)
            for segment in range(plan.own):
                await previous.send(header(SEGMENT_BYTES, segment=segment), bytes_of(twos))
                forwarded = header(SEGMENT_BYTES, segment=plan.own + segment)
                with trio.fail_after(5):
                    await following.receive(forwarded, into)
                assert (np.frombuffer(into, np.float32) == 3).all()
            nursery.cancel_scope.cancel()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.data(), st.sampled_from([0, 1, 999, IN_LINE_BYTES + 1, 1_200_001]))
async def test_a_broadcast_brings_the_roots_bytes_to_all(
    size: int, data: st.DataObject, nbytes: int
) -> None:
    root = data.draw(st.integers(0, size - 1))
    values = np.random.default_rng(2).bytes(nbytes)
    buffers = [memoryview(bytearray(nbytes)) for _ in range(size)]
    buffers[root] = memoryview(values)  # read-only

    async def call(position: RingPosition) -> None:
        await broadcast(
            position, op=0, fingerprint=9, completed=-1, root=root, buffer=buffers[position.rank]
        )

    with ring_of(size) as ring:
        await at_every_rank(ring, call)
    assert all(buffer == values for buffer in buffers)


async def test_ops_of_all_sizes_follow_each_other_on_the_same_lanes() -> None:
    with ring_of(3) as ring:
        for op, count in enumerate([0, 1, 70_000, 2, 900_000, 0, 5]):
            inputs = inputs_of(3, count, "int64", seed=op)
            for result in await reduce_all(ring, inputs, op=op):
                np.testing.assert_array_equal(result, np.sum(inputs, axis=0, dtype=np.int64))
            if op:
                assert {p.from_previous.peer_completed for p in ring if p.from_previous} == {op - 1}
