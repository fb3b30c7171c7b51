"""Predicts how long an all-reduce takes by each strategy, and chooses the fastest (`auto`).

The model is the usual one (Thakur, Rabenseifner and Gropp 2005, section 3): a step costs alpha, the
latency of an edge, and a byte beta, the inverse of its bandwidth. Where a rank passes on each
record as it arrives, and has more than one for a step, the steps overlap and latency hides behind
bandwidth. Each strategy is as slow as the slowest edge that it uses. All numbers are integers:
every rank that has the same table decides alike, on any machine.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

from pmesh.core.ops.plan import (
    SEGMENT_BYTES,
    SHORT_SEGMENT_BYTES,
    chain_segment_bytes,
    halvings,
)

Strategy: TypeAlias = Literal["ring", "tree", "centralized", "hierarchical", "chain", "direct"]
Islands: TypeAlias = tuple[tuple[int, ...], ...]

ISLAND_FACTOR = 4
"""An island's edges are this many times faster than the slowest of the ring. Less doesn't pay for
the way to the island's first rank and back."""

CHAIN_FACTOR = 2
"""A chain leaves out the ring's slowest edge if it is this many times slower than all others. Less
may be the noise of two measurements (`pmesh.core.links.bandwidth`)."""

LONG_WAY_NS = 16_000_000
"""The latency of a long edge. Within a house most records take less, even by Wi-Fi."""

FAR_NS = 1_500_000
"""The latency of a far edge; a cable at its best has less. Below it `direct` saves little, and a
switch may drop what several ranks send to one at the same time."""


class EdgeCost(NamedTuple):
    """What it costs to send from one rank to another."""

    alpha_ns: int
    """Nanoseconds of each record, whatever its size."""
    beta_ps: int
    """Picoseconds of each byte: 8,000 at 1 Gbit/s."""

    @property
    def is_long(self) -> bool:
        """Whether a ring with this edge uses short records."""
        return self.alpha_ns >= LONG_WAY_NS

    def predict_ns(self, *, steps: int, nbytes: int) -> int:
        """Return how long `steps` with `nbytes` in all take, if each waits for the one before."""
        return self.alpha_ns * steps + self.beta_ps * nbytes // 1000

    def predict_flow_ns(self, *, steps: int, nbytes: int) -> int:
        """Return how long `steps` of `nbytes` each take, if ranks pass on each record at once.

        A rank may pass on a step's first record after alpha and the record's own time, but not
        before it has sent its last record of the step before.
        """
        if not steps:
            return 0
        most = SHORT_SEGMENT_BYTES if self.is_long else SEGMENT_BYTES
        first = self.predict_ns(steps=1, nbytes=min(nbytes, most))
        sending = self.predict_ns(steps=0, nbytes=nbytes)
        return (steps - 1) * max(first, sending) + self.alpha_ns + sending


Costs: TypeAlias = tuple[tuple[EdgeCost, ...], ...]
"""`costs[a][b]` is that of the edge from rank a to rank b, in ring order. The diagonal doesn't
matter."""


@dataclass(frozen=True, slots=True)
class Edges:
    """What all ranks of a ring know of its edges (`pmesh.core.topology.ranks`)."""

    costs: Costs
    islands: Islands
    """The runs of ranks between which all edges are ISLAND_FACTOR times faster than the ring's
    slowest. Islands, and the ranks of each, are in ring order; one may hold the last ranks and the
    first. Without at least two islands, one of which has at least two ranks, the ring is an
    ordinary one: there are none."""
    line: tuple[int, ...]
    """The ranks in ring order, cut at the slowest edge, or the last of equally slow ones."""


def has_slow_edge(edges: Edges) -> bool:
    """Return whether one edge of the ring takes CHAIN_FACTOR times as long as any other."""
    *_, second, slowest = [0, 0, *sorted(times_along(edges.costs))]
    return slowest >= CHAIN_FACTOR * second


def is_far(edges: Edges) -> bool:
    """Return whether an edge of the ring has a latency as by Wi-Fi, so that each hop counts."""
    return any(edges.costs[rank - 1][rank].alpha_ns >= FAR_NS for rank in range(len(edges.costs)))


def segment_bytes_of(edges: Edges) -> int | None:
    """Return the most bytes in a record of a ring over these edges; None for the default.

    Over long edges, short records let the steps of a ring overlap, which hides their latency. Over
    others they would cost more than they save.
    """
    is_long = any(edges.costs[rank - 1][rank].is_long for rank in range(len(edges.costs)))
    return SHORT_SEGMENT_BYTES if is_long else None


def times_along(costs: Costs) -> list[int]:
    """Return the time of one full record over each edge of the ring, in ring order."""
    size = len(costs)
    return [
        costs[rank][(rank + 1) % size].predict_ns(steps=1, nbytes=SEGMENT_BYTES)
        for rank in range(size)
    ]


def predict_ns(strategy: Strategy, edges: Edges, nbytes: int) -> int:
    """Return how long an all-reduce of `nbytes` takes; hierarchical is only for islands."""
    return _PREDICTIONS[strategy](edges, nbytes)


@lru_cache(maxsize=64)  # training repeats a few sizes, and the table changes with the view
def choose(edges: Edges, nbytes: int) -> Strategy:
    """Return the fastest strategy; among equals, the first in the order below.

    Over far edges `direct` replaces the ring. By the model both take as long for much data, but a
    connection that loses a packet, or is slow to start, holds up a whole ring.
    """
    waiters: list[Strategy] = ["direct" if is_far(edges) else "ring", "tree", "centralized"]
    if edges.islands:
        waiters.append("hierarchical")
    if has_slow_edge(edges):
        waiters.append("chain")
    return min(waiters, key=lambda strategy: predict_ns(strategy, edges, nbytes))


def _ring_ns(edges: Edges, nbytes: int) -> int:
    return _around_ns(edges, range(len(edges.costs)), nbytes)


def _around_ns(edges: Edges, ring: Sequence[int], nbytes: int) -> int:
    size = len(ring)
    used = [edges.costs[ring[place - 1]][ring[place]] for place in range(size)]
    chunk = -(-nbytes // size)
    return max(edge.predict_flow_ns(steps=2 * (size - 1), nbytes=chunk) for edge in used)


def _tree_ns(edges: Edges, nbytes: int) -> int:
    size = len(edges.costs)
    distances = [half for half, _ in halvings(size)]
    used = [
        edges.costs[rank][(rank + sign * distance) % size]
        for rank in range(size)
        for distance in distances
        for sign in (1, -1)
    ]
    steps, sent = 2 * len(distances), 2 * (size - 1) * nbytes // size
    return max((edge.predict_ns(steps=steps, nbytes=sent) for edge in used), default=0)


def _centralized_ns(edges: Edges, nbytes: int) -> int:
    """Predict that the root receives all, then sends all."""
    others = range(1, len(edges.costs))
    used = [*(edges.costs[rank][0] for rank in others), *(edges.costs[0][rank] for rank in others)]
    each_way = len(others) * nbytes
    return max((edge.predict_ns(steps=2, nbytes=2 * each_way) for edge in used), default=0)


def _hierarchical_ns(edges: Edges, nbytes: int) -> int:
    """Add up the phases: right for one record, too much for many, whose phases overlap."""
    heads = [island[0] for island in edges.islands]
    there_and_back = _there_and_back_ns(edges, edges.islands, nbytes, SEGMENT_BYTES)
    return there_and_back + _around_ns(edges, heads, nbytes)


def _chain_ns(edges: Edges, nbytes: int) -> int:
    """Count the way back as if it came afterwards: one interface carries both directions."""
    most = chain_segment_bytes(len(edges.costs), nbytes)
    return _there_and_back_ns(edges, (edges.line,), nbytes, most)


def _direct_ns(edges: Edges, nbytes: int) -> int:
    """Predict that all edges are used at once, by records that are passed on as they arrive."""
    size = len(edges.costs)
    used = [edges.costs[a][b] for a in range(size) for b in range(size) if a != b]
    each_step = -(-nbytes // size) * (size - 1)
    return max((edge.predict_flow_ns(steps=2, nbytes=each_step) for edge in used), default=0)


def _there_and_back_ns(edges: Edges, chains: Islands, nbytes: int, most: int) -> int:
    pairs = [pair for chain in chains for pair in itertools.pairwise(chain)]
    longest, record = max(map(len, chains)) - 1, min(nbytes, most)
    return max(
        (
            _one_way_ns(edges.costs[b][a], longest, nbytes, record)
            + _one_way_ns(edges.costs[a][b], longest, nbytes, record)
            for a, b in pairs
        ),
        default=0,
    )


def _one_way_ns(edge: EdgeCost, hops: int, nbytes: int, record: int) -> int:
    to_the_end = edge.predict_ns(steps=hops, nbytes=hops * record)
    return to_the_end + edge.predict_ns(steps=0, nbytes=nbytes - record)


_PREDICTIONS: Mapping[Strategy, Callable[[Edges, int], int]] = MappingProxyType(
    {
        "ring": _ring_ns,
        "tree": _tree_ns,
        "centralized": _centralized_ns,
        "hierarchical": _hierarchical_ns,
        "chain": _chain_ns,
        "direct": _direct_ns,
    }
)
