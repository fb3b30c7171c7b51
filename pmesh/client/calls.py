"""One collective call: a tree, checked, cut into buckets, run as ops, and put together again."""

from dataclasses import dataclass

import numpy as np

from pmesh.client.buckets import fill, plan_buckets, read
from pmesh.client.leaves import Leaf, describe
from pmesh.client.session import TrainerSession
from pmesh.client.trees import Tree, digest, flatten
from pmesh.core.messages import Call
from pmesh.core.reductions import WIRE_DTYPES, check_reduction
from pmesh.core.session import World
from pmesh.errors import RankLost, UnsupportedArray, UsageError
from pmesh.ids import OpNumber, Rank, TrainerId

_WEIGHT_BYTES = 8  # a weight travels as a value of its bucket
ALONE = OpNumber(-1)


@dataclass(frozen=True, slots=True)
class LastOp:
    """What the last collective call came to."""

    op: OpNumber
    """The number of its op; of the last, where a tree took several. -1: this rank was alone."""
    contributors: tuple[Rank, ...]
    """Whose values are in the result: all ranks that the job had left at the end of that op."""
    names: tuple[str, ...]
    """For each of them the name of its machine."""
    bytes: int
    """What the values took in shared memory, over all ops of the call."""

    @classmethod
    def among(cls, op: OpNumber, world: World, nbytes: int) -> "LastOp":
        """An op that completed in this world."""
        return cls(op, tuple(Rank(i) for i in range(len(world.names))), world.names, nbytes)


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

    In an average each op also adds up the weights, as its last value: ranks may be lost between one
    op and the next, and each bucket is divided by what was contributed to it.
    """
    leaves = arrays.leaves
    results: list[object] = [None] * len(leaves)
    buckets = plan_buckets(leaves, bucket_bytes=wanted.bucket_bytes)
    room_bytes = max((bucket.nbytes for bucket in buckets), default=0) + _WEIGHT_BYTES
    label = _label(wanted, arrays)
    root = _trainer_at(wanted.root, session.world) if wanted.kind == "broadcast" else None
    nbytes = 0
    last: LastOp | None = None
    for bucket in buckets:
        count = bucket.count + (wanted.weight is not None)
        root_rank = _rank_of(root, session.world)
        if wanted.kind != "broadcast" or root_rank == session.world.rank:
            region = session.input_values(bucket.wire, count, room_bytes=room_bytes)
            fill(bucket, leaves, region, wanted.weight)
        if label:
            call = Call(wanted.kind, bucket.wire, (count,), wanted.reduction, root_rank, tree=label)
        else:
            leaf = leaves[0]
            call = Call(wanted.kind, leaf.dtype, leaf.values.shape, wanted.reduction, root_rank)
        done = session.run_op(call, bucket.wire, count, timeout_s=wanted.timeout_s)
        total = None if wanted.weight is None else _checked_total(float(done.values[-1]))
        for index, array in read(bucket, leaves, done.values, total):
            results[index] = array
        nbytes += done.values.nbytes
        last = LastOp.among(done.op, done.world, nbytes)
    return arrays.tree.rebuild(results), last


def run_alone(wanted: Collective, arrays: Arrays, world: World) -> tuple[object, LastOp]:
    """The same without an op, for a rank that is alone for the time being: its own values."""
    if wanted.weight is not None:
        _checked_total(wanted.weight)
    results: list[object] = []
    nbytes = 0
    for leaf in arrays.leaves:
        region = np.empty(leaf.values.size, WIRE_DTYPES[leaf.wire])
        leaf.fill(region)
        results.append(leaf.like(region))
        nbytes += region.nbytes
    return arrays.tree.rebuild(results), LastOp.among(ALONE, world, nbytes)


def _trainer_at(root: int, world: World) -> TrainerId:
    """O5: who is the root of all buckets, while ranks may change between them."""
    if not 0 <= root < len(world.trainers):
        raise UsageError(f"there is no rank {root}: this job has ranks 0 to {len(world.names) - 1}")
    return world.trainers[root]


def _rank_of(root: TrainerId | None, world: World) -> int:
    """-1 if there is none; RankLost if it was lost between two ops, which all ranks see alike."""
    if root is None:
        return -1
    if root not in world.trainers:
        raise RankLost("the root of this broadcast is lost; some of its arrays had not been sent")
    return world.trainers.index(root)


def _label(wanted: Collective, arrays: Arrays) -> str:
    """What a bucket is called on all ranks; nothing for a single array."""
    if wanted.weight is not None:
        return f"average_gradients {arrays.digest()}"
    return "" if arrays.tree.is_bare else f"tree {arrays.digest()}"


def _checked_total(total: float) -> float:
    if total == 0:  # on every rank alike, so all of them stop at the same op
        raise UsageError("nothing to average: the weights of all ranks add up to 0")
    return total
