"""Collectives for arrays whose sizes may differ between ranks, so that the ranks exchange them.

Each takes two ops. In an `exchange` every rank describes its array as a row of integers. The table
of all rows is the same on all ranks. From it each rank knows what it will receive, or that the
arrays don't fit together. The second op moves the bytes (O4: it fails on all if a rank is lost).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pmesh.client.collective.bucketed import LastOp
from pmesh.client.session.rows import exchange_rows
from pmesh.client.session.session import Done, TrainerSession
from pmesh.client.trees.arrays import digest, no_array
from pmesh.client.trees.raw import from_raw, to_raw
from pmesh.core.ops.reductions import Values
from pmesh.core.wire.calls import Call
from pmesh.core.wire.trainer import World
from pmesh.errors import OpMismatch, RosterChanged, UnsupportedArray, UsageError
from pmesh.ids import TrainerId

LIBRARIES = ("numpy", "mlx", "torch")
MAX_DIMENSIONS = 8
_NAME_BYTES = 24
_HEAD_VALUES = 2 + _NAME_BYTES // 8 + MAX_DIMENSIONS
_NONE: tuple[int, ...] = (-1,) * _HEAD_VALUES
"""The row of a rank that gives nothing."""


class Head(NamedTuple):
    """The library, dtype and shape of an array."""

    library: str
    dtype: str
    """The name of numpy, whatever the library."""
    shape: tuple[int, ...]

    def to_row(self) -> list[int]:
        """Return the head as int64 values."""
        name = np.frombuffer(self.dtype.encode().ljust(_NAME_BYTES, b"\0"), np.int64).tolist()
        shape = [*self.shape, *[0] * (MAX_DIMENSIONS - len(self.shape))]
        return [LIBRARIES.index(self.library), len(self.shape), *name, *shape]

    @classmethod
    def of_row(cls, row: Sequence[int]) -> "Head | None":
        """Return the head that `to_row` has described; None if the rank gives nothing."""
        if row[0] < 0:
            return None
        name = np.array(row[2 : 2 + _NAME_BYTES // 8], np.int64).tobytes().rstrip(b"\0").decode()
        first = 2 + _NAME_BYTES // 8
        return cls(LIBRARIES[row[0]], name, tuple(row[first : first + row[1]]))


@dataclass(frozen=True, slots=True)
class ArrayBytes:
    """An array as the bytes that are sent."""

    head: Head
    data: Values
    """The bytes, flat uint8."""
    like: object
    """The user's array."""


def block_of(x: object, where: str = "") -> ArrayBytes:
    """Return the array's bytes; raise UnsupportedArray if it can't be sent as bytes."""
    raw = to_raw(x, f"{where}: " if where else "")
    if raw is None:
        raise no_array(x, f"{where}: " if where else "")
    library = "numpy" if raw.library == "scalar" else raw.library
    dtype = raw.plain_dtype
    if dtype is None or len(dtype) > _NAME_BYTES or len(raw.shape) > MAX_DIMENSIONS:
        raise UnsupportedArray(
            f"{where or 'x'}: arrays of numbers in the machine's byte order, with at most "
            f"{MAX_DIMENSIONS} dimensions, can be moved; not {raw.dtype} with {len(raw.shape)}"
        )
    return ArrayBytes(Head(library, dtype, raw.shape), raw.data, x)


def build(head: Head, data: Values, like: object) -> object:
    """Return an array of these bytes, which it may keep; for `like` see `from_raw`."""
    dtype = head.dtype
    # ml_dtypes adds its types to numpy's table, but they have no notation of their own.
    if head.library == "numpy" and dtype in np.sctypeDict and np.dtype(dtype).isbuiltin == 1:
        dtype = np.dtype(dtype).str
    return from_raw(head.library, dtype, head.shape, data, like=like)


@dataclass(frozen=True, slots=True)
class ExchangedTable:
    """The rows of an `exchange`, by rank."""

    heads: tuple[Head | None, ...]
    counts: tuple[tuple[int, ...], ...]
    """The further integers of each rank."""
    places: tuple[int, ...]
    """The place of each rank in the ring."""
    done: Done

    @property
    def size(self) -> int:
        """The number of ranks that took part."""
        return len(self.heads)

    def by_place(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Reorder numbers by rank into the order of the ring."""
        found = [0] * self.size
        for rank, place in enumerate(self.places):
            found[place] = counts[rank]
        return tuple(found)

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self.done.world.rank

    def label(self) -> str:
        """Return a digest that is equal on two ranks only if the tables are (I5)."""
        return digest([f"{self.heads} {self.counts}"])


def exchange(
    session: TrainerSession,
    head: Head | None,
    counts: Sequence[int] = (),
    *,
    what: str,
    timeout_s: float,
) -> ExchangedTable:
    """Exchange the heads and counts of all ranks.

    Args:
        session: runs the op.
        head: the head of this rank's array, if it gives one.
        counts: further integers, as many on each rank.
        what: the name of the call, the same on all ranks; see `exchange_rows`.
        timeout_s: for the op.
    """
    row = [*(_NONE if head is None else head.to_row()), *counts]
    call = Call("exchange", "int64", (len(row),), tree=what)
    by_place, done = exchange_rows(session, row, call, timeout_s=timeout_s)
    rows = [by_place[place] for place in session.places]
    return ExchangedTable(
        heads=tuple(Head.of_row(row) for row in rows),
        counts=tuple(tuple(row[_HEAD_VALUES:]) for row in rows),
        places=session.places,
        done=done,
    )


class Moved(NamedTuple):
    """The result of `move`."""

    data: Values
    """The bytes in the order of ranks; the caller may keep them."""
    last: LastOp


def move(
    session: TrainerSession,
    table: ExchangedTable,
    kind: str,
    gives: Sequence[Values],
    *,
    root: int = -1,
    parts: Sequence[int],
    parts_in: Sequence[int] = (),
    timeout_s: float,
) -> Moved:
    """Move bytes between the ranks.

    Args:
        session: runs the op.
        table: the result of the `exchange` before.
        kind: all_gather, gather, scatter or all_to_all.
        gives: this rank's bytes: one array; for a scatter's root and an all_to_all one for each
            rank; none if it gives nothing.
        root: the root's rank.
        parts: bytes, by rank; see `StartOp`.
        parts_in: bytes, by rank; see `StartOp`.
        timeout_s: for the op.
    """
    places = table.places
    count = sum(block.size for block in gives)
    region = session.input_values("uint8", count, room_bytes=0)
    if len(gives) == len(places):
        gives = [gives[rank] for rank in _by_place(places)]
    begin = 0
    for block in gives:
        region[begin : begin + block.size] = block
        begin += block.size
    call = Call(
        kind,
        "uint8",
        (sum(parts),) if kind != "all_to_all" else (),
        root=places[root] if root >= 0 else -1,
        tree=table.label(),
    )
    done = session.run_op(
        call,
        "uint8",
        count,
        timeout_s=timeout_s,
        parts=table.by_place(parts),
        parts_in=table.by_place(parts_in) if parts_in else (),
    )
    sizes = parts_in if kind == "all_to_all" else parts
    data = np.empty(done.values.size, np.uint8)
    if kind == "scatter":
        data[:] = done.values
    elif data.size:
        _copy_by_rank(done.values, data, sizes, places)
    last = LastOp.among(done.op, done.world, count + data.size)
    return Moved(data, last)


def _by_place(places: Sequence[int]) -> list[int]:
    """Return the rank at each place in the ring."""
    return sorted(range(len(places)), key=places.__getitem__)


def _copy_by_rank(
    source: Values, target: Values, sizes: Sequence[int], places: Sequence[int]
) -> None:
    """Copy blocks from the order of the ring into the order of ranks."""
    starts: dict[int, int] = {}
    begin = 0
    for rank in _by_place(places):
        starts[rank] = begin
        begin += sizes[rank]
    begin = 0
    for rank, size in enumerate(sizes):
        target[begin : begin + size] = source[starts[rank] : starts[rank] + size]
        begin += size


def cut(data: Values, sizes: Sequence[int]) -> list[Values]:
    """Copy bytes into separate pieces, so that each may become an array's memory."""
    ends = np.cumsum(sizes).tolist()
    return [data[end - size : end].copy() for end, size in zip(ends, sizes, strict=True)]


def check_alike(table: ExchangedTable, *, whole: bool, what: str) -> Head:
    """Return the first head, if the arrays of all ranks can be concatenated, or stacked if `whole`.

    Raises:
        OpMismatch: they can't; all ranks raise it.
    """
    heads = [head for head in table.heads if head is not None]
    first = heads[0]
    for rank, head in enumerate(heads):
        skip = 0 if whole else 1
        if (head.dtype, head.shape[skip:]) != (first.dtype, first.shape[skip:]) or len(
            head.shape
        ) != len(first.shape):
            raise OpMismatch(
                f"{what}: rank 0 gives {first.dtype} {list(first.shape)}, rank {rank} gives "
                f"{head.dtype} {list(head.shape)}"
            )
    return first


def check_count(xs: Sequence[Any], size: int, what: str) -> None:
    """Raise UsageError unless there is one array for each rank."""
    if len(xs) != size:
        raise UsageError(f"{what} takes one array for each of {size} ranks, not {len(xs)}")


def with_root(what: str, session: TrainerSession, trainer: TrainerId) -> str:
    """Return the call's name with its root, for `exchange`; raises as `rank_of`."""
    return f"{what} root={rank_of(session.ranks, trainer)}"


def rank_of(world: World, trainer: TrainerId) -> int:
    """Return the root's rank now; raise RosterChanged, on all ranks, if the root is lost."""
    if trainer not in world.trainers:
        raise RosterChanged("the root of this call is lost")
    return world.trainers.index(trainer)
