"""The compressed ring all-reduce over real sockets."""

import threading
import tracemalloc
from functools import partial

import numpy as np
import pytest
import trio
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from pmesh.compression.blocks import Bytes, Float32s
from pmesh.compression.codecs import Codec, codec_of
from pmesh.core.ops.coded import PIECE_VALUES, plan_coded_ring
from pmesh.core.ops.plan import SEGMENT_BYTES
from pmesh.errors import LaneBroken
from pmesh.net.lanes.lane import CallsDiffer
from pmesh.net.lanes.ring import RingPosition, Tensors, all_reduce_coded
from tests.worlds.coded_rings import Coded, Plain, noise, reduce_coded, reduce_coded_all
from tests.worlds.examples import examples
from tests.worlds.lanes import bytes_on_the_wire, header, reduce_all, ring_of

NAMES = ["bf16", "fp16", "int8", "int8-stochastic"]


def garbage(xs: list[Float32s]) -> list[Float32s]:
    return [np.full_like(x, np.nan) for x in xs]


async def check_against_hops(
    codec: Codec, size: int, count: int, reduction: str, *, factor: float = 1.0
) -> list[int]:
    """Every rank has the bits of the hops done one after the other, and keeps what it rounded.

    Returns how many values each has clipped.
    """
    op = 3
    xs, residuals = noise(size, count), noise(size, count, seed=2)
    xs = [np.multiply(x, factor, dtype=np.float32) for x in xs]
    for array in xs + residuals:
        array.setflags(write=False)  # I8, O9
    results, kept, expected_kept = garbage(xs), garbage(xs), garbage(xs)
    tensors = [Tensors(*four) for four in zip(xs, results, residuals, kept, strict=True)]
    with ring_of(size) as ring, trio.fail_after(20):
        clipped = await reduce_coded_all(ring, tensors, codec, reduction=reduction, op=op)
    coded = [Coded(*three) for three in zip(xs, residuals, expected_kept, strict=True)]
    expected, expected_clipped = reduce_coded(codec, coded, reduction=reduction, op=op)
    assert [result.tobytes() for result in results] == [expected.tobytes()] * size  # I3
    assert [x.tobytes() for x in kept] == [x.tobytes() for x in expected_kept]
    assert clipped == expected_clipped
    return clipped


@examples(80, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(1, 8),
    st.integers(0, 40) | st.integers(0, 5000),
    st.sampled_from(NAMES),
    st.sampled_from(["sum", "mean"]),
)
async def test_every_rank_gets_what_the_hops_come_to(
    size: int, count: int, name: str, reduction: str
) -> None:
    await check_against_hops(codec_of(name), size, count, reduction)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [2, 3, 5])
async def test_so_they_do_when_chunks_take_several_pieces(size: int, name: str) -> None:
    await check_against_hops(codec_of(name), size, size * 3 * PIECE_VALUES // 2 + 1, "mean")


@pytest.mark.parametrize("count", [1000, 5 * PIECE_VALUES])
async def test_what_each_rank_clips_is_counted(count: int) -> None:
    assert all(await check_against_hops(codec_of("fp16"), 2, count, "sum", factor=1e5))


@pytest.mark.parametrize("count", [3 * 256 * 30, 3 * 32 * 1024, 3 * 32 * 1024 + 900])
async def test_the_line_and_the_tasks_agree_where_they_meet(count: int) -> None:
    await check_against_hops(codec_of("int8"), 3, count, "sum")


@pytest.mark.parametrize("size", range(1, 6))
@pytest.mark.parametrize("count", [11, 5 * PIECE_VALUES + 3])
async def test_without_loss_it_is_the_sum_and_the_mean(size: int, count: int) -> None:
    xs = [np.round(x * 8) for x in noise(size, count)]  # whose sums are exact in any order
    for reduction, expected in (("sum", np.sum(xs, axis=0)), ("mean", np.mean(xs, axis=0))):
        results = garbage(xs)
        with ring_of(size) as ring:
            tensors = [Tensors(x, result) for x, result in zip(xs, results, strict=True)]
            await reduce_coded_all(ring, tensors, Plain(), reduction=reduction)
        for result in results:
            np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.parametrize("count", [40_000, 400_001])
@pytest.mark.parametrize("size", [2, 3, 5])
async def test_a_slow_network_changes_nothing(size: int, count: int) -> None:
    """No rank waits for room: neither in a socket's buffer, nor in its own few places."""
    xs, codec = noise(size, count), codec_of("bf16")
    with ring_of(size, buffer_bytes=2048) as ring, trio.fail_after(30):
        for op in range(2):
            results = garbage(xs)
            tensors = [Tensors(x, result) for x, result in zip(xs, results, strict=True)]
            await reduce_coded_all(ring, tensors, codec, op=op)
            expected, _ = reduce_coded(codec, [Coded(x) for x in xs], reduction="sum", op=op)
            assert {result.tobytes() for result in results} == {expected.tobytes()}


async def test_a_rank_alone_gets_its_values_and_what_it_was_owed() -> None:
    count = PIECE_VALUES + 5
    (own,), (residual,) = noise(1, count), noise(1, count, seed=2)
    result, kept = garbage([own, own])
    with ring_of(1) as ring:
        tensors = [Tensors(own, result, residual, kept)]
        assert await reduce_coded_all(ring, tensors, codec_of("int8"), reduction="mean") == [0]
        np.testing.assert_array_equal(result, own + residual)
        np.testing.assert_array_equal(kept, np.zeros(count))
        await reduce_coded_all(ring, [Tensors(own, result)], codec_of("int8"))
    np.testing.assert_array_equal(result, own)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize(("name", "factor"), [("bf16", 1.98), ("fp16", 1.98), ("int8", 3.85)])
async def test_so_much_less_crosses_an_edge_with_all_headers(
    size: int, name: str, factor: float
) -> None:
    count, codec = 840 * 512, codec_of(name)
    xs = noise(size, count)
    with ring_of(size) as ring:
        await reduce_all(ring, xs)
        plain = [lane.bytes_sent for p in ring if (lane := p.to_next)]
        await reduce_coded_all(ring, [Tensors(x, np.empty_like(x)) for x in xs], codec, op=1)
        coded = [
            lane.bytes_sent - before
            for p, before in zip(ring, plain, strict=True)
            if (lane := p.to_next)
        ]
    for rank, (more, less) in enumerate(zip(plain, coded, strict=True)):
        assert more >= factor * less
        plan = plan_coded_ring(rank=rank, size=size, count=count, codec=codec)
        assert less == bytes_on_the_wire(plan)


@pytest.mark.parametrize("size", [2, 3, 8])
async def test_no_rank_leaves_before_the_last_has_come(size: int) -> None:
    left: list[int] = []
    with ring_of(size) as ring:

        async def barrier(position: RingPosition) -> None:
            nothing = np.empty(0, np.float32)
            await all_reduce_coded(
                position,
                op=0,
                fingerprint=9,
                completed=-1,
                tensors=Tensors(nothing, nothing),
                codec=codec_of("bf16"),
                reduction="sum",
            )
            left.append(position.rank)

        async with trio.open_nursery() as nursery:
            for position in ring[1:]:
                nursery.start_soon(barrier, position)
            await wait_all_tasks_blocked()
            assert left == []
            nursery.start_soon(barrier, ring[0])
        assert sorted(left) == list(range(size))


class ThreadRecorder(Plain):
    """Notes in which threads it works."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.largest = 0

    def decode(self, wire: Bytes, out: Float32s) -> None:
        self.threads.add(threading.get_ident())
        self.largest = max(self.largest, out.size)
        super().decode(wire, out)


async def test_only_small_pieces_are_worked_on_in_the_event_loop() -> None:
    here = threading.get_ident()
    for count, in_line in ((1000, True), (3 * PIECE_VALUES, False)):
        codec, xs = ThreadRecorder(), noise(2, count)
        with ring_of(2) as ring:
            await reduce_coded_all(ring, [Tensors(x, np.empty_like(x)) for x in xs], codec)
        assert (here in codec.threads) == in_line
        assert codec.largest <= PIECE_VALUES


async def test_an_op_of_16_mib_needs_a_few_pieces_of_memory() -> None:
    xs, codec = [np.ones(4 << 20, np.float32) for _ in range(2)], codec_of("bf16")
    tensors = [Tensors(x, np.zeros_like(x), None, np.zeros_like(x)) for x in xs]
    with ring_of(2) as ring:
        await reduce_coded_all(ring, tensors, codec)  # the first op gives memory to the lanes
        tracemalloc.start()
        try:
            await reduce_coded_all(ring, tensors, codec)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 4 << 20  # both ranks': their places, and what the codec works in
    assert all((t.result == 2).all() for t in tensors)


# --- what goes wrong


def fresh(xs: list[Float32s]) -> list[Tensors]:
    return [Tensors(x, np.empty_like(x)) for x in xs]


@pytest.mark.parametrize("count", [10, 700_000])
async def test_a_rank_that_called_something_else_is_noticed_next_to_it(count: int) -> None:
    with ring_of(3) as ring:
        with pytest.raises(ExceptionGroup) as caught:
            await reduce_coded_all(
                ring, fresh(noise(3, count)), codec_of("int8"), op=5, fingerprints=[9, 9, 8]
            )
        errors = caught.value.exceptions  # of the ranks; each is one plain error
        assert all(isinstance(error, CallsDiffer) and error.op == 5 for error in errors)


@pytest.mark.parametrize("count", [10, 700_000])
async def test_a_lost_neighbour_breaks_the_op_with_its_name(count: int) -> None:
    with ring_of(2) as ring:
        assert ring[1].to_next
        ring[1].to_next.close()
        with pytest.raises(ExceptionGroup) as caught:
            await reduce_coded_all(ring[:1], fresh(noise(1, count)), codec_of("int8"))
        (error,) = caught.value.exceptions
        assert isinstance(error, LaneBroken)
        assert "mac-1" in str(error)


@pytest.mark.parametrize("count", [10, 100_000, 700_000])
async def test_after_a_cancelled_op_a_new_roster_goes_on_over_the_same_lanes(count: int) -> None:
    """V3, V4, V7: no worker writes any more, and what was left in sockets is dropped."""
    xs, codec = noise(3, count), codec_of("int8")
    expected, _ = reduce_coded(codec, [Coded(x) for x in xs], reduction="sum", op=0)
    with ring_of(3, buffer_bytes=16_384) as ring:
        for roster in range(2, 6):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    started = ring[: roster % 3 + 1]
                    nursery.start_soon(partial(reduce_coded_all, started, fresh(xs), codec))
                    for _ in range(roster * 7):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()
            for position in ring:
                position.roster = roster
            tensors = fresh(xs)
            with trio.fail_after(20):
                await reduce_coded_all(ring, tensors, codec)
            assert {t.result.tobytes() for t in tensors} == {expected.tobytes()}


async def test_a_cancelled_op_has_no_worker_when_it_returns() -> None:
    """V3: its memory is another attempt's at once."""
    began, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    class Slow(Plain):
        def decode(self, wire: Bytes, out: Float32s) -> None:
            began.set()
            go_on.wait(20)
            super().decode(wire, out)
            ended.set()

    with ring_of(2) as ring:
        async with trio.open_nursery() as nursery:
            xs = noise(2, 3 * PIECE_VALUES)
            nursery.start_soon(partial(reduce_coded_all, ring, fresh(xs), Slow()))
            await trio.to_thread.run_sync(began.wait, 20)
            nursery.cancel_scope.cancel()
            go_on.set()
        assert ended.is_set()


async def test_a_small_op_first_gets_rid_of_what_a_large_one_left_half_sent() -> None:
    xs, codec = noise(2, 10), codec_of("bf16")
    expected, _ = reduce_coded(codec, [Coded(x) for x in xs], reduction="sum", op=0)
    with ring_of(2, buffer_bytes=16_384) as ring:
        for position in ring:
            assert position.to_next
            position.to_next.post(header(SEGMENT_BYTES), bytes(SEGMENT_BYTES))
            position.roster = 2
        tensors = fresh(xs)
        with trio.fail_after(5):
            await reduce_coded_all(ring, tensors, codec)
        assert {t.result.tobytes() for t in tensors} == {expected.tobytes()}


async def test_a_ring_without_its_lanes_is_a_mistake_of_the_caller() -> None:
    ring = [RingPosition(rank=0, size=2, roster=1)]
    with pytest.raises(ExceptionGroup) as caught:
        await reduce_coded_all(ring, fresh(noise(1, 10)), Plain())
    assert caught.group_contains(ValueError, match="needs its lanes")
