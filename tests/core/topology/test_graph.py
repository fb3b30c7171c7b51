import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.topology.graph import (
    MUCH_BETTER,
    RELAYED_COST,
    STEPS,
    USUAL,
    edge_cost,
    edges_around,
    is_much_better,
    measure_costs,
    measured_graph,
    slowest_edge,
)
from pmesh.core.wire.link import RELAYED, MeasuredEdge
from tests.worlds.builders import ANNA, BERT, CARA, DORA


def test_the_graph_is_complete_and_bears_the_costs() -> None:
    graph = measured_graph([CARA, ANNA, BERT], ((0, 1, 2), (1, 0, 3), (2, 3, 0)))
    assert {frozenset((a, b)): graph.edges[a, b]["cost"] for a, b in graph.edges} == {
        frozenset((ANNA, BERT)): 1,
        frozenset((ANNA, CARA)): 2,
        frozenset((BERT, CARA)): 3,
    }


def test_an_edge_costs_what_the_worse_of_its_ends_measured() -> None:
    edge = MeasuredEdge
    heard = {
        ANNA: {BERT.incarnation: edge(1000, 940), CARA.incarnation: edge(4000, 0)},
        BERT: {ANNA.incarnation: edge(2000, 94), CARA.incarnation: edge(500)},
        CARA: {ANNA.incarnation: edge(250, 300), BERT.incarnation: edge(500, RELAYED)},
    }
    two, four = edge_cost(edge(2000, 94)), edge_cost(edge(4000, 300))
    assert measure_costs([CARA, BERT, ANNA], heard) == (
        (0, two, four),
        (two, 0, RELAYED_COST),
        (four, RELAYED_COST, 0),
    )


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
    assert is_much_better(MeasuredEdge(500, 94), MeasuredEdge(500, mbit_s)) == better
    assert math.floor(STEPS * math.log2(1.3)) + 1 == MUCH_BETTER


def test_ranks_of_one_machine_have_no_edge_between_them() -> None:
    assert edges_around([ANNA, ANNA, BERT]) == (frozenset((ANNA, BERT)),) * 2
    assert edges_around([ANNA]) == edges_around([]) == ()
    assert slowest_edge([ANNA, ANNA], {}) is None


def test_an_agent_starts_without_networkx() -> None:
    code = "import sys, pmesh.agent.run; print('networkx' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "False"
