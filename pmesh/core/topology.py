"""The measured network as a graph, and the ring through it.

The leader plans, the others check: the same costs give the same ring on every node.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from pmesh.ids import Incarnation, Member

Costs: TypeAlias = tuple[tuple[int, ...], ...]
"""A symmetric matrix; row and column i belong to the i-th of the sorted members."""

UNMEASURED_COST = 20
"""About a millisecond: what a home network is taken for before its first round trip."""

EXACT_UP_TO = 9
"""Nodes for which every cycle is considered: 2^8 * 8 * 9 costs twice, 2 ms."""

TWO_OPT_ROUNDS = 20
"""Bound of the heuristic above EXACT_UP_TO; each round is n^2 exchanges."""


def round_trip_cost(round_trip_us: int) -> int:
    """The cost of an edge in half octaves, so that noise does not turn the ring.

    >>> round_trip_cost(1000), round_trip_cost(1100), round_trip_cost(4000)
    (20, 20, 24)
    """
    return UNMEASURED_COST if round_trip_us <= 0 else round(2 * math.log2(max(round_trip_us, 1)))


def measure_costs(
    members: Sequence[Member], heard: Mapping[Member, Mapping[Incarnation, int]]
) -> Costs:
    """The cost of each edge from what both its ends report, the worse of the two."""
    ordered = sorted(members)

    def cost(a: Member, b: Member) -> int:
        return max(
            round_trip_cost(heard.get(a, {}).get(b.incarnation, 0)),
            round_trip_cost(heard.get(b, {}).get(a.incarnation, 0)),
        )

    return tuple(tuple(0 if a == b else cost(a, b) for b in ordered) for a in ordered)


def measured_graph(members: Sequence[Member], costs: Costs) -> "nx.Graph[Member]":
    """The complete graph of the members with `cost` on each edge."""
    ordered = sorted(members)
    graph: nx.Graph[Member] = nx.Graph()
    graph.add_nodes_from(ordered)
    for (i, a), (j, b) in itertools.combinations(enumerate(ordered), 2):
        graph.add_edge(a, b, cost=costs[i][j])
    return graph


def plan_ring(graph: "nx.Graph[Member]") -> tuple[Member, ...]:
    """The cycle whose slowest edge is fastest, then of the least total cost.

    Among equals the one that comes first when written from its smallest node. Exact for up to
    EXACT_UP_TO nodes (Held and Karp 1962, once for the bottleneck and once for the sum); above,
    nearest neighbour and 2-opt.
    """
    nodes = sorted(graph.nodes)
    weights = [[graph.edges[a, b]["cost"] if a != b else 0 for b in nodes] for a in nodes]
    if len({weight for i, row in enumerate(weights) for weight in row[i + 1 :]}) <= 1:
        return tuple(nodes)
    tour = _exact_tour(weights) if len(nodes) <= EXACT_UP_TO else _heuristic_tour(weights)
    return tuple(nodes[i] for i in tour)


def _exact_tour(weights: Sequence[Sequence[int]]) -> list[int]:
    matrix = np.array(weights, np.float64)
    left = (1 << len(weights)) - 2
    bottleneck = _held_karp(matrix, np.maximum)[left, 0]
    matrix[matrix > bottleneck] = math.inf
    best = _held_karp(matrix, np.add)
    tour = [0]
    while left:
        at = tour[-1]
        inside = [j for j in range(1, len(weights)) if left >> j & 1]
        after = next(j for j in inside if matrix[at, j] + best[left ^ 1 << j, j] == best[left, at])
        tour.append(after)
        left ^= 1 << after
    return tour


def _held_karp(weights: NDArray[np.float64], combine: np.ufunc) -> NDArray[np.float64]:
    """For each [set of nodes left, node at]: the least cost of visiting those and returning to 0.

    One set size after the other, all sets of that size at once: a loop over sets held the event
    loop for 7 to 16 ms with 9 nodes. Meaningless, and never asked for, where `at` is itself left.
    """
    n = len(weights)
    sets = np.arange(0, 1 << n, 2)
    sizes = sum(sets >> j & 1 for j in range(n))
    best = np.full((1 << n, n), math.inf)
    best[0] = weights[:, 0]
    for size in range(1, n):
        of_size = sets[sizes == size]
        for j in range(1, n):
            left = of_size[of_size >> j & 1 == 1]
            through_j = combine(weights[:, j], best[left ^ 1 << j, j, None])
            best[left] = np.minimum(best[left], through_j)
    return best


def _heuristic_tour(weights: Sequence[Sequence[int]]) -> list[int]:
    tour, left = [0], set(range(1, len(weights)))
    while left:
        after = min(left, key=lambda j: (weights[tour[-1]][j], j))
        tour.append(after)
        left.remove(after)
    for _ in range(TWO_OPT_ROUNDS):
        better = min(_reversals(tour), key=lambda candidate: _worth(candidate, weights))
        if _worth(better, weights) >= _worth(tour, weights):
            break
        tour = better
    return tour


def _reversals(tour: list[int]) -> list[list[int]]:
    pairs = itertools.combinations(range(1, len(tour) + 1), 2)
    return [tour[:i] + tour[i:j][::-1] + tour[j:] for i, j in pairs]


def _worth(tour: Sequence[int], weights: Sequence[Sequence[int]]) -> tuple[int, int, Sequence[int]]:
    edges = [weights[a][b] for a, b in itertools.pairwise([*tour, tour[0]])]
    return max(edges), sum(edges), tour
