"""The ring of a job's ranks as a graph, from which slow edges are taken away."""

from collections.abc import Sequence

from pmesh.core.ops.cost import ISLAND_FACTOR, Costs, Edges, Islands, times_along


def join_ranks(costs: Costs) -> Edges:
    """Return what follows from the costs of the edges: the same on every machine."""
    times = times_along(costs)
    slowest = max(times)
    last = max(range(len(times)), key=lambda rank: (times[rank], rank))
    islands = _runs([slowest > 0 and time * ISLAND_FACTOR <= slowest for time in times])
    (line,) = _runs([rank != last for rank in range(len(times))])
    return Edges(costs, islands if 1 < len(islands) < len(times) else (), line)


def edges_among(edges: Edges, ranks: Sequence[int]) -> Edges:
    """Return the edges between some ranks, at least two, as if there were no others."""
    return join_ranks(tuple(tuple(edges.costs[a][b] for b in ranks) for a in ranks))


def _runs(joined: Sequence[bool]) -> Islands:
    """Return the ranks that are joined, each to the next one if `joined` says so; not all are."""
    import networkx as nx  # noqa: PLC0415 - 0.1 s; an agent's start need not wait for it

    size = len(joined)
    ring: nx.DiGraph[int] = nx.DiGraph()
    ring.add_nodes_from(range(size))
    ring.add_edges_from((rank, (rank + 1) % size) for rank in range(size) if joined[rank])
    runs = nx.weakly_connected_components(ring)
    return tuple(tuple(nx.topological_sort(ring.subgraph(run))) for run in runs)
