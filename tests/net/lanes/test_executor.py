import itertools
import math
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import numpy as np
import pytest
import trio
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from pmesh.core.ops.moving import (
    plan_all_gather,
    plan_all_to_all,
    plan_broadcast,
    plan_gather,
    plan_scatter,
)
from pmesh.core.ops.plan import SEGMENT_BYTES, SMALL_BYTES, RankPlan
from pmesh.core.ops.reduce_scatter import WINDOW, plan_reduce, plan_reduce_scatter
from pmesh.core.ops.reducing import (
    plan_centralized,
    plan_chain,
    plan_direct,
    plan_exchange,
    plan_hierarchical,
    plan_ring,
    plan_tree,
)
from pmesh.core.ops.reductions import Values
from pmesh.errors import LaneBroken
from pmesh.net.lanes import executor
from pmesh.net.lanes.lane import CallsDiffer
from tests.worlds.faults import Faults
from tests.worlds.lanes import Bytes, OpOfAllRanks, bytes_on_the_wire, header, inputs_of, web
from tests.worlds.system import without_library

Make = Callable[[int, int], OpOfAllRanks]
"""The collective among so many ranks, of about so many values each."""

ISLANDS = {1: ((0,),), 2: ((0,), (1,)), 3: ((2, 0), (1,)), 4: ((0, 1), (2, 3))}


def bytes_of(rows: Sequence[Values]) -> list[Bytes]:
    return [row.view(np.uint8) for row in rows]


def reducing(plan: Callable[..., RankPlan], size: int, count: int, **more: object) -> OpOfAllRanks:
    sources = inputs_of(size, count, "float32")
    return OpOfAllRanks(
        plans=[plan(rank=rank, size=size, count=count, itemsize=4, **more) for rank in range(size)],
        sources=bytes_of(sources),
        results=[4 * count] * size,
        dtype="float32",
        reduction="mean",
    )


def ring(size: int, count: int) -> OpOfAllRanks:
    return reducing(plan_ring, size, count)


def exchange(size: int, count: int) -> OpOfAllRanks:
    """Two ranks; of others a ring."""
    if size != 2:
        return ring(size, count)
    both = ring(size, count)
    both.plans = [plan_exchange(rank=rank, size=2, nbytes=4 * count) for rank in range(size)]
    return both


def tree(size: int, count: int) -> OpOfAllRanks:
    return reducing(plan_tree, size, count)


def centralized(size: int, count: int) -> OpOfAllRanks:
    return reducing(plan_centralized, size, count)


def hierarchical(size: int, count: int) -> OpOfAllRanks:
    islands = ISLANDS.get(size) or ((0, 1, 2), tuple(range(3, size)))
    return reducing(plan_hierarchical, size, count, islands=islands)


def chain(size: int, count: int) -> OpOfAllRanks:
    line = tuple((2 + place) % size for place in range(size))
    return reducing(plan_chain, size, count, line=line)


def direct(size: int, count: int) -> OpOfAllRanks:
    return reducing(plan_direct, size, count)


def reduce(size: int, count: int) -> OpOfAllRanks:
    root = size // 2
    return OpOfAllRanks(
        plans=[
            plan_reduce(rank=rank, size=size, root=root, nbytes=8 * count) for rank in range(size)
        ],
        sources=bytes_of(inputs_of(size, count, "int64")),
        results=[8 * count if rank == root else 0 for rank in range(size)],
        dtype="int64",
        reduction="sum",
    )


def reduce_scatter(size: int, count: int) -> OpOfAllRanks:
    parts = np.array_split(np.empty(count, np.int64), size)
    nbytes = tuple(part.nbytes for part in parts)
    return OpOfAllRanks(
        plans=[plan_reduce_scatter(rank=rank, size=size, nbytes=nbytes) for rank in range(size)],
        sources=bytes_of(inputs_of(size, count, "int64")),
        results=nbytes,
        dtype="int64",
        reduction="max",
    )


def uneven(size: int, count: int) -> tuple[int, ...]:
    """Bytes for each rank; the second has none."""
    return tuple(0 if rank == 1 else count + 1001 * rank for rank in range(size))


def random_bytes(counts: Sequence[int]) -> list[Bytes]:
    dice = np.random.default_rng(3)
    return [dice.integers(0, 256, count, np.uint8) for count in counts]


def broadcast(size: int, count: int) -> OpOfAllRanks:
    root = size // 2
    return OpOfAllRanks(
        plans=[plan_broadcast(rank=r, size=size, root=root, nbytes=count) for r in range(size)],
        sources=random_bytes([count if rank == root else 0 for rank in range(size)]),
        results=[0 if rank == root else count for rank in range(size)],
    )


def all_gather(size: int, count: int) -> OpOfAllRanks:
    nbytes = uneven(size, count)
    return OpOfAllRanks(
        plans=[plan_all_gather(rank=rank, size=size, nbytes=nbytes) for rank in range(size)],
        sources=random_bytes(nbytes),
        results=[sum(nbytes)] * size,
    )


def gather(size: int, count: int) -> OpOfAllRanks:
    nbytes, root = uneven(size, count), size - 1
    return OpOfAllRanks(
        plans=[plan_gather(rank=r, size=size, root=root, nbytes=nbytes) for r in range(size)],
        sources=random_bytes(nbytes),
        results=[sum(nbytes) if rank == root else 0 for rank in range(size)],
    )


def scatter(size: int, count: int) -> OpOfAllRanks:
    nbytes, root = uneven(size, count), size - 1
    return OpOfAllRanks(
        plans=[plan_scatter(rank=r, size=size, root=root, nbytes=nbytes) for r in range(size)],
        sources=random_bytes([sum(nbytes) if rank == root else 0 for rank in range(size)]),
        results=nbytes,
    )


def all_to_all(size: int, count: int) -> OpOfAllRanks:
    rows = [tuple(count + 13 * a + 101 * b for b in range(size)) for a in range(size)]
    columns = [tuple(row[rank] for row in rows) for rank in range(size)]
    return OpOfAllRanks(
        plans=[
            plan_all_to_all(rank=rank, size=size, to=rows[rank], from_=columns[rank])
            for rank in range(size)
        ],
        sources=random_bytes(list(map(sum, rows))),
        results=list(map(sum, columns)),
    )


def expected(make: Make, asked: OpOfAllRanks) -> list[bytes]:
    """What each rank is to get; of a mean only about that."""
    size, sources = len(asked.plans), [source.tobytes() for source in asked.sources]
    nothing = [b""] * size
    if make is broadcast:
        return [sources[size // 2] if nbytes else b"" for nbytes in asked.results]
    if make is gather:
        return [*nothing[1:], b"".join(sources)]
    if make is all_gather:
        return [b"".join(sources)] * size
    if make in {scatter, all_to_all}:
        rows = [sources[-1]] if make is scatter else sources
        counts = [asked.results] if make is scatter else [_row(plan, asked) for plan in asked.plans]
        blocks = [_cut(row, count) for row, count in zip(rows, counts, strict=True)]
        return [b"".join(column) for column in zip(*blocks, strict=True)]
    values = [np.frombuffer(source, asked.dtype) for source in sources]
    if make is reduce_scatter:
        return [p.tobytes() for p in np.array_split(np.max(values, axis=0), size)]
    assert make is reduce
    nothing[size // 2] = np.sum(values, axis=0).tobytes()
    return nothing


def _row(plan: RankPlan, asked: OpOfAllRanks) -> list[int]:
    """How many bytes the rank of that plan has for each."""
    rank, size = asked.plans.index(plan), len(asked.plans)
    own = sum(copy.nbytes for copy in plan.copies)
    return [
        own if peer == rank else sum(send.nbytes for send in plan.sends.get(peer, ()))
        for peer in range(size)
    ]


def _cut(data: bytes, counts: Sequence[int]) -> list[bytes]:
    ends = itertools.accumulate(counts)
    return [data[end - count : end] for end, count in zip(ends, counts, strict=True)]


def check(make: Make, asked: OpOfAllRanks, results: Sequence[Bytes]) -> None:
    if make not in {ring, exchange, tree, centralized, hierarchical, chain, direct}:
        assert [result.tobytes() for result in results] == expected(make, asked)
        return
    assert len({result.tobytes() for result in results}) == 1  # I3: bit for bit
    mean = np.mean([source.view(np.float32) for source in asked.sources], axis=0)
    np.testing.assert_allclose(results[0].view(np.float32), mean, rtol=1e-5, atol=1e-5)


ALL = [
    ring,
    exchange,
    tree,
    centralized,
    hierarchical,
    chain,
    direct,
    reduce,
    reduce_scatter,
    broadcast,
    all_gather,
    gather,
    scatter,
    all_to_all,
]
each = pytest.mark.parametrize("make", ALL)
LARGE = 700_001


@pytest.fixture(params=["library", "threads", "tasks"])
def pipe(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, faults: Faults
) -> Iterator[None]:
    threads_from = 0 if request.param == "threads" else math.inf
    faults.limit(executor, "THREADS_FROM_BYTES", threads_from)
    with nullcontext() if request.param == "library" else without_library(monkeypatch):
        yield


by_either = pytest.mark.usefixtures("either")
disturbed = pytest.mark.usefixtures("pipe")


@by_either
@each
@pytest.mark.parametrize("size", range(1, 6))
@pytest.mark.parametrize("count", [0, 1, 1000, LARGE])
async def test_every_collective_brings_what_it_should_and_sends_what_its_plan_says(
    make: Make, size: int, count: int
) -> None:
    asked = make(size, count)
    with web() as lanes, trio.fail_after(30):
        check(make, asked, await asked.everywhere(lanes))
        for rank, plan in enumerate(asked.plans):
            assert lanes.bytes_sent(rank) == bytes_on_the_wire(plan)


@each
@pytest.mark.parametrize("size", range(6, 10))
async def test_so_it_does_among_as_many_as_a_home_has(make: Make, size: int) -> None:
    asked = make(size, 3000)
    with web() as lanes, trio.fail_after(30):
        check(make, asked, await asked.everywhere(lanes))
        for rank, plan in enumerate(asked.plans):
            assert lanes.bytes_sent(rank) == bytes_on_the_wire(plan)


@pytest.mark.unmeasured
@disturbed
@each
@pytest.mark.parametrize("count", [SMALL_BYTES // 8, LARGE])
async def test_a_slow_network_changes_nothing(make: Make, count: int) -> None:
    """With small socket buffers even a small record does not fit: no rank may wait for room."""
    asked = make(4, count)
    with web(buffer_bytes=2048) as lanes, trio.fail_after(30):
        for asked.op in range(2):
            check(make, asked, await asked.everywhere(lanes))


@by_either
async def test_collectives_of_all_kinds_and_sizes_follow_each_other_on_the_same_lanes() -> None:
    with web() as lanes, trio.fail_after(30):
        for op, (make, count) in enumerate(itertools.product(ALL, [5, 300_000, 0])):
            asked = make(4, count)
            asked.op = op
            check(make, asked, await asked.everywhere(lanes))


@pytest.mark.unmeasured
@disturbed
@each
@pytest.mark.parametrize("count", [10, LARGE])
async def test_after_a_cancelled_op_a_new_roster_goes_on_over_the_same_lanes(
    make: Make, count: int
) -> None:
    """V4, V7: what the old attempt left in lanes and sockets is dropped, at whatever point."""
    asked = make(4, count)
    with web(buffer_bytes=16_384) as lanes, trio.fail_after(30):
        for roster in range(2, 6):
            async with trio.open_nursery() as nursery:
                for rank in range(roster % 3 + 1):
                    nursery.start_soon(asked.at, rank, lanes)
                for _ in range(roster * 7):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            lanes.roster = roster
            check(make, asked, await asked.everywhere(lanes))


@by_either
async def test_a_small_op_first_gets_rid_of_what_a_large_one_left_half_sent() -> None:
    asked = centralized(3, 10)
    with web(buffer_bytes=16_384) as lanes, trio.fail_after(5):
        lanes.open(asked.plans)
        for lane in lanes.sending.values():
            lane.post(header(SEGMENT_BYTES), bytes(SEGMENT_BYTES))
            assert not lane.idle
        lanes.roster = 2
        check(centralized, asked, await asked.everywhere(lanes))
        assert {lane.records_dropped for lane in lanes.receiving.values()} == {1}


@disturbed
@each
@pytest.mark.parametrize("count", [10, LARGE])
async def test_a_lost_rank_breaks_the_op_of_those_who_wait_for_it_with_its_name(
    make: Make, count: int
) -> None:
    asked, lost = make(3, count), 0
    tell, told = trio.open_memory_channel[str](3)
    with web() as lanes, trio.fail_after(30):

        async def notice(rank: int) -> None:
            try:
                await asked.at(rank, lanes)
            except LaneBroken as e:  # plainly, whichever part has noticed
                tell.send_nowait(str(e))

        lanes.open(asked.plans)
        waits = [plan for plan in asked.plans[1:] if lost in plan.receives]
        async with trio.open_nursery() as nursery:
            for rank in (1, 2):
                nursery.start_soon(notice, rank)
            await wait_all_tasks_blocked()
            for lane in lanes.lanes_of(lost):
                lane.close()
            # One that had waited for the other, which ends now, may wait for the view to end it.
            if waits:
                assert "mac-0" in await told.receive()
            nursery.cancel_scope.cancel()


@disturbed
@each
@pytest.mark.parametrize("count", [10, LARGE])
async def test_a_rank_that_called_something_else_is_noticed_by_those_who_hear_it(
    make: Make, count: int
) -> None:
    asked = make(3, count)
    asked.op, asked.fingerprints = 5, [8, 9, 9]
    tell, told = trio.open_memory_channel[str](3)
    with web() as lanes, trio.fail_after(30):

        async def notice(rank: int) -> None:
            try:
                await asked.at(rank, lanes)
            except CallsDiffer as e:
                tell.send_nowait(f"{e} ({e.op})")

        async with trio.open_nursery() as nursery:
            for rank in range(3):
                nursery.start_soon(notice, rank)
            assert "called something else as op 5 (5)" in await told.receive()
            nursery.cancel_scope.cancel()


@by_either
async def test_a_record_is_passed_on_while_the_next_has_not_been_sent() -> None:
    count = 3 * SEGMENT_BYTES // 8
    asked = reduce(3, count)
    asked.plans = [plan_reduce(rank=r, size=3, root=2, nbytes=8 * count) for r in range(3)]
    asked.sources = bytes_of([np.full(count, rank + 1, np.int64) for rank in range(3)])
    into = memoryview(bytearray(SEGMENT_BYTES))
    with web() as lanes, trio.fail_after(5):
        lanes.open(asked.plans)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asked.at, 1, lanes)
            for segment in range(3):
                record = header(SEGMENT_BYTES, segment=segment)
                await lanes.sending[0, 1].send(record, bytes(SEGMENT_BYTES))
                await lanes.receiving[1, 2].receive(record, into)
                assert (np.frombuffer(into, np.int64) == 2).all()


@by_either
async def test_a_rank_that_only_passes_on_needs_no_memory_for_the_tensor() -> None:
    asked = reduce(3, 4 << 20)
    with web() as lanes, trio.fail_after(30):
        lanes.open(asked.plans)
        results = [np.zeros(nbytes, np.uint8) for nbytes in asked.results]

        async def run() -> None:
            async with trio.open_nursery() as nursery:
                for rank, result in enumerate(results):
                    nursery.start_soon(asked.run, rank, lanes, result)

        await run()  # the first op gives memory to the lanes
        tracemalloc.start()
        try:
            await run()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < (WINDOW + 1) * SEGMENT_BYTES


@pytest.mark.parametrize("size", [1, 2])
async def test_others_run_meanwhile_even_if_nothing_is_waited_for(size: int) -> None:
    asked = gather(size, 10)
    with web() as lanes, assert_checkpoints():
        await asked.at(0, lanes)
