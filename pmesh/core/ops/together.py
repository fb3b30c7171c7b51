"""What an op is if one agent has all its ranks: values are added, and copied, within its memory.

The agent has mapped the values and the results of all of them, so nothing travels. The op is a list
of folds. Each reads values of some ranks, reduces them in their order, and writes the result once
for each rank that gets it; or only once, if all ranks can read it there. The order is the ring's,
as in `pmesh.core.ops.reducing` and `reduce_scatter`: so every rank gets the bits that it would get
over the ring.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from pmesh.core.ops.kinds import KINDS
from pmesh.core.ops.plan import SMALL_BYTES, chunk_bounds
from pmesh.core.ops.reductions import WIRE_DTYPES, is_exact
from pmesh.core.wire.trainer import StartOp


class ValuesAt(NamedTuple):
    """Where values begin, in the source or in the result of a rank."""

    rank: int
    offset: int
    """In bytes."""


class Fold(NamedTuple):
    """Values that are reduced, or one rank's that are only copied."""

    takes: tuple[ValuesAt, ...]
    """In the sources: at least one, in the order in which they are reduced."""
    gives: tuple[ValuesAt, ...]
    """In the results."""
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Together:
    """An op of all ranks."""

    size: int
    folds: tuple[Fold, ...]
    reduces: bool
    makes_nan_equal: bool
    """Over the ring each rank would add for itself (`RankPlan.added_twice`)."""

    @property
    def moving_bytes(self) -> int:
        """The bytes that are read and written."""
        return sum(fold.nbytes * (len(fold.takes) + len(fold.gives)) for fold in self.folds)


SAME_FOR_ALL = frozenset({"all_reduce", "all_gather"})
"""What gives all ranks the same result, however large."""


def plan_together(requests: Sequence[StartOp], *, root: int, once: bool = False) -> Together:
    """Plan an op, which is no broadcast, from what its ranks ask for, by rank.

    Args:
        requests: of one call. Their sizes are those of correct clients: whoever carries the plan
            out checks that it fits the memory.
        root: the root's rank; 0 for a call without one.
        once: write the result of an op of SAME_FOR_ALL only for rank 0.

    Raises:
        ValueError: a rank gives another one more or less than that one expects.
    """
    first = requests[0]
    if first.call.kind == "all_to_all":
        given = tuple(request.parts for request in requests)
        if given != tuple(zip(*(request.parts_in for request in requests), strict=True)):
            raise ValueError("the ranks differ in what they exchange")
        return _plan_all_to_all(given, WIRE_DTYPES[first.wire_dtype].itemsize)
    return _plan(
        *(first.call.kind, first.call.reduction or "sum", first.wire_dtype),
        *(first.count, first.parts, len(requests), root, once),
    )


@lru_cache(maxsize=16)
def _plan(  # noqa: PLR0917 - by which it is remembered
    kind: str,
    reduction: str,
    dtype: str,
    count: int,
    parts: tuple[int, ...],
    size: int,
    root: int,
    once: bool,  # noqa: FBT001 - as above
) -> Together:
    itemsize, known = WIRE_DTYPES[dtype].itemsize, KINDS[kind]
    reduces = known.reduces and known.row is None
    amounts = parts if known.bound else (count,) * size
    at = _Setting(
        size=size,
        root=root,
        getters=1 if once else size,
        count=count,
        itemsize=itemsize,
        bounds=[itemsize * bound for bound in itertools.accumulate(amounts, initial=0)],
    )
    is_small = count * itemsize <= SMALL_BYTES
    exchanged = kind == "all_reduce" and size == 2 and is_small and is_exact(reduction, dtype)  # noqa: PLR2004 - as in `plan_along_ring`
    folds = tuple(fold for fold in _FOLDS[kind](at) if fold.nbytes and fold.gives)
    return Together(size, folds, reduces, exchanged)


@lru_cache(maxsize=16)
def _plan_all_to_all(parts: tuple[tuple[int, ...], ...], itemsize: int) -> Together:
    size, folds = len(parts), list[Fold]()
    results = [0] * size
    for giver, amounts in enumerate(parts):
        source = 0
        for getter, amount in enumerate(amounts):
            nbytes = amount * itemsize
            if nbytes:
                gives = (ValuesAt(getter, results[getter]),)
                folds.append(Fold((ValuesAt(giver, source),), gives, nbytes))
            source += nbytes
            results[getter] += nbytes
    return Together(size, tuple(folds), reduces=False, makes_nan_equal=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """What the folds of an op depend on."""

    size: int
    root: int
    getters: int
    """The ranks below this number get what all get."""
    count: int
    itemsize: int
    bounds: Sequence[int]
    """Where the part of each rank begins, in bytes, and the end."""

    @property
    def nbytes(self) -> int:
        return self.count * self.itemsize

    def from_all(self, first: int, offset: int) -> tuple[ValuesAt, ...]:
        """Return a place in the source of every rank, in ring order from the first on."""
        return tuple(ValuesAt((first + step) % self.size, offset) for step in range(self.size))

    def to_all(self, offset: int) -> tuple[ValuesAt, ...]:
        return tuple(ValuesAt(rank, offset) for rank in range(self.getters))

    def parts(self) -> Iterator[tuple[int, int, int]]:
        """Yield each rank, where its part begins, and the bytes of it."""
        for rank, (begin, end) in enumerate(itertools.pairwise(self.bounds)):
            yield rank, begin, end - begin


def _all_reduce(at: _Setting) -> Iterator[Fold]:
    """Each chunk begins at the rank of its number, and goes around the ring."""
    bounds = [at.itemsize * value for value in chunk_bounds(at.count, at.size)]
    for chunk, (begin, end) in enumerate(itertools.pairwise(bounds)):
        yield Fold(at.from_all(chunk, begin), at.to_all(begin), end - begin)


def _reduce(at: _Setting) -> Iterator[Fold]:
    yield Fold(at.from_all(at.root + 1, 0), (ValuesAt(at.root, 0),), at.nbytes)


def _reduce_scatter(at: _Setting) -> Iterator[Fold]:
    for rank, begin, nbytes in at.parts():
        yield Fold(at.from_all(rank + 1, begin), (ValuesAt(rank, 0),), nbytes)


def _all_gather(at: _Setting) -> Iterator[Fold]:
    for rank, begin, nbytes in at.parts():
        yield Fold((ValuesAt(rank, 0),), at.to_all(begin), nbytes)


def _gather(at: _Setting) -> Iterator[Fold]:
    for rank, begin, nbytes in at.parts():
        yield Fold((ValuesAt(rank, 0),), (ValuesAt(at.root, begin),), nbytes)


def _scatter(at: _Setting) -> Iterator[Fold]:
    for rank, begin, nbytes in at.parts():
        yield Fold((ValuesAt(at.root, begin),), (ValuesAt(rank, 0),), nbytes)


def _barrier(_: _Setting) -> Iterator[Fold]:
    return iter(())


_FOLDS: Mapping[str, Callable[[_Setting], Iterator[Fold]]] = MappingProxyType(
    {
        "all_reduce": _all_reduce,
        "barrier": _barrier,
        "reduce": _reduce,
        "all_gather": _all_gather,
        "gather": _gather,
        "scatter": _scatter,
        "reduce_scatter": _reduce_scatter,
        # A sum of tables that have one row each is all their rows.
        "sync": _all_gather,
        "exchange": _all_gather,
        "collect": _all_gather,
    }
)
