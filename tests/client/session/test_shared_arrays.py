# ruff: noqa: ANN401 - arrays of libraries that have no common type
"""Arrays in memory that the agent shares: inputs that are not copied, results that stay there."""

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmesh
from pmesh.client.collective.bucketed import LENT_FROM_BYTES
from pmesh.client.elastic import place
from pmesh.core.wire.trainer import Joined, World
from pmesh.ids import TrainerId
from pmesh.testing import SimulatedMesh
from tests.worlds.every_array import make
from tests.worlds.faults import Faults
from tests.worlds.scripted_agent import VIEW, ScriptedAgent, joins, replies
from tests.worlds.watched_agent import WatchedAgent, run_ranks

COUNT = 30_000
NBYTES = 4 * COUNT


def numbered(mesh: pmesh.Mesh) -> Any:
    x = mesh.empty(COUNT)
    x[:] = np.arange(COUNT)
    return x


def inputs(agent: WatchedAgent) -> set[int]:
    """The arenas that the first trainer holds to fill."""
    return {*agent.sessions[0].inputs}


def lent(agent: WatchedAgent) -> set[int]:
    return {number for session in agent.sessions for number in session.lent}


# --- inputs


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "int32", "bool"])
def test_an_array_of_the_mesh_is_reduced_where_it_lies(agent: WatchedAgent, dtype: str) -> None:
    def program(mesh: pmesh.Mesh) -> list[Any]:
        x = mesh.empty((3, 4), dtype)
        assert x.shape == (3, 4)
        assert x.dtype == dtype
        x[:] = np.arange(12).reshape(3, 4) + mesh.rank
        before = x.copy()
        results = [mesh.all_reduce(x, "max"), mesh.reduce(x, 1, "max")]
        assert np.array_equal(x, before)
        return results

    (first, none), (second, third) = run_ranks(agent.home, 2, program)
    right = (np.arange(12).reshape(3, 4) + 1).astype(dtype)
    assert none is None
    for result in (first, second, third):
        assert np.array_equal(result, right)
    assert agent.wanted == [12 * np.dtype(dtype).itemsize] * 2


PARTS: dict[str, Callable[[Any], Any]] = {
    "the first half": lambda x: x[: COUNT // 2],
    "the last values": lambda x: x[-7:],
    "as a matrix": lambda x: x.reshape(3, -1),
    "a row of it": lambda x: x.reshape(3, -1)[1],
    "its bits as another dtype": lambda x: x.view(np.int32),
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())
def test_so_is_a_part_of_it(
    agent: WatchedAgent, mesh: pmesh.Mesh, part: Callable[[Any], Any]
) -> None:
    x = numbered(mesh)
    assert np.array_equal(mesh.all_reduce(part(x)), part(np.arange(COUNT, dtype=np.float32)))
    assert agent.wanted == [NBYTES]


def test_so_is_a_torch_tensor_made_of_it(agent: WatchedAgent, mesh: pmesh.Mesh) -> None:
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(mesh.empty(COUNT))
    x[:] = torch.arange(COUNT)
    result = mesh.all_reduce(x[10:])
    assert torch.equal(result, x[10:])
    result[0] = 0
    assert x[10] == 10
    assert agent.wanted == [NBYTES]


def test_so_is_each_large_array_of_a_tree(agent: WatchedAgent, mesh: pmesh.Mesh) -> None:
    """Also while the one before it is under way, when others would be laid out."""
    count = 9 << 20  # two of them make a bucket too large
    x = mesh.empty((2, count))
    x[:] = [[1], [2]]
    result = mesh.all_reduce({"a": x[0], "b": x[1], "c": np.ones(3, np.float32)})
    assert [float(result[name].max()) for name in "abc"] == [1, 2, 1]
    assert [nbytes for nbytes in agent.wanted if nbytes > 4 * count + 100] == [8 * count]


OTHERS: dict[str, Callable[[pmesh.Mesh, Any], Any]] = {
    "every other value": lambda mesh, x: mesh.all_reduce(x[::2]),
    "columns": lambda mesh, x: mesh.all_reduce(x.reshape(2, -1).T),
    "as halves": lambda mesh, x: mesh.all_reduce(x.view(np.float16)),
    "in the other byte order": lambda mesh, x: mesh.all_reduce(x.view(">f4")),
    "not aligned": lambda mesh, x: mesh.all_reduce(x.view(np.uint8)[1:-3].view(np.float32)),
    "broadcast": lambda mesh, x: mesh.broadcast(x),
    "several in one op": lambda mesh, x: mesh.all_reduce([x[:5], x[5:10]]),
    "an average": lambda mesh, x: mesh.average_gradients([x]),
    "compressed": lambda mesh, x: mesh.all_reduce(x, compression="int8"),
    "another call": lambda mesh, x: mesh.all_gather(x),
}


@pytest.mark.parametrize("call", OTHERS.values(), ids=OTHERS.keys())
def test_what_does_not_lie_there_as_it_travels_is_copied(
    agent: WatchedAgent, call: Callable[[pmesh.Mesh, Any], Any]
) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        x = numbered(mesh)
        x.view(np.int32)[:] &= 0x7BFF7BFF  # a number in each of these dtypes
        mesh.barrier()  # both have it
        before = len(agent.wanted)
        mesh.barrier()
        found = call(mesh, x)
        assert len(agent.wanted) > before
        np.testing.assert_array_equal(found, call(mesh, x.copy()))

    run_ranks(agent.home, 2, program)


def test_what_a_root_has_sent_stays_though_its_array_changes(
    agent: WatchedAgent, mesh: pmesh.Mesh
) -> None:
    x = numbered(mesh)
    mesh.broadcast(x)
    x[:] = 7
    (sent,) = agent.retained
    assert bytes(sent.memory) == sent.was == np.arange(COUNT, dtype=np.float32).tobytes()


def test_its_memory_goes_back_when_the_last_view_of_it_is_gone(
    agent: WatchedAgent, mesh: pmesh.Mesh
) -> None:
    x = numbered(mesh)
    view = x[5:].reshape(-1, 5)
    del x
    gc.collect()
    mesh.barrier()
    assert len(inputs(agent)) == 1
    assert mesh.all_reduce(view)[0, 0] == 5
    assert len(agent.wanted) == 1
    del view
    gc.collect()
    mesh.barrier()
    assert inputs(agent) == set()


def test_another_array_in_its_old_place_is_copied(agent: WatchedAgent, mesh: pmesh.Mesh) -> None:
    """Memory that was given back is found by nobody, whatever lies at its address now."""
    for value in range(20):
        x = mesh.empty(COUNT)
        del x
        y = np.full(COUNT, value, np.float32)
        assert (mesh.all_reduce(y) == value).all()
    assert len(inputs(agent)) == 1


def test_in_a_group_the_arrays_of_the_mesh_are_ordinary_ones(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> tuple[float, float]:
        x = mesh.empty(3)
        group = mesh.group([1, 0])
        assert group is not None
        y = group.empty(3)
        x[:], y[:] = mesh.rank, group.rank
        return float(group.all_reduce(x).sum()), float(mesh.all_reduce(y).sum())

    assert run_ranks(agent.home, 2, program) == [(3, 3)] * 2


def test_an_empty_one_and_one_without_dimensions(agent: WatchedAgent, mesh: pmesh.Mesh) -> None:
    assert mesh.empty([0, 3]).shape == (0, 3)
    assert mesh.all_reduce(mesh.empty((0, 3))).shape == (0, 3)
    x = mesh.empty(())
    x[()] = 5
    assert mesh.all_reduce(x) == 5
    assert agent.wanted == [4]


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "text"),
    [
        (3, "float16", pmesh.UnsupportedArray, "float16 does not travel as it is; empty.. makes f"),
        (3, ">f4", pmesh.UnsupportedArray, ">f4"),
        (3, "datetime64[s]", pmesh.UnsupportedArray, "datetime64"),
        ((2, -1), "float32", pmesh.UsageError, r"no array has the shape \(2, -1\)"),
        (10**19, "bool", pmesh.UsageError, "no array has the shape 10000000000000000000"),
        ((2, 2.5), "float32", TypeError, "float"),
    ],
)
def test_what_can_not_be_had_says_so(
    mesh: pmesh.Mesh, shape: Any, dtype: str, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        mesh.empty(shape, dtype)
    assert mesh.empty(np.int64(3)).shape == (3,)  # type: ignore[call-overload] # numpy's own integers


def test_a_closed_mesh_has_none(mesh: pmesh.Mesh) -> None:
    x = numbered(mesh)
    mesh.close()
    with pytest.raises(pmesh.MeshClosed):
        mesh.empty(3)
    assert x[7] == 7  # the array stays


# --- results


def test_a_result_stays_where_it_is_for_as_long_as_it_is_kept(
    agent: WatchedAgent, mesh: pmesh.Mesh
) -> None:
    x = numbered(mesh)
    first = mesh.all_reduce(x, copy=False)
    kept = first[100:].reshape(-1, 100)
    del first
    for value in range(1, 5):
        x[:] = value
        assert (mesh.all_reduce(x, copy=False) == value).all()
        assert np.array_equal(kept.reshape(-1), np.arange(100, COUNT))
    assert len(lent(agent)) == 2
    del kept
    gc.collect()
    mesh.barrier()
    assert lent(agent) == set()


def test_it_can_not_be_written_to(mesh: pmesh.Mesh) -> None:
    """O2: others may still have to fetch it."""
    result = mesh.all_reduce(numbered(mesh), copy=False)
    with pytest.raises(ValueError, match="read-only"):
        result[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        result.flags.writeable = True


def test_it_outlives_the_mesh(agent: WatchedAgent) -> None:
    with pmesh.connect("job", home=agent.home) as mesh:
        result = mesh.all_reduce(numbered(mesh), copy=False)
    assert np.array_equal(result, np.arange(COUNT))


def test_where_the_agent_lends_no_more_it_is_a_copy(agent: WatchedAgent, mesh: pmesh.Mesh) -> None:
    agent.lends = False
    result = mesh.all_reduce(numbered(mesh), copy=False)
    x = np.arange(COUNT, dtype=np.float32)
    result += 1
    mesh.all_reduce(x)
    mesh.all_reduce(x)
    assert np.array_equal(result, x + 1)


def test_a_tree_stays_too(agent: WatchedAgent, mesh: pmesh.Mesh) -> None:
    a, b, c = np.ones((2, COUNT), np.float32), np.zeros(4, np.float32), np.ones(COUNT)
    tree: Any = {"a": a, "b": [b], "c": c}
    result = mesh.all_reduce(tree, copy=False)
    assert len(lent(agent)) == 2  # for each dtype
    assert not result["a"].flags.writeable
    assert np.array_equal(result["a"], tree["a"])
    assert np.array_equal(result["b"][0], tree["b"][0])


@pytest.mark.parametrize("count", [1, LENT_FROM_BYTES // 4 - 1])
def test_what_is_small_is_copied(agent: WatchedAgent, mesh: pmesh.Mesh, count: int) -> None:
    for x in (np.ones(count, np.float32), {"a": np.ones(count, np.float32)}):
        result: Any = mesh.all_reduce(x, copy=False)
        array = result["a"] if isinstance(result, dict) else result
        array += 1
    assert lent(agent) == set()


@pytest.mark.parametrize(
    ("library", "dtype"),
    [("numpy", "float16"), ("mlx", "float32"), ("torch", "float32"), ("torch", "bfloat16")],
)
def test_what_can_not_stay_is_copied(
    agent: WatchedAgent, mesh: pmesh.Mesh, library: str, dtype: str
) -> None:
    x = make(library, dtype, [1.0] * COUNT)
    result = mesh.all_reduce(x, copy=False)
    assert type(result) is type(x)
    result[0] = 5
    assert lent(agent) == set()


def test_a_handle_gives_it_too(agent: WatchedAgent, mesh: pmesh.Mesh) -> None:
    x = numbered(mesh)
    handle: Any = mesh.all_reduce(x, copy=False, async_op=True)
    result = handle.wait()
    assert result is handle.wait()
    assert not result.flags.writeable
    assert agent.wanted == [NBYTES]
    mesh.all_reduce(x + 1)
    mesh.all_reduce(x + 1)
    assert np.array_equal(result, x)


def test_out_is_a_copy(mesh: pmesh.Mesh) -> None:
    with pytest.raises(pmesh.UsageError, match="copy=False"):
        mesh.all_reduce(np.ones(3), out=np.ones(3), copy=False)


# --- without an agent


def test_once_its_agent_has_stopped_it_is_an_array_like_others(
    tmp_path: Path, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    faults.limit(place, "_TRY_AGAIN_S", 0.001)
    with ScriptedAgent(tmp_path, joins) as agent:
        mesh = pmesh.connect("job", home=agent.home, on_superseded="sync")
        agent.wait_until_closed()
    with caplog.at_level(logging.WARNING, "pmesh"):
        x = mesh.empty(3)
    assert "this rank trains alone" in caplog.text
    x[:] = 5
    assert mesh.all_reduce(x, copy=False).tolist() == [5] * 3
    assert mesh.empty(3).shape == (3,)
    mesh.close()


def test_who_finds_out_there_that_the_agent_has_stopped_is_alone_in_the_next_call(
    tmp_path: Path,
) -> None:
    """O5: the ranks after a call are those whose values it has brought."""
    joined = Joined(World(1, (TrainerId(0), TrainerId(1)), ("mac-0", "mac-1")), VIEW)
    with ScriptedAgent(tmp_path, replies(joined)) as agent:
        mesh = pmesh.connect("job", home=agent.home, on_superseded="sync")
        agent.wait_until_closed()
    x = mesh.empty(3)
    x[:] = 5
    assert mesh.all_reduce(x, copy=False).tolist() == [5] * 3
    assert (mesh.rank, mesh.names, mesh.trainers) == (0, ("mac-1",), (TrainerId(1),))
    mesh.close()


def test_an_agent_that_has_stopped_is_told_by_default(tmp_path: Path) -> None:
    with ScriptedAgent(tmp_path, joins) as agent:
        mesh = pmesh.connect("job", home=agent.home)
        agent.wait_until_closed()
    with pytest.raises(pmesh.AgentStopped):
        mesh.empty(3)
    mesh.close()


def test_simulated_ranks_have_them_too() -> None:
    def rank(mesh: pmesh.Mesh) -> bool:
        x = mesh.empty(COUNT)
        x[:] = mesh.rank
        total = mesh.all_reduce(x, copy=False)
        return bool((total == 1).all()) and not total.flags.writeable

    assert SimulatedMesh(2).run(rank) == [True, True]
