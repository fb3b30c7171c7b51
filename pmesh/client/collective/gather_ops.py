"""Collectives whose result depends on what each rank gives, which the ranks exchange first.

Each takes two ops. In an `exchange` every rank describes what it has as a row of integers. From the
table of all rows, which is the same everywhere, each rank knows what it gets, or that the arrays
don't fit together. The second op moves the bytes (O4: it fails everywhere if a rank is lost in it).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pmesh.client.collective.bucketed import LastOp
from pmesh.client.link.session import Done, TrainerSession, exchange_rows
from pmesh.client.trees.arrays import digest, no_array
from pmesh.client.trees.raw import from_raw, to_raw
from pmesh.core.ops.reductions import Values
from pmesh.core.wire.link import Call
from pmesh.core.wire.local import World
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
    """As numpy names it, whatever the library."""
    shape: tuple[int, ...]

    def to_row(self) -> list[int]:
        """The head as int64."""
        name = np.frombuffer(self.dtype.encode().ljust(_NAME_BYTES, b"\0"), np.int64).tolist()
        shape = [*self.shape, *[0] * (MAX_DIMENSIONS - len(self.shape))]
        return [LIBRARIES.index(self.library), len(self.shape), *name, *shape]

    @classmethod
    def of_row(cls, row: Sequence[int]) -> "Head | None":
        """The reverse of `to_row`; None: the rank gives nothing."""
        if row[0] < 0:
            return None
        name = np.array(row[2 : 2 + _NAME_BYTES // 8], np.int64).tobytes().rstrip(b"\0").decode()
        first = 2 + _NAME_BYTES // 8
        return cls(LIBRARIES[row[0]], name, tuple(row[first : first + row[1]]))


@dataclass(frozen=True, slots=True)
class Block:
    """An array as the bytes that travel."""

    head: Head
    data: Values
    """Flat uint8."""
    like: object
    """The user's."""


def block_of(x: object, where: str = "") -> Block:
    """The array's bytes; raises UnsupportedArray for what does not travel so."""
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
    return Block(Head(library, dtype, raw.shape), raw.data, x)


def build(head: Head, data: Values, like: object) -> object:
    """An array of these bytes, which it may keep; of the library of `like`, if that is an array."""
    dtype = head.dtype
    # Those of ml_dtypes are in numpy's table too, but have no notation of their own.
    if head.library == "numpy" and dtype in np.sctypeDict and np.dtype(dtype).isbuiltin == 1:
        dtype = np.dtype(dtype).str
    return from_raw(head.library, dtype, head.shape, data, like=like)


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of an `exchange`, by rank."""

    heads: tuple[Head | None, ...]
    counts: tuple[tuple[int, ...], ...]
    """The further integers of each rank."""
    places: tuple[int, ...]
    """For each rank its place in the ring."""
    done: Done

    @property
    def size(self) -> int:
        """How many ranks took part."""
        return len(self.heads)

    def by_place(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Numbers by rank, reordered by place in the ring."""
        found = [0] * self.size
        for rank, place in enumerate(self.places):
            found[place] = counts[rank]
        return tuple(found)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.done.world.rank

    def label(self) -> str:
        """Alike on two ranks only if the tables are (I5)."""
        return digest([f"{self.heads} {self.counts}"])


def exchange(
    session: TrainerSession,
    head: Head | None,
    counts: Sequence[int] = (),
    *,
    what: str,
    timeout_s: float,
) -> Table:
    """Give all ranks what this one has, and get what they have; for `what` see `exchange_rows`.

    Args:
        session: runs the op.
        head: of this rank's array, if it gives one.
        counts: further integers, as many on each rank.
        what: the call, alike on all ranks.
        timeout_s: for the op.
    """
    row = [*(_NONE if head is None else head.to_row()), *counts]
    call = Call("exchange", "int64", (len(row),), tree=what)
    by_place, done = exchange_rows(session, row, call, timeout_s=timeout_s)
    rows = [by_place[place] for place in session.places]
    return Table(
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
    table: Table,
    kind: str,
    gives: Sequence[Values],
    *,
    root: int = -1,
    parts: Sequence[int],
    parts_in: Sequence[int] = (),
    timeout_s: float,
) -> Moved:
    """Move bytes.

    Args:
        session: runs the op.
        table: from the `exchange` before it.
        kind: all_gather, gather, scatter or all_to_all.
        gives: this rank's bytes, one array or, for a scatter's root and an all_to_all, one for each
            rank; none if it gives nothing.
        root: a rank.
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
    """For each place in the ring its rank."""
    return sorted(range(len(places)), key=places.__getitem__)


def _copy_by_rank(
    source: Values, target: Values, sizes: Sequence[int], places: Sequence[int]
) -> None:
    """Copy blocks that lie in the order of the ring into the order of ranks."""
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
    """Cut bytes into pieces that own them, so that each may become an array's memory."""
    ends = np.cumsum(sizes).tolist()
    return [data[end - size : end].copy() for end, size in zip(ends, sizes, strict=True)]


def check_alike(table: Table, *, whole: bool, what: str) -> Head:
    """The first head, if all ranks' arrays can lie behind one another, or on one another.

    Raises:
        OpMismatch: they can't; on all ranks alike.
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
    """Raises UsageError unless there is one for each rank."""
    if len(xs) != size:
        raise UsageError(f"{what} takes one array for each of {size} ranks, not {len(xs)}")


def with_root(what: str, session: TrainerSession, trainer: TrainerId) -> str:
    """The call with its root, for `exchange`; RosterChanged, on all ranks alike, if it is lost."""
    return f"{what} root={rank_of(session.ranks, trainer)}"


def rank_of(world: World, trainer: TrainerId) -> int:
    """Where the root of a call is now; RosterChanged, on all ranks alike, if it is lost."""
    if trainer not in world.trainers:
        raise RosterChanged("the root of this call is lost")
    return world.trainers.index(trainer)
