"""One collective call: check a tree, cut it into buckets, run an op for each, and rebuild it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import zip_longest
from typing import Any, Literal, cast

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from pmesh.client.collective.buckets import Backward, Bucket, plan_buckets, share_memory
from pmesh.client.session.arenas import InputRegion
from pmesh.client.session.session import Done, Early, TrainerSession
from pmesh.client.trees.arrays import (
    WIRE_OF,
    Leaf,
    Tree,
    describe,
    describe_one,
    digest,
    divided,
    flatten,
    is_mlx,
    is_of,
    numpy_leaf,
)
from pmesh.client.trees.raw import describe_bits
from pmesh.core.ops.plan import chunk_bounds
from pmesh.core.ops.reductions import WIRE_DTYPES, Values, check_reduction
from pmesh.core.wire.calls import Call
from pmesh.core.wire.trainer import World
from pmesh.errors import RankLost, UnsupportedArray, UsageError
from pmesh.ids import OpNumber, Rank, TrainerId

LENT_FROM_BYTES = 64 * 1024
"""To copy less takes less time than the agent needs to lend it, and to hear that it was dropped."""


def fill(bucket: Bucket, leaves: Sequence[Leaf], region: Values, weight: float | None) -> None:
    """Copy the bucket's arrays into a region of an arena, one after another.

    If the region has one value more than the bucket, it becomes the weight.
    """
    start = 0
    for index in bucket.leaves:
        end = start + leaves[index].values.size
        leaves[index].fill(region[start:end], weight)
        start = end
    if start < region.size:
        region[start] = weight


def may_be_lent(bucket: Bucket, leaves: Sequence[Leaf]) -> bool:
    """Return True if the bucket's arrays can and should be views of a read-only region."""
    own = [leaves[index] for index in bucket.leaves]
    return bucket.nbytes >= LENT_FROM_BYTES and _may_be_views(bucket.wire, own)


def _may_be_views(wire: str, leaves: Sequence[Leaf]) -> bool:
    dtype = WIRE_DTYPES[wire]
    return all(leaf.takes_read_only and leaf.may_keep(dtype) for leaf in leaves)


def read(
    bucket: Bucket,
    leaves: Sequence[Leaf],
    region: Values,
    divisor: float | None,
    *,
    lent: bool = False,
) -> list[tuple[int, object]]:
    """Return arrays like the user's from a region laid out by `fill`, each with its index.

    Those of numpy and torch share one block of memory: many small blocks take twice as long to
    fault in, and the results of a call are mostly dropped together. A `lent` region is that block.
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


_UNLIKE = "out= must have the same paths, shapes and dtypes as the input"
_WIDENS = 2  # at most, for 16-bit floats
_WEIGHT_BYTES = 8  # a weight is sent as a value of its bucket
ALONE = OpNumber(-1)
OnNonfinite = Literal["keep", "raise", "skip"]


@dataclass(frozen=True, slots=True)
class LastOp:
    """Facts about the last collective call."""

    op: OpNumber
    """The number of its op; of the last op if it took several; -1 if this rank was alone."""
    contributors: tuple[Rank, ...]
    """The ranks whose values are in the result: all that were left at the end of that op."""
    names: tuple[str, ...]
    """The names of their machines."""
    bytes: int
    """The size of the values in shared memory, over all ops of the call."""
    compression: str = "none"
    """The compression of the values, as `pmesh.compression.schemes.spec` names it."""
    why: str = ""
    """The reason for the compression, if the call did not name it."""
    compressed_bytes: int = 0
    """The size of this rank's compressed values; 0 if nothing was compressed."""
    residual_norm: float | None = None
    """The L2 norm of what compression has left out on this rank, to be added next time; None
    without error feedback."""
    clipped: int = 0
    """The number of values on this rank that were too large for fp16, and became its largest."""

    @classmethod
    def among(cls, op: OpNumber, world: World, nbytes: int) -> "LastOp":
        """Return the facts about an op that completed in this world."""
        ranks = cast("tuple[Rank, ...]", tuple(range(len(world.names))))
        return cls(op, ranks, world.names, nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """The op for an array, or for each bucket of a tree."""

    kind: str
    reduction: str = ""
    root: TrainerId | None = None
    """The root's trainer, which stays the same while ranks change (O5)."""
    strategy: str = ""
    weight: float | None = None
    """This rank's weight in an average; the reduction is a sum then."""
    bucket_bytes: int
    timeout_s: float
    borrows: bool = False
    """True if numpy's results may stay in shared memory, which is read-only."""
    backward: Backward | None = None
    """The order of gradients that are computed while others are sent; None for the order of the
    tree, in buckets of `bucket_bytes`."""

    on_nonfinite: OnNonfinite = "keep"
    """What happens if a gradient is NaN or infinite."""

    def buckets_of(self, leaves: Sequence[Leaf]) -> list[Bucket]:
        """Return the buckets, one for each op of the call."""
        if self.backward is None:
            return plan_buckets(leaves, bucket_bytes=self.bucket_bytes)
        backward = self.backward
        return plan_buckets(leaves, bucket_bytes=backward.bucket_bytes, order=backward.order)


@dataclass(frozen=True, slots=True)
class Arrays:
    """A tree of the user's, with its leaves as numpy sees them."""

    tree: Tree
    leaves: tuple[Leaf, ...]
    lazy: bool = False
    """True if MLX's arrays are not evaluated yet: the values of their leaves are arbitrary."""
    shares_memory: bool = False
    """True if a result is written where another array of the call lies, as with tied weights."""

    def evaluated(self) -> "Arrays":
        """Evaluate all arrays; call it in the user's thread, which has the MLX streams."""
        return Arrays(self.tree, tuple(describe(self.tree))) if self.lazy else self

    def digest(self) -> str:
        """Return a digest that is equal on two ranks only if paths, dtypes and shapes are (I5)."""
        named = zip(self.tree.paths, self.leaves, strict=True)
        return digest([f"{path} {leaf.users_dtype} {leaf.values.shape}" for path, leaf in named])

    def is_like(self, other: "Arrays") -> bool:
        """Return True if all paths, dtypes and shapes are the same."""
        pairs = zip(self.leaves, other.leaves, strict=False)
        return self.tree.paths == other.tree.paths and all(_are_alike(*pair) for pair in pairs)

    def detached(self) -> "Arrays":
        """Return the same arrays, with results in numpy, for a thread that is not the user's."""
        return Arrays(self.tree, tuple(map(detached, self.leaves)))

    def attach(self, results: Sequence[Values]) -> list[object]:
        """Return the user's arrays, made from the results of `detached`."""
        return [leaf.rebuild(values) for leaf, values in zip(self.leaves, results, strict=True)]


def take_apart(
    x: object, *, reduction: str = "", only_moves: bool = False, lazily: bool = False
) -> Arrays:
    """Return the arrays of a tree; with `lazily` those of MLX are not evaluated.

    Raises:
        UnsupportedArray: an array can't be sent, or the reduction does not fit its dtype.
    """
    if x is None:
        raise UnsupportedArray("None is not an array")
    tree = flatten(x)
    if only_moves:
        leaves = tuple(describe_bits(tree))
    elif isinstance(x, np.ndarray):
        leaves, lazily = (numpy_leaf(cast("NDArray[Any]", x)),), False
    else:
        leaves = tuple(describe(tree, lazily=lazily))
    for path, leaf in zip(tree.paths, leaves, strict=True):
        if reduction:
            allow_reduction(reduction, leaf.dtype, path)
    return Arrays(tree, leaves, lazy=lazily and any(map(is_mlx, tree.leaves)))


@lru_cache(maxsize=256)  # a training reduces a few dtypes, again and again
def allow_reduction(reduction: str, dtype: str, path: str = "") -> None:
    """Raise UnsupportedArray if values of a user's dtype can't be reduced so."""
    try:
        check_reduction(reduction, WIRE_OF[dtype])
    except ValueError as e:
        raise UnsupportedArray(f"{path}: {e}" if path else str(e)) from e


def run_collective(
    session: TrainerSession,
    wanted: Collective,
    arrays: Arrays,
    look: Callable[[Values, World], None] | None = None,
) -> tuple[list[object], LastOp | None]:
    """Run the ops; return the leaves of the result, and the last op (None if there are no leaves).

    `look` is called with the values of each op, and who took part; not with a single array.

    In an average each op also adds up the weights, as its last value. A rank may be lost between
    two ops, so each bucket is divided by the weights that were contributed to it.
    """
    leaves = arrays.leaves
    if arrays.tree.is_bare and wanted.weight is None:
        result, only = run_single(session, wanted, leaves[0])
        return [result], only
    buckets = wanted.buckets_of(leaves)
    overlap = _Overlap(session, wanted, arrays, buckets)
    label = _label(wanted, arrays)
    nbytes = 0
    last: LastOp | None = None
    for bucket, following in zip_longest(buckets, buckets[1:]):
        count = overlap.count(bucket)
        root = _rank_of(wanted.root, session.world)
        region = overlap.region(bucket)
        if region is None and (wanted.kind != "broadcast" or root == session.world.rank):
            overlap.lay_out(bucket)
        call = Call(
            wanted.kind,
            bucket.wire,
            (count,),
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
        if look is not None:
            look(done.values, done.world)
        if done.values.size or not count:  # else only the root of a reduce has the result
            overlap.take(bucket, done)
        nbytes += count * WIRE_DTYPES[bucket.wire].itemsize
        last = LastOp.among(done.op, done.world, nbytes)
    overlap.read()
    return overlap.results, last


def run_single(session: TrainerSession, wanted: Collective, leaf: Leaf) -> tuple[object, LastOp]:
    """Run the op of an array that is no part of a tree: there is nothing to overlap."""
    wire, values, broadcasts = WIRE_OF[leaf.dtype], leaf.values, wanted.kind == "broadcast"
    nbytes = values.size * WIRE_DTYPES[wire].itemsize
    root = -1 if wanted.root is None else _rank_of(wanted.root, session.world)
    # O2: what a broadcast's root has sent is retained, but the user may change this memory.
    region = None if broadcasts else session.region_of(values, wire)
    if region is None and (not broadcasts or root == session.world.rank):
        room_bytes = nbytes + _WEIGHT_BYTES
        leaf.fill(
            session.input_values(wire, values.size, room_bytes=room_bytes, retained=broadcasts)
        )
    done = session.run_op(
        Call(
            wanted.kind,
            leaf.bits_of or leaf.dtype,
            values.shape,
            wanted.reduction,
            root,
            strategy=wanted.strategy,
        ),
        wire,
        values.size,
        timeout_s=wanted.timeout_s,
        region=region,
        borrows=wanted.borrows and nbytes >= LENT_FROM_BYTES and _may_be_views(wire, [leaf]),
    )
    result = None
    if done.values.size or not values.size:  # else only the root of a reduce has the result
        keeps = not done.lent and leaf.may_keep(done.values.dtype)
        result = leaf.of(done.values.copy() if keeps else done.values)
    return result, LastOp.among(done.op, done.world, nbytes)


def run_in_turn(
    session: TrainerSession, wanted: Collective, leaf: Leaf, following: Sequence[Leaf]
) -> tuple[object, LastOp]:
    """Run the op of a small array; send those of the following arrays with it, if there are any.

    Called for each of these next, without any, it only waits for the result. An op that was sent is
    void if one before it has failed, and is run anew.
    """
    if not session.has_begun:
        if not following:
            return run_single(session, wanted, leaf)
        session.begin_ops(
            [_early(wanted, each) for each in (leaf, *following)], timeout_s=wanted.timeout_s
        )
    done = session.end_op()
    return leaf.like(done.values), LastOp.among(done.op, done.world, done.values.nbytes)


def _early(wanted: Collective, leaf: Leaf) -> Early:
    call = Call(
        wanted.kind, leaf.dtype, leaf.values.shape, wanted.reduction, strategy=wanted.strategy
    )
    return Early(call, leaf.wire, leaf.values.size, leaf.fill)


class _Overlap:
    """Fills the next bucket and reads the previous result while the op of a bucket runs."""

    def __init__(
        self,
        session: TrainerSession,
        wanted: Collective,
        arrays: Arrays,
        buckets: Sequence[Bucket],
    ) -> None:
        self.results: list[object] = [None] * len(arrays.leaves)
        self._session = session
        self._wanted = wanted
        self._tree = arrays.tree
        self._leaves = list(arrays.leaves)
        # With a weight of 0 the values are not read, so they need not be computed.
        lazy = arrays.lazy and wanted.weight != 0
        self._unevaluated = {i for i, x in enumerate(arrays.tree.leaves) if lazy and is_mlx(x)}
        self._room_bytes = max((bucket.nbytes for bucket in buckets), default=0) + _WEIGHT_BYTES
        # Not for a large array, which has its own bucket: it would take as much memory again.
        largest = wanted.bucket_bytes if wanted.backward is None else wanted.backward.bucket_bytes
        ahead = [b.nbytes for b in buckets[1:] if b.nbytes <= largest]
        # Not for a broadcast: what its root has sent is retained, so each op needs new memory (O2).
        self._ahead_bytes = 0 if wanted.kind == "broadcast" or not ahead else max(ahead)
        session.prepare_ahead(self._ahead_bytes and self._ahead_bytes + _WEIGHT_BYTES)
        self._laid_out: Bucket | None = None
        self._unread: tuple[Bucket, Done, float | None] | None = None

    def count(self, bucket: Bucket) -> int:
        """Return the number of values of the bucket's op."""
        return bucket.count + (self._wanted.weight is not None)

    def region(self, bucket: Bucket) -> InputRegion | None:
        """Return where its values lie, if the user has put them into shared memory."""
        # O2: what a broadcast's root has sent is retained, but the user may change this memory.
        if self._wanted.kind == "broadcast" or self._wanted.weight is not None:
            return None
        if len(bucket.leaves) != 1:
            return None
        return self._session.region_of(self._leaves[bucket.leaves[0]].values, bucket.wire)

    def lay_out(self, bucket: Bucket) -> None:
        """Fill the input of the next op, unless it was filled ahead."""
        if bucket is not self._laid_out:
            self._evaluate(bucket)
            count = self.count(bucket)
            region = self._session.input_values(
                bucket.wire,
                count,
                room_bytes=self._room_bytes,
                retained=self._wanted.kind == "broadcast",
            )
            fill(bucket, self._leaves, region, self._wanted.weight)

    def meanwhile(self, following: Bucket | None) -> None:
        """Fill the next bucket and read the last result while an op runs."""
        if following is not None:
            self._evaluate(following)
        fits = following is not None and following.nbytes <= self._ahead_bytes
        if following is not None and fits and self.region(following) is None:
            region = self._session.values_ahead(following.wire, self.count(following))
            fill(following, self._leaves, region, self._wanted.weight)
            self._laid_out = following
        self.read()

    def _evaluate(self, bucket: Bucket) -> None:
        """Compute the bucket's arrays; only these, since `mx.eval` waits for all it is given."""
        if not self._unevaluated:
            return
        indices = [index for index in bucket.leaves if index in self._unevaluated]
        for index, leaf in zip(indices, describe(self._tree, indices), strict=True):
            self._leaves[index] = leaf
        self._unevaluated.difference_update(indices)

    def take(self, bucket: Bucket, done: Done) -> None:
        """Take the result of an op; raise UsageError if all weights add up to 0."""
        total = None if self._wanted.weight is None else checked_total(float(done.values[-1].real))
        self._unread = bucket, done, total
        if not self._ahead_bytes:
            self.read()

    def read(self) -> None:
        """Make arrays from the last result."""
        if self._unread is not None:
            bucket, done, total = self._unread
            self._unread = None
            for index, array in read(bucket, self._leaves, done.values, total, lent=done.lent):
                self.results[index] = array


def run_alone(wanted: Collective, arrays: Arrays, world: World) -> tuple[list[object], LastOp]:
    """Return the result for a rank that is alone for now: its own values, without an op."""
    if wanted.weight is not None:
        checked_total(wanted.weight)
    ended = [single_alone(leaf, world) for leaf in arrays.evaluated().leaves]
    nbytes = sum(last.bytes for _, last in ended)
    return [result for result, _ in ended], LastOp.among(ALONE, world, nbytes)


def single_alone(leaf: Leaf, world: World) -> tuple[object, LastOp]:
    """Return the result of one array for a rank that is alone for now: its own values."""
    region = np.empty(leaf.values.size, WIRE_DTYPES[leaf.wire])
    leaf.fill(region)
    return leaf.like(region), LastOp.among(ALONE, world, region.nbytes)


def run_reduce_scatter(
    session: TrainerSession, leaf: Leaf, *, reduction: str, timeout_s: float
) -> tuple[Values, LastOp]:
    """Return this rank's part, as `numpy.array_split` cuts the first dimension."""
    places = session.places
    rows = leaf.values.shape[0]
    bounds = chunk_bounds(rows, len(places))
    width = leaf.values.size // rows if rows else 0
    ranks = sorted(range(len(places)), key=places.__getitem__)  # the rank at each place
    region = session.input_values(leaf.wire, leaf.values.size, room_bytes=0)
    begin = 0
    for rank in ranks:
        part = _part_of(leaf, bounds[rank], bounds[rank + 1])
        part.fill(region[begin : begin + part.values.size])
        begin += part.values.size
    call = Call("reduce_scatter", leaf.dtype, leaf.values.shape, reduction)
    done = session.run_op(
        call,
        leaf.wire,
        leaf.values.size,
        timeout_s=timeout_s,
        parts=tuple((bounds[rank + 1] - bounds[rank]) * width for rank in ranks),
    )
    rank = done.world.rank
    own = _part_of(leaf, bounds[rank], bounds[rank + 1])
    return cast("Values", own.like(done.values)), LastOp.among(done.op, done.world, region.nbytes)


def _part_of(leaf: Leaf, begin: int, end: int) -> Leaf:
    return structs.replace(leaf, values=leaf.values[begin:end])


def _rank_of(root: TrainerId | None, world: World) -> int:
    """Return the root's rank, or -1; raise RankLost, on all ranks, if it was lost between ops."""
    if root is None:
        return -1
    if root not in world.trainers:
        raise RankLost("the root of this call is lost; some of its arrays had not been sent")
    return world.trainers.index(root)


def _label(wanted: Collective, arrays: Arrays) -> str:
    """Return the name that all ranks give a call with these arrays."""
    if wanted.weight is not None:
        order = wanted.backward
        by = "" if order is None else f" by {order.digest(arrays.tree.paths)}"
        return f"average_gradients {arrays.digest()}{by}"
    return f"tree {arrays.digest()}"


def checked_total(total: float) -> float:
    """Return the sum of all weights; raise UsageError if it is 0."""
    if total == 0:  # it is the same on every rank, so all of them stop at the same op
        raise UsageError("nothing to average: the weights of all ranks add up to 0")
    return total


def detached(leaf: Leaf) -> Leaf:
    """Return the same array, with a result in numpy, for a thread that is not the user's."""
    return structs.replace(leaf, rebuild=as_it_is, rebuild_copies=False)


def as_it_is(values: Values) -> object:
    """Return the values."""
    return values


def written_into(
    arrays: Arrays, out: object, *, bucket_bytes: int, only_moves: bool = False
) -> Arrays:
    """Return the same arrays, with results written into `out`.

    Args:
        arrays: what is sent.
        out: a tree like it.
        bucket_bytes: the most that is sent as one op; of less, all is sent before any is written.
        only_moves: see `take_apart`.

    Raises:
        UnsupportedArray: an array of `out` can't be written to.
        UsageError: `out` has other paths, shapes or dtypes.
    """
    in_place = out is arrays.tree.source  # usual with torch: skip what is known already
    targets = arrays if in_place else take_apart(out, only_moves=only_moves)
    if not (in_place or targets.is_like(arrays)):
        raise UsageError(_UNLIKE)
    together = zip(
        arrays.leaves, targets.leaves, targets.tree.leaves, targets.tree.paths, strict=True
    )
    leaves = tuple(_writes(*each) for each in together)
    values = [leaf.values for leaf in arrays.leaves]
    written = [] if in_place else [leaf.values for leaf in targets.leaves]
    many = _WIDENS * sum(each.nbytes for each in values) > bucket_bytes
    return Arrays(targets.tree, leaves, shares_memory=many and share_memory(values, written))


def written_into_one(leaf: Leaf, x: object, out: object) -> Leaf:
    """Return the same array `x`, with a result written into `out`; raises as `written_into`."""
    target = leaf if out is x else describe_one(out)
    if target is None or not _are_alike(leaf, target):
        raise UsageError(_UNLIKE)
    return _writes(leaf, target, out)


def _are_alike(one: Leaf, two: Leaf) -> bool:
    return one.users_dtype == two.users_dtype and one.values.shape == two.values.shape


def _writes(leaf: Leaf, target: Leaf, x: object, path: str = "") -> Leaf:
    write = _writer(target, x, path)
    return structs.replace(leaf, rebuild=write, rebuild_copies=True, target=_divisible(target))


def _writer(target: Leaf, x: object, path: str) -> Callable[[Values], object]:
    if not may_be_written(x) or (target.bits_of and not is_memory_of(x, target.values)):
        where = f"{path}: " if path else ""
        raise UnsupportedArray(
            f"{where}out= takes numpy arrays that may be written to and torch tensors on the CPU"
            f"{', in one piece and in the byte order of the machine' * bool(target.bits_of)}"
        )
    repeats = zip(target.values.shape, target.values.strides, strict=True)
    if not target.values.flags.c_contiguous and any(n > 1 and not step for n, step in repeats):
        where = f"{path}: " if path else ""
        raise UnsupportedArray(f"{where}out= has one place for several values: pass a copy of it")

    def write(values: Values) -> object:
        if values is not target.values:
            np.copyto(target.values, values)
        return x

    return write


def is_memory_of(x: object, values: Values) -> bool:
    """Return True if the values are the array's memory, not a copy of several pieces."""
    address = x.ctypes.data if isinstance(x, np.ndarray) else cast("Any", x).data_ptr()
    return not values.size or address == values.ctypes.data


def _divisible(target: Leaf) -> "Values | None":
    """Return the array if quotients can be written to it without rounding."""
    return target.values if target.values.dtype == WIRE_DTYPES[target.wire] else None


def may_be_written(x: object) -> bool:
    """Return True for arrays of numpy, or of torch on the CPU, that may be written to."""
    if isinstance(x, np.ndarray):
        return bool(x.flags.writeable)
    tensor = cast("Any", x)  # torch has no types here
    if not is_of("torch", "Tensor", x):
        return False
    return tensor.device.type == "cpu" and not (tensor.is_neg() or tensor.is_conj())
