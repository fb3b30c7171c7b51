import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.links.bandwidth import CHANGED
from pmesh.core.ops.cost import (
    CHAIN_FACTOR,
    FAR_NS,
    ISLAND_FACTOR,
    EdgeCost,
    Edges,
    Strategy,
    choose,
    has_slow_edge,
    is_far,
    predict_ns,
)
from pmesh.core.topology.ranks import join_ranks

FAST = EdgeCost(alpha_ns=20_000, beta_ps=200)
LAN = EdgeCost(alpha_ns=200_000, beta_ps=8_000)
MIB = 1024 * 1024

COSTS = st.builds(EdgeCost, st.integers(0, 10**8), st.integers(0, 10**6))


def edges_of(size: int, *fast: tuple[int, ...], inside: EdgeCost = FAST) -> Edges:
    """All ranks on one LAN, some of them on the same machine."""

    def cost(a: int, b: int) -> EdgeCost:
        return inside if any({a, b} <= set(island) for island in fast) else LAN

    return join_ranks(tuple(tuple(cost(a, b) for b in range(size)) for a in range(size)))


@st.composite
def any_edges(draw: st.DrawFn) -> Edges:
    size = draw(st.integers(1, 9))
    return join_ranks(tuple(tuple(draw(COSTS) for _ in range(size)) for _ in range(size)))


def test_an_edge_costs_its_latency_for_each_step_and_its_bandwidth_for_each_byte() -> None:
    edge = EdgeCost(alpha_ns=500_000, beta_ps=8_000)
    assert edge.predict_ns(steps=2, nbytes=1_000_000) == 1_000_000 + 8_000_000


def test_latency_hides_behind_the_bandwidth_of_steps_that_have_many_records() -> None:
    edge = EdgeCost(alpha_ns=1000, beta_ps=1000)
    assert edge.predict_flow_ns(steps=3, nbytes=500) == 3 * 1500
    assert edge.predict_flow_ns(steps=3, nbytes=MIB) == 3 * MIB + 1000
    assert edge.predict_flow_ns(steps=0, nbytes=MIB) == 0


@pytest.mark.parametrize("size", range(2, 10))
def test_large_tensors_take_the_ring_and_the_smallest_the_fewest_steps(size: int) -> None:
    edges = edges_of(size)
    assert choose(edges, 100 * MIB) == "ring"
    assert choose(edges, 0) == ("ring" if size == 2 else "centralized")  # as many steps with two


def test_between_those_the_tree_is_the_fastest() -> None:
    assert [choose(edges_of(8), nbytes) for nbytes in (1024, 64 * 1024)] == ["centralized", "tree"]


def test_one_rank_alone_is_done_at_once() -> None:
    assert choose(edges_of(1), 5) == "ring"
    assert predict_ns("ring", edges_of(1), 5) == 0


def test_a_slow_edge_across_the_ring_is_no_reason_to_leave_it() -> None:
    """The tree crosses the ring, so it is as slow as the edges there."""
    across = EdgeCost(alpha_ns=10**9, beta_ps=8_000)
    ring = {(a, (a + d) % 5) for a in range(5) for d in (1, -1)}
    costs = tuple(tuple(LAN if (a, b) in ring else across for b in range(5)) for a in range(5))
    assert {choose(join_ranks(costs), nbytes) for nbytes in (0, 1024, MIB)} == {"ring"}


def test_the_tree_goes_over_each_of_its_edges_in_both_directions() -> None:
    slow_back = EdgeCost(alpha_ns=10**9, beta_ps=8_000)
    costs = tuple(tuple(slow_back if (b + 1) % 4 == a else LAN for b in range(4)) for a in range(4))
    edges = join_ranks(costs)
    assert predict_ns("ring", edges, 0) < predict_ns("tree", edges, 0) == 4 * 10**9


def test_two_machines_with_several_ranks_each_are_islands() -> None:
    edges = edges_of(6, (0, 1, 2), (3, 4, 5))
    assert edges.islands == ((0, 1, 2), (3, 4, 5))
    assert choose(edges, 100 * MIB) == "hierarchical"


def test_an_island_may_hold_the_rings_end_and_its_beginning() -> None:
    assert edges_of(5, (4, 0), (2, 3)).islands == ((4, 0), (1,), (2, 3))


@pytest.mark.parametrize(
    "edges",
    [
        edges_of(1),
        edges_of(4),  # all alike
        edges_of(4, (0, 1, 2, 3)),  # all on one machine
        edges_of(2, (0, 1)),
    ],
)
def test_where_all_edges_are_alike_there_are_no_islands(edges: Edges) -> None:
    assert edges.islands == ()
    assert choose(edges, MIB) != "hierarchical"


def with_slow_edge(size: int, at: int, slow: EdgeCost) -> Edges:
    """All alike but for one edge of the ring, which is slow in both directions."""
    ends = {at, (at + 1) % size}
    row = range(size)
    return join_ranks(tuple(tuple(slow if {a, b} == ends else LAN for b in row) for a in row))


@pytest.mark.parametrize("size", range(3, 10))
@pytest.mark.parametrize("factor", [2 * CHAIN_FACTOR, 10, 10**6])
def test_large_tensors_take_the_chain_where_one_edge_of_the_ring_is_slow_or_missing(
    size: int, factor: int
) -> None:
    slow = EdgeCost(alpha_ns=LAN.alpha_ns, beta_ps=LAN.beta_ps * factor)
    for at in range(size):
        edges = with_slow_edge(size, at, slow)
        assert choose(edges, 100 * MIB) == "chain"
        assert sorted(edges.line) == list(range(size))
        assert {edges.line[0], edges.line[-1]} == {at, (at + 1) % size}


def test_of_a_long_chain_the_time_until_it_is_filled_counts() -> None:
    """Thirteen more records of 64 KiB travel before the last of 16 MiB is back: 5 %."""
    edges = edges_of(8)
    both_ways = 2 * LAN.predict_ns(steps=0, nbytes=16 * MIB)
    filled = predict_ns("chain", edges, 16 * MIB) - both_ways
    assert filled == pytest.approx(12 * (LAN.alpha_ns + 64 * 1024 * 8) + 2 * LAN.alpha_ns, rel=1e-3)


@pytest.mark.parametrize("size", range(3, 10))
def test_an_edge_that_may_be_slower_by_noise_alone_is_no_reason_for_a_chain(size: int) -> None:
    """Where its measurement is 30 % too low and the others are 30 % too high."""
    slow = EdgeCost(alpha_ns=LAN.alpha_ns, beta_ps=round(LAN.beta_ps * CHANGED**2))
    assert choose(with_slow_edge(size, 0, slow), 100 * MIB) == "ring"


@pytest.mark.parametrize(("factor", "found"), [(ISLAND_FACTOR, True), (ISLAND_FACTOR - 1, False)])
def test_an_island_is_several_times_faster_than_the_slowest_edge(
    factor: int, *, found: bool
) -> None:
    inside = EdgeCost(LAN.alpha_ns // factor, LAN.beta_ps // factor)
    assert bool(edges_of(4, (0, 1), (2, 3), inside=inside).islands) == found


@pytest.mark.parametrize("size", range(3, 10))
@pytest.mark.parametrize("nbytes", [4096, MIB, 64 * MIB])
def test_by_wifi_all_send_straight_to_each_other(size: int, nbytes: int) -> None:
    wifi = EdgeCost(alpha_ns=FAR_NS, beta_ps=30_000)
    assert choose(join_ranks(((wifi,) * size,) * size), nbytes) == "direct"
    cable = wifi._replace(alpha_ns=FAR_NS - 1)
    assert choose(join_ranks(((cable,) * size,) * size), nbytes) != "direct"


@given(any_edges(), st.integers(0, 2**40))
def test_the_choice_is_never_slower_than_another_and_always_whole_numbers(
    edges: Edges, nbytes: int
) -> None:
    strategies: list[Strategy] = ["direct" if is_far(edges) else "ring", "tree", "centralized"]
    strategies += ["hierarchical"] if edges.islands else []
    strategies += ["chain"] if has_slow_edge(edges) else []
    predicted = {strategy: predict_ns(strategy, edges, nbytes) for strategy in strategies}
    assert all(type(ns) is int for ns in predicted.values())
    chosen = choose(edges, nbytes)
    assert predicted[chosen] == min(predicted.values())
    assert all(predicted[s] > predicted[chosen] for s in strategies[: strategies.index(chosen)])
