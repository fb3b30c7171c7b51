# ruff: noqa: ANN401 - arrays of libraries that have no common type
"""reduce, reduce_scatter, out= and strategies; all_reduce and trees are in test_mesh."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pmesh
from tests.worlds.every_array import make, seen
from tests.worlds.watched_agent import WatchedAgent, run_ranks

RANKS = 3
KINDS = [
    ("numpy", "float64"),
    ("numpy", "float16"),
    ("numpy", "bfloat16"),
    ("numpy", "int32"),
    ("mlx", "float32"),
    ("mlx", "bfloat16"),
    ("torch", "float16"),
    ("torch", "bfloat16"),
    ("torch", "int64"),
]


@pytest.mark.parametrize("root", range(RANKS))
@pytest.mark.parametrize(("library", "dtype"), KINDS)
def test_reduce_gives_one_rank_the_result(
    agent: WatchedAgent, library: str, dtype: str, root: int
) -> None:
    def program(mesh: pmesh.Mesh) -> Any:
        result = mesh.reduce(make(library, dtype, [[1, mesh.rank]]), root=root)
        return None if result is None else seen(result)

    expected: list[Any] = [None] * RANKS
    expected[root] = seen(make(library, dtype, [[3, 3]]))
    assert run_ranks(agent.home, RANKS, program) == expected


@pytest.mark.parametrize("shape", [(), (0,), (2, 0)])
def test_reduce_of_a_tree_with_empty_arrays_in_it(
    agent: WatchedAgent, shape: tuple[int, ...]
) -> None:
    def program(mesh: pmesh.Mesh) -> Any:
        return mesh.reduce({"a": np.ones(shape), "b": [np.ones(2, np.float16)]}, 1, "prod")

    first, second = run_ranks(agent.home, 2, program)
    assert first is None
    assert second["a"].shape == shape
    assert second["b"][0].tolist() == [1, 1]


@pytest.mark.parametrize(("library", "dtype"), KINDS)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7])
def test_reduce_scatter_cuts_the_result_as_numpy_does(
    agent: WatchedAgent, library: str, dtype: str, rows: int
) -> None:
    x = np.arange(rows * 2).reshape(rows, 2)

    def program(mesh: pmesh.Mesh) -> Any:
        return seen(mesh.reduce_scatter(make(library, dtype, x + mesh.rank)))

    parts = np.array_split(3 * x + 3, RANKS)
    expected = [seen(make(library, dtype, part)) for part in parts]
    assert run_ranks(agent.home, RANKS, program) == expected


@pytest.mark.parametrize("op", ["mean", "max", "min", "prod"])
def test_reduce_scatter_reduces_as_all_reduce_does(agent: WatchedAgent, op: str) -> None:
    def program(mesh: pmesh.Mesh) -> bool:
        x = np.random.default_rng(mesh.rank).random((5, 3))
        part, whole = mesh.reduce_scatter(x, op), mesh.all_reduce(x, op)
        assert (x == np.random.default_rng(mesh.rank).random((5, 3))).all()
        return np.allclose(part, np.array_split(whole, RANKS)[mesh.rank], rtol=1e-15)

    assert run_ranks(agent.home, RANKS, program) == [True] * RANKS


@pytest.mark.parametrize(
    "strategy", ["ring", "tree", "centralized", "hierarchical", "chain", "direct", "auto"]
)
def test_the_strategy_travels_with_the_op(agent: WatchedAgent, strategy: Any) -> None:
    with pmesh.connect("job", home=agent.home) as mesh:
        assert mesh.all_reduce(np.ones(1), strategy=strategy).tolist() == [1]
    assert [call.strategy for call in agent.calls] == ["" if strategy == "auto" else strategy]


def test_ranks_that_name_different_strategies_hear_of_it(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        with pytest.raises(pmesh.OpMismatch, match="tree"):
            mesh.all_reduce(np.ones(1), strategy="tree" if mesh.rank else "ring")

    run_ranks(agent.home, 2, program)


OUTS: dict[str, Callable[[], Any]] = {
    "numpy": lambda: make("numpy", "float32", [0, 0]),
    "numpy float16": lambda: make("numpy", "float16", [0, 0]),
    "numpy bfloat16": lambda: make("numpy", "bfloat16", [0, 0]),
    "numpy, every second": lambda: np.zeros(4)[::2],
    "numpy, other byte order": lambda: np.zeros(2, ">f8"),
    "torch": lambda: make("torch", "float32", [0, 0]),
    "torch float16": lambda: make("torch", "float16", [0, 0]),
    "torch bfloat16": lambda: make("torch", "bfloat16", [0, 0]),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("new", OUTS.values(), ids=OUTS.keys())
def test_results_are_written_into_out(
    agent: WatchedAgent, new: Callable[[], Any], *, late: bool
) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        out, x = new(), new()
        x[0] = 5
        for give in (x, out):  # out may be x itself
            if late:
                result = mesh.all_reduce(give, out=out, async_op=True).wait()
            else:
                result = mesh.all_reduce(give, out=out)
            assert result is out
        assert out.tolist() == [20, 0]
        assert x.tolist() == [5, 0]

    run_ranks(agent.home, 2, program)


def test_a_tree_is_written_into_another_of_any_libraries(agent: WatchedAgent) -> None:
    with pmesh.connect("job", home=agent.home) as mesh:
        x = {"a": np.ones(2, np.float16), "b": [np.full((1, 2), 3), np.array(2.0)]}
        out: Any = {
            "b": [np.zeros((1, 2), int), np.zeros(())],
            "a": make("torch", "float16", [0, 0]),
        }
        result = mesh.all_reduce(x, out=out)
    assert result["a"] is out["a"]
    assert (out["a"].tolist(), out["b"][0].tolist(), float(out["b"][1])) == ([1, 1], [[3, 3]], 2)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("compression", [None, "fp16"])
def test_arrays_that_share_memory_with_out_are_sent_as_they_were(
    agent: WatchedAgent, compression: str | None, *, late: bool
) -> None:
    """Each array is an op of its own, and its result is there before the next ones are sent."""

    def program(mesh: Any) -> None:  # it may or may not return a handle
        def average(xs: list[Any], out: list[Any]) -> list[Any]:
            made = mesh.average_gradients(
                xs, out=out, bucket_bytes=4, compression=compression, async_op=late
            )
            return [x.tolist() for x in (made.wait() if late else made)]

        tied = np.full(3, mesh.rank * 2.0, np.float32)
        assert average([tied] * 4, [tied] * 4) == [[1, 1, 1]] * 4
        one, *others = (np.full(2, n + 2.0 * mesh.rank, np.float32) for n in range(4))
        assert average([one, *others], [*others, one]) == [[n + 1] * 2 for n in range(4)]
        whole = np.arange(8, dtype=np.float32).reshape(4, 2) + 2 * mesh.rank
        columns = [whole[:3, 0], whole[3:, 0], whole[:, 1]]
        average(columns, columns)
        assert whole.reshape(-1).tolist() == [n + 1 for n in range(8)]

    run_ranks(agent.home, 2, program)


def test_an_out_in_which_values_share_a_place_is_refused(agent: WatchedAgent) -> None:
    torch = pytest.importorskip("torch")
    with pmesh.connect("job", home=agent.home) as mesh:
        for call in (mesh.all_reduce, mesh.broadcast):
            with pytest.raises(pmesh.UnsupportedArray, match="out= "):
                call(torch.ones(3), out=torch.zeros(1).expand(3))
        row = torch.zeros(2).expand(1, 2)
        assert mesh.all_reduce(torch.ones(1, 2), out=row).tolist() == [[1, 1]]


def read_only() -> Any:
    x = np.zeros(2)
    x.flags.writeable = False
    return x


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (read_only, pmesh.UnsupportedArray, "out= takes numpy arrays that may be written to and"),
        (lambda: make("mlx", "float32", [0, 0]), pmesh.UsageError, "shapes and dtypes"),
        (lambda: np.zeros(3), pmesh.UsageError, "same paths, shapes and dtypes as the input"),
        (lambda: np.zeros((2, 1)), pmesh.UsageError, "paths, shapes and dtypes"),
        (lambda: np.zeros(2, np.float32), pmesh.UsageError, "paths, shapes and dtypes"),
        (lambda: [np.zeros(2)], pmesh.UsageError, "paths, shapes and dtypes"),
    ],
)
def test_an_out_that_can_not_take_the_result_is_refused(
    agent: WatchedAgent, out: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pmesh.connect("job", home=agent.home) as mesh, pytest.raises(error, match=message):
        mesh.all_reduce(np.ones(2), out=out())
    assert agent.calls == []


def test_mlx_arrays_scalars_and_negated_tensors_are_no_out(agent: WatchedAgent) -> None:
    torch = pytest.importorskip("torch")
    negated = torch.complex(torch.zeros(2), torch.ones(2)).conj().imag
    with pmesh.connect("job", home=agent.home) as mesh:
        for out in (make("mlx", "float32", [0, 0]), np.float32(1), negated):
            with pytest.raises(pmesh.UnsupportedArray, match=r"^0: out= takes"):
                mesh.all_reduce([np.ones(np.shape(out), np.float32)], out=[out])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.reduce_scatter(np.array(1.0)), pmesh.UsageError, "at least one dimension"),
        (lambda m: m.reduce_scatter([np.ones(2)]), pmesh.UsageError, "takes one array"),
        (lambda m: m.reduce_scatter(np.ones(2, bool), "mean"), pmesh.UnsupportedArray, "min, prod"),
        (lambda m: m.reduce_scatter(np.ones(2), timeout_s=0), pmesh.UsageError, "timeout_s"),
        (lambda m: m.reduce(np.ones(2), root=1), pmesh.UsageError, "ranks 0 to 0"),
        (lambda m: m.reduce(np.ones(2), 0, "median"), pmesh.UnsupportedArray, "no 'median'"),
        (lambda m: m.all_reduce(np.ones(2), strategy="best"), pmesh.UsageError, "'ring'.*'best'"),
    ],
)
def test_a_call_without_meaning_raises_before_an_op_starts(
    agent: WatchedAgent, call: Callable[[Any], object], error: type[Exception], message: str
) -> None:
    with pmesh.connect("job", home=agent.home) as mesh, pytest.raises(error, match=message):
        call(mesh)
    assert agent.calls == []


@pytest.mark.parametrize("bucket_bytes", [8, 1 << 20])
def test_gradients_are_averaged_into_arrays_of_the_users(
    agent: WatchedAgent, bucket_bytes: int
) -> None:
    def program(mesh: pmesh.Mesh) -> bool:
        w, b = np.full((2, 3), mesh.rank, np.float32), np.full(2, 4.0 * mesh.rank)
        grads = {"w": w, "b": b}
        averaged = mesh.average_gradients(grads, out=grads, bucket_bytes=bucket_bytes)
        return (
            averaged["w"] is w
            and averaged["b"] is b
            and bool((w == 0.5).all())
            and b.tolist() == [2.0, 2.0]
        )

    assert run_ranks(agent.home, 2, program) == [True, True]


@pytest.mark.parametrize(
    ("library", "dtype"),
    [(library, dtype) for library, dtype in KINDS if library != "mlx" and "int" not in dtype],
)
def test_averages_of_any_dtype_are_rounded_as_those_of_new_arrays(
    agent: WatchedAgent, library: str, dtype: str
) -> None:
    def program(mesh: pmesh.Mesh) -> bool:
        x = make(library, dtype, [[1, 10 * mesh.rank, 1 / 3]])
        out = make(library, dtype, [[0, 0, 0]])
        (fresh,) = mesh.average_gradients([x], weight=mesh.rank + 1)
        (given,) = mesh.average_gradients([x], weight=mesh.rank + 1, out=[out])
        return given is out and seen(fresh) == seen(out)

    assert run_ranks(agent.home, RANKS, program) == [True] * RANKS


def test_averages_are_written_when_they_are_waited_for(agent: WatchedAgent) -> None:
    with pmesh.connect("job", home=agent.home) as mesh:
        out = np.zeros(3, np.float32)
        handle = mesh.average_gradients([np.ones(3, np.float32)], out=[out], async_op=True)
        mesh.barrier()  # behind it
        assert out.tolist() == [0] * 3
        assert handle.wait()[0] is out
        assert out.tolist() == [1] * 3
