import threading
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmesh
from pmesh.core.wire.calls import Call
from pmesh.ids import OpNumber, Rank
from tests.worlds.scripted_agent import ScriptedAgent, joins
from tests.worlds.watched_agent import WatchedAgent, run_ranks

UFUNCS: dict[str, Any] = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
FLOATS = ["float64", "float32", "float16", "bfloat16"]


def dtype_named(name: str) -> "np.dtype[Any]":
    ml_dtypes = pytest.importorskip("ml_dtypes")
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def values(rank: int, dtype: "np.dtype[Any]", shape: tuple[int, ...] = (3, 5)) -> Any:  # noqa: ANN401
    """Small integers: exact in every dtype, and so are their sums and products."""
    return np.random.default_rng(rank).integers(0, 4, shape).astype(dtype)


@pytest.mark.parametrize(
    ("name", "op"),
    [(name, op) for name in FLOATS for op in ("sum", "mean", "max", "min", "prod")]
    + [(name, op) for name in ("int32", "int64") for op in UFUNCS]
    + [("bool", op) for op in ("max", "min", "prod")],
)
def test_all_reduce_is_what_numpy_says(agent: WatchedAgent, name: str, op: str) -> None:
    dtype, ranks = dtype_named(name), 3
    inputs = [values(rank, dtype) for rank in range(ranks)]
    results = run_ranks(agent.home, ranks, lambda mesh: mesh.all_reduce(inputs[mesh.rank], op))
    wide = [x.astype(np.float64) for x in inputs]
    expected = sum(wide) / ranks if op == "mean" else reduce(UFUNCS[op], wide)
    for result in results:
        assert result.dtype == dtype
        assert result.tobytes() == np.asarray(expected).astype(dtype).tobytes()
    for rank in range(ranks):
        np.testing.assert_array_equal(inputs[rank], values(rank, dtype))


def test_low_precision_sums_are_added_in_float32(agent: WatchedAgent) -> None:
    # In float16 each of the ones would be lost beside 2048; together they are not.
    x = [np.full(1, value, np.float16) for value in (2048, 1, 1)]
    results = run_ranks(agent.home, 3, lambda mesh: mesh.all_reduce(x[mesh.rank]))
    assert [float(result[0]) for result in results] == [2050.0] * 3


def tree_of(rank: int) -> dict[str, Any]:
    return {
        "w": values(rank, np.dtype(np.float32)),
        "layers": [
            (values(rank, np.dtype(np.int64)), np.zeros((0, 4))),
            {"flag": np.array(rank == 0), "scale": np.float64(rank)},
        ],
    }


def test_a_tree_is_reduced_leaf_by_leaf_one_op_for_each_dtype(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> dict[str, Any]:
        return mesh.all_reduce(tree_of(mesh.rank), "max")

    for result in run_ranks(agent.home, 2, program):
        np.testing.assert_array_equal(result["w"], np.maximum(tree_of(0)["w"], tree_of(1)["w"]))
        pair, last = result["layers"]
        assert type(pair) is tuple
        assert pair[1].shape == (0, 4)
        assert last["flag"].dtype == np.bool_
        assert bool(last["flag"])
        assert type(last["scale"]) is np.float64
        assert last["scale"] == 1
    assert [(call.dtype, call.shape) for call in agent.calls] == [
        ("float64", (1,)),
        ("float32", (15,)),
        ("int64", (15,)),
        ("bool", (1,)),
    ]


@pytest.mark.parametrize("root", [0, 1, 2])
def test_broadcast_gives_everyone_the_roots_values(agent: WatchedAgent, root: int) -> None:
    def program(mesh: pmesh.Mesh) -> dict[str, Any]:
        return mesh.broadcast(tree_of(mesh.rank), root=root)

    for result in run_ranks(agent.home, 3, program):
        np.testing.assert_array_equal(result["w"], tree_of(root)["w"])
        assert result["layers"][1]["scale"] == root


def test_the_root_gets_a_copy_not_its_own_array(agent: WatchedAgent) -> None:
    x = np.ones(3)
    (result,) = run_ranks(agent.home, 1, lambda mesh: mesh.broadcast(x))
    result[:] = 2
    assert (x == 1).all()


def test_a_roots_input_is_not_written_again_because_others_may_still_fetch_it(
    agent: WatchedAgent,
) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        for k in range(3):
            mesh.broadcast(np.full(10, k, np.float32), root=0)
            mesh.all_reduce(np.full(10, 9 + k, np.float32))

    run_ranks(agent.home, 2, program)
    assert len(agent.retained) == 3
    assert all(sent.unchanged for sent in agent.retained)


def test_results_stay_when_the_agent_uses_the_output_again(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> list[Any]:
        return [mesh.all_reduce(np.full(4, k, np.float32)) for k in range(3)]

    (results,) = run_ranks(agent.home, 1, program)
    assert [float(result[0]) for result in results] == [0, 1, 2]


def test_one_input_arena_serves_ops_of_every_size_up_to_its_own(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        for count in (1000, 10, 1000, 500):
            mesh.all_reduce(np.ones(count))
        mesh.all_reduce(np.ones(100_000))
        mesh.all_reduce(np.ones(1))

    run_ranks(agent.home, 1, program)
    assert len(agent.wanted) == 2


def test_a_tree_asks_once_for_what_its_largest_bucket_needs(agent: WatchedAgent) -> None:
    grads = {"a": np.ones(10, np.float32), "b": np.ones(50_000, np.float32)}
    run_ranks(agent.home, 1, lambda mesh: mesh.average_gradients(grads, bucket_bytes=64))
    assert len(agent.calls) == 2
    assert len(agent.wanted) == 1


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1, 1)])
def test_empty_and_zero_dimensional_arrays_keep_their_shape(
    agent: WatchedAgent, shape: tuple[int, ...]
) -> None:
    def program(mesh: pmesh.Mesh) -> tuple[Any, Any]:
        return mesh.all_reduce(np.ones(shape)), mesh.broadcast(np.ones(shape))

    for reduced, sent in run_ranks(agent.home, 2, program):
        assert reduced.shape == sent.shape == shape
        assert (reduced == 2).all()


def test_an_empty_tree_needs_no_op(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> tuple[object, object, object]:
        empty: dict[str, Any] = {}
        return mesh.all_reduce(empty), mesh.average_gradients([()]), mesh.last_op

    assert run_ranks(agent.home, 1, program) == [({}, [()], None)]
    assert agent.calls == []


def test_a_barrier_and_what_the_last_op_came_to(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> tuple[pmesh.LastOp | None, ...]:
        assert mesh.last_op is None
        mesh.all_reduce({"a": np.ones(3, np.float32), "b": np.ones(2)})
        after_tree = mesh.last_op
        mesh.barrier()
        return after_tree, mesh.last_op

    for result in run_ranks(agent.home, 2, program):
        ranks, names = (Rank(0), Rank(1)), ("simulated",) * 2
        assert result == (
            pmesh.LastOp(OpNumber(1), ranks, names, 28),
            pmesh.LastOp(OpNumber(2), ranks, names, 0),
        )
    assert agent.calls[-1] == Call("barrier", "float32", (0,))


def test_gradients_count_by_their_weight(agent: WatchedAgent) -> None:
    weights = [1, 0, 5]

    def program(mesh: pmesh.Mesh) -> Any:  # noqa: ANN401 - a tree
        grads: list[Any] = [
            np.full((2, 2), mesh.rank + 1, np.float32),
            np.full(3, mesh.rank, np.float16),
        ]
        grads[0][0, 0] = np.nan if mesh.rank == 1 else 7  # weight 0: not looked at
        return mesh.average_gradients(grads, weight=weights[mesh.rank])

    for result in run_ranks(agent.home, 3, program):
        np.testing.assert_allclose(result[0], [[7, 16 / 6], [16 / 6, 16 / 6]], rtol=1e-6)
        assert result[0].dtype == np.float32
        np.testing.assert_array_equal(result[1], np.full(3, 10 / 6, np.float16))


def test_the_average_does_not_depend_on_the_buckets(agent: WatchedAgent) -> None:
    rng = np.random.default_rng(0)
    grads = [{f"{i}": rng.standard_normal(20).astype(np.float32) for i in range(9)} for _ in "ab"]

    def program(mesh: pmesh.Mesh) -> list[dict[str, Any]]:
        mine = grads[mesh.rank]
        return [mesh.average_gradients(mine, 3, size) for size in (1, 200, 10**6)]

    for one, some, all_in_one in run_ranks(agent.home, 2, program):
        for key, value in one.items():
            assert value.tobytes() == some[key].tobytes() == all_in_one[key].tobytes()


def test_every_bucket_of_an_average_adds_up_the_weights_for_itself(agent: WatchedAgent) -> None:
    grads: dict[str, Any] = {"a": np.ones(2, np.float32), "b": np.ones(2)}
    for result in run_ranks(agent.home, 2, lambda m: m.average_gradients(grads, weight=0.1)):
        assert (result["a"] == 1).all()
        assert (result["b"] == 1).all()
    assert [(call.dtype, call.shape) for call in agent.calls] == [
        ("float64", (3,)),
        ("float32", (3,)),
    ]


def test_weights_that_add_up_to_nothing_raise_on_every_rank_which_stay_in_step(
    agent: WatchedAgent,
) -> None:
    def program(mesh: pmesh.Mesh) -> float:
        grads = [np.ones(9, np.float32), np.ones(9)]
        with pytest.raises(pmesh.UsageError, match="add up to 0"):
            mesh.average_gradients(grads, weight=0)
        return float(mesh.all_reduce(np.array(1.0)))

    assert run_ranks(agent.home, 2, program) == [2.0, 2.0]


@pytest.mark.parametrize(
    "different",
    [
        lambda mesh: mesh.all_reduce(np.ones(4)),
        lambda mesh: mesh.all_reduce(np.ones(3, np.float32)),
        lambda mesh: mesh.all_reduce(np.ones(3), "max"),
        lambda mesh: mesh.all_reduce([np.ones(3)]),
        lambda mesh: mesh.broadcast(np.ones(3)),
        lambda mesh: mesh.barrier(),
        lambda mesh: mesh.average_gradients(np.ones(2)),
    ],
)
def test_a_mismatch_raises_on_every_rank_and_the_next_op_works(
    agent: WatchedAgent,
    different: Callable[[pmesh.Mesh], object],
) -> None:
    def program(mesh: pmesh.Mesh) -> float:
        with pytest.raises(pmesh.OpMismatch, match=r"op 0 of job .* rank 0 .*; rank 1 ") as caught:
            different(mesh) if mesh.rank else mesh.all_reduce(np.ones(3))
        assert "all_reduce(float64, 3, sum)" in str(caught.value)
        return float(mesh.all_reduce(np.array(1.0)))

    assert run_ranks(agent.home, 2, program) == [2.0, 2.0]


@pytest.mark.parametrize(
    "other",
    [
        {"a": np.ones((2, 3)), "c": np.ones(4)},  # another key
        {"a": np.ones((3, 2)), "b": np.ones(4)},  # another shape of the same size
        {"a": np.ones(4), "b": np.ones((2, 3))},  # another order
        [np.ones((2, 3)), np.ones(4)],
    ],
)
def test_trees_of_one_size_that_differ_are_not_added(agent: WatchedAgent, other: Any) -> None:  # noqa: ANN401
    tree = {"a": np.ones((2, 3)), "b": np.ones(4)}

    def program(mesh: pmesh.Mesh) -> None:
        with pytest.raises(pmesh.OpMismatch, match=r"differs: (a|b|0): "):
            mesh.all_reduce(other if mesh.rank else tree)

    run_ranks(agent.home, 2, program)


def test_the_order_of_a_dicts_keys_may_differ_between_ranks(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> dict[str, Any]:
        tree = {"a": np.full(2, 1.0), "b": np.full(2, 10.0)}
        return mesh.all_reduce(tree if mesh.rank else dict(reversed(tree.items())))

    for result in run_ranks(agent.home, 2, program):
        assert (float(result["a"][0]), float(result["b"][0])) == (2, 20)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.all_reduce(np.ones(2), "median"), pmesh.UnsupportedArray, "no 'median'"),
        (lambda m: m.all_reduce({"a": np.ones(2, int)}, "mean"), pmesh.UnsupportedArray, "^a: "),
        (lambda m: m.all_reduce(np.ones(2, "c8"), "max"), pmesh.UnsupportedArray, "mean, prod"),
        (lambda m: m.all_reduce(2.5), pmesh.UnsupportedArray, "wrap it"),
        (lambda m: m.average_gradients([np.ones(2, int)]), pmesh.UnsupportedArray, "^0: "),
        (lambda m: m.average_gradients(np.ones(2), weight=-1), pmesh.UsageError, "weight"),
        (
            lambda m: m.average_gradients(np.ones(2), weight=float("nan")),
            pmesh.UsageError,
            "weight",
        ),
        (lambda m: m.average_gradients(np.ones(2), bucket_bytes=0), pmesh.UsageError, "bucket_byt"),
        (lambda m: m.broadcast(np.ones(2), root=1), pmesh.UsageError, "ranks 0 to 0"),
        (lambda m: m.broadcast(np.ones(2), root=-1), pmesh.UsageError, "no rank -1"),
        (lambda m: m.barrier(timeout_s=0), pmesh.UsageError, "timeout_s"),
        (lambda m: m.all_reduce(np.ones(2), timeout_s=float("nan")), pmesh.UsageError, "timeout_s"),
    ],
)
def test_a_call_without_meaning_raises_before_an_op_starts(
    agent: WatchedAgent,
    call: Callable[[pmesh.Mesh], object],
    error: type[Exception],
    message: str,
) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        with pytest.raises(error, match=message):
            call(mesh)
        mesh.barrier()  # the rank has stayed in step

    run_ranks(agent.home, 1, program)
    assert [call.kind for call in agent.calls] == ["barrier"]


def test_threads_take_turns(agent: WatchedAgent) -> None:
    with pmesh.connect("job", home=agent.home) as mesh:
        results: list[float] = []

        def work(k: int) -> None:
            results.extend(float(mesh.all_reduce(np.array(float(k)))) for _ in range(20))

        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(results) == sorted([0.0, 1.0, 2.0, 3.0] * 20)


def test_what_a_mesh_knows(agent: WatchedAgent) -> None:
    with pmesh.connect("job", home=agent.home) as mesh:
        assert (mesh.rank, mesh.size, mesh.names) == (0, 1, ("simulated",))
        assert mesh.view.seats[0].name == "simulated"
        assert repr(mesh.view) == "<View 2: simulated; job 'job' of 1>"
        assert "<td><b>simulated</b></td>" in mesh._repr_html_()
        assert repr(mesh) == "<Mesh 'job', rank 0 of 1, step 0: simulated>"


def test_the_latest_reports_travel_once_with_the_next_call(agent: WatchedAgent) -> None:
    with pmesh.connect("job", home=agent.home) as mesh:
        mesh.report(loss=0.5)
        assert agent.reported == []
        mesh.report(loss=0.25, **{"eval/loss": np.float64(0.5)})
        mesh.barrier()
        mesh.all_reduce(np.ones(3))
        mesh.report(loss=0.125)
        mesh.sync(None)
    assert agent.reported == [
        {"loss": 0.25, "eval/loss": 0.5},
        {"loss": 0.125, "eval/loss": 0.5},
    ]


def test_reports_that_are_refused_change_nothing(agent: WatchedAgent) -> None:
    with pmesh.connect("job", home=agent.home) as mesh:
        mesh.report(loss=0.5)
        with pytest.raises(pmesh.UsageError, match=r"pass accuracy=float\(…\)"):
            mesh.report(loss=0.25, accuracy=np.ones(1))  # type: ignore[arg-type] # the mistake
        mesh.barrier()
    assert agent.reported == [{"loss": 0.5}]


def test_reports_are_no_error_where_nobody_reads_them(tmp_path: Path) -> None:
    with ScriptedAgent(tmp_path, joins) as agent, pmesh.connect("job", home=tmp_path) as mesh:
        agent.wait_until_closed()
        mesh.report(loss=0.5)
        with pytest.raises(pmesh.AgentStopped):
            mesh.barrier()
        mesh.report(loss=0.25)
        mesh.close()
        mesh.report(loss=0.125)
