# pyright: basic
"""What type checkers know of each call's result: `make check` holds it, and it runs besides."""

import inspect
from typing import TYPE_CHECKING, Any, assert_type

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

import pmesh
from pmesh.client.group import Collectives
from pmesh.core.values import View
from pmesh.ids import Rank, TrainerId
from pmesh.p2p.client.calls import PointToPoint
from pmesh.testing import SimulatedMesh

if TYPE_CHECKING:
    import torch  # pyright: ignore[reportMissingImports] - as in the test of it

Floats = NDArray[np.float32]
AnyArray = np.ndarray[tuple[int, ...], np.dtype[Any]]


def call_everything(mesh: pmesh.Mesh) -> None:
    ask_for_facts(mesh)
    reduce(mesh)
    move(mesh)
    place(mesh)
    share(mesh)
    send(mesh)
    call_late(mesh)
    group_ranks(mesh)
    mesh.close()


def ask_for_facts(mesh: pmesh.Mesh) -> None:
    assert_type(mesh.rank, Rank)
    assert_type(mesh.size, int)
    assert_type(mesh.names, tuple[str, ...])
    assert_type(mesh.trainers, tuple[TrainerId, ...])
    assert_type(mesh.step, int)
    assert_type(mesh.view, View)
    assert_type(mesh.last_op, pmesh.LastOp | None)
    assert_type(mesh.shard(10), np.ndarray[tuple[int], np.dtype[np.int64]])
    assert_type(mesh.share(10), np.ndarray[tuple[int], np.dtype[np.int64]])
    assert_type(mesh.batch(10, 4), np.ndarray[tuple[int], np.dtype[np.int64]])
    assert_type(mesh.empty(3), Floats)
    assert_type(mesh.empty((2, 3), np.float64), NDArray[np.float64])
    assert_type(mesh.empty(3, "int8"), NDArray[Any])
    kept = mesh.error_feedback_state()
    assert_type(kept, dict[str, AnyArray])
    mesh.load_error_feedback_state(kept)
    mesh.report(loss=0.5)
    assert_type(mesh.compare(kept), pmesh.Compared)


def reduce(mesh: pmesh.Mesh) -> None:
    x: Floats = np.ones(2, np.float32)
    m = mx.ones(2)
    tree = {"w": m, "b": m}
    assert_type(mesh.sync(tree), dict[str, mx.array])
    assert_type(mesh.all_reduce(x), Floats)
    assert_type(mesh.all_reduce(m, "max", out=None, strategy="ring"), mx.array)
    assert_type(mesh.all_reduce(tree), dict[str, mx.array])
    assert_type(mesh.all_reduce((x, [m])), tuple[Floats, list[mx.array]])
    assert_type(mesh.average_gradients([m, m], weight=2), list[mx.array])
    assert_type(mesh.average_gradients([m, m], on_nonfinite="skip"), list[mx.array])
    grads: list[Floats | None] = [x, None]
    assert_type(mesh.average_gradients(grads, missing="zeros"), list[Floats | None])
    assert_type(mesh.broadcast(x), Floats)
    assert_type(mesh.broadcast(tree, root=1), dict[str, mx.array])
    assert_type(mesh.reduce(m), mx.array | None)
    assert_type(mesh.reduce_scatter(x), Floats)


def move(mesh: pmesh.Mesh) -> None:
    x: Floats = np.ones(2, np.float32)
    m = mx.ones(2)
    assert_type(mesh.all_gather(x), Floats)
    assert_type(mesh.all_gather(m, stacked=True), mx.array)
    assert_type(mesh.gather(m), mx.array | None)
    assert_type(mesh.all_to_all([m] * mesh.size), list[mx.array])
    assert_type(mesh.scatter([x] * mesh.size), Floats)
    assert_type(mesh.scatter([m] * mesh.size if mesh.rank == 0 else None), mx.array)
    assert_type(mesh.all_gather_object(1), list[Any])
    assert_type(mesh.broadcast_object(1), Any)
    mesh.barrier()
    mesh.monitored_barrier(10)


def place(mesh: pmesh.Mesh) -> None:
    x: Floats = np.ones(2, np.float32)
    xs = [x] * mesh.size
    outs = [np.zeros(2, np.float32) for _ in xs]
    assert_type(mesh.all_gather_into(outs, x), None)
    assert_type(mesh.gather_into(outs if mesh.rank == 0 else None, x), None)
    assert_type(mesh.scatter_into(outs[0], xs if mesh.rank == 0 else None), None)
    assert_type(mesh.reduce_scatter_into(outs[0], xs), None)
    assert_type(mesh.all_to_all_into(outs, xs), None)


def share(mesh: pmesh.Mesh) -> None:
    assert_type(mesh.rpc, pmesh.Rpc)
    mesh.rpc.register(abs)
    assert_type(mesh.rpc.call_async(mesh.rank, "abs", 1), pmesh.RemoteCall)
    assert_type(mesh.rpc.map("abs", [1], ranks=[mesh.rank]), list[Any])
    store = mesh.store
    assert_type(store, pmesh.Store)
    key = f"of {mesh.rank}"
    store.set(key, b"1")
    store.append(key, b"0")
    store.wait([key], timeout_s=10)
    assert_type(store.get(key), bytes)
    assert_type(store.add("n"), int)
    assert_type(store.compare_set("b", b"", b"2"), bytes | None)
    assert_type(store.check([key]), bool)
    assert_type(store.keys(), list[str])
    assert_type(store.delete(key), bool)


def send(mesh: pmesh.Mesh) -> None:
    x: Floats = np.ones(2, np.float32)
    m = mx.ones(2)
    other = 1 - mesh.rank
    assert_type(mesh.sendrecv(m, other, other), mx.array)
    sending = mesh.send(x, other, async_op=True)
    assert_type(sending, pmesh.Handle[None])
    assert_type(mesh.recv(other, like=m), mx.array)
    mesh.send(x, other, async_op=True)
    assert_type(mesh.recv(other), AnyArray)
    mesh.send(x, other, async_op=True)
    assert_type(mesh.recv_like(x, other), Floats)
    assert_type(mesh.last_source, Rank | None)
    sending.wait()


def call_late(mesh: pmesh.Mesh) -> None:
    x: Floats = np.ones(2, np.float32)
    xs = [x] * mesh.size
    handle = mesh.all_reduce(x, async_op=True)
    assert_type(handle, pmesh.Handle[Floats])
    assert_type(handle.wait(), Floats)
    assert_type(mesh.average_gradients([x], async_op=True), pmesh.Handle[list[Floats]])
    assert_type(mesh.broadcast(x, async_op=True), pmesh.Handle[Floats])
    assert_type(mesh.reduce(x, async_op=True), pmesh.Handle[Floats | None])
    assert_type(mesh.reduce_scatter(x, async_op=True), pmesh.Handle[Floats])
    assert_type(mesh.all_gather(x, async_op=True), pmesh.Handle[Floats])
    assert_type(mesh.gather(x, async_op=True), pmesh.Handle[Floats | None])
    assert_type(mesh.all_to_all(xs, async_op=True), pmesh.Handle[list[Floats]])
    assert_type(mesh.scatter(xs, async_op=True), pmesh.Handle[Floats])
    sending = mesh.send(x, 1 - mesh.rank, async_op=True), mesh.send(x, 1 - mesh.rank, async_op=True)
    receiving = mesh.recv(1 - mesh.rank, like=x, async_op=True)
    assert_type(receiving, pmesh.Handle[Floats])
    assert_type(mesh.recv_like(x, 1 - mesh.rank, async_op=True).wait(), Floats)
    for each in sending:
        assert_type(each.wait(), None)
    receiving.wait()


def group_ranks(mesh: pmesh.Mesh) -> None:
    assert_type(mesh.group([0, 1]), pmesh.Group | None)
    assert_type(mesh.split(0), pmesh.Group | None)
    with_names = pmesh.DeviceMesh(mesh, (1, 2), ("data", "model"))
    assert_type(with_names["model"], pmesh.Group)
    assert_type(with_names["model"].all_reduce(mx.ones(2)), mx.array)


def test_the_types_are_those_that_checkers_expect() -> None:
    SimulatedMesh(2).run(call_everything)


@pytest.mark.parametrize("name", [name for name in dir(pmesh.Mesh) if not name.startswith("_")])
def test_every_public_name_of_a_mesh_is_among_them(name: str) -> None:
    assert f"mesh.{name}" in inspect.getsource(inspect.getmodule(call_everything) or pmesh)


@pytest.mark.parametrize(
    "name",
    [
        name
        for kind in (Collectives, PointToPoint)
        for name, call in inspect.getmembers(kind, inspect.isfunction)
        if "async_op" in inspect.signature(call).parameters and not name.startswith("_")
    ],
)
def test_every_call_that_may_be_late_is_among_them(name: str) -> None:
    source = inspect.getsource(call_late)
    assert f"mesh.{name}(" in source


def test_torch_tensors_keep_their_type() -> None:
    library: Any = pytest.importorskip("torch")

    def train(mesh: pmesh.Mesh) -> None:
        t: torch.Tensor = library.ones(2)
        parameters: dict[str, torch.Tensor] = {"w": t}
        assert_type(mesh.sync(parameters), "dict[str, torch.Tensor]")
        assert_type(mesh.all_reduce(t), "torch.Tensor")
        assert_type(mesh.average_gradients([t, t]), "list[torch.Tensor]")
        assert_type(mesh.broadcast(parameters), "dict[str, torch.Tensor]")
        assert_type(mesh.reduce(t), "torch.Tensor | None")
        assert_type(mesh.scatter([t, t]), "torch.Tensor")
        assert_type(mesh.all_gather(t, async_op=True).wait(), "torch.Tensor")
        assert_type(mesh.sendrecv(t, 1 - mesh.rank, 1 - mesh.rank), "torch.Tensor")

    SimulatedMesh(2).run(train)


def test_a_rank_that_scatters_nothing_does_not_end_the_function_for_a_checker() -> None:
    def receive(mesh: pmesh.Mesh) -> list[bool]:
        if mesh.rank == 0:
            return [bool(mesh.scatter([np.zeros(1), np.ones(1)])[0] == 0) for _ in range(2)]
        mine = mesh.scatter(None)
        assert_type(mine, Any)
        late = mesh.scatter(None, async_op=True)
        assert_type(late, pmesh.Handle[Any])
        return [bool(x[0] == 1) for x in (mine, late.wait())]

    assert SimulatedMesh(2).run(receive) == [[True, True]] * 2
