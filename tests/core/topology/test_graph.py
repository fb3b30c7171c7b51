import itertools
import math
import subprocess
import sys

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.topology.graph import (
    MUCH_BETTER,
    RELAYED_COST,
    STEPS,
    USUAL,
    Costs,
    Graph,
    cost_of,
    edge_cost,
    edges_around,
    is_much_better,
    measure_costs,
    measured_graph,
    measured_of,
    relays_between,
    slowest_edge,
    times_faster,
)
from pmesh.core.wire.views import RELAYED, MeasuredEdge
from pmesh.ids import Incarnation, Member, NodeId
from tests.worlds.builders import ANNA, BERT, CARA, DORA

MEMBERS = [Member(NodeId(bytes([i]) * 32), Incarnation(i + 1)) for i in range(7)]


def graph_of(costs: Costs) -> Graph:
    """Of as many of these members as the costs are for; those above the diagonal count."""
    graph: Graph = nx.Graph()
    graph.add_nodes_from(MEMBERS[: len(costs)])
    for (i, a), (j, b) in itertools.combinations(enumerate(graph), 2):
        graph.add_edge(a, b, cost=costs[i][j])
    return graph


def test_a_cost_that_is_a_doubling_less_is_twice_as_fast() -> None:
    assert times_faster(3 * STEPS, 2 * STEPS) == 2.0
    assert times_faster(STEPS, 4 * STEPS) == 0.125


@given(st.permutations(MEMBERS[:5]), st.data())
def test_the_costs_of_a_commit_are_those_of_the_graph_whatever_the_order_of_the_members(
    members: list[Member], data: st.DataObject
) -> None:
    speeds = st.sampled_from([RELAYED, 0, 94, 940])
    heard = {
        a: {b.incarnation: MeasuredEdge(500, data.draw(speeds)) for b in members if b != a}
        for a in members
    }
    graph, costs = measured_graph(members, heard), measure_costs(members, heard)
    assert list(graph) == sorted(members)
    for (i, a), (j, b) in itertools.permutations(enumerate(graph), 2):
        assert costs[i][j] == cost_of(graph, (a, b)) == edge_cost(measured_of(graph, (a, b)))


def test_an_edge_costs_what_the_worse_of_its_ends_measured() -> None:
    edge = MeasuredEdge
    heard = {
        ANNA: {BERT.incarnation: edge(1000, 940), CARA.incarnation: edge(4000, 0)},
        BERT: {ANNA.incarnation: edge(2000, 94), CARA.incarnation: edge(500)},
        CARA: {ANNA.incarnation: edge(250, 300), BERT.incarnation: edge(500, RELAYED)},
    }
    two, four = edge_cost(edge(2000, 94)), edge_cost(edge(4000, 300))
    members = [CARA, BERT, ANNA]
    assert measure_costs(members, heard) == (
        (0, two, four),
        (two, 0, RELAYED_COST),
        (four, RELAYED_COST, 0),
    )
    assert measured_of(measured_graph(members, heard), (CARA, ANNA)) == edge(4000, 300)


def test_what_nobody_has_measured_costs_as_much_as_a_usual_home_network() -> None:
    usual = edge_cost(USUAL)
    assert measure_costs([ANNA, DORA], {}) == ((0, usual), (usual, 0))
    assert edge_cost(MeasuredEdge(0, 94)) == edge_cost(MeasuredEdge(1000, 94))


@given(st.integers(1, 2**62), st.integers(1, 2**62), st.integers(1, 2**31))
def test_an_edge_costs_more_if_it_is_slower_and_most_if_it_is_relayed(
    one: int, other: int, mbit_s: int
) -> None:
    shorter, longer = sorted((one, other))
    cost = edge_cost(MeasuredEdge(shorter, mbit_s))
    assert 0 <= cost <= edge_cost(MeasuredEdge(longer, mbit_s)) < RELAYED_COST
    assert cost - STEPS - 1 <= edge_cost(MeasuredEdge(shorter, 2 * mbit_s)) <= cost


def test_noise_of_round_trips_costs_nothing() -> None:
    assert edge_cost(MeasuredEdge(950, 100)) == edge_cost(MeasuredEdge(1100, 100))


@pytest.mark.parametrize(
    ("mbit_s", "better"), [(94, False), (110, False), (120, False), (140, True)]
)
def test_a_ring_is_much_better_if_its_slowest_edge_is_more_than_30_percent_faster(
    mbit_s: int, *, better: bool
) -> None:
    before, after = (edge_cost(MeasuredEdge(500, speed)) for speed in (94, mbit_s))
    assert is_much_better(before, after) == better
    assert math.floor(STEPS * math.log2(1.3)) + 1 == MUCH_BETTER


def test_of_equally_slow_edges_the_first_of_the_ring_is_named() -> None:
    a, b, c, *_ = MEMBERS
    graph = graph_of(((0, 2, 3), (2, 0, 3), (3, 3, 0)))
    assert slowest_edge(graph, (a, b, c)) == frozenset((b, c))
    assert slowest_edge(graph, (c, a, b)) == frozenset((c, a))


def test_ranks_of_one_machine_have_no_edge_between_them() -> None:
    assert edges_around([ANNA, ANNA, BERT]) == (frozenset((ANNA, BERT)),) * 2
    assert edges_around([ANNA]) == edges_around([]) == ()
    assert slowest_edge(measured_graph([ANNA], {}), [ANNA, ANNA]) is None


def test_an_agent_starts_without_networkx() -> None:
    code = "import sys, pmesh.agent.run; print('networkx' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "False"


@given(
    st.integers(2, 7).flatmap(
        lambda size: st.lists(
            st.lists(st.integers(0, 300), min_size=size, max_size=size),
            min_size=size,
            max_size=size,
        )
    )
)
def test_those_between_two_members_are_in_the_order_of_their_paths(rows: list[list[int]]) -> None:
    one, other, *between = MEMBERS[: len(rows)]
    graph = graph_of(tuple(map(tuple, rows)))
    hops: nx.Graph[Member] = nx.Graph()
    for end, relay in itertools.product((one, other), between):
        hops.add_edge(end, relay, time=math.exp2(cost_of(graph, (end, relay)) / STEPS))
    relays = relays_between(graph, one, other)
    assert set(relays) == set(between)
    times = [nx.path_weight(hops, (one, relay, other), "time") for relay in relays]
    assert times == sorted(times)
    assert not between or times[0] == nx.shortest_path_length(hops, one, other, weight="time")


def test_of_two_equally_short_paths_the_one_over_the_first_member_comes_first() -> None:
    a, b, c, d, *_ = MEMBERS
    assert relays_between(graph_of(((20,) * 4,) * 4), c, a) == [b, d]


def test_who_is_reached_over_another_itself_is_the_last_to_forward() -> None:
    fast, slow = MeasuredEdge(500, 940), MeasuredEdge(500, 10)
    heard = {
        ANNA: {BERT.incarnation: fast, CARA.incarnation: slow},
        BERT: {DORA.incarnation: MeasuredEdge(500, RELAYED)},
        CARA: {DORA.incarnation: slow},
    }
    graph = measured_graph((ANNA, BERT, CARA, DORA), heard)
    assert relays_between(graph, ANNA, DORA) == [CARA, BERT]
