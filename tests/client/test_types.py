"""What type checkers know of each call's result: `make check` holds it, and it runs besides."""

from typing import Any, assert_type

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

import pmesh
from pmesh.ids import Rank
from pmesh.testing import SimulatedMesh

Floats = NDArray[np.float32]


def call_everything(mesh: pmesh.Mesh) -> None:
    x: Floats = np.ones(2, np.float32)
    m = mx.ones(2)
    tree = {"w": m, "b": m}
    assert_type(mesh.rank, Rank)
    assert_type(mesh.names, tuple[str, ...])
    assert_type(mesh.sync(tree), dict[str, mx.array])

    assert_type(mesh.all_reduce(x), Floats)
    assert_type(mesh.all_reduce(m), mx.array)
    assert_type(mesh.all_reduce(tree), dict[str, mx.array])
    handle = mesh.all_reduce(x, async_op=True)
    assert_type(handle, pmesh.Handle[Floats])
    assert_type(handle.wait(), Floats)
    assert_type(mesh.average_gradients([m, m], weight=2), list[mx.array])
    assert_type(mesh.broadcast(x), Floats)
    assert_type(mesh.reduce(m), mx.array | None)
    assert_type(mesh.reduce_scatter(x), Floats)
    assert_type(mesh.all_gather(x), Floats)
    assert_type(mesh.all_gather(m, stacked=True), mx.array)
    assert_type(mesh.gather(m), mx.array | None)
    assert_type(mesh.all_to_all([m] * mesh.size), list[mx.array])
    assert_type(mesh.scatter([x] * mesh.size), Floats)
    assert_type(mesh.all_gather_object(1), list[Any])
    assert_type(mesh.shard(10), np.ndarray[tuple[int], np.dtype[np.int64]])

    other = 1 - mesh.rank
    assert_type(mesh.sendrecv(m, other, other), mx.array)
    sending = mesh.send(x, other, async_op=True)
    assert_type(sending, pmesh.Handle[None])
    assert_type(mesh.recv(other, like=m), mx.array)
    sending.wait()
    assert_type(mesh.group([0, 1]), pmesh.Group | None)
    assert_type(mesh.last_op, pmesh.LastOp | None)


def test_the_types_are_those_that_checkers_expect() -> None:
    SimulatedMesh(2).run(call_everything)


def test_a_rank_that_scatters_nothing_does_not_end_the_function_for_a_checker() -> None:
    def receive(mesh: pmesh.Mesh) -> bool:
        mine = mesh.scatter([np.zeros(1), np.ones(1)] if mesh.rank == 0 else None)
        return bool(mine[0] == mesh.rank)

    assert SimulatedMesh(2).run(receive) == [True, True]
