"""Every plan, at every rank, in every order: by `PlanWorld`."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.ops.cost import Islands
from pmesh.core.ops.moving import (
    plan_all_gather,
    plan_all_to_all,
    plan_broadcast,
    plan_gather,
    plan_scatter,
)
from pmesh.core.ops.plan import (
    IN_LINE_BYTES,
    LARGE_CHUNK_BYTES,
    LARGE_SEGMENT_BYTES,
    SEGMENT_BYTES,
    SHORT_SEGMENT_BYTES,
    Need,
    PlanEvent,
    RankPlan,
    chunk_bounds,
)
from pmesh.core.ops.reduce_scatter import plan_reduce, plan_reduce_scatter
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
from tests.worlds.examples import examples
from tests.worlds.plans import PlanWorld, TurnOrder, check_shape, values_of

SIZES = st.integers(1, 9)
COUNTS = st.integers(0, 70)
SEGMENTS = st.sampled_from([8, 16, 40, 1024])
SEEDS = st.integers(0, 2**32)
ORDERS = st.builds(TurnOrder, seed=SEEDS, room=st.sampled_from([0, 1, 3, 1000]))
IN_LINE = SEEDS.map(lambda seed: TurnOrder(seed=seed, room=1000, in_line=True))
MOVERS = st.sampled_from(["broadcast", "all_gather", "gather", "scatter", "all_to_all"])


@st.composite
def islands_of_ring(draw: st.DrawFn, size: int) -> Islands:
    """Any partition of the ring into runs, of which one may hold its end and its beginning."""
    first = draw(st.integers(0, size - 1))
    ring = [(first + i) % size for i in range(size)]
    cuts = sorted(draw(st.sets(st.integers(1, size - 1)))) if size > 1 else []
    ends = zip([0, *cuts], [*cuts, size], strict=True)
    return tuple(tuple(ring[a:b]) for a, b in ends)


@dataclass(frozen=True)
class AllReduce:
    """One of all that may be asked for."""

    strategy: str
    size: int
    count: int
    segment_bytes: int
    islands: Islands

    def plans(self, *, itemsize: int) -> list[RankPlan]:
        return [self._plan(rank, itemsize) for rank in range(self.size)]

    def _plan(self, rank: int, itemsize: int) -> RankPlan:
        size, count, segment_bytes = self.size, self.count, self.segment_bytes
        if self.strategy == "hierarchical":
            return plan_hierarchical(
                rank=rank,
                size=size,
                count=count,
                itemsize=itemsize,
                islands=self.islands,
                segment_bytes=segment_bytes,
            )
        if self.strategy == "chain":
            line = tuple(rank for island in self.islands for rank in island)
            return plan_chain(
                rank=rank,
                size=size,
                count=count,
                itemsize=itemsize,
                line=line,
                segment_bytes=segment_bytes,
            )
        make = {
            "ring": plan_ring,
            "tree": plan_tree,
            "centralized": plan_centralized,
            "direct": plan_direct,
        }
        return make[self.strategy](
            rank=rank, size=size, count=count, itemsize=itemsize, segment_bytes=segment_bytes
        )


ALL_REDUCES = SIZES.flatmap(
    lambda size: st.builds(
        AllReduce,
        strategy=st.sampled_from(
            ["ring", "tree", "centralized", "hierarchical", "chain", "direct"]
        ),
        size=st.just(size),
        count=COUNTS,
        segment_bytes=SEGMENTS,
        islands=islands_of_ring(size),
    )
)


def reduced(sources: Sequence[Values], reduction: str) -> Values:
    total = np.sum(sources, axis=0, dtype=sources[0].dtype)
    if reduction == "mean" and len(sources) > 1:
        total /= len(sources)  # once: these sums are exact
    return np.asarray(total)


def whole_bytes(sources: Sequence[Values]) -> list[int]:
    return [source.nbytes for source in sources]


@examples(300)
@given(ALL_REDUCES, ORDERS | IN_LINE, st.sampled_from(["sum", "mean"]))
def test_an_all_reduce_brings_the_right_bits_to_all_in_any_order(
    asked: AllReduce, order: TurnOrder, reduction: str
) -> None:
    sources = values_of(asked.size, asked.count, "float64", seed=asked.count)
    plans = asked.plans(itemsize=8)
    check_shape(plans, segment_bytes=asked.segment_bytes)
    world = PlanWorld(plans, sources, reduction=reduction)
    expected = reduced(sources, reduction).tobytes()
    assert {result.tobytes() for result in world.run(order, whole_bytes(sources))} == {expected}


@examples(100)
@given(ALL_REDUCES, ORDERS, ORDERS)
def test_neither_ranks_nor_orders_differ_in_a_bit_where_sums_are_rounded(
    asked: AllReduce, order: TurnOrder, another: TurnOrder
) -> None:
    sources = values_of(asked.size, asked.count, "float32", seed=asked.count)
    results = set[bytes]()
    for each in (order, another):
        world = PlanWorld(asked.plans(itemsize=4), sources, reduction="mean")
        results |= {result.tobytes() for result in world.run(each, whole_bytes(sources))}
    assert len(results) == 1


@given(st.integers(2, 9), st.integers(0, 5 * SEGMENT_BYTES // 4))
def test_a_ring_takes_one_record_a_step_in_line_if_its_chunks_fit(size: int, count: int) -> None:
    for rank in range(size):
        plan = plan_ring(rank=rank, size=size, count=count, itemsize=4)
        (sends,) = plan.sends.values()
        assert {send.step for send in sends} == set(range(2 * (size - 1)))
        chunk_bytes = -(-count // size) * 4
        assert plan.small == (chunk_bytes <= IN_LINE_BYTES)
        assert not plan.small or len(sends) == 2 * (size - 1)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_only_large_chunks_travel_in_large_segments(size: int) -> None:
    least = size * LARGE_CHUNK_BYTES // 4
    for count, most in ((least, LARGE_SEGMENT_BYTES), (least - size, SEGMENT_BYTES)):
        plan = plan_ring(rank=0, size=size, count=count, itemsize=4)
        assert {send.nbytes for send in plan.sends[1][:16]} == {most}
        assert plan.moving_bytes == 2 * plan.bytes_sent == 4 * (size - 1) * 4 * count // size


@given(st.permutations(range(7)), st.integers(0, 3 * SEGMENT_BYTES // 4))
def test_a_chain_uses_each_edge_of_its_line_once_in_each_direction(
    line: list[int], count: int
) -> None:
    for rank in range(7):
        plan = plan_chain(rank=rank, size=7, count=count, itemsize=4, line=tuple(line))
        place = line.index(rank)
        beside = {line[at] for at in (place - 1, place + 1) if 0 <= at < len(line)}
        assert {*plan.sends} == {*plan.receives} == beside
        for sends in plan.sends.values():
            assert sum(send.nbytes for send in sends) == 4 * count


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_chain_sends_the_first_result_back_before_the_last_sum_has_come(size: int) -> None:
    """What a record of the result waits for is the sum of that record alone."""
    line, count = tuple(range(size)), 5 * SEGMENT_BYTES // 4
    first = plan_chain(
        rank=0, size=size, count=count, itemsize=4, line=line, segment_bytes=SEGMENT_BYTES
    )
    assert [send.needs for send in first.sends[1]] == [(Need(1, i + 1),) for i in range(5)]


@pytest.mark.parametrize("size", range(2, 10))
@pytest.mark.parametrize("mib", [1, 16, 100])
def test_the_longer_a_chain_the_shorter_its_records_so_that_it_is_filled_soon(
    size: int, mib: int
) -> None:
    count, line = mib << 18, tuple(range(size))
    plan = plan_chain(rank=size - 1, size=size, count=count, itemsize=4, line=line)
    hops = 2 * (size - 1) - 1  # of the last record, after its first one
    filling = hops * plan.largest / plan.bytes_sent
    assert filling <= 1 / 32 or plan.largest == SHORT_SEGMENT_BYTES
    assert filling > 1 / 100 or plan.largest == SEGMENT_BYTES


@given(SIZES, COUNTS, ORDERS | IN_LINE)
def test_an_exchange_brings_the_sum_to_all_in_one_step(
    size: int, count: int, order: TurnOrder
) -> None:
    sources = values_of(size, count, "float64", seed=count)
    plans = [plan_exchange(rank=rank, size=size, nbytes=8 * count) for rank in range(size)]
    steps, sent = int(size > 1), 8 * count * (size - 1)
    assert all((plan.steps, plan.bytes_sent) == (steps, sent) for plan in plans)
    check_shape(plans, segment_bytes=SEGMENT_BYTES)
    results = PlanWorld(plans, sources, reduction="mean").run(order, whole_bytes(sources))
    assert {result.tobytes() for result in results} == {reduced(sources, "mean").tobytes()}


@examples(200)
@given(SIZES, COUNTS, SEGMENTS, ORDERS | IN_LINE, st.data())
def test_a_reduce_brings_the_sum_to_its_root_alone(
    size: int, count: int, segment_bytes: int, order: TurnOrder, data: st.DataObject
) -> None:
    root = data.draw(st.integers(0, size - 1))
    reduction = data.draw(st.sampled_from(["sum", "mean"]))
    sources = values_of(size, count, "float64", seed=count)
    plans = [
        plan_reduce(rank=r, size=size, root=root, nbytes=8 * count, segment_bytes=segment_bytes)
        for r in range(size)
    ]
    check_shape(plans, segment_bytes=segment_bytes)
    nbytes = [8 * count if rank == root else 0 for rank in range(size)]
    results = PlanWorld(plans, sources, reduction=reduction).run(order, nbytes)
    assert results[root].tobytes() == reduced(sources, reduction).tobytes()


@pytest.mark.slow
@examples(100)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=9),
    SEGMENTS,
    ORDERS | IN_LINE,
    st.sampled_from(["sum", "mean"]),
)
def test_a_reduce_scatter_brings_each_rank_its_part_of_the_sum(
    counts: list[int], segment_bytes: int, order: TurnOrder, reduction: str
) -> None:
    size, nbytes = len(counts), tuple(8 * count for count in counts)
    sources = values_of(size, sum(counts), "float64", seed=sum(counts))
    plans = [
        plan_reduce_scatter(rank=r, size=size, nbytes=nbytes, segment_bytes=segment_bytes)
        for r in range(size)
    ]
    check_shape(plans, segment_bytes=segment_bytes)
    parts = np.split(reduced(sources, reduction), np.cumsum(counts)[:-1])
    results = PlanWorld(plans, sources, reduction=reduction).run(order, whole_bytes(parts))
    assert [result.tobytes() for result in results] == [part.tobytes() for part in parts]


@pytest.mark.parametrize("size", [2, 3, 9])
def test_what_only_passes_through_takes_the_room_of_a_few_records(size: int) -> None:
    for rank in range(size):
        tensor = {"rank": rank, "size": size, "segment_bytes": 80}
        assert plan_reduce(root=0, nbytes=8000, **tensor).scratch_bytes <= 4 * 80
        assert plan_reduce_scatter(nbytes=(8000,) * size, **tensor).scratch_bytes <= 8 * 80


def matrix(size: int) -> st.SearchStrategy[list[list[int]]]:
    """How many bytes from each rank to each."""
    row = st.lists(st.sampled_from([0, 0, 1, 7, 8, 100]), min_size=size, max_size=size)
    return st.lists(row, min_size=size, max_size=size)


def moving_plans(
    kind: str, counts: list[list[int]], root: int, segment_bytes: int
) -> list[RankPlan]:
    """`counts`: of an all_to_all; of the others the root's row says each rank's bytes."""
    size, nbytes = len(counts), tuple(counts[root])

    def known(rank: int) -> tuple[int, ...]:
        """What a rank need not know is nonsense."""
        return tuple(n if rank in {r, root} else 10**9 for r, n in enumerate(nbytes))

    def plan(rank: int) -> RankPlan:
        here = {"rank": rank, "size": size, "segment_bytes": segment_bytes}
        match kind:
            case "broadcast":
                return plan_broadcast(root=root, nbytes=sum(nbytes), **here)
            case "all_gather":
                return plan_all_gather(nbytes=nbytes, in_place=False, **here)
            case "gather":
                return plan_gather(root=root, nbytes=known(rank), **here)
            case "scatter":
                return plan_scatter(root=root, nbytes=known(rank), **here)
            case _:
                to, from_ = tuple(counts[rank]), tuple(row[rank] for row in counts)
                return plan_all_to_all(to=to, from_=from_, **here)

    return [plan(rank) for rank in range(size)]


def moved(kind: str, counts: list[list[int]], root: int) -> tuple[list[bytes], list[bytes]]:
    """Every rank's source, and the result that it is to get."""
    size, dice = len(counts), np.random.default_rng(7)
    blocks = [[dice.bytes(n) for n in row] for row in counts]
    own, everything = blocks[root], b"".join(blocks[root])
    at_root = [everything if rank == root else b"" for rank in range(size)]
    match kind:
        case "broadcast":
            lacking = [b"" if rank == root else everything for rank in range(size)]
            return at_root, lacking
        case "all_gather":
            return own, [everything] * size
        case "gather":
            return own, at_root
        case "scatter":
            return at_root, own
        case _:
            return [b"".join(row) for row in blocks], [
                b"".join(row[rank] for row in blocks) for rank in range(size)
            ]


@examples(300)
@given(MOVERS, st.integers(1, 9).flatmap(matrix), SEGMENTS, ORDERS | IN_LINE, st.data())
def test_what_is_moved_arrives_where_it_belongs(
    kind: str,
    counts: list[list[int]],
    segment_bytes: int,
    order: TurnOrder,
    data: st.DataObject,
) -> None:
    root = data.draw(st.integers(0, len(counts) - 1))
    plans = moving_plans(kind, counts, root, segment_bytes)
    check_shape(plans, segment_bytes=segment_bytes)
    sources, expected = moved(kind, counts, root)
    world = PlanWorld(plans, [np.frombuffer(source, np.uint8) for source in sources])
    results = world.run(order, [len(result) for result in expected])
    assert [result.tobytes() for result in results] == expected


BARRIERS: dict[str, Callable[[int, int], RankPlan]] = {
    "ring": lambda rank, size: plan_ring(rank=rank, size=size, count=0, itemsize=4),
    "tree": lambda rank, size: plan_tree(rank=rank, size=size, count=0, itemsize=4),
    "centralized": lambda rank, size: plan_centralized(rank=rank, size=size, count=0, itemsize=4),
    "direct": lambda rank, size: plan_direct(rank=rank, size=size, count=0, itemsize=4),
    "exchange": lambda rank, size: plan_exchange(rank=rank, size=size, nbytes=0),
    "hierarchical": lambda rank, size: plan_hierarchical(
        rank=rank,
        size=size,
        count=0,
        itemsize=4,
        islands=(tuple(range(size // 2)), tuple(range(size // 2, size))),
    ),
    "reduce_scatter": lambda rank, size: plan_reduce_scatter(
        rank=rank, size=size, nbytes=(0,) * size
    ),
    "all_gather": lambda rank, size: plan_all_gather(rank=rank, size=size, nbytes=(0,) * size),
}


@pytest.mark.parametrize("size", range(2, 10))
@pytest.mark.parametrize("kind", BARRIERS)
def test_no_rank_leaves_a_barrier_before_all_have_come(kind: str, size: int) -> None:
    """Whoever is missing, nobody gets all that its plan says."""
    for missing in range(size):
        plans = [BARRIERS[kind](rank, size) for rank in range(size)]
        ended = ranks_that_end(plans, missing)
        assert ended == set(), (kind, size, missing)


def test_no_rank_but_the_root_waits_for_all_in_a_reduce() -> None:
    plans = [plan_reduce(rank=rank, size=4, root=2, nbytes=0) for rank in range(4)]
    assert ranks_that_end(plans, missing=1) == {3, 0}


def ranks_that_end(plans: list[RankPlan], missing: int) -> set[int]:
    """Those that receive all that they are to, while one rank does nothing."""
    landed = {(peer, rank): 0 for rank, plan in enumerate(plans) for peer in plan.receives}
    moved_on = True
    while moved_on:
        moved_on = False
        for (sender, receiver), number in landed.items():
            sends = plans[sender].sends[receiver]
            if sender == missing or number == len(sends):
                continue
            receive = plans[receiver].receives[sender][number]
            waits = [(sender, sends[number].needs), (receiver, receive.needs)]
            if all(landed[n.peer, at] >= n.number for at, needs in waits for n in needs):
                landed[sender, receiver] += 1
                moved_on = True
    return {
        rank
        for rank, plan in enumerate(plans)
        if rank != missing
        and all(landed[peer, rank] == len(rs) for peer, rs in plan.receives.items())
    }


def test_what_has_no_bytes_is_not_moved() -> None:
    plans = [*moving_plans("all_to_all", [[0] * 3] * 3, 0, 8), *moving_plans("gather", [[0]], 0, 8)]
    assert all(not plan.sends and not plan.copies and plan.steps == 0 for plan in plans)


def test_an_all_to_all_begins_at_every_rank_with_another_and_goes_on_one_by_one() -> None:
    size = 5
    plans = moving_plans("all_to_all", [[100] * size] * size, 0, 40)
    for step in range(size - 1):
        receivers = [tuple(plan.sends)[step] for plan in plans]
        assert sorted(receivers) == list(range(size))
    for plan in plans:
        for before, peer in itertools.pairwise(plan.sends):
            assert {send.needs for send in plan.sends[peer]} == {((before, 3, PlanEvent.SENT),)}


def test_plans_of_shapes_that_come_again_are_kept() -> None:
    plans = [plan_tree(rank=0, size=4, count=9, itemsize=4) for _ in range(2)]
    assert plans[0] is plans[1]


@pytest.mark.parametrize("reach", range(4))
def test_a_broadcast_goes_as_far_as_it_should_and_tells_the_ranks_beyond(reach: int) -> None:
    plans = [plan_broadcast(rank=r, size=4, root=1, nbytes=9, reach=reach) for r in range(4)]
    check_shape(plans, segment_bytes=9)
    received = [sum(r.nbytes for rs in plan.receives.values() for r in rs) for plan in plans]
    assert received == [9 * (0 < (rank - 1) % 4 <= reach) for rank in range(4)]
    assert ranks_that_end(plans, missing=1) == set()


@given(st.integers(0, 1000), st.integers(1, 9))
def test_chunks_are_those_of_numpy_array_split(count: int, chunks: int) -> None:
    bounds = chunk_bounds(count, chunks)
    expected = [len(part) for part in np.array_split(np.empty(count), chunks)]
    assert [end - begin for begin, end in itertools.pairwise(bounds)] == expected
