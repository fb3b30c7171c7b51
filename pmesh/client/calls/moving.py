"""The collectives that only move arrays or objects, and the barriers."""

from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any, Literal, TypeVar, cast, overload

import msgspec
import numpy as np

from pmesh.client.calls.queue import Caller, Handle, check_timeout
from pmesh.client.calls.reducing import DEFAULT_TIMEOUT_S
from pmesh.client.collective.bucketed import ALONE, LastOp
from pmesh.client.collective.gather_ops import (
    ArrayBytes,
    Head,
    block_of,
    build,
    check_alike,
    check_count,
    cut,
    exchange,
    move,
    rank_of,
    with_root,
)
from pmesh.client.session.session import TrainerSession
from pmesh.client.trees.arrays import evaluate_mlx
from pmesh.core.ops.reductions import Values
from pmesh.core.wire.calls import Call
from pmesh.core.wire.trainer import World
from pmesh.errors import RosterChanged, RunError, UsageError

T = TypeVar("T")


class Moving(Caller):
    """all_gather, gather, scatter and all_to_all."""

    @overload
    def all_gather(
        self,
        x: T,
        timeout_s: float = ...,
        *,
        stacked: bool = ...,
        async_op: Literal[False] = ...,
    ) -> T: ...
    @overload
    def all_gather(
        self, x: T, timeout_s: float = ..., *, stacked: bool = ..., async_op: Literal[True]
    ) -> Handle[T]: ...
    def all_gather(
        self,
        x: T,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        stacked: bool = False,
        async_op: bool = False,
    ) -> T | Handle[T]:
        """Send the array of each rank to all ranks.

        Args:
            x: one array, of any dtype of numbers. Its first dimension may differ between ranks.
            timeout_s: for each of two ops.
            stacked: True stacks the arrays, which must have the same shape, along a new first
                dimension. False concatenates them along the first dimension, in the order of ranks.
            async_op: return a handle at once.

        Raises:
            OpMismatch: the arrays don't fit together.
            RosterChanged: a rank was lost in the call.
            PmeshError: as for `all_reduce`.
        """
        result = self._gather(x, None, stacked=stacked, timeout_s=timeout_s, async_op=async_op)
        return cast("T | Handle[T]", result)

    @overload
    def gather(
        self,
        x: T,
        root: int = ...,
        timeout_s: float = ...,
        *,
        stacked: bool = ...,
        async_op: Literal[False] = ...,
    ) -> T | None: ...
    @overload
    def gather(
        self,
        x: T,
        root: int = ...,
        timeout_s: float = ...,
        *,
        stacked: bool = ...,
        async_op: Literal[True],
    ) -> Handle[T | None]: ...
    def gather(
        self,
        x: T,
        root: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        stacked: bool = False,
        async_op: bool = False,
    ) -> T | Handle[T | None] | None:
        """Send the arrays of all ranks to one rank; the others get None. See `all_gather`."""
        result = self._gather(x, root, stacked=stacked, timeout_s=timeout_s, async_op=async_op)
        return cast("T | Handle[T | None] | None", result)

    # The result has the root's type, which a rank that passes None does not know.
    @overload
    def scatter(
        self,
        xs: None,
        root: int = ...,
        timeout_s: float = ...,
        *,
        async_op: Literal[False] = ...,
    ) -> Any: ...  # noqa: ANN401 - as above
    @overload
    def scatter(
        self, xs: None, root: int = ..., timeout_s: float = ..., *, async_op: Literal[True]
    ) -> Handle[Any]: ...
    @overload
    def scatter(
        self,
        xs: Sequence[T] | None,
        root: int = ...,
        timeout_s: float = ...,
        *,
        async_op: Literal[False] = ...,
    ) -> T: ...
    @overload
    def scatter(
        self,
        xs: Sequence[T] | None,
        root: int = ...,
        timeout_s: float = ...,
        *,
        async_op: Literal[True],
    ) -> Handle[T]: ...
    def scatter(
        self,
        xs: Sequence[T] | None,
        root: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        async_op: bool = False,
    ) -> T | Handle[T]:
        """Send each rank one of the root's arrays.

        Args:
            xs: on the root one array for each rank, which differ in their first dimension only; on
                other ranks None.
            root: the rank that has the arrays.
            timeout_s: for each of two ops.
            async_op: return a handle at once.

        Raises:
            RosterChanged: a rank was lost, or the ranks changed places, in the call.
            PmeshError: as for `all_reduce`.
        """
        size, is_root, trainer = self.size, root == self.rank, self._trainer_at(root)
        ranks = self.trainers
        timeout_s = check_timeout(timeout_s)
        blocks: list[ArrayBytes] = []
        if is_root:
            blocks = self._blocks(xs, "scatter")
        firsts = [(block.data.size, *block.head.shape[:1]) for block in blocks]

        def ops(session: TrainerSession) -> tuple[Any, LastOp]:
            # Only the root knows the sizes: for each rank the bytes and the first dimension.
            sent = [n for first in firsts for n in (*first, 0)[:2]] if is_root else [0] * 2 * size
            head = blocks[0].head if is_root else None
            what = with_root("scatter", session, trainer)
            table = exchange(session, head, sent, what=what, timeout_s=timeout_s)
            at = rank_of(table.done.world, trainer)
            counts, like = table.counts[at], table.heads[at]
            if table.done.world.trainers != ranks or like is None:
                raise RosterChanged("the ranks changed before an array for each could be sent")
            moved = move(
                session,
                table,
                "scatter",
                [block.data for block in blocks],
                root=at,
                parts=counts[::2],
                timeout_s=timeout_s,
            )
            shape = (*counts[2 * table.rank + 1 :][: len(like.shape[:1])], *like.shape[1:])
            return (like._replace(shape=shape), moved.data, None), moved.last

        def alone(world: World) -> tuple[Any, LastOp]:
            if not is_root:
                raise RosterChanged("the root of this scatter is not here")
            return _copy_of(blocks[root]), LastOp.among(ALONE, world, 0)

        result = self._call(ops, alone, _built, timeout_s=timeout_s, async_op=async_op)
        return cast("T | Handle[T]", result)

    @overload
    def all_to_all(
        self, xs: Sequence[T], timeout_s: float = ..., *, async_op: Literal[False] = ...
    ) -> list[T]: ...
    @overload
    def all_to_all(
        self, xs: Sequence[T], timeout_s: float = ..., *, async_op: Literal[True]
    ) -> Handle[list[T]]: ...
    def all_to_all(
        self,
        xs: Sequence[T],
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        async_op: bool = False,
    ) -> list[T] | Handle[list[T]]:
        """Send each rank one array, and receive one from each.

        Args:
            xs: one array for each rank; all arrays of all ranks differ in their first dimension
                only.
            timeout_s: for each of two ops.
            async_op: return a handle at once.

        Returns:
            The array from each rank, in the order of ranks.

        Raises:
            OpMismatch: the arrays of two ranks differ in more than the first dimension.
            RosterChanged: a rank was lost, or the ranks changed places, in the call.
            PmeshError: as for `all_reduce`.
        """
        blocks, rank, ranks = self._blocks(xs, "all_to_all"), self.rank, self.trainers
        timeout_s = check_timeout(timeout_s)

        def ops(session: TrainerSession) -> tuple[Any, LastOp]:
            sent = [n for b in blocks for n in (b.data.size, *b.head.shape[:1], 0)[:2]]
            head, like = blocks[0].head, blocks[0].like
            table = exchange(session, head, sent, what="all_to_all", timeout_s=timeout_s)
            if table.done.world.trainers != ranks:  # O4: also if they have only changed places
                raise RosterChanged("the ranks changed before an array for each could be sent")
            check_alike(table, whole=False, what="all_to_all")
            mine = [counts[2 * table.rank :][:2] for counts in table.counts]
            sizes = [nbytes for nbytes, _ in mine]
            moved = move(
                session,
                table,
                "all_to_all",
                [block.data for block in blocks],
                parts=[block.data.size for block in blocks],
                parts_in=sizes,
                timeout_s=timeout_s,
            )
            heads = [_with_rows(head, rows) for _, rows in mine]
            pieces = cut(moved.data, sizes)
            return [(h, piece, like) for h, piece in zip(heads, pieces, strict=True)], moved.last

        def alone(world: World) -> tuple[Any, LastOp]:
            return [_copy_of(blocks[rank])], LastOp.among(ALONE, world, 0)

        def finish(parts: list[_Parts]) -> list[object]:
            return [build(*each) for each in parts]

        result = self._call(ops, alone, finish, timeout_s=timeout_s, async_op=async_op)
        return cast("list[T] | Handle[list[T]]", result)

    def _gather(
        self, x: object, root: int | None, *, stacked: bool, timeout_s: float, async_op: bool
    ) -> object:
        evaluate_mlx([x])
        block = block_of(x)
        if not stacked and not block.head.shape:
            raise UsageError("cannot concatenate 0-d arrays; pass stacked=True")
        trainer = None if root is None else self._trainer_at(root)
        what = "all_gather" if root is None else "gather"
        timeout_s = check_timeout(timeout_s)

        def ops(session: TrainerSession) -> tuple[Any, LastOp]:
            named = what if trainer is None else with_root(what, session, trainer)
            table = exchange(
                session,
                block.head,
                [block.data.size],
                what=f"{named} stacked" if stacked else named,
                timeout_s=timeout_s,
            )
            check_alike(table, whole=stacked, what=what)
            at = -1 if trainer is None else rank_of(table.done.world, trainer)
            sizes = [counts[0] for counts in table.counts]
            moved = move(
                session, table, what, [block.data], root=at, parts=sizes, timeout_s=timeout_s
            )
            if at not in (-1, table.rank):
                return None, moved.last
            if stacked:
                head = block.head._replace(shape=(table.size, *block.head.shape))
            else:
                rows = sum(each.shape[0] for each in table.heads if each is not None)
                head = _with_rows(block.head, rows)
            return (head, moved.data, x), moved.last

        def alone(world: World) -> tuple[Any, LastOp]:
            shape = (1, *block.head.shape) if stacked else block.head.shape
            last = LastOp.among(ALONE, world, block.data.size)
            return (block.head._replace(shape=shape), block.data.copy(), x), last

        return self._call(ops, alone, _built, timeout_s=timeout_s, async_op=async_op)

    def _blocks(self, xs: Sequence[object] | None, what: str) -> list[ArrayBytes]:
        """Return the bytes of the array for each rank; raise UsageError if they do not fit."""
        if xs is None:
            raise UsageError(f"{what} takes one array for each rank")
        check_count(xs, self.size, what)
        evaluate_mlx(list(xs))
        blocks = [block_of(x, f"[{i}]") for i, x in enumerate(xs)]
        first = blocks[0].head
        for i, block in enumerate(blocks):
            same = _with_rows(block.head, 0) == _with_rows(first, 0)
            if not same or (not first.shape and block.head.shape):
                raise UsageError(
                    f"{what} takes arrays that differ in their first dimension only: [0] is "
                    f"{first.dtype} {list(first.shape)}, [{i}] is {block.head.dtype} "
                    f"{list(block.head.shape)}"
                )
        return blocks


_Parts = tuple[Head, Values, object]
"""The arguments of `build`."""


def _copy_of(block: ArrayBytes) -> _Parts:
    return block.head, block.data.copy(), block.like


def _built(parts: _Parts | None) -> object:
    return None if parts is None else build(*parts)


def _with_rows(head: Head, rows: int) -> Head:
    return head._replace(shape=(rows, *head.shape[1:])) if head.shape else head


class Objects(Caller):
    """all_gather_object, broadcast_object and barriers."""

    def all_gather_object(self, obj: object, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Any]:
        """Send an object of each rank to all ranks: data that MessagePack can encode, never code.

        Args:
            obj: None, bool, int (64 bits), float, str, bytes, and lists, tuples and dicts of these.
                Tuples and sets arrive as lists, dataclasses as dicts, dates as text.
            timeout_s: for each of two ops.

        Returns:
            The objects in the order of ranks.

        Raises:
            UsageError: the object holds something else, or that of some rank exceeds 64 MiB.
            RosterChanged: a rank was lost in the call.
            PmeshError: as for `all_reduce`.
        """
        data = _packed(obj)
        timeout_s = check_timeout(timeout_s)

        def ops(session: TrainerSession) -> tuple[Any, LastOp]:
            head = Head("numpy", "uint8", (data.size,))
            table = exchange(session, head, what="all_gather_object", timeout_s=timeout_s)
            sizes = [_size_of(each, rank) for rank, each in enumerate(table.heads)]
            moved = move(session, table, "all_gather", [data], parts=sizes, timeout_s=timeout_s)
            return [_unpacked(piece) for piece in cut(moved.data, sizes)], moved.last

        def alone(world: World) -> tuple[Any, LastOp]:
            return [_unpacked(data)], LastOp.among(ALONE, world, data.size)

        return cast("list[Any]", self._call(ops, alone, _as_it_is, timeout_s=timeout_s))

    def broadcast_object(
        self, obj: object = None, root: int = 0, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Any:  # noqa: ANN401 - the root's object
        """Send the root's object to all ranks; see `all_gather_object`. Others may omit `obj`."""
        is_root, trainer = root == self.rank, self._trainer_at(root)
        data = _packed(obj) if is_root else np.empty(0, np.uint8)
        timeout_s = check_timeout(timeout_s)

        def ops(session: TrainerSession) -> tuple[Any, LastOp]:
            head = Head("numpy", "uint8", (data.size,)) if is_root else None
            what = with_root("broadcast_object", session, trainer)
            table = exchange(session, head, what=what, timeout_s=timeout_s)
            at = rank_of(table.done.world, trainer)
            size = _size_of(table.heads[at], at)
            if is_root:
                session.input_values("uint8", size, room_bytes=0, retained=True)[:] = data
            place = session.world.trainers.index(trainer)
            call = Call("broadcast", "uint8", (size,), root=place)
            done = session.run_op(call, "uint8", size, timeout_s=timeout_s)
            return _unpacked(done.values), LastOp.among(done.op, done.world, size)

        def alone(world: World) -> tuple[Any, LastOp]:
            return _unpacked(data) if is_root else obj, LastOp.among(ALONE, world, 0)

        return self._call(ops, alone, _as_it_is, timeout_s=timeout_s)

    def barrier(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait until every rank has called this; raises as `all_reduce` does."""
        timeout_s = check_timeout(timeout_s)

        def ops(session: TrainerSession) -> tuple[None, LastOp]:
            call = Call("barrier", "float32", (0,))
            done = session.run_op(call, "float32", 0, timeout_s=timeout_s)
            return None, LastOp.among(done.op, done.world, 0)

        def alone(world: World) -> tuple[None, LastOp]:
            return None, LastOp.among(ALONE, world, 0)

        self._call(ops, alone, _as_it_is, timeout_s=timeout_s)

    def monitored_barrier(self, timeout_s: float) -> None:
        """Wait until every rank has called this; if the time is over, name the missing ranks.

        Args:
            timeout_s: how long to wait.

        Raises:
            OpTimedOut: some ranks did not call in time; it names them all. Ranks that call later
                get the same error.
            PmeshError: as for `all_reduce`.
        """
        self.barrier(timeout_s)


MAX_OBJECT_BYTES = 64 << 20  # each byte may become a dict, which takes 64 bytes in memory
_UNPACKABLE = (TypeError, OverflowError, RecursionError, ValueError)


def _packed(obj: object) -> Values:
    try:
        return np.frombuffer(msgspec.msgpack.encode(obj, enc_hook=_as_plain), np.uint8)
    except _UNPACKABLE as e:
        path = "" if isinstance(e, RecursionError) else _path_to_unpackable(obj)
        where = f"obj{path}: " if path else ""
        raise UsageError(f"{where}not data that MessagePack can say: {e}") from e


def _as_plain(x: Any) -> object:  # noqa: ANN401 - msgspec gives whatever it does not know
    """Return what is sent for an object: a number for a 0-d array, text for a path."""
    if getattr(x, "ndim", None) == 0:
        return cast("object", x.item())
    if isinstance(x, PurePath):
        return str(x)
    kind = f"{type(x).__module__}.{type(x).__name__}".removeprefix("builtins.")
    hint = "; .item() makes a number of one value, .tolist() a list" if hasattr(x, "item") else ""
    raise TypeError(f"{kind} is not supported{hint}")


def _path_to_unpackable(obj: object) -> str:
    """Return a path such as "[3]['loss']"; empty if it is the object itself."""
    items: Iterable[tuple[object, object]] = ()
    if isinstance(obj, dict):
        items = cast("dict[object, object]", obj).items()
    elif isinstance(obj, list | tuple):
        items = enumerate(cast("Sequence[object]", obj))
    for key, child in items:
        try:
            msgspec.msgpack.encode(child, enc_hook=_as_plain)
        except _UNPACKABLE:
            return f"[{key!r}]{_path_to_unpackable(child)}"
    return ""


def _size_of(head: Head | None, rank: int) -> int:
    """Return the bytes that a rank announces; raise UsageError, on all ranks, if out of range."""
    size = head.shape[0] if head is not None and len(head.shape) == 1 else 0
    if not 0 < size <= MAX_OBJECT_BYTES:  # even None takes a byte
        raise UsageError(
            f"the object of rank {rank} has {size} bytes as MessagePack, and may have 1 to "
            f"{MAX_OBJECT_BYTES}; move arrays by all_gather or broadcast"
        )
    return size


def _unpacked(data: Values) -> Any:  # noqa: ANN401 - whatever was sent
    try:
        return msgspec.msgpack.decode(data.tobytes())
    except (*_UNPACKABLE, msgspec.MsgspecError) as e:
        raise RunError(f"what a rank has sent as an object is none: {e}") from e


def _as_it_is(result: T) -> T:
    return result
