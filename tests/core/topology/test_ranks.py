"""Which ranks of a ring are near to each other, and where the ring is cut."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.ops.cost import ISLAND_FACTOR, Costs, EdgeCost, times_along
from pmesh.core.topology.ranks import join_ranks


@st.composite
def any_costs(draw: st.DrawFn) -> Costs:
    """Few distinct costs, so that ties are common, and edges without any cost occur."""
    size = draw(st.integers(1, 9))
    scale = draw(st.sampled_from([0, 1, 10**6]))
    edge = st.builds(EdgeCost, st.integers(0, 9).map(lambda alpha: scale * alpha), st.just(0))
    return tuple(tuple(draw(edge) for _ in range(size)) for _ in range(size))


@given(any_costs())
def test_islands_are_runs_of_the_ring_and_hold_every_rank_once(costs: Costs) -> None:
    islands = join_ranks(costs).islands
    assert len(islands) != 1
    if islands:
        assert max(map(len, islands)) > 1
        assert 0 in islands[0]
        ring = [rank for island in islands for rank in island]
        assert sorted(ring) == list(range(len(costs)))
        assert all((a + 1) % len(costs) == b for a, b in itertools.pairwise(ring))


@given(any_costs())
def test_all_edges_of_islands_are_fast_and_all_edges_between_them_are_not(costs: Costs) -> None:
    times, size = times_along(costs), len(costs)
    islands = join_ranks(costs).islands
    inside = {rank for island in islands for rank in island[:-1]}
    if islands:
        fast = {rank for rank in range(size) if times[rank] * ISLAND_FACTOR <= max(times)}
        assert inside == fast


@given(any_costs())
def test_the_line_is_the_ring_cut_at_the_last_of_its_slowest_edges(costs: Costs) -> None:
    line, times = join_ranks(costs).line, times_along(costs)
    assert sorted(line) == list(range(len(costs)))
    assert all((a + 1) % len(costs) == b for a, b in itertools.pairwise(line))
    assert times[line[-1]] == max(times)
    assert line[-1] == len(times) - 1 or max(times[line[-1] + 1 :]) < max(times)


def test_one_slow_edge_makes_no_islands() -> None:
    fast, slow = EdgeCost(20_000, 200), EdgeCost(200_000, 8_000)
    costs = tuple(tuple(slow if (a, b) == (3, 0) else fast for b in range(4)) for a in range(4))
    assert join_ranks(costs).islands == ()
    assert join_ranks(costs).line == (0, 1, 2, 3)
