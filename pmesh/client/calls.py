"""One collective call: a tree, checked, cut into buckets, run as ops, and put together again."""

from dataclasses import dataclass

from pmesh.client.buckets import Bucket, fill, plan_buckets, read
from pmesh.client.leaves import Leaf, describe
from pmesh.client.session import TrainerSession
from pmesh.client.trees import Tree, digest, flatten
from pmesh.core.messages import Call
from pmesh.core.reductions import check_reduction
from pmesh.errors import UnsupportedArray, UsageError
from pmesh.ids import OpNumber, Rank

_WEIGHT_BYTES = 8  # a weight travels as a value of the first bucket


@dataclass(frozen=True, slots=True)
class LastOp:
    """What the last collective call came to."""

    op: OpNumber
    """The number of its op; of the last, where a tree took several."""
    contributors: tuple[Rank, ...]
    """Whose values are in the result."""
    bytes: int
    """What the values took in shared memory, over all ops of the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """What is to be done with an array, or with each bucket of a tree."""

    kind: str
    reduction: str = ""
    root: int = -1
    weight: float | None = None
    """This rank's, in an average; the reduction is a sum then."""
    bucket_bytes: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Arrays:
    """A tree of the user's, with its leaves as numpy sees them."""

    tree: Tree
    leaves: tuple[Leaf, ...]

    def digest(self) -> str:
        """Alike on two ranks only if all paths, dtypes and shapes are (I5)."""
        named = zip(self.tree.paths, self.leaves, strict=True)
        return digest([f"{path} {leaf.dtype} {leaf.values.shape}" for path, leaf in named])


def take_apart(x: object, *, reduction: str = "") -> Arrays:
    """The arrays of a tree; raises UnsupportedArray for what can't travel, or be reduced so."""
    tree = flatten(x)
    leaves = tuple(describe(tree))
    for path, leaf in zip(tree.paths, leaves, strict=True):
        try:
            if reduction:
                check_reduction(reduction, leaf.wire)
        except ValueError as e:
            raise UnsupportedArray(f"{path}: {e}" if path else str(e)) from e
    return Arrays(tree, leaves)


def run_collective(
    session: TrainerSession, wanted: Collective, arrays: Arrays
) -> tuple[object, LastOp | None]:
    """Run the ops; returns the user's tree of results, and what it came to (None: nothing to do).

    In an average, the first op also adds up the weights, as its last value.
    """
    leaves = arrays.leaves
    results: list[object] = [None] * len(leaves)
    buckets = plan_buckets(leaves, bucket_bytes=wanted.bucket_bytes)
    room_bytes = max((bucket.nbytes for bucket in buckets), default=0) + _WEIGHT_BYTES
    label = _label(wanted, arrays)
    total: float | None = None
    nbytes = 0
    last: LastOp | None = None
    for bucket in buckets:
        adds_weights = wanted.weight is not None and total is None
        count = bucket.count + adds_weights
        if wanted.kind != "broadcast" or wanted.root == session.rank:
            region = session.input_values(bucket.wire, count, room_bytes=room_bytes)
            fill(bucket, leaves, region, wanted.weight)
        call = _call(wanted, bucket, count, label) if label else _bare_call(wanted, leaves[0])
        done, region = session.run_op(call, bucket.wire, count, timeout_s=wanted.timeout_s)
        if adds_weights:
            total = _checked_total(float(region[-1]))
        for index, array in read(bucket, leaves, region, total):
            results[index] = array
        nbytes += region.nbytes
        last = LastOp(done.op, done.contributors, nbytes)
    return arrays.tree.rebuild(results), last


def _label(wanted: Collective, arrays: Arrays) -> str:
    """What a bucket is called on all ranks; nothing for a single array."""
    if wanted.weight is not None:
        return f"average_gradients {arrays.digest()}"
    return "" if arrays.tree.is_bare else f"tree {arrays.digest()}"


def _bare_call(wanted: Collective, leaf: Leaf) -> Call:
    return Call(wanted.kind, leaf.dtype, leaf.values.shape, wanted.reduction, wanted.root)


def _call(wanted: Collective, bucket: Bucket, count: int, label: str) -> Call:
    return Call(wanted.kind, bucket.wire, (count,), wanted.reduction, wanted.root, tree=label)


def _checked_total(total: float) -> float:
    if total == 0:  # on every rank alike, so all of them stop at the same op
        raise UsageError("nothing to average: the weights of all ranks add up to 0")
    return total
