"""The collectives that reduce or broadcast trees of arrays, bucket by bucket."""

import math
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, cast, get_args, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pmesh.client.calls.queue import Caller, Handle, Turn, check_timeout
from pmesh.client.collective.bucketed import (
    Arrays,
    Collective,
    LastOp,
    allow_reduction,
    as_it_is,
    detached,
    run_alone,
    run_collective,
    run_in_turn,
    run_reduce_scatter,
    run_single,
    single_alone,
    take_apart,
    written_into,
    written_into_one,
)
from pmesh.client.collective.differences import name_differences, only_orders_differ
from pmesh.client.collective.guard import check_alone, run_guarded
from pmesh.client.elastic.place import Place
from pmesh.client.feedback.call import (
    Compression,
    chosen,
    run_compressed,
)
from pmesh.client.feedback.memory import Feedback
from pmesh.client.session.session import TrainerSession
from pmesh.client.trees.arrays import WIRE_OF, Leaf, describe_one
from pmesh.compression.schemes import Scheme
from pmesh.core.ops.reductions import Values
from pmesh.core.wire.trainer import World
from pmesh.errors import OpMismatch, UnsupportedArray, UsageError

DEFAULT_BUCKET_BYTES = 32 * 1024 * 1024  # so large that latency hardly counts, yet little memory
_MOST_VALUES = sys.maxsize // 8  # an address space holds no more values of 8 bytes
DEFAULT_TIMEOUT_S = 1800.0  # I6: a slow peer that is alive gets this long

R = TypeVar("R")
Scalar = TypeVar("Scalar", bound=np.generic)
T = TypeVar("T")


class NamedReduction(Protocol):
    """A member of `torch.distributed.ReduceOp`, such as `ReduceOp.SUM`."""

    @property
    def name(self) -> str:
        """The name, such as "SUM"."""
        ...


Reduction: TypeAlias = str | NamedReduction
_OTHER_NAMES = {"avg": "mean", "product": "prod"}


def named_reduction(op: Reduction) -> str:
    """Return the name of a reduction, as `Call` has it.

    >>> named_reduction("sum"), named_reduction("SUM"), named_reduction("avg")
    ('sum', 'sum', 'mean')
    """
    name = (op if isinstance(op, str) else str(getattr(op, "name", op))).lower()
    return _OTHER_NAMES.get(name, name)


Strategy = Literal["auto", "ring", "tree", "centralized", "hierarchical", "chain", "direct"]
_STRATEGIES = get_args(Strategy)


class Reducing(Caller):
    """all_reduce, broadcast, reduce and reduce_scatter."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._feedback = Feedback()

    @overload
    def empty(self, shape: int | Sequence[int]) -> NDArray[np.float32]: ...
    @overload
    def empty(self, shape: int | Sequence[int], dtype: type[Scalar]) -> NDArray[Scalar]: ...
    @overload
    def empty(self, shape: int | Sequence[int], dtype: DTypeLike) -> NDArray[Any]: ...
    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """Return a numpy array in memory that the agent shares: to reduce it needs no copy.

        Fill it and pass it to `all_reduce` or `reduce` of this mesh. You may also pass a contiguous
        part of it, or a torch tensor made of it by `torch.from_numpy`. For any other call, and once
        the agent has stopped, it is an ordinary array. As with every collective, do not change it
        until the call is done. With `copy=False` the result is not copied either.

        Args:
            shape: as for `numpy.empty`; the first values are arbitrary, too.
            dtype: any that `all_reduce` takes except float16 and bfloat16, which are converted.

        Raises:
            UnsupportedArray: the dtype is another one.
            TypeError: the shape holds something else than whole numbers.
            UsageError: there is no room; the agent gives a trainer a quarter of its memory.
        """
        wire = np.dtype(dtype)
        if WIRE_OF.get(wire.name) != wire.name or not wire.isnative:
            own = ", ".join(name for name, travels_as in WIRE_OF.items() if name == travels_as)
            raise UnsupportedArray(f"{wire} does not travel as it is; empty() makes {own}")
        sizes = tuple(map(operator.index, shape if isinstance(shape, Sequence) else (shape,)))
        count = math.prod(sizes)
        if any(size < 0 for size in sizes) or count > _MOST_VALUES:
            raise UsageError(f"no array has the shape {shape}")

        def run(place: Place) -> tuple[Values, None]:
            return place.empty(wire.name, count), None

        return cast("NDArray[Any]", self._do(run, lambda values: values.reshape(sizes)))

    @overload
    def all_reduce(
        self,
        x: T,
        op: Reduction = ...,
        timeout_s: float = ...,
        *,
        out: T | None = ...,
        copy: bool = ...,
        strategy: Strategy = ...,
        compression: Scheme | str | None = ...,
        async_op: Literal[False] = ...,
    ) -> T: ...
    @overload
    def all_reduce(
        self,
        x: T,
        op: Reduction = ...,
        timeout_s: float = ...,
        *,
        out: T | None = ...,
        copy: bool = ...,
        strategy: Strategy = ...,
        compression: Scheme | str | None = ...,
        async_op: Literal[True],
    ) -> Handle[T]: ...
    def all_reduce(
        self,
        x: T,
        op: Reduction = "sum",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        out: T | None = None,
        copy: bool = True,
        strategy: Strategy = "auto",
        compression: Scheme | str | None = None,
        async_op: bool = False,
    ) -> T | Handle[T]:
        """Reduce the values of all ranks; every rank gets the result.

        Args:
            x: an array or a tree, with the same shapes and dtypes on every rank.
            op: sum, mean (floats only), max, min or prod; for bool max (any), min or prod (all);
                for integers and bool also band, bor and bxor, which combine bits.
                Names in capitals and those of `torch.distributed.ReduceOp` mean the same.
            timeout_s: for each op; a tree takes one op for each 32 MiB of a dtype.
            out: arrays like x for the result, numpy's or torch's on the CPU; may be x itself.
            copy: with False numpy arrays of the result may stay in the agent's memory: they can't
                be written to, and are yours for as long as you keep them. See `empty`.
            strategy: "ring" sends the fewest bytes, "tree" and "centralized" wait least often,
                "hierarchical" first reduces among ranks with fast links, "chain" avoids the ring's
                slowest link, "direct" waits twice and uses all links. "auto" takes the one that
                costs least according to measurements of the links. Each adds in an order of its
                own: if you name one, two runs with the same ring give the same bits.
            compression: "int8", PowerSGD(rank=4) and so on (`pmesh.compression.schemes`). It sends
                fewer bytes, and the result is less exact, but has the same bits on every rank. Only
                for sums and means of floats, which are compressed from float32.
            async_op: return a handle at once.

        Returns:
            The same structure as `x`. A tree's arrays of numpy and torch may be views of one block
            of memory, as those of `average_gradients`.

        Raises:
            UnsupportedCompression: the compression is invalid, or does not fit these values.
            UnsupportedArray: x or its dtype is not supported, or not for this op.
            OpMismatch: another rank called something else.
            RankLost: a rank is lost, and some rank has connected with `on_loss="raise"`.
            NotEnoughRanks: fewer than `min_ranks` were left until the time was over.
            OpTimedOut: some rank did not call in time.
            HistorySuperseded: the job has continued without this rank; `sync` comes back to it.
            AgentStopped: the agent on this machine has stopped; `sync` comes back through another.
            GroupBroken: in a group, instead of the errors that a lost rank causes.
        """
        named = op if isinstance(op, str) else named_reduction(op)
        wanted = _all_reduce_of(named, strategy, timeout_s, DEFAULT_BUCKET_BYTES, borrows=not copy)
        reduction = wanted.reduction
        if out is not None and not copy:
            raise UsageError("out= is where the result is copied to: not with copy=False")
        leaf = describe_one(x) if compression is None else None
        if leaf is not None:
            allow_reduction(reduction, leaf.dtype)
            if out is not None:
                leaf = written_into_one(leaf, x, out)
            return cast("T", self._run_one(wanted, leaf, async_op=async_op))
        arrays = take_apart(x, reduction=reduction)
        scheme = None
        if compression is not None:
            scheme = chosen(compression, arrays, reduction=reduction, strategy=wanted.strategy)
        if out is not None:
            arrays = written_into(arrays, out, bucket_bytes=DEFAULT_BUCKET_BYTES)
        return cast("T", self._run(wanted, arrays, compression=scheme, async_op=async_op))

    @overload
    def broadcast(
        self,
        x: T,
        root: int = ...,
        timeout_s: float = ...,
        *,
        out: T | None = ...,
        async_op: Literal[False] = ...,
    ) -> T: ...
    @overload
    def broadcast(
        self,
        x: T,
        root: int = ...,
        timeout_s: float = ...,
        *,
        out: T | None = ...,
        async_op: Literal[True],
    ) -> Handle[T]: ...
    def broadcast(
        self,
        x: T,
        root: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        out: T | None = None,
        async_op: bool = False,
    ) -> T | Handle[T]:
        """Send the values of one rank to all.

        Args:
            x: an array or a tree of any numbers, with the same shapes and dtypes on every rank;
                only the root's values matter.
            root: the rank that sends; if ranks change, it stays the same trainer.
            timeout_s: for each op; a tree takes one op for each 32 MiB of a dtype.
            out: as for `all_reduce`; may be x itself.
            async_op: return a handle at once.

        Raises:
            RankLost: the root is lost.
            PmeshError: as for `all_reduce`.
        """
        wanted = Collective(
            kind="broadcast",
            root=self._trainer_at(root),
            bucket_bytes=DEFAULT_BUCKET_BYTES,
            timeout_s=check_timeout(timeout_s),
        )
        arrays = take_apart(x, only_moves=True)
        if out is not None:
            arrays = written_into(arrays, out, bucket_bytes=DEFAULT_BUCKET_BYTES, only_moves=True)
        return cast("T | Handle[T]", self._run(wanted, arrays, async_op=async_op))

    @overload
    def reduce(
        self,
        x: T,
        root: int = ...,
        op: Reduction = ...,
        timeout_s: float = ...,
        *,
        async_op: Literal[False] = ...,
    ) -> T | None: ...
    @overload
    def reduce(
        self,
        x: T,
        root: int = ...,
        op: Reduction = ...,
        timeout_s: float = ...,
        *,
        async_op: Literal[True],
    ) -> Handle[T | None]: ...
    def reduce(
        self,
        x: T,
        root: int = 0,
        op: Reduction = "sum",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        async_op: bool = False,
    ) -> T | Handle[T | None] | None:
        """Reduce the values of all ranks; one rank gets the result, the others None.

        Args:
            x: an array or a tree, with the same shapes and dtypes on every rank.
            root: the rank that gets the result; if ranks change, it stays the same trainer.
            op: as for `all_reduce`.
            timeout_s: as for `all_reduce`.
            async_op: return a handle at once.

        Raises:
            RankLost: the root is lost.
            PmeshError: as for `all_reduce`.
        """
        reduction = named_reduction(op)
        wanted = Collective(
            kind="reduce",
            reduction=reduction,
            root=self._trainer_at(root),
            bucket_bytes=DEFAULT_BUCKET_BYTES,
            timeout_s=check_timeout(timeout_s),
        )
        result = self._run(
            wanted, take_apart(x, reduction=reduction), async_op=async_op, keep=root == self.rank
        )
        return cast("T | None", result)

    @overload
    def reduce_scatter(
        self, x: T, op: Reduction = ..., timeout_s: float = ..., *, async_op: Literal[False] = ...
    ) -> T: ...
    @overload
    def reduce_scatter(
        self, x: T, op: Reduction = ..., timeout_s: float = ..., *, async_op: Literal[True]
    ) -> Handle[T]: ...
    def reduce_scatter(
        self,
        x: T,
        op: Reduction = "sum",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        async_op: bool = False,
    ) -> T | Handle[T]:
        """Reduce the values of all ranks; each rank gets a part of the result.

        Args:
            x: one array with a first dimension, of the same shape and dtype on every rank.
            op: as for `all_reduce`.
            timeout_s: for the op.
            async_op: return a handle at once.

        Returns:
            This rank's part of the first dimension, as `numpy.array_split` cuts it into `size`
            parts: the first `len(x) % size` ranks get one row more.

        Raises:
            RosterChanged: a rank was lost in the op.
            PmeshError: as for `all_reduce`.
        """
        reduction = named_reduction(op)
        arrays = take_apart(x, reduction=reduction)
        if not arrays.tree.is_bare or not arrays.leaves[0].values.ndim:
            raise UsageError("reduce_scatter takes one array, with at least one dimension")
        timeout_s = check_timeout(timeout_s)
        leaf = arrays.detached().leaves[0]

        def ops(session: TrainerSession) -> tuple[Values, LastOp]:
            return run_reduce_scatter(session, leaf, reduction=reduction, timeout_s=timeout_s)

        alone = cast("Callable[[World], tuple[Values, LastOp]]", partial(single_alone, leaf))
        result = self._call(
            ops, alone, arrays.leaves[0].rebuild, timeout_s=timeout_s, async_op=async_op
        )
        return cast("T | Handle[T]", result)

    def _run_one(self, wanted: Collective, leaf: Leaf, *, async_op: bool) -> object:
        """Run the op of an array that is no part of a tree; return one like it, or a handle."""
        late = async_op or not self._line.idle
        laid = detached(leaf) if late else leaf
        ops = partial(run_single, wanted=wanted, leaf=laid)
        alone = partial(single_alone, laid)
        run = partial(Place.run, ops=ops, alone=alone, timeout_s=wanted.timeout_s)
        finish: Callable[[Any], object] = leaf.rebuild if late else as_it_is
        return self._do(run, finish, async_op=async_op)

    def _run(
        self,
        wanted: Collective,
        arrays: Arrays,
        *,
        compression: Compression | None = None,
        async_op: bool,
        keep: bool = True,
        writes: bool = False,
    ) -> object:
        """Run an op for each bucket of a tree; return a tree like it, or a handle of one."""
        # What is written into out= may be what is averaged once more, or what another op has still
        # to send, so it is written at the end.
        again = arrays.shares_memory or (writes and wanted.on_nonfinite != "keep")
        late = async_op or not self._line.idle or again
        laid = arrays.evaluated().detached() if late else arrays  # MLX's graphs belong to threads
        ops = self._ops(wanted, laid, compression)
        finish: Callable[[list[Any]], object] = arrays.tree.rebuild
        if not keep:
            finish = _drop
        elif late:
            finish = partial(rebuild_late, arrays)
        alone = partial(_alone, wanted, laid)
        run = partial(Place.run, ops=ops, alone=alone, timeout_s=wanted.timeout_s)
        return self._do(run, finish, async_op=async_op)

    def _ops(
        self, wanted: Collective, arrays: Arrays, compression: Compression | None
    ) -> Callable[[TrainerSession], tuple[list[object], LastOp | None]]:
        # No inner functions: Python would build their annotations in each call, which takes 5 µs.
        run = run_collective if wanted.on_nonfinite == "keep" else run_guarded
        ops = partial(run, wanted=wanted, arrays=arrays)
        if compression is not None:
            ops = partial(
                run_compressed,
                wanted=wanted,
                compression=compression,
                arrays=arrays,
                feedback=self._feedback,
            )
        # An all-reduce returns only after all ranks have called, so each gets its error here.
        if wanted.kind == "all_reduce" and not arrays.tree.is_bare:
            ops = partial(_naming_differences, ops, arrays, wanted.timeout_s)
            if wanted.weight is not None and compression is None:
                in_trees_order = partial(run, wanted=replace(wanted, backward=None), arrays=arrays)
                again = partial(_naming_differences, in_trees_order, arrays, wanted.timeout_s)
                ops = partial(_agreeing_on_order, ops, again, arrays)
        return ops


def _alone(wanted: Collective, arrays: Arrays, world: World) -> tuple[list[object], LastOp | None]:
    check_alone(wanted, arrays, world)
    return run_alone(wanted, arrays, world)


def _naming_differences(
    ops: Callable[[TrainerSession], R], arrays: Arrays, timeout_s: float, session: TrainerSession
) -> R:
    try:
        return ops(session)
    except OpMismatch as e:
        if only_orders_differ(e, arrays):
            raise
        raise name_differences(session, e, arrays, timeout_s=timeout_s) from None


def _agreeing_on_order(
    ops: Callable[[TrainerSession], R],
    in_trees_order: Callable[[TrainerSession], R],
    arrays: Arrays,
    session: TrainerSession,
) -> R:
    try:
        return ops(session)
    except OpMismatch as e:
        # All ranks read the same text, also one that had not called yet, so all continue here.
        if not only_orders_differ(e, arrays):
            raise
    return in_trees_order(session)


def all_reduce_in_turn(
    calls: Reducing, xs: Sequence[object], op: str, timeout_s: float
) -> list[Callable[[], object]]:
    """Return functions that reduce small arrays in place, each one of them, as `all_reduce` does.

    The ops may be sent together, so call all the functions, in order: until the last one, other
    calls wait. Each returns, or raises, as soon as its own op has ended.

    Args:
        calls: the mesh or the group.
        xs: arrays that are no parts of trees, each with at least one value.
        op: as for `all_reduce`.
        timeout_s: for each op.
    """
    wanted = _all_reduce_of(op, "auto", timeout_s, DEFAULT_BUCKET_BYTES, borrows=False)
    leaves = [leaf for x in xs if (leaf := describe_one(x)) is not None]
    for leaf in leaves:
        allow_reduction(wanted.reduction, leaf.dtype)
    first, *others = [written_into_one(leaf, x, x) for leaf, x in zip(leaves, xs, strict=True)]
    turn = Turn()

    def one(leaf: Leaf, following: Sequence[Leaf]) -> Callable[[], object]:
        ops = partial(run_in_turn, wanted=wanted, leaf=leaf, following=following)
        alone = partial(single_alone, leaf)
        run = partial(Place.run, ops=ops, alone=alone, timeout_s=wanted.timeout_s)
        do = calls._do  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        return partial(do, run, _unchanged, turn=turn)

    return [one(first, others), *(one(leaf, ()) for leaf in others)]


def _unchanged(result: object) -> object:
    return result


def rebuild_late(arrays: Arrays, results: list[Any]) -> object:
    """Return the user's tree, made from the results of detached arrays."""
    return arrays.tree.rebuild(arrays.attach(results))


def _drop(_: object) -> None:
    """Return None, on the ranks that are not the root."""


@lru_cache(maxsize=64)  # a training makes the same few calls again and again
def _all_reduce_of(
    op: str, strategy: Strategy, timeout_s: float, bucket_bytes: int, *, borrows: bool
) -> Collective:
    return Collective(
        kind="all_reduce",
        reduction=named_reduction(op),
        strategy=named_strategy(strategy),
        bucket_bytes=bucket_bytes,
        timeout_s=check_timeout(timeout_s),
        borrows=borrows,
    )


def named_strategy(strategy: Strategy) -> str:
    """Return the strategy as `Call` names it; empty if the agents choose."""
    if strategy not in _STRATEGIES:
        raise UsageError(f"strategy is one of {_STRATEGIES}, not {strategy!r}")
    return "" if strategy == "auto" else strategy
