import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.ops.schedule import (
    IN_LINE_BYTES,
    LARGE_CHUNK_BYTES,
    LARGE_SEGMENT_BYTES,
    SEGMENT_BYTES,
    Plan,
    chunk_bounds,
    plan_all_reduce,
    plan_broadcast,
    plan_exchange,
)

SIZES = st.integers(1, 9)
COUNTS = st.integers(0, 5 * SEGMENT_BYTES // 4)


def all_reduce_plans(size: int, count: int, itemsize: int = 4) -> list[Plan]:
    return [
        plan_all_reduce(rank=rank, size=size, count=count, itemsize=itemsize)
        for rank in range(size)
    ]


@given(st.integers(0, 1000), SIZES)
def test_chunks_are_those_of_numpy_array_split(count: int, chunks: int) -> None:
    bounds = chunk_bounds(count, chunks)
    expected = [len(part) for part in np.array_split(np.empty(count), chunks)]
    assert [end - begin for begin, end in itertools.pairwise(bounds)] == expected


@given(SIZES, COUNTS)
def test_what_a_rank_sends_is_what_the_next_receives(size: int, count: int) -> None:
    plans = all_reduce_plans(size, count)
    for rank, plan in enumerate(plans):
        assert plan.sends == plans[(rank + 1) % size].receives


@given(SIZES, COUNTS)
def test_a_rank_sends_its_own_chunk_and_then_forwards_what_it_received(
    size: int, count: int
) -> None:
    for plan in all_reduce_plans(size, count):
        forwarded = [piece[1:] for piece in plan.sends[plan.own :]]
        assert forwarded == [piece[1:] for piece in plan.receives[: len(forwarded)]]
        assert {piece.step for piece in plan.sends[: plan.own]} <= {0}
        assert all(piece.step > 0 for piece in plan.sends[plan.own :])


@given(SIZES, COUNTS)
def test_every_step_carries_at_least_one_record_and_no_record_is_too_large(
    size: int, count: int
) -> None:
    for plan in all_reduce_plans(size, count):
        steps = 2 * (size - 1)
        assert {piece.step for piece in plan.sends} == set(range(steps))
        assert all(0 <= piece.nbytes <= SEGMENT_BYTES for piece in plan.sends)
        if plan.in_line and size > 1:
            assert len(plan.sends) == len(plan.receives) == steps
            assert all(piece.nbytes <= IN_LINE_BYTES for piece in plan.sends)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_only_large_chunks_travel_in_large_segments(size: int) -> None:
    least = size * LARGE_CHUNK_BYTES // 4
    for count, most in ((least, LARGE_SEGMENT_BYTES), (least - size, SEGMENT_BYTES)):
        for plan in all_reduce_plans(size, count):
            assert {piece.nbytes for piece in plan.sends[:16]} == {most}
            assert plan.bytes_sent == 2 * (size - 1) * 4 * count // size


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("values_per_rank", [0, 1, 1000, SEGMENT_BYTES])
def test_the_ring_costs_what_the_design_says(size: int, values_per_rank: int) -> None:
    nbytes = 4 * values_per_rank * size
    for plan in all_reduce_plans(size, values_per_rank * size):
        assert plan.steps == 2 * (size - 1)
        assert plan.bytes_sent == 2 * (size - 1) * nbytes // size


@given(st.integers(2, 9), COUNTS)
def test_after_the_gather_every_rank_has_received_every_chunk_but_its_finished_one(
    size: int, count: int
) -> None:
    for plan in all_reduce_plans(size, count):
        gathered = [piece for piece in plan.receives if piece.step >= size - 1]
        finished = [piece for piece in plan.receives if piece.step == size - 2]
        spans = sorted((p.offset, p.offset + p.nbytes) for p in gathered + finished if p.nbytes)
        assert sum(end - begin for begin, end in spans) == 4 * count
        assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))


@given(SIZES, st.data(), st.integers(0, 3 * SEGMENT_BYTES))
def test_a_broadcast_goes_once_around_and_stops_before_the_root(
    size: int, data: st.DataObject, nbytes: int
) -> None:
    root = data.draw(st.integers(0, size - 1))
    plans = [plan_broadcast(rank=r, size=size, root=root, nbytes=nbytes) for r in range(size)]
    for rank, plan in enumerate(plans):
        assert plan.sends == plans[(rank + 1) % size].receives
        assert sum(piece.nbytes for piece in plan.receives) == (0 if rank == root else nbytes)
        assert plan.own == (len(plan.sends) if rank == root else 0)
    assert plans[root].receives == ()
    assert max(plan.steps for plan in plans) == size - 1
    assert all(bool(plan.sends) == (rank != (root - 1) % size) for rank, plan in enumerate(plans))


@given(st.integers(0, 3 * SEGMENT_BYTES))
def test_an_exchange_sends_what_the_ring_of_two_would_in_one_step(nbytes: int) -> None:
    plan = plan_exchange(nbytes)
    (ring, _) = all_reduce_plans(2, nbytes // 4)
    assert (plan.steps, plan.bytes_sent) == (1, nbytes)
    assert abs(plan.bytes_sent - ring.bytes_sent) < 8
    assert plan.sends == plan.receives
    assert plan.own == len(plan.sends)
    assert plan.in_line == (nbytes <= IN_LINE_BYTES)
    assert plan.moving_bytes == 2 * nbytes


def test_a_ring_of_one_has_nothing_to_do() -> None:
    plan = plan_all_reduce(rank=0, size=1, count=10, itemsize=8)
    assert (plan.sends, plan.receives, plan.steps) == ((), (), 0)
