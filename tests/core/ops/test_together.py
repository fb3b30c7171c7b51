"""Ops of ranks that are all at one agent give each rank what the plans over lanes give it."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.ops.kinds import KINDS, Setting, extent_of
from pmesh.core.ops.reductions import REDUCTIONS, WIRE_DTYPES, Values, check_reduction
from pmesh.core.ops.together import SAME_FOR_ALL, Fold, Together, ValuesAt, plan_together
from pmesh.core.wire.calls import Call
from pmesh.core.wire.trainer import StartOp
from pmesh.ids import OpNumber
from pmesh.net.sessions.combining import InNumpy
from tests.worlds.plans import PlanWorld, TurnOrder

COMBINED = sorted(KINDS.keys() - {"broadcast"})


def request(call: Call, count: int, dtype: str = "float32", **parts: tuple[int, ...]) -> StartOp:
    return StartOp(OpNumber(0), call, dtype, count, 0, 1.0, **parts)  # type: ignore[arg-type] # one of WIRE_DTYPES


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[StartOp], int]:
    """One call of each rank, and the root."""
    size = draw(st.integers(2, 5))
    name = draw(st.sampled_from(COMBINED))
    kind, root = KINDS[name], draw(st.integers(0, size - 1))
    dtype = kind.row.dtype if kind.row else draw(st.sampled_from(sorted(WIRE_DTYPES)))
    reduction = draw(st.sampled_from(REDUCTIONS)) if kind.reduces and not kind.row else ""
    try:
        check_reduction(reduction or "sum", dtype)
    except ValueError:
        reduction = "prod"  # of all dtypes
    amounts = st.lists(st.integers(0, 9), min_size=size, max_size=size)
    parts = tuple(draw(amounts)) if kind.bound else ()
    count = draw(st.integers(kind.row.least, min(kind.row.most, 20))) if kind.row else 0
    count = count or (0 if name == "barrier" else draw(st.sampled_from([0, 1, 7, 300, 9000])))
    call = Call(name, dtype, (), reduction, root if kind.rooted else 0)
    given = [request(call, count, dtype, parts=parts) for _ in range(size)]
    if name == "all_to_all":
        to = [tuple(draw(amounts)) for _ in range(size)]
        from_ = list(zip(*to, strict=True))
        given = [request(call, 0, dtype, parts=to[r], parts_in=from_[r]) for r in range(size)]
    return given, root


def values(count: int, dtype: str, rank: int) -> Values:
    """Values whose order of adding shows in the bits of a float."""
    drawn = np.random.default_rng(rank).uniform(-3, 3, count)
    return (drawn > 0 if dtype == "bool" else drawn * 7).astype(WIRE_DTYPES[dtype])


def combined(
    plan: Together, sources: Sequence[Values], sizes: Sequence[int], request: StartOp
) -> list[bytes]:
    results = [np.full(nbytes, 0xEE, np.uint8) for nbytes in sizes]
    op = InNumpy(
        plan,
        [source.data.cast("B") if source.size else memoryview(b"") for source in sources],
        [result.data for result in results],
        dtype=request.wire_dtype,
        reduction=request.call.reduction or "sum",
    )
    assert op.work()
    return [result.tobytes() for result in results]


def compare_with_lanes(requests: list[StartOp], root: int) -> None:
    size, first, kind = len(requests), requests[0], KINDS[requests[0].call.kind]
    itemsize = WIRE_DTYPES[first.wire_dtype].itemsize
    extents = [extent_of(r, rank=rank, size=size) for rank, r in enumerate(requests)]
    sources = [values(extent.gives, first.wire_dtype, rank) for rank, extent in enumerate(extents)]
    plan = plan_together(requests, root=root)
    sizes = [extent.gets * itemsize for extent in extents]
    here = combined(plan, sources, sizes, first)
    if kind.row and kind.reduces:
        tables = [np.zeros((size, first.count), np.int64) for _ in range(size)]
        for rank, table in enumerate(tables):
            table[rank] = sources[rank]
        sources = [table.reshape(-1) for table in tables]
    plans = [
        kind.plan(Setting(request=r, rank=rank, size=size, root=root))
        for rank, r in enumerate(requests)
    ]
    reduction = first.call.reduction or "sum"
    there = PlanWorld(plans, sources, reduction=reduction).run(TurnOrder(seed=0, room=2), sizes)
    assert here == [result.tobytes() for result in there]
    if first.call.kind in SAME_FOR_ALL:
        written = combined(plan_together(requests, root=root, once=True), sources, sizes, first)
        assert written == [here[0], *(b"\xee" * nbytes for nbytes in sizes[1:])]


@given(drawn=calls())
def test_each_rank_gets_the_bits_that_the_lanes_would_bring(
    drawn: tuple[list[StartOp], int],
) -> None:
    compare_with_lanes(*drawn)


@pytest.mark.parametrize("size", [3, 4, 5])
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
@pytest.mark.parametrize("kind", ["all_reduce", "reduce", "reduce_scatter"])
@pytest.mark.parametrize("reduction", ["sum", "mean", "prod"])
def test_values_are_added_in_the_order_of_the_ring(
    size: int, dtype: str, kind: str, reduction: str
) -> None:
    root = size - 1
    call = Call(kind, dtype, (), reduction, root if kind == "reduce" else 0)
    parts = tuple(range(90, 90 + size)) if kind == "reduce_scatter" else ()
    compare_with_lanes([request(call, 500, dtype, parts=parts)] * size, root)


def test_ranks_that_differ_in_what_they_exchange_are_noticed() -> None:
    call = Call("all_to_all", "float32", ())
    lies = [request(call, 0, parts=(1, 2), parts_in=(1, 3)) for _ in range(2)]
    with pytest.raises(ValueError, match="the ranks differ"):
        plan_together(lies, root=0)
    with pytest.raises(ValueError, match="zip"):
        plan_together([lies[0], request(call, 0, parts=(1, 2), parts_in=(1,))], root=0)


def test_small_sums_of_two_ranks_have_one_nan_as_over_lanes() -> None:
    small = [request(Call("all_reduce", "float32", (9,), "sum"), 9)] * 2
    large = [replace_count(r, 9000) for r in small]
    assert plan_together(small, root=0).makes_nan_equal
    assert not plan_together(large, root=0).makes_nan_equal
    nans = [np.full(9, np.nan, np.float32), np.full(9, -np.nan, np.float32)]
    one, two = combined(plan_together(small, root=0), nans, [36, 36], small[0])
    assert one == two == np.full(9, np.nan, np.float32).tobytes()


def replace_count(before: StartOp, count: int) -> StartOp:
    return request(before.call, count)


def test_what_moves_is_read_once_and_written_once() -> None:
    """Item 5 of issue 36: each input once, each output once."""
    sums = plan_together([request(Call("all_reduce", "float32", (), "sum"), 100)] * 3, root=0)
    assert sums.moving_bytes == 2 * 3 * 400
    assert replace(sums, folds=(Fold((ValuesAt(0, 0),), (ValuesAt(1, 0),), 8),)).moving_bytes == 16
