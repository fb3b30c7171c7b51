"""How arrays are cut into parts, one for each rank, and who has which part after ranks changed."""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pmesh.core.ops.plan import chunk_bounds


class Span(NamedTuple):
    """The values from `begin` to `end` of a flat array."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        """How many there are."""
        return self.end - self.begin


def parts_of(rank: int, size: int, replicas: int) -> list[int]:
    """The parts that a rank keeps: its own first, then those of the ranks behind it.

    >>> parts_of(2, 3, 2)
    [2, 0]
    """
    return [(rank + i) % size for i in range(min(replicas, size))]


def span_of(part: int, count: int, size: int) -> Span:
    """One of `size` parts of `count` values, as `numpy.array_split` cuts them.

    >>> [span_of(part, 7, 3) for part in range(3)]
    [Span(begin=0, end=3), Span(begin=3, end=5), Span(begin=5, end=7)]
    """
    bounds = chunk_bounds(count, size)
    return Span(bounds[part], bounds[part + 1])


def cover(held: Sequence[Iterable[Span]], count: int) -> list[tuple[int, Span]]:
    """Who gives which values, so that each is given at most once: rank and span, in order.

    What no rank holds is in none of the spans.

    Args:
        held: for each rank the spans that it has.
        count: how many values there are.

    >>> cover([[Span(0, 4)], [Span(2, 6)], [Span(8, 9)]], 10)
    [(0, Span(begin=0, end=4)), (1, Span(begin=4, end=6)), (2, Span(begin=8, end=9))]
    """
    found: list[tuple[int, Span]] = []
    at = 0
    pieces = sorted(
        (span.begin, -span.end, rank) for rank, spans in enumerate(held) for span in spans
    )
    for begin, minus_end, rank in pieces:
        span = Span(max(begin, at), min(-minus_end, count))
        if span.size > 0:
            found.append((rank, span))
            at = span.end
    return found


def owners_of(sizes: Mapping[str, int], size: int) -> dict[str, int]:
    """For each array the rank that owns the whole of it: the largest first, to who has the least.

    >>> owners_of({"a": 3, "b": 5, "c": 1}, 2)
    {'b': 0, 'a': 1, 'c': 1}
    """
    loads = [(0, rank) for rank in range(size)]
    owners: dict[str, int] = {}
    for path, count in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        load, rank = heapq.heappop(loads)
        owners[path] = rank
        heapq.heappush(loads, (load + count, rank))
    return owners


def buckets_of(nbytes: Mapping[str, int], bucket_bytes: int) -> list[tuple[str, ...]]:
    """The arrays in runs of at most `bucket_bytes`; a larger array has its own.

    >>> buckets_of({"a": 3, "b": 5, "c": 1}, 6)
    [('a',), ('b', 'c')]
    """
    found: list[tuple[str, ...]] = []
    run: list[str] = []
    filled = 0
    for path, size in nbytes.items():
        if run and filled + size > bucket_bytes:
            found.append(tuple(run))
            run, filled = [], 0
        run.append(path)
        filled += size
    if run:
        found.append(tuple(run))
    return found
