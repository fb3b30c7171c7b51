# ruff: noqa: ANN401 - numbers of several kinds
"""Collectives of known sizes: one op each, into arrays that are there."""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pmesh.client.mesh import Mesh
from pmesh.errors import OpMismatch, UnsupportedArray, UsageError
from pmesh.testing import SimulatedMesh
from tests.worlds.every_array import make

DTYPES = ("float64", "float16", "complex64", "uint8", "int16", "bool")


def ops_of(mesh: Mesh, call: Callable[[], object]) -> int:
    """How many ops a call takes."""
    mesh.barrier()
    assert mesh.last_op is not None
    before = mesh.last_op.op
    call()
    return mesh.last_op.op - before


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_gather_into_writes_each_rank_s_rows_in_one_op(dtype: str) -> None:
    def train(mesh: Mesh) -> list[Any]:
        x = np.full((mesh.rank + 1, 2), mesh.rank).astype(dtype)
        outs = [np.empty((rank + 1, 2), dtype) for rank in range(3)]
        assert ops_of(mesh, lambda: mesh.all_gather_into(outs, x)) == 1
        return [out.tolist() for out in outs]

    expected = [np.full((rank + 1, 2), rank).astype(dtype).tolist() for rank in range(3)]
    assert SimulatedMesh(3).run(train) == [expected] * 3


def test_gather_into_and_scatter_into_have_a_root() -> None:
    def train(mesh: Mesh) -> list[Any]:
        x, out = np.array([mesh.rank, 7]), np.zeros(2, int)
        outs = [np.zeros(2, int) for _ in range(3)] if mesh.rank == 2 else None
        assert ops_of(mesh, lambda: mesh.gather_into(outs, x, root=2)) == 1
        assert ops_of(mesh, lambda: mesh.scatter_into(out, outs, root=2)) == 1
        return [out.tolist(), [each.tolist() for each in outs or []]]

    gathered = [[0, 7], [1, 7], [2, 7]]
    assert SimulatedMesh(3).run(train) == [
        [[0, 7], []],
        [[1, 7], []],
        [[2, 7], gathered],
    ]


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_the_arrays_for_each_rank_may_be_the_rows_of_one(library: str) -> None:
    def train(mesh: Mesh) -> list[Any]:
        rows = make(library, "float32", [[0, 0], [0, 0]])
        x, out = (make(library, "float32", [mesh.rank, n]) for n in (7, 0))
        mesh.gather_into(rows, x)
        mesh.scatter_into(out, rows)
        return [rows.tolist(), out.tolist()]

    assert SimulatedMesh(2).run(train) == [
        [[[0, 7], [1, 7]], [0, 7]],
        [[[0, 0], [0, 0]], [1, 7]],
    ]


@pytest.mark.parametrize(("op", "expected"), [("sum", 6.0), ("mean", 2.0), ("max", 3.0)])
def test_reduce_scatter_into_combines_unequal_parts(op: str, expected: float) -> None:
    def train(mesh: Mesh) -> Any:
        xs = [np.full(rank + 1, mesh.rank + 1.0, np.float16) for rank in range(3)]
        out = np.zeros(mesh.rank + 1, np.float16)
        assert ops_of(mesh, lambda: mesh.reduce_scatter_into(out, xs, op)) == 1
        return out.tolist()

    assert SimulatedMesh(3).run(train) == [[expected] * n for n in (1, 2, 3)]


def test_all_to_all_into_takes_one_op_if_all_parts_are_equal() -> None:
    def train(mesh: Mesh) -> Any:
        xs = [np.array([10 * mesh.rank + rank]) for rank in range(3)]
        outs = [np.zeros(1, int) for _ in range(3)]
        assert ops_of(mesh, lambda: mesh.all_to_all_into(outs, xs, equal=True)) == 1
        again = [np.zeros(1, int) for _ in range(3)]
        assert ops_of(mesh, lambda: mesh.all_to_all_into(again, xs)) == 2
        assert [out.tolist() for out in again] == [out.tolist() for out in outs]
        return np.concatenate(outs).tolist()

    assert SimulatedMesh(3).run(train) == [[rank, 10 + rank, 20 + rank] for rank in range(3)]


def test_all_to_all_into_moves_unequal_parts() -> None:
    counts = [[1, 0], [2, 3]]

    def train(mesh: Mesh) -> Any:
        xs = [np.full(n, mesh.rank, np.uint8) for n in counts[mesh.rank]]
        outs = [np.empty(row[mesh.rank], np.uint8) for row in counts]
        mesh.all_to_all_into(outs, xs)
        return np.concatenate(outs).tolist()

    assert SimulatedMesh(2).run(train) == [[0, 1, 1], [1, 1, 1]]


def test_ranks_of_a_group_count_in_its_order_not_in_that_of_the_ring() -> None:
    def train(mesh: Mesh) -> Any:
        group = mesh.group([2, 0, 1])
        assert group is not None
        rank = group.rank
        gathered, swapped, parts = ([np.zeros(1) for _ in range(3)] for _ in range(3))
        group.all_gather_into(gathered, np.array([10.0 * rank]))
        group.all_to_all_into(swapped, [np.array([10.0 * rank + to]) for to in range(3)])
        mine, scattered = np.zeros(1), np.zeros(1)
        group.reduce_scatter_into(mine, [np.array([float(to)]) for to in range(3)])
        group.gather_into(parts if rank == 1 else None, np.array([float(rank)]), root=1)
        group.scatter_into(scattered, parts if rank == 1 else None, root=1)
        found = [np.concatenate(gathered), np.concatenate(swapped), mine, scattered]
        return rank, [each.tolist() for each in found]

    for rank, found in SimulatedMesh(3).run(train):
        swapped = [10.0 * each + rank for each in range(3)]
        assert found == [[0.0, 10.0, 20.0], swapped, [3.0 * rank], [float(rank)]]


def test_parts_that_nobody_expects_fail_on_all_ranks() -> None:
    def train(mesh: Mesh) -> str:
        xs = [np.zeros(1 + mesh.rank), np.zeros(1)]
        with pytest.raises(OpMismatch, match="rank 1 gives rank 0 16 bytes, which expects 8"):
            mesh.all_to_all_into([np.zeros(1), np.zeros(1)], xs)
        return "failed"

    assert SimulatedMesh(2).run(train) == ["failed"] * 2


def wrong_calls(mesh: Mesh) -> dict[str, Callable[[], None]]:
    """Calls that differ on rank 1."""
    n = 2 + mesh.rank
    one, two = np.zeros(n), [np.zeros(n), np.zeros(n)]
    dtype = "float32" if mesh.rank else "int32"
    few, own = np.zeros(2, dtype), [np.zeros(2, dtype), np.zeros(2, dtype)]
    return {
        "sizes gathered": lambda: mesh.all_gather_into(two, one),
        "sizes reduced": lambda: mesh.reduce_scatter_into(one, two),
        "sizes exchanged": lambda: mesh.all_to_all_into(two, two.copy(), equal=True),
        "dtypes gathered": lambda: mesh.all_gather_into(own, few),
        "dtypes reduced": lambda: mesh.reduce_scatter_into(few, own),
        "dtypes exchanged": lambda: mesh.all_to_all_into(own, own.copy()),
    }


def test_other_sizes_or_dtypes_on_a_rank_fail_on_all_ranks() -> None:
    def train(mesh: Mesh) -> list[str]:
        for call in wrong_calls(mesh).values():
            with pytest.raises(OpMismatch):
                call()
        return list(wrong_calls(mesh))

    assert SimulatedMesh(2).run(train)[0] == [
        *("sizes gathered", "sizes reduced", "sizes exchanged"),
        *("dtypes gathered", "dtypes reduced", "dtypes exchanged"),
    ]


def test_a_root_that_waits_for_other_sizes_fails() -> None:
    def train(mesh: Mesh) -> None:
        one, two = np.zeros(2 + mesh.rank), [np.zeros(2), np.zeros(2)]
        if mesh.rank == 1:
            with contextlib.suppress(OpMismatch):  # it may have sent before the root has called
                mesh.gather_into(None, one)
        else:
            with pytest.raises(OpMismatch):
                mesh.gather_into(two, one)

    SimulatedMesh(2).run(train)


def test_arguments_that_can_t_be_are_refused_before_an_op() -> None:
    def train(mesh: Mesh) -> None:
        x, two = np.zeros(4), [np.zeros(4), np.zeros(4)]
        frozen = np.zeros(4)
        frozen.flags.writeable = False
        with pytest.raises(UsageError, match="one array for each of 2 ranks, not 1"):
            mesh.all_gather_into([x], x)
        with pytest.raises(UsageError, match="gives 8 bytes, and expects 32 of itself"):
            mesh.all_gather_into(two, x[:1])
        with pytest.raises(UsageError, match="arrays of one size"):
            mesh.all_to_all_into(two, [x, x[:1]], equal=True)
        with pytest.raises(UsageError, match="of one dtype"):
            mesh.reduce_scatter_into(x, [x, x.astype("int64")])
        with pytest.raises(UnsupportedArray, match="in one piece"):
            mesh.all_gather_into([np.zeros((8, 2))[::2, 0]] * 2, x)
        with pytest.raises(UnsupportedArray, match="may be written to"):
            mesh.scatter_into(frozen, two)

    SimulatedMesh(2).run(train)


def test_broadcast_writes_into_out() -> None:
    def train(mesh: Mesh) -> list[int]:
        x = np.arange(3, dtype=np.uint16) * (mesh.rank + 1)
        assert mesh.broadcast(x, 1, out=x) is x
        with pytest.raises(UnsupportedArray, match="in one piece and in the byte order"):
            mesh.broadcast(x, out=np.zeros(6, np.uint16)[::2])
        return [int(each) for each in x]

    assert SimulatedMesh(2).run(train) == [[0, 2, 4]] * 2


@pytest.mark.parametrize(("op", "expected"), [("band", 4), ("BOR", 7), ("bxor", 3)])
def test_bits_are_combined(op: str, expected: int) -> None:
    def train(mesh: Mesh) -> int:
        return int(mesh.all_reduce(np.array([5 + mesh.rank], np.int16), op)[0])

    assert SimulatedMesh(2).run(train) == [expected] * 2
