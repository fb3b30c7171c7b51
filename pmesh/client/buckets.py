"""Which arrays go together as one op."""

from collections.abc import Sequence
from dataclasses import dataclass

from pmesh.client.leaves import Leaf, divided
from pmesh.core.reductions import WIRE_DTYPES, Values


@dataclass(frozen=True, slots=True)
class Bucket:
    """A run of arrays that travel as one dtype, as one op."""

    wire: str
    leaves: tuple[int, ...]
    """Their indices in the tree."""
    count: int
    """Values, all in all."""

    @property
    def nbytes(self) -> int:
        """What it takes in an arena."""
        return self.count * WIRE_DTYPES[self.wire].itemsize


def plan_buckets(
    leaves: Sequence[Leaf], *, bucket_bytes: float, wire: str | None = None
) -> list[Bucket]:
    """Cut the arrays into buckets of at most `bucket_bytes`; a larger array has its own.

    The order is the same for all ranks: by the dtype that travels, the widest first (so that the
    weights of an average are added in the best precision there is), then as in the tree.

    Args:
        leaves: the tree's.
        bucket_bytes: may be infinite.
        wire: what all of them travel as; None: each as its dtype does.
    """
    if len(leaves) == 1:
        return [Bucket(wire or leaves[0].wire, (0,), leaves[0].values.size)]
    buckets: list[Bucket] = []
    for dtype in _WIDEST_FIRST:
        room = bucket_bytes / WIRE_DTYPES[dtype].itemsize
        run: list[int] = []
        count = 0
        for index in (i for i, leaf in enumerate(leaves) if (wire or leaf.wire) == dtype):
            size = leaves[index].values.size
            if run and count + size > room:
                buckets.append(Bucket(dtype, tuple(run), count))
                run, count = [], 0
            run.append(index)
            count += size
        if run:
            buckets.append(Bucket(dtype, tuple(run), count))
    return buckets


_WIDEST_FIRST = ("float64", "float32", "int64", "int32", "bool")


def fill(bucket: Bucket, leaves: Sequence[Leaf], region: Values, weight: float | None) -> None:
    """Lay the bucket's arrays one behind the other into a region of an arena.

    Where the region has one value more than the bucket, that is the weight itself.
    """
    start = 0
    for index in bucket.leaves:
        end = start + leaves[index].values.size
        leaves[index].fill(region[start:end], weight)
        start = end
    if start < region.size:
        region[start] = weight


def may_be_lent(bucket: Bucket, leaves: Sequence[Leaf]) -> bool:
    """Whether its arrays would be views of a region that can't be written to, and may be."""
    dtype = WIRE_DTYPES[bucket.wire]
    own = (leaves[index] for index in bucket.leaves)
    return all(leaf.takes_read_only and leaf.may_keep(dtype) for leaf in own)


def read(
    bucket: Bucket,
    leaves: Sequence[Leaf],
    region: Values,
    divisor: float | None,
    *,
    lent: bool = False,
) -> list[tuple[int, object]]:
    """Arrays like the user's from a region laid out by `fill`, each with its index.

    Those of numpy and torch share one block of memory: the first touch of many small ones costs
    twice as much, and results of one call are mostly dropped together. What is lent is that memory.
    """
    values = region[: bucket.count]
    if not lent and any(leaves[index].may_keep(values.dtype) for index in bucket.leaves):
        values = values.copy() if divisor is None else divided(values, divisor)
        divisor = None
    found: list[tuple[int, object]] = []
    start = 0
    for index in bucket.leaves:
        end = start + leaves[index].values.size
        leaf, part = leaves[index], values[start:end]
        array = leaf.of(part) if divisor is None else leaf.quotient(part, divisor)
        found.append((index, array))
        start = end
    return found
