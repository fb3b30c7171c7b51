"""The ring that follows from the costs of the edges.

The leader plans and the others check: the same costs give the same ring on every node.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pmesh.core.topology.graph import Costs
from pmesh.ids import Member

Weights: TypeAlias = NDArray[np.int64]
"""Costs as a symmetric n x n matrix; a search raises the cost of the edges that it must avoid."""

Tour: TypeAlias = NDArray[np.intp]
"""The indices of all nodes, in the order of a cycle through them."""

ONE_RING = 3
"""The most nodes through which there is only one cycle."""

EXACT_UP_TO = 9
"""The most nodes for which every cycle is considered: 2^8 * 8 * 9 costs twice, in 2 ms."""

AVOIDED = 1 << 40
"""Added to the cost of an edge that a search must avoid. A commit has no cost above 1,000, so this
exceeds the cost of a whole cycle."""

STARTS = 5
"""Searches for one plan, each from another node. With 20 nodes the last four improve half of the
plans."""

ROUNDS = 64
"""The most changes that a search tries. With 64 nodes most searches end after 20. Costs invented to
prolong them block the event loop for 35 ms; without this bound for 100."""

SEARCH_BUDGET = 1 << 23
"""The most pairs of nodes that a search compares, n^2 in a round: above 362 nodes plans get
coarser, and one for 1,024 nodes takes a second."""

LONGEST_MOVED = 3
"""The most nodes of a path that is moved, as in Or's work."""


def plan_ring(members: Sequence[Member], costs: Costs) -> tuple[Member, ...]:
    """Return the cycle whose slowest edge is fastest, and of those the one of least total cost.

    Up to EXACT_UP_TO nodes it is exact (Held and Karp 1962, once for the bottleneck and once for
    the sum); of several best cycles it is the first when each is written from its smallest node.
    With more nodes a local search reverses paths (2-opt, Croes 1958) and moves short ones (Or-opt,
    Or 1976). It computes with integers and prefers the lower index, so every machine finds the same
    ring. The best tours of networkx take four times as long; their slowest edge is slower than ours
    in up to a quarter of random meshes of 8, and in most of 12.
    """
    nodes = sorted(members)
    weights = _weights(len(nodes), costs)
    edges = weights[np.triu_indices(len(nodes), 1)]
    if not edges.size or edges.min() == edges.max():
        return tuple(nodes)
    tour = _exact_tour(weights) if len(nodes) <= EXACT_UP_TO else _searched_tour(weights)
    return tuple(nodes[i] for i in tour)


def _weights(size: int, costs: Costs) -> Weights:
    """Mirror the part above the diagonal; a liar's matrix need not be symmetric."""
    upper = np.triu(np.array(costs, np.int64).reshape(size, size), 1)
    return upper + upper.T


def _exact_tour(weights: Weights) -> list[int]:
    matrix = weights.astype(np.float64)
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
    """For each [set of nodes left, current node]: the least cost to visit those and return to 0.

    It handles all sets of one size at once: a loop over sets blocked the event loop for 7 to 16 ms
    with 9 nodes. An entry whose current node is in the set has no meaning and is never read.
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


def _searched_tour(weights: Weights) -> list[int]:
    rounds = min(ROUNDS, SEARCH_BUDGET // weights.size)
    found = [_search(weights, start, rounds) for start in range(STARTS)]
    return min((*_worth(tour, weights), _from_smallest(tour)) for tour in found)[-1]


def _search(weights: Weights, start: int, rounds: int) -> Tour:
    """Shorten a tour until no change helps; then avoid its slowest edges, and start again.

    The search ends when it cannot avoid them all. Avoiding an edge is worth any total cost.
    """
    best = tour = _nearest_neighbours(weights, start)
    limit = _worth(tour, weights)[0]
    priced = weights + AVOIDED * (weights > limit)
    for _ in range(rounds):
        better = _improved(tour, priced)
        if better is not None:
            tour = better
        elif _worth(tour, weights)[0] > limit:
            return best
        else:
            best, limit = tour, _worth(tour, weights)[0] - 1
            priced = weights + AVOIDED * (weights > limit)
    return min(best, tour, key=lambda found: _worth(found, weights))


def _nearest_neighbours(weights: Weights, start: int) -> Tour:
    apart = weights.copy()
    apart[:, start] = AVOIDED
    tour = [start]
    for _ in range(len(weights) - 1):
        after = int(apart[tour[-1]].argmin())
        apart[:, after] = AVOIDED
        tour.append(after)
    return np.array(tour)


def _improved(tour: Tour, weights: Weights) -> Tour | None:
    better = _reverse_path(tour, weights)
    for length in range(1, LONGEST_MOVED + 1):
        if better is not None:
            break
        better = move_path(tour, weights, length)
    return better


def _reverse_path(tour: Tour, weights: Weights) -> Tour | None:
    """Return the best tour with one path reversed; None if none is better."""
    after = _from(tour, 1)
    edges = weights[tour, after]
    change = weights[tour[:, None], tour] + weights[after[:, None], after] - edges[:, None] - edges
    np.fill_diagonal(change, 0)
    i, j = divmod(int(change.argmin()), len(tour))  # the first of equals: i < j
    if change[i, j] >= 0:
        return None
    return np.concatenate([tour[: i + 1], tour[i + 1 : j + 1][::-1], tour[j + 1 :]])


def move_path(tour: Tour, weights: Weights, length: int) -> Tour | None:
    """Return the best tour with a path of `length` nodes moved; None if none is better."""
    size = len(tour)
    before, after, last, behind = (_from(tour, k) for k in (-1, 1, length - 1, length))
    saved = weights[before, tour] + weights[last, behind] - weights[before, behind]
    # At [i, j]: the path that begins with tour[i] goes between tour[j] and after[j].
    ahead = weights[tour[:, None], tour] + weights[last[:, None], after]
    turned = weights[last[:, None], tour] + weights[tour[:, None], after]
    change = np.minimum(ahead, turned) - saved[:, None] - weights[tour, after]
    at = np.arange(size)
    for k in range(-1, length):
        change[at, (at + k) % size] = 0  # the path is already there
    i, j = divmod(int(change.argmin()), size)
    if change[i, j] >= 0:
        return None
    path, rest = np.split(_from(tour, i), [length])
    cut = (j - i - length) % size + 1
    path = path[::-1] if turned[i, j] < ahead[i, j] else path
    return np.concatenate([rest[:cut], path, rest[cut:]])


def _from(tour: Tour, place: int) -> Tour:
    return np.concatenate([tour[place:], tour[:place]])  # np.roll takes five times as long


def _from_smallest(tour: Tour) -> list[int]:
    """Return the same cycle from node 0, in the direction of its smaller neighbour."""
    first = _from(tour, int(tour.argmin())).tolist()
    return min(first, [0, *reversed(first[1:])])


def _worth(tour: Tour, weights: Weights) -> tuple[int, int]:
    edges = weights[tour, _from(tour, 1)]
    return int(edges.max()), int(edges.sum())
