"""The graph of the members: what is known of the edge between each two, and what it costs.

Whoever reads the graph makes it from heartbeats. A commit carries the costs alone, as a matrix, and
the ring is planned from that: so no view waits for the import of networkx, which takes 0.1 s.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from pmesh.core.wire.views import RELAYED, MeasuredEdge
from pmesh.ids import Incarnation, Member

if TYPE_CHECKING:
    import networkx as nx

Graph: TypeAlias = "nx.Graph[Member]"
"""Each two members are joined by an edge."""

Costs: TypeAlias = tuple[tuple[int, ...], ...]
"""A symmetric matrix; row and column i belong to the i-th of the sorted members."""

Heard: TypeAlias = Mapping[Member, Mapping[Incarnation, MeasuredEdge]]
"""What each member has measured of the way to its peers."""

UNKNOWN = MeasuredEdge()

STEPS = 16
"""Costs are in sixteenths of an octave: within one step, 4 %, a ring may not be the best."""

MUCH_BETTER = 7
"""V13: Steps by which the slowest edge of a ring must get better: the first ones above 30 %."""

SENT_BITS = 8 * 1024 * 1024
"""An edge costs the time of 1 MiB, the largest record, and a round trip."""

USUAL = MeasuredEdge(round_trip_us=1000, mbit_s=1000)
"""The assumption for a home network, before anything is measured."""

RELAYED_COST = 1000
"""Of an edge over which no bytes travel directly: 2^62 microseconds cost 992."""


def edge_cost(edge: MeasuredEdge) -> int:
    """Return the time of 1 MiB and a round trip, in sixteenths of an octave of microseconds.

    The bandwidth is settled; the round trip is rounded to half octaves, against its noise.

    >>> [edge_cost(MeasuredEdge(500, mbit_s)) for mbit_s in (1000, 940, 100, 10)]
    [210, 211, 262, 315]
    """
    if edge.mbit_s == RELAYED:
        return RELAYED_COST
    round_trip_us = edge.round_trip_us or USUAL.round_trip_us
    sending_us = SENT_BITS / (edge.mbit_s or USUAL.mbit_s)
    return round(STEPS * math.log2(2 ** (round(2 * math.log2(round_trip_us)) / 2) + sending_us))


def edge_between(a: Member, b: Member, heard: Heard) -> MeasuredEdge:
    """Return the worse of what two members report of their edge; what is unknown says nothing."""
    reports = (
        heard.get(a, {}).get(b.incarnation, UNKNOWN),
        heard.get(b, {}).get(a.incarnation, UNKNOWN),
    )
    known = [edge.mbit_s for edge in reports if edge.mbit_s]
    return MeasuredEdge(max(edge.round_trip_us for edge in reports), min(known, default=0))


def measure_costs(members: Iterable[Member], heard: Heard) -> Costs:
    """Return what each edge costs."""
    ordered = sorted(members)
    costs = [[0] * len(ordered) for _ in ordered]
    for (i, a), (j, b) in itertools.combinations(enumerate(ordered), 2):
        costs[i][j] = costs[j][i] = edge_cost(edge_between(a, b, heard))
    return tuple(map(tuple, costs))


def measured_graph(members: Iterable[Member], heard: Heard) -> Graph:
    """Return the graph of the members: each edge has what is `measured`, and its `cost`."""
    import networkx as nx  # noqa: PLC0415 - 0.1 s; an agent's start need not wait for it

    graph: Graph = nx.Graph()
    graph.add_nodes_from(sorted(members))
    for a, b in itertools.combinations(graph, 2):
        edge = edge_between(a, b, heard)
        graph.add_edge(a, b, measured=edge, cost=edge_cost(edge))
    return graph


def cost_of(graph: Graph, edge: Collection[Member]) -> int:
    """Return what the edge between two members costs."""
    one, other = edge
    cost: int = graph.edges[one, other]["cost"]
    return cost


def measured_of(graph: Graph, edge: Collection[Member]) -> MeasuredEdge:
    """Return what was measured of the edge between two members."""
    one, other = edge
    measured: MeasuredEdge = graph.edges[one, other]["measured"]
    return measured


def edges_around(ring: Sequence[Member]) -> tuple[frozenset[Member], ...]:
    """Return the edges of a cycle; of neighbours on one machine there is none."""
    pairs = itertools.pairwise((*ring, *ring[:1]))
    return tuple(frozenset(pair) for pair in pairs if pair[0] != pair[1])


def slowest_edge(graph: Graph, ring: Sequence[Member]) -> frozenset[Member] | None:
    """Return the edge of a cycle that costs most; None if it has no edges."""
    return max(edges_around(ring), key=lambda edge: cost_of(graph, edge), default=None)


def times_faster(before: int, after: int) -> float:
    """Return how many times as fast as one edge another is, by their costs."""
    return float(2 ** ((before - after) / STEPS))


def is_much_better(before: int, after: int) -> bool:
    """V13: True if the cost of a ring's slowest edge falls by more than 30 %."""
    return before - after >= MUCH_BETTER


def relays_between(graph: Graph, one: Member, other: Member) -> list[Member]:
    """V5: Return who may forward between two members, the shortest path first.

    Every path has two edges, as what is relayed is not relayed again. So the paths are sorted:
    `networkx.shortest_simple_paths` finds the same order, for 20 members in 20 ms.
    """

    def takes(relay: Member) -> float:
        return sum(math.exp2(cost_of(graph, (end, relay)) / STEPS) for end in (one, other))

    return sorted((member for member in graph if member not in {one, other}), key=takes)
