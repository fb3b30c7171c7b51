"""What users of torch and numpy type: other names, absent gradients, values that are no arrays."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest

import pmesh
from pmesh.testing import SimulatedMesh
from tests.worlds.every_array import make, seen


@pytest.mark.parametrize(
    ("op", "result"), [("SUM", 6), ("avg", 3), ("Mean", 3), ("MAX", 4), ("product", 8)]
)
def test_other_names_of_reductions_mean_the_same(op: str, result: float) -> None:
    def train(mesh: pmesh.Mesh) -> list[float]:
        x = np.array([2.0 + 2 * mesh.rank])
        return [float(mesh.all_reduce(x, op)[0]), float((mesh.reduce(x, op=op) or [result])[0])]

    assert SimulatedMesh(2).run(train) == [[result] * 2] * 2


def test_reductions_of_torch_mean_the_same() -> None:
    distributed = pytest.importorskip("torch.distributed")
    names = {"SUM": 6, "AVG": 3, "MIN": 2, "PRODUCT": 8}

    def train(mesh: pmesh.Mesh) -> list[float]:
        x = np.array([2.0 + 2 * mesh.rank])
        ops = [getattr(distributed.ReduceOp, name) for name in names]
        return [float(mesh.all_reduce(x, op)[0]) for op in ops]

    assert SimulatedMesh(2).run(train) == [list(names.values())] * 2


@pytest.mark.parametrize("timeout_s", [None, timedelta(minutes=5), "5"])
def test_a_time_of_another_type_is_refused_with_what_it_is(timeout_s: Any) -> None:  # noqa: ANN401
    def train(mesh: pmesh.Mesh) -> None:
        calls = mesh.barrier, partial(mesh.sync, {}), partial(mesh.all_reduce, np.ones(1), "sum")
        for call in calls:
            with pytest.raises(pmesh.UsageError, match="timeout_s is a number of seconds, not"):
                call(timeout_s)

    SimulatedMesh(1).run(train)


def test_a_root_that_is_no_rank_is_refused() -> None:
    def train(mesh: pmesh.Mesh) -> None:
        roots: list[Any] = [None, -1, 1, "0"]
        for root in roots:
            with pytest.raises(pmesh.UsageError, match="there is no rank"):
                mesh.broadcast(np.ones(1), root)

    SimulatedMesh(1).run(train)


def test_a_reduction_that_does_not_exist_is_named() -> None:
    def train(mesh: pmesh.Mesh) -> None:
        with pytest.raises(pmesh.UnsupportedArray, match="no 'band' of float64"):
            mesh.all_reduce(np.ones(1), "BAND")

    SimulatedMesh(1).run(train)


def test_gradients_that_no_rank_has_stay_none() -> None:
    def train(mesh: pmesh.Mesh) -> object:
        return mesh.average_gradients({"used": np.ones(1), "unused": [None, None]})

    assert SimulatedMesh(2).run(train) == [{"used": np.ones(1), "unused": [None, None]}] * 2


def test_gradients_that_only_some_ranks_have_are_named_with_the_option() -> None:
    def train(mesh: pmesh.Mesh) -> str:
        grads = {"used": np.ones(1), "head": {"w": np.ones(2) if mesh.rank == 0 else None}}
        with pytest.raises(pmesh.OpMismatch) as caught:
            mesh.average_gradients(grads)
        return str(caught.value)

    said = (
        "op 0 of job 'simulated' differs: head.w: (2,) float64 on rank 0 (simulated), None on rank "
        "1 (simulated); average_gradients(..., missing='zeros') counts None as zeros"
    )
    assert SimulatedMesh(2).run(train) == [said] * 2


def zeros_like(library: str, dtype: str, *, compression: str | None = None) -> list[Any]:
    """Three ranks of which each lacks another array, and all lack one; the weights are 1, 2, 3."""

    def train(mesh: pmesh.Mesh) -> Any:  # noqa: ANN401 - a tree
        grads: list[Any] = [make(library, dtype, [6.0, 12.0]) for _ in range(3)]
        grads[mesh.rank] = None
        tree: Any = {"w": grads, "unused": None}
        weight = 1 + mesh.rank
        late: Any = mesh.average_gradients(
            tree, weight, missing="zeros", compression=compression, async_op=True
        )
        at_once: Any = mesh.average_gradients(
            tree, weight, missing="zeros", compression=compression
        )
        assert [seen(x) for x in late.wait()["w"]] == [seen(x) for x in at_once["w"]]
        assert at_once["unused"] is None
        return [seen(x) for x in at_once["w"]]

    return SimulatedMesh(3).run(train)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("library", ["numpy", "torch", "mlx"])
def test_gradients_that_only_some_ranks_have_count_as_zeros_elsewhere(
    library: str, dtype: str
) -> None:
    expected = [seen(make(library, dtype, values)) for values in ([5, 10], [4, 8], [3, 6])]
    assert zeros_like(library, dtype) == [expected] * 3


def test_what_is_missing_everywhere_stays_so_whatever_its_name() -> None:
    def train(mesh: pmesh.Mesh) -> None:
        one = np.ones(2) if mesh.rank else None
        tree: Any = {"a": {"b": None}, "a.b": np.ones(2), "\ud800": one}
        found = mesh.average_gradients(tree, missing="zeros")
        assert found["a"]["b"] is None
        assert [found[key].tolist() for key in ("a.b", "\ud800")] == [[1, 1], [0.5, 0.5]]

    SimulatedMesh(2).run(train)


def test_what_is_missing_is_compressed_as_the_rest() -> None:
    expected = [seen(make("numpy", "float32", values)) for values in ([5, 10], [4, 8], [3, 6])]
    assert zeros_like("numpy", "float32", compression="fp16") == [expected] * 3


def test_a_rank_without_any_gradient_gets_those_of_the_others() -> None:
    def train(mesh: pmesh.Mesh) -> Any:  # noqa: ANN401 - a tree
        grads: Any = [make("torch", "float32", [4.0]) if mesh.rank else None]
        return [seen(x) for x in mesh.average_gradients(grads, missing="zeros")]

    assert SimulatedMesh(2).run(train) == [[seen(make("torch", "float32", [2.0]))]] * 2


def test_where_all_ranks_have_all_gradients_it_takes_one_more_op() -> None:
    def train(mesh: pmesh.Mesh) -> tuple[int, object]:
        mean = mesh.average_gradients([np.ones(2)], missing="zeros")
        assert mesh.last_op is not None
        return mesh.last_op.op, mean[0].tolist()

    assert SimulatedMesh(2).run(train) == [(1, [1, 1])] * 2


def test_another_tree_is_named_also_where_what_is_missing_counts() -> None:
    def train(mesh: pmesh.Mesh) -> None:
        tree = {"w": np.ones(1 + mesh.rank), "unused": None if mesh.rank else np.ones(1)}
        with pytest.raises(pmesh.OpMismatch, match=r"differs: w: \(1,\) float64 on rank 0 .*\)$"):
            mesh.average_gradients(tree, missing="zeros")

    SimulatedMesh(2).run(train)


def test_missing_has_two_values_and_no_place_in_out() -> None:
    def train(mesh: pmesh.Mesh) -> None:
        wrong: Any = "skip"
        with pytest.raises(pmesh.UsageError, match=r"missing is one of \('error', 'zeros'\)"):
            mesh.average_gradients([np.ones(1)], missing=wrong)
        grads = [np.ones(1)]
        with pytest.raises(pmesh.UsageError, match="out= has no place"):
            mesh.average_gradients(grads, out=grads, missing="zeros")

    SimulatedMesh(1).run(train)


NO_ARRAYS: dict[str, tuple[Callable[[], Any], str]] = {
    "None": (lambda: None, "None is not an array"),
    "generator": (
        lambda: (x for x in [np.ones(1)]),
        r"a generator is .*pass a list, as in list\(x\)",
    ),
    "values": ({"a": np.ones(1)}.values, r"a dict_values is .*list\(x\)"),
    "set": (lambda: {1.0}, "a set is not an array$"),
    "number": (lambda: 1.0, r"a float is not an array; wrap it, as in numpy.array\(x\)"),
}


@pytest.mark.parametrize(("make", "said"), NO_ARRAYS.values(), ids=NO_ARRAYS)
def test_what_is_no_array_says_what_to_pass(make: Callable[[], Any], said: str) -> None:
    def train(mesh: pmesh.Mesh) -> None:
        with pytest.raises(pmesh.UnsupportedArray, match=said):
            mesh.all_reduce(make())

    SimulatedMesh(1).run(train)


def test_numbers_of_numpy_and_paths_travel_in_objects() -> None:
    def train(mesh: pmesh.Mesh) -> object:
        said = {"loss": np.float32(0.5), "n": np.array(3), "file": PurePosixPath("/a"), "t": (1, 2)}
        return mesh.all_gather_object(said)[0]

    assert SimulatedMesh(1).run(train) == [{"loss": 0.5, "n": 3, "file": "/a", "t": [1, 2]}]


@pytest.mark.parametrize(
    ("obj", "said"),
    [
        ({"steps": [1, {"loss": np.ones(3)}]}, r"obj\['steps'\]\[1\]\['loss'\]: .*\.tolist\(\)"),
        (object(), r"^not data that MessagePack can say: object is not supported$"),
        ([1, 2**70], r"obj\[1\]: "),
    ],
)
def test_what_can_not_travel_is_named_by_its_path(obj: object, said: str) -> None:
    def train(mesh: pmesh.Mesh) -> None:
        with pytest.raises(pmesh.UsageError, match=said):
            mesh.all_gather_object(obj)

    SimulatedMesh(1).run(train)


def test_a_shard_is_the_users_to_change() -> None:
    def train(mesh: pmesh.Mesh) -> bool:
        mine = mesh.shard(10)
        before = mine.copy()
        mine[:] = 0
        return bool(np.array_equal(mesh.shard(10), before))

    assert SimulatedMesh(2).run(train) == [True, True]
