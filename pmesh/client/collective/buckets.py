"""Buckets: which arrays of a tree are sent together, as one op, and in which order."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pmesh.client.trees.arrays import Leaf, Tree, digest, insertion_order, is_mlx
from pmesh.core.ops.reductions import WIRE_DTYPES, Values


@dataclass(frozen=True, slots=True)
class Bucket:
    """Arrays that are sent one after another, in the same dtype, as one op."""

    wire: str
    leaves: tuple[int, ...]
    """The indices of the arrays in the tree."""
    count: int
    """The number of values of all arrays."""

    @property
    def nbytes(self) -> int:
        """The size of the values in an arena."""
        return self.count * WIRE_DTYPES[self.wire].itemsize


def plan_buckets(
    leaves: Sequence[Leaf],
    *,
    bucket_bytes: float,
    wire: str | None = None,
    order: Sequence[int] = (),
) -> list[Bucket]:
    """Cut the arrays into buckets of at most `bucket_bytes`; a larger array has its own.

    The order is the same on all ranks: first by the dtype that is sent, the widest first (so that
    the weights of an average are added in the best precision), then by `order`.

    Args:
        leaves: the leaves of the tree.
        bucket_bytes: may be infinite.
        wire: the dtype in which all are sent; None if each has its own.
        order: the indices of the leaves in their order; empty for the order of the tree.
    """
    if len(leaves) == 1:
        return [Bucket(wire or leaves[0].wire, (0,), leaves[0].values.size)]
    buckets: list[Bucket] = []
    used = {wire or leaf.wire for leaf in leaves}
    for dtype in (each for each in WIRE_DTYPES if each in used):
        room = bucket_bytes / WIRE_DTYPES[dtype].itemsize
        run: list[int] = []
        count = 0
        indices = order or range(len(leaves))
        for index in (i for i in indices if (wire or leaves[i].wire) == dtype):
            size = leaves[index].values.size
            if run and count + size > room:
                buckets.append(Bucket(dtype, tuple(run), count))
                run, count = [], 0
            run.append(index)
            count += size
        if run:
            buckets.append(Bucket(dtype, tuple(run), count))
    return buckets


@dataclass(frozen=True, slots=True)
class Backward:
    """The order in which a backward pass computes gradients: the last layers first."""

    order: tuple[int, ...]
    """The indices of the leaves."""
    bucket_bytes: int
    """So small that most of the network's time passes while the next bucket is computed."""

    def digest(self, paths: Sequence[str]) -> str:
        """Return a digest that is equal on two ranks if their buckets are (I5)."""
        return digest([str(self.bucket_bytes), *(paths[index] for index in self.order)])


_MOST_BUCKETS = 8  # more hide more of the network's time, but each op has its latency
_LEAST_BUCKET_BYTES = 4 * 1024 * 1024  # 0.2 s at 200 Mbit/s: latency is little beside it


def backward_order(tree: Tree, leaves: Sequence[Leaf], bucket_bytes: int) -> Backward | None:
    """Return the order for gradients that MLX may still have to compute.

    None if other arrays are among them, or one bucket is enough. The result does not depend on
    whether they are computed already, as that may differ between ranks.

    Args:
        tree: the tree of the gradients.
        leaves: its arrays.
        bucket_bytes: the most for a bucket; a larger array has its own.
    """
    if not all(map(is_mlx, tree.leaves)):
        return None
    nbytes = sum(leaf.values.size * WIRE_DTYPES[leaf.wire].itemsize for leaf in leaves)
    most = min(bucket_bytes, max(_LEAST_BUCKET_BYTES, -(-nbytes // _MOST_BUCKETS)))
    if nbytes <= most:
        return None
    order = insertion_order(tree)
    return Backward(order[::-1], most) if len(order) == len(leaves) else None


def share_memory(values: Sequence[Values], written: Sequence[Values]) -> bool:
    """Return True if any two of all these arrays overlap, but those that are the same in both."""
    spans = [_span(each) for each in values]
    others = [two for one, two in zip(spans, map(_span, written), strict=False) if one != two]
    return any(end > begin for (_, end), (begin, _) in pairwise(sorted([*spans, *others])))


def _span(values: Values) -> tuple[int, int]:
    """Return the addresses between which an array lies; an empty one lies nowhere."""
    if not values.size:
        return 0, 0
    begin: int = values.__array_interface__["data"][0]
    if values.flags.c_contiguous:
        return begin, begin + values.nbytes
    steps = [(n - 1) * stride for n, stride in zip(values.shape, values.strides, strict=True)]
    low, high = (sum(pick(0, step) for step in steps) for pick in (min, max))
    return begin + low, begin + high + values.itemsize
