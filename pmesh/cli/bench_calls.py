"""The collectives that `pmesh bench` measures: call, correct result and bus factor of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast, get_args

import numpy as np
from numpy.typing import NDArray

from pmesh.client.calls.reducing import Strategy
from pmesh.client.mesh import Mesh

Float32Array: TypeAlias = NDArray[np.float32]
PERIOD: Final = 4099  # a prime, so a misplaced segment changes the phase


@dataclass(frozen=True, slots=True)
class CallTrial:
    """One call, repeated with the same input."""

    call: Callable[[], object]
    is_right: Callable[[Any], bool]


Prepare: TypeAlias = Callable[[Mesh, int, str], CallTrial]
"""Takes the mesh, the number of float32 values in the largest array of any rank, a strategy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One row of the table."""

    name: str
    prepare: Prepare
    bus_factor: Callable[[int], float]
    """Bytes that a link of n ranks must carry per byte of the array, as nccl-tests defines it."""
    strategies: tuple[str, ...] = ("",)
    """The values of its `strategy` keyword; "" if it has none."""
    has_sizes: bool = True


def input_of(count: int, rank: int) -> Float32Array:
    """Return whole numbers, so that float32 sums those of all ranks without rounding.

    >>> input_of(3, 1)
    array([0., 2., 4.], dtype=float32)
    """
    values: Float32Array = np.resize(np.arange(PERIOD, dtype=np.float32), count)
    values *= np.float32(rank + 1)
    return values


def sum_of(count: int, ranks: int) -> Float32Array:
    return input_of(count, ranks * (ranks + 1) // 2 - 1)


def _all_reduce(mesh: Mesh, count: int, strategy: str) -> CallTrial:
    mine, right = input_of(count, mesh.rank), sum_of(count, mesh.size)
    chosen = cast("Strategy", strategy)  # from this collective's row in the table
    return CallTrial(lambda: mesh.all_reduce(mine, strategy=chosen), _equals(right))


def _all_reduce_shared(mesh: Mesh, count: int, _: str) -> CallTrial:
    """Use memory that the agent shares: neither the input nor the result is copied."""
    mine, right = mesh.empty(count), sum_of(count, mesh.size)
    mine[:] = input_of(count, mesh.rank)
    return CallTrial(lambda: mesh.all_reduce(mine, copy=False), _equals(right))


def _broadcast(mesh: Mesh, count: int, _: str) -> CallTrial:
    mine, right = input_of(count, mesh.rank), input_of(count, 0)
    return CallTrial(lambda: mesh.broadcast(mine), _equals(right))


def _reduce(mesh: Mesh, count: int, _: str) -> CallTrial:
    mine, right = input_of(count, mesh.rank), sum_of(count, mesh.size)
    return CallTrial(lambda: mesh.reduce(mine), _at_root(mesh, right))


def _all_gather(mesh: Mesh, count: int, _: str) -> CallTrial:
    mine, right = _parts(mesh, count)[mesh.rank], np.concatenate(_parts(mesh, count))
    return CallTrial(lambda: mesh.all_gather(mine), _equals(right))


def _gather(mesh: Mesh, count: int, _: str) -> CallTrial:
    mine, right = _parts(mesh, count)[mesh.rank], np.concatenate(_parts(mesh, count))
    return CallTrial(lambda: mesh.gather(mine), _at_root(mesh, right))


def _scatter(mesh: Mesh, count: int, _: str) -> CallTrial:
    parts = _parts(mesh, count)
    given = None if mesh.rank else parts
    return CallTrial(lambda: mesh.scatter(given), _equals(parts[mesh.rank]))


def _reduce_scatter(mesh: Mesh, count: int, _: str) -> CallTrial:
    mine = input_of(count, mesh.rank)
    right = np.array_split(sum_of(count, mesh.size), mesh.size)[mesh.rank]
    return CallTrial(lambda: mesh.reduce_scatter(mine), _equals(right))


def _all_to_all(mesh: Mesh, count: int, _: str) -> CallTrial:
    mine = np.array_split(input_of(count, mesh.rank), mesh.size)
    others = (np.array_split(input_of(count, rank), mesh.size) for rank in range(mesh.size))
    right = np.concatenate([parts[mesh.rank] for parts in others])
    return CallTrial(lambda: mesh.all_to_all(mine), lambda got: _equals(right)(np.concatenate(got)))


def _sendrecv(mesh: Mesh, count: int, _: str) -> CallTrial:
    following, previous = (mesh.rank + 1) % mesh.size, (mesh.rank - 1) % mesh.size
    mine, right = input_of(count, mesh.rank), input_of(count, previous)
    if mesh.size == 1:
        return CallTrial(mine.copy, _equals(right))  # a rank can't send to itself
    return CallTrial(lambda: mesh.sendrecv(mine, following, previous), _equals(right))


def _barrier(mesh: Mesh, _count: int, _strategy: str) -> CallTrial:
    return CallTrial(mesh.barrier, lambda _: True)


def _parts(mesh: Mesh, count: int) -> list[Float32Array]:
    """Cut an array into one part for each rank, and scale each part by another factor."""
    parts = np.array_split(input_of(count, 0), mesh.size)
    return [part * np.float32(rank + 1) for rank, part in enumerate(parts)]


def _equals(right: Float32Array) -> Callable[[Any], bool]:
    return lambda result: np.array_equal(result, right)


def _at_root(mesh: Mesh, right: Float32Array) -> Callable[[Any], bool]:
    """Expect the result at rank 0 and None at the others."""
    return (lambda result: result is None) if mesh.rank else _equals(right)


def _one_way(_: int) -> float:
    """All bytes of the array cross one link."""
    return 1.0


def _all_but_own(ranks: int) -> float:
    """Each rank already holds its own part."""
    return (ranks - 1) / ranks


def _there_and_back(ranks: int) -> float:
    """Each part is reduced at one rank, then sent to all."""
    return 2 * _all_but_own(ranks)


COLLECTIVES: Final[Sequence[Benchmark]] = (
    Benchmark(
        name="all_reduce",
        prepare=_all_reduce,
        bus_factor=_there_and_back,
        strategies=get_args(Strategy),
    ),
    Benchmark(name="all_reduce_shared", prepare=_all_reduce_shared, bus_factor=_there_and_back),
    Benchmark(name="reduce", prepare=_reduce, bus_factor=_one_way),
    Benchmark(name="broadcast", prepare=_broadcast, bus_factor=_one_way),
    Benchmark(name="all_gather", prepare=_all_gather, bus_factor=_all_but_own),
    Benchmark(name="gather", prepare=_gather, bus_factor=_all_but_own),
    Benchmark(name="scatter", prepare=_scatter, bus_factor=_all_but_own),
    Benchmark(name="reduce_scatter", prepare=_reduce_scatter, bus_factor=_all_but_own),
    Benchmark(name="all_to_all", prepare=_all_to_all, bus_factor=_all_but_own),
    Benchmark(name="sendrecv", prepare=_sendrecv, bus_factor=_one_way),
    Benchmark(name="barrier", prepare=_barrier, bus_factor=lambda _: 0.0, has_sizes=False),
)
STRATEGIES: Final = tuple(dict.fromkeys(s for c in COLLECTIVES for s in c.strategies if s))
