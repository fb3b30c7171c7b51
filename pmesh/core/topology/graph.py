"""What is known of the edge between each two members, and what it costs."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from pmesh.core.wire.link import RELAYED, MeasuredEdge
from pmesh.ids import Incarnation, Member

if TYPE_CHECKING:
    import networkx as nx

Costs: TypeAlias = tuple[tuple[int, ...], ...]
"""A symmetric matrix; row and column i belong to the i-th of the sorted members."""

Heard: TypeAlias = Mapping[Member, Mapping[Incarnation, MeasuredEdge]]
"""What each member has measured of the way to its peers."""

Edges: TypeAlias = Mapping[frozenset[Member], MeasuredEdge]
"""What is known of the edge between each two members."""

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


def worse_of(one: MeasuredEdge, other: MeasuredEdge) -> MeasuredEdge:
    """Return the worse of what the two ends of an edge report; what is unknown says nothing."""
    known = [edge.mbit_s for edge in (one, other) if edge.mbit_s]
    round_trip_us = max(one.round_trip_us, other.round_trip_us)
    return MeasuredEdge(round_trip_us, min(known, default=0))


def measured_edges(members: Sequence[Member], heard: Heard) -> Edges:
    """Return what is known of the edge between each two of the members."""
    return {
        frozenset((a, b)): worse_of(
            heard.get(a, {}).get(b.incarnation, UNKNOWN),
            heard.get(b, {}).get(a.incarnation, UNKNOWN),
        )
        for a, b in itertools.combinations(members, 2)
    }


def measure_costs(members: Sequence[Member], heard: Heard) -> Costs:
    """Return the cost of each edge: the worse of the two that its ends report."""
    ordered = sorted(members)
    edges = measured_edges(ordered, heard)
    costs = [[0] * len(ordered) for _ in ordered]
    for (i, a), (j, b) in itertools.combinations(enumerate(ordered), 2):
        costs[i][j] = costs[j][i] = edge_cost(edges[frozenset((a, b))])
    return tuple(map(tuple, costs))


def edges_around(ring: Sequence[Member]) -> tuple[frozenset[Member], ...]:
    """Return the edges of a cycle; of neighbours on one machine there is none."""
    pairs = itertools.pairwise((*ring, *ring[:1]))
    return tuple(frozenset(pair) for pair in pairs if pair[0] != pair[1])


def slowest_edge(ring: Sequence[Member], edges: Edges) -> MeasuredEdge | None:
    """Return the edge of a cycle that costs most; None if it has no edges."""
    around = [edges[edge] for edge in edges_around(ring)]
    return max(around, key=edge_cost, default=None)


def times_faster(before: MeasuredEdge, after: MeasuredEdge) -> float:
    """Return how many times as fast as one edge another is, by their costs."""
    return float(2 ** ((edge_cost(before) - edge_cost(after)) / STEPS))


def is_much_better(before: MeasuredEdge, after: MeasuredEdge) -> bool:
    """V13: True if the slowest edge of a ring gets better by more than 30 %."""
    return edge_cost(before) - edge_cost(after) >= MUCH_BETTER


def measured_graph(members: Sequence[Member], costs: Costs) -> "nx.Graph[Member]":
    """Return the complete graph of the members with `cost` on each edge."""
    import networkx as nx  # noqa: PLC0415 - 0.1 s; an agent's start need not wait for it

    ordered = sorted(members)
    graph: nx.Graph[Member] = nx.Graph()
    graph.add_nodes_from(ordered)
    for (i, a), (j, b) in itertools.combinations(enumerate(ordered), 2):
        graph.add_edge(a, b, cost=costs[i][j])
    return graph
