"""What users of torch and numpy type: other names, absent gradients, values that are no arrays."""

from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest

import pmesh
from pmesh.testing import SimulatedMesh


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


def test_a_reduction_that_does_not_exist_is_named() -> None:
    def train(mesh: pmesh.Mesh) -> None:
        with pytest.raises(pmesh.UnsupportedArray, match="no 'band' of float64"):
            mesh.all_reduce(np.ones(1), "BAND")

    SimulatedMesh(1).run(train)


def test_gradients_that_no_rank_has_stay_none() -> None:
    def train(mesh: pmesh.Mesh) -> object:
        return mesh.average_gradients({"used": np.ones(1), "unused": [None, None]})

    assert SimulatedMesh(2).run(train) == [{"used": np.ones(1), "unused": [None, None]}] * 2


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
