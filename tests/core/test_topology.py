import itertools
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.topology import (
    EXACT_UP_TO,
    UNMEASURED_COST,
    Costs,
    measure_costs,
    measured_graph,
    plan_ring,
    round_trip_cost,
)
from pmesh.ids import Incarnation, Member, NodeId
from tests.core.builders import ANNA, BERT, CARA, DORA


def make_members(size: int) -> list[Member]:
    return [Member(NodeId(bytes([i]) * 32), Incarnation(i + 1)) for i in range(size)]


@st.composite
def symmetric_costs(draw: st.DrawFn, sizes: st.SearchStrategy[int], largest: int = 6) -> Costs:
    """Few distinct costs, so that ties are common."""
    size = draw(sizes)
    rows = [[0] * size for _ in range(size)]
    for i, j in itertools.combinations(range(size), 2):
        rows[i][j] = rows[j][i] = draw(st.integers(0, largest))
    return tuple(map(tuple, rows))


def ring_through(costs: Costs) -> tuple[int, ...]:
    """The planned ring as indices into the sorted members."""
    members = make_members(len(costs))
    ring = plan_ring(measured_graph(members, costs))
    return tuple(members.index(member) for member in ring)


def edges_of(ring: Sequence[int], costs: Costs) -> list[int]:
    return [costs[a][b] for a, b in itertools.pairwise([*ring, ring[0]])]


def worth(ring: Sequence[int], costs: Costs) -> tuple[int, int, Sequence[int]]:
    """Smaller is better: the slowest edge, then the total, then the order of the nodes."""
    edges = edges_of(ring, costs)
    return max(edges), sum(edges), ring


@given(symmetric_costs(st.integers(1, 7)))
def test_the_ring_is_the_best_of_all_rings(costs: Costs) -> None:
    every_ring = ((0, *rest) for rest in itertools.permutations(range(1, len(costs))))
    assert ring_through(costs) == min(every_ring, key=lambda ring: worth(ring, costs))


@pytest.mark.parametrize("size", [8, 9])
def test_the_one_cheap_ring_of_eight_or_nine_is_found(size: int) -> None:
    cheap = [0, *range(2, size), 1]
    links = {frozenset(edge) for edge in itertools.pairwise([*cheap, 0])}
    costs = tuple(
        tuple(0 if a == b else 20 if {a, b} in links else 21 for b in range(size))
        for a in range(size)
    )
    assert edges_of(ring_through(costs), costs) == [20] * size
    assert ring_through(costs) == min(tuple(cheap), (0, *reversed(cheap[1:])))


def test_one_slow_edge_is_avoided_even_at_a_higher_total() -> None:
    slow = {frozenset((0, 1)): 9, frozenset((0, 2)): 1, frozenset((1, 3)): 1}
    costs = tuple(
        tuple(0 if a == b else slow.get(frozenset((a, b)), 6) for b in range(4)) for a in range(4)
    )
    ring = ring_through(costs)
    assert max(edges_of(ring, costs)) == 6
    assert ring == (0, 2, 1, 3)


@pytest.mark.parametrize("size", range(8))
def test_where_all_edges_are_alike_the_ring_is_in_order_of_node_id(size: int) -> None:
    costs = tuple(tuple(20 * (a != b) for b in range(size)) for a in range(size))
    assert ring_through(costs) == tuple(range(size))


@given(symmetric_costs(st.integers(EXACT_UP_TO + 1, EXACT_UP_TO + 4), largest=40))
def test_above_nine_the_ring_visits_everyone_once_and_no_swap_betters_it(costs: Costs) -> None:
    ring = ring_through(costs)
    assert sorted(ring) == list(range(len(costs)))
    for i, j in itertools.combinations(range(1, len(ring) + 1), 2):
        other = [*ring[:i], *reversed(ring[i:j]), *ring[j:]]
        assert worth(other, costs)[:2] >= worth(ring, costs)[:2]


def test_above_nine_the_search_ends_after_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    size = EXACT_UP_TO + 2
    far = tuple(
        tuple(20 + (a - b) ** 2 * 7 % 13 * (a != b) for b in range(size)) for a in range(size)
    )
    monkeypatch.setattr("pmesh.core.topology.TWO_OPT_ROUNDS", 0)
    unimproved = ring_through(far)
    monkeypatch.setattr("pmesh.core.topology.TWO_OPT_ROUNDS", 1)
    once = ring_through(far)
    assert sorted(unimproved) == sorted(once) == list(range(size))
    assert worth(once, far) < worth(unimproved, far)


@given(symmetric_costs(st.integers(2, 11)), st.randoms(use_true_random=False))
def test_everyone_plans_the_same_ring_in_whatever_order_it_lists_the_members(
    costs: Costs, random: Random
) -> None:
    members = make_members(len(costs))
    shuffled = sorted(members, key=lambda _: random.random())
    assert plan_ring(measured_graph(shuffled, costs)) == plan_ring(measured_graph(members, costs))


def test_the_graph_is_complete_and_bears_the_costs() -> None:
    graph = measured_graph([CARA, ANNA, BERT], ((0, 1, 2), (1, 0, 3), (2, 3, 0)))
    assert {frozenset((a, b)): graph.edges[a, b]["cost"] for a, b in graph.edges} == {
        frozenset((ANNA, BERT)): 1,
        frozenset((ANNA, CARA)): 2,
        frozenset((BERT, CARA)): 3,
    }


def test_an_edge_costs_what_the_worse_of_its_ends_measured() -> None:
    heard = {
        ANNA: {BERT.incarnation: 1000, CARA.incarnation: 4000},
        BERT: {ANNA.incarnation: 2000, CARA.incarnation: 500},
        CARA: {ANNA.incarnation: 250, BERT.incarnation: 500},
    }
    one, two, four, half = map(round_trip_cost, (1000, 2000, 4000, 500))
    assert one < two < four
    assert measure_costs([CARA, BERT, ANNA], heard) == (
        (0, two, four),
        (two, 0, half),
        (four, half, 0),
    )


def test_what_nobody_has_measured_costs_as_much_as_a_usual_home_network() -> None:
    assert measure_costs([ANNA, DORA], {}) == ((0, UNMEASURED_COST), (UNMEASURED_COST, 0))
    assert round_trip_cost(0) == round_trip_cost(-1) == UNMEASURED_COST == round_trip_cost(1000)


@given(st.integers(1, 10**7), st.integers(1, 10**7))
def test_a_longer_round_trip_never_costs_less(one: int, other: int) -> None:
    shorter, longer = sorted((one, other))
    assert round_trip_cost(shorter) <= round_trip_cost(longer)
    assert round_trip_cost(2 * one) == round_trip_cost(one) + 2
