"""One collective call: a tree, checked, cut into buckets, run as ops, and put together again."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

import numpy as np

from pmesh.client.arenas import Region
from pmesh.client.buckets import Bucket, fill, may_be_lent, plan_buckets, read
from pmesh.client.leaves import Leaf, describe
from pmesh.client.op_session import OpSession
from pmesh.client.orders import Order
from pmesh.client.session import Done
from pmesh.client.trees import Tree, digest, flatten
from pmesh.compression.schemes import Scheme
from pmesh.core.messages import Call
from pmesh.core.reductions import WIRE_DTYPES, Values, check_reduction
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
    compression: str = "none"
    """How they were compressed, as `pmesh.compression.schemes.spec` names it."""
    why: str = ""
    """Why so, where it is not what the call has named."""
    compressed_bytes: int = 0
    """What this rank's values took once compressed; 0: they were not."""
    residual_norm: float | None = None
    """The L2 norm of all that compression has left out on this rank, to be added next time; None
    without error feedback."""
    clipped: int = 0
    """How many values on this rank were too large for fp16, and were cut to its largest."""

    @classmethod
    def among(cls, op: OpNumber, world: World, nbytes: int) -> "LastOp":
        """An op that completed in this world."""
        return cls(op, tuple(Rank(i) for i in range(len(world.names))), world.names, nbytes)


@dataclass(frozen=True, slots=True)
class Compression:
    """How a call's values are compressed."""

    scheme: Scheme
    feeds_back: bool
    """Whether what is left out goes into the next call."""
    why: str = ""
    """Who has said so, if not the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """What is to be done with an array, or with each bucket of a tree."""

    kind: str
    reduction: str = ""
    root: TrainerId | None = None
    """Who it is, whatever its rank becomes (O5)."""
    strategy: str = ""
    weight: float | None = None
    """This rank's, in an average; the reduction is a sum then."""
    compression: Compression | None = None
    bucket_bytes: int
    timeout_s: float
    borrows: bool = False
    """Whether numpy's arrays may stay in shared memory, where they can't be written to."""


@dataclass(frozen=True, slots=True)
class Arrays:
    """A tree of the user's, with its leaves as numpy sees them."""

    tree: Tree
    leaves: tuple[Leaf, ...]

    def digest(self) -> str:
        """Alike on two ranks only if all paths, dtypes and shapes are (I5)."""
        named = zip(self.tree.paths, self.leaves, strict=True)
        return digest([f"{path} {leaf.dtype} {leaf.values.shape}" for path, leaf in named])

    def is_like(self, other: "Arrays") -> bool:
        """Whether all paths, dtypes and shapes are the same."""
        pairs = zip(self.leaves, other.leaves, strict=False)
        return self.tree.paths == other.tree.paths and all(
            one.dtype == two.dtype and one.values.shape == two.values.shape for one, two in pairs
        )

    def detached(self) -> "Arrays":
        """The same, whose results are numpy's as yet: for a thread that is not the user's."""
        plain = (replace(leaf, rebuild=_as_it_is, rebuild_copies=False) for leaf in self.leaves)
        return Arrays(self.tree, tuple(plain))

    def attach(self, results: Sequence[Values]) -> list[object]:
        """The user's arrays from the results of `detached`."""
        return [leaf.rebuild(values) for leaf, values in zip(self.leaves, results, strict=True)]


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
    session: OpSession, order: Order, wanted: Collective, arrays: Arrays
) -> tuple[list[object], LastOp | None]:
    """Run the ops; returns the leaves of the result, and what it came to (None: nothing to do).

    In an average each op also adds up the weights, as its last value: ranks may be lost between one
    op and the next, and each bucket is divided by what was contributed to it.
    """
    leaves = arrays.leaves
    buckets = plan_buckets(leaves, bucket_bytes=wanted.bucket_bytes)
    overlap = _Overlap(session, wanted, leaves, buckets)
    label = _label(wanted, arrays)
    nbytes = 0
    last: LastOp | None = None
    for bucket, following in zip_longest(buckets, buckets[1:]):
        count = overlap.count(bucket)
        root = _rank_of(wanted.root, session.world)
        region = overlap.region(bucket)
        if region is None and (wanted.kind != "broadcast" or root == session.world.rank):
            overlap.lay_out(bucket)
        shape: tuple[int, ...] = (count,)
        dtype = bucket.wire
        if not label:
            dtype, shape = leaves[0].dtype, leaves[0].values.shape
        call = Call(
            wanted.kind,
            dtype,
            shape,
            wanted.reduction,
            root,
            tree=label,
            strategy=wanted.strategy,
        )
        done = session.run_op(
            call,
            bucket.wire,
            count,
            timeout_s=wanted.timeout_s,
            meanwhile=partial(overlap.meanwhile, following),
            region=region,
            borrows=wanted.borrows and may_be_lent(bucket, leaves),
        )
        if done.values.size or not count:  # else it is for the root of a reduce
            overlap.came(bucket, done)
        nbytes += count * WIRE_DTYPES[bucket.wire].itemsize
        last = LastOp.among(done.op, order.seen(done.world), nbytes)
    overlap.read()
    return overlap.results, last


class _Overlap:
    """While the op of a bucket runs, the next one is laid out and the one before is read."""

    def __init__(
        self,
        session: OpSession,
        wanted: Collective,
        leaves: Sequence[Leaf],
        buckets: Sequence[Bucket],
    ) -> None:
        self.results: list[object] = [None] * len(leaves)
        self._session = session
        self._wanted = wanted
        self._leaves = leaves
        self._room_bytes = max((bucket.nbytes for bucket in buckets), default=0) + _WEIGHT_BYTES
        # A large array, in a bucket of its own, would take as much memory again.
        ahead = [b.nbytes for b in buckets[1:] if b.nbytes <= wanted.bucket_bytes]
        # A broadcast's root can't: what it has sent is kept, and memory is asked for anew (O2).
        self._ahead_bytes = 0 if wanted.kind == "broadcast" or not ahead else max(ahead)
        session.prepare_ahead(self._ahead_bytes and self._ahead_bytes + _WEIGHT_BYTES)
        self._laid_out: Bucket | None = None
        self._unread: tuple[Bucket, Done, float | None] | None = None

    def count(self, bucket: Bucket) -> int:
        """The values of its op."""
        return bucket.count + (self._wanted.weight is not None)

    def region(self, bucket: Bucket) -> Region | None:
        """Where its values are already, if the user has put them into shared memory."""
        # O2: what a broadcast's root has sent is retained, and the user's may change.
        if self._wanted.kind == "broadcast" or self._wanted.weight is not None:
            return None
        if len(bucket.leaves) != 1:
            return None
        return self._session.region_of(self._leaves[bucket.leaves[0]].values, bucket.wire)

    def lay_out(self, bucket: Bucket) -> None:
        """Fill the input of the next op, if that was not done ahead."""
        if bucket is not self._laid_out:
            count = self.count(bucket)
            region = self._session.input_values(bucket.wire, count, room_bytes=self._room_bytes)
            fill(bucket, self._leaves, region, self._wanted.weight)

    def meanwhile(self, following: Bucket | None) -> None:
        """What there is to do while an op runs."""
        fits = following is not None and following.nbytes <= self._ahead_bytes
        if following is not None and fits and self.region(following) is None:
            region = self._session.values_ahead(following.wire, self.count(following))
            fill(following, self._leaves, region, self._wanted.weight)
            self._laid_out = following
        self.read()

    def came(self, bucket: Bucket, done: Done) -> None:
        """The result of an op; UsageError if it can't be averaged."""
        total = None if self._wanted.weight is None else checked_total(float(done.values[-1]))
        self._unread = bucket, done, total
        if not self._ahead_bytes:
            self.read()

    def read(self) -> None:
        """Take the arrays out of the last result that came."""
        if self._unread is not None:
            bucket, done, total = self._unread
            self._unread = None
            for index, array in read(bucket, self._leaves, done.values, total, lent=done.lent):
                self.results[index] = array


def run_alone(wanted: Collective, arrays: Arrays, world: World) -> tuple[list[object], LastOp]:
    """The same without an op, for a rank that is alone for the time being: its own values."""
    if wanted.weight is not None:
        checked_total(wanted.weight)
    results: list[object] = []
    nbytes = 0
    for leaf in arrays.leaves:
        region = np.empty(leaf.values.size, WIRE_DTYPES[leaf.wire])
        leaf.fill(region)
        results.append(leaf.like(region))
        nbytes += region.nbytes
    return results, LastOp.among(ALONE, world, nbytes)


def _rank_of(root: TrainerId | None, world: World) -> int:
    """-1 if there is none; RankLost if it was lost between two ops, which all ranks see alike."""
    if root is None:
        return -1
    if root not in world.trainers:
        raise RankLost("the root of this call is lost; some of its arrays had not been sent")
    return world.trainers.index(root)


def _label(wanted: Collective, arrays: Arrays) -> str:
    """What a bucket is called on all ranks; nothing for a single array."""
    if wanted.weight is not None:
        return f"average_gradients {arrays.digest()}"
    return "" if arrays.tree.is_bare else f"tree {arrays.digest()}"


def checked_total(total: float) -> float:
    """The sum of all weights; raises UsageError if there is nothing to divide by."""
    if total == 0:  # on every rank alike, so all of them stop at the same op
        raise UsageError("nothing to average: the weights of all ranks add up to 0")
    return total


def _as_it_is(values: Values) -> object:
    return values
