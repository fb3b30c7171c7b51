"""Finds who has which part of a flat array after ranks have changed, and who gets whole arrays."""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """The values from `begin` to `end` of a flat array."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        """The number of values."""
        return self.end - self.begin


def cover(held: Sequence[Iterable[Span]], count: int) -> list[tuple[int, Span]]:
    """Choose one rank for each value that any rank holds; return (rank, span) pairs in order.

    Values that no rank holds are in no span.

    Args:
        held: the spans that each rank holds.
        count: the number of values.

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
    """Assign whole arrays to ranks, the largest first, each to the rank with the fewest values.

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
    """Group consecutive arrays into buckets of at most `bucket_bytes`; a larger one is alone.

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
