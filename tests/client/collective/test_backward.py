# ruff: noqa: ANN401 - MLX may be absent
"""Gradients of MLX are computed bucket by bucket, the last layers first, while others travel."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

import pmesh
from pmesh.client.collective.bucketed import Collective, run_collective, take_apart
from pmesh.client.collective.buckets import Backward, backward_order
from pmesh.client.session.session import TrainerSession
from pmesh.testing import SimulatedMesh
from tests.client.collective.recorder import OpRecorder
from tests.worlds.faults import Faults, Real

MIB = 1024 * 1024
BUCKET_BYTES = 4096  # two of the layers below
LAYERS = 6


@pytest.fixture
def mx() -> Any:
    return pytest.importorskip("mlx.core")


def gradients(mx: Any, seed: int = 0, layers: Sequence[int] = range(LAYERS)) -> dict[str, Any]:
    """Not yet evaluated; the last two are registered last, and come first as text."""
    made = {f"layer.{i}": mx.full((512,), seed + i) / 3 for i in layers}
    return {"model": made, "lm_head": mx.full((512,), seed) / 7, "a_last": mx.full((512,), 1.0)}


@pytest.fixture
def evaluated(faults: Faults) -> list[int]:
    """How many arrays each evaluation was of."""
    pytest.importorskip("mlx.core")
    from pmesh.client.trees import mlx  # noqa: PLC0415 - it needs MLX

    found: list[int] = []

    def recorded(evaluate: Real, arrays: Sequence[object]) -> None:
        found.append(len(arrays))
        evaluate(arrays)

    faults.around(mlx, "evaluate", recorded)
    return found


def test_a_bucket_is_computed_while_the_one_before_travels(mx: Any, faults: Faults) -> None:
    from pmesh.client.trees import mlx  # noqa: PLC0415 - it needs MLX

    recorder = OpRecorder()

    def recorded(evaluate: Real, arrays: Sequence[object]) -> None:
        evaluate(arrays)
        values = [int(cast("Any", array)[0].item()) for array in arrays]
        recorder.events.append(f"compute {values}")

    faults.around(mlx, "evaluate", recorded)
    arrays = take_apart([mx.full((2,), float(i)) for i in range(5)], lazily=True)
    wanted = Collective(
        kind="all_reduce",
        reduction="sum",
        weight=1.0,
        bucket_bytes=100,
        timeout_s=1.0,
        backward=Backward((4, 3, 2, 1, 0), 16),
    )
    results, _ = run_collective(cast("TrainerSession", recorder), wanted, arrays)
    assert [array.tolist() for array in cast("list[Any]", results)] == [[i] * 2 for i in range(5)]
    assert recorder.events == [
        *("compute [4, 3]", "lay out"),
        *("op 0", "compute [2, 1]", "lay out ahead", "op 0 is done"),
        *("op 1", "compute [0]", "lay out ahead", "op 1 is done"),
        *("op 2", "op 2 is done"),
    ]


def test_the_layers_that_were_registered_last_go_first(mx: Any) -> None:
    tree, leaves = (arrays := take_apart(gradients(mx), lazily=True)).tree, arrays.leaves
    backward = backward_order(tree, leaves, BUCKET_BYTES)
    assert backward is not None
    assert [tree.paths[index] for index in backward.order] == [
        "a_last",
        "lm_head",
        *(f"model.layer.{i}" for i in reversed(range(LAYERS))),
    ]


@pytest.mark.parametrize(
    ("tree_mib", "bucket_mib"), [(1, None), (4, None), (5, 4), (40, 5), (80, 10), (400, 32)]
)
def test_there_are_at_most_eight_buckets_of_at_least_4_and_at_most_32_mib(
    mx: Any, tree_mib: int, bucket_mib: int | None
) -> None:
    arrays = take_apart([mx.zeros((MIB // 4,)) for _ in range(tree_mib)], lazily=True)
    backward = backward_order(arrays.tree, arrays.leaves, 32 * MIB)
    assert (backward and backward.bucket_bytes) == (bucket_mib and bucket_mib * MIB)


def test_the_bits_are_those_of_gradients_that_are_evaluated_before(
    mx: Any, evaluated: list[int]
) -> None:
    def train(mesh: pmesh.Mesh) -> list[list[float]]:
        lazy, eager = gradients(mx, mesh.rank), gradients(mx, mesh.rank)
        found = mesh.average_gradients(lazy, weight=mesh.rank + 1, bucket_bytes=BUCKET_BYTES)
        mx.eval(eager)
        handle = mesh.average_gradients(
            eager, weight=mesh.rank + 1, bucket_bytes=BUCKET_BYTES, async_op=True
        )
        expected = handle.wait()
        assert list(found) == list(expected)
        return [np.array(found["lm_head"]).tolist(), np.array(expected["lm_head"]).tolist()]

    (first, second), other = SimulatedMesh(2).run(train)
    assert first == second
    assert other == [first, second]
    assert sorted(evaluated) == sorted([2] * 8 + [8] * 2)


def test_gradients_that_are_compressed_or_asked_for_later_are_computed_at_once(
    mx: Any, evaluated: list[int]
) -> None:
    def train(mesh: pmesh.Mesh) -> None:
        mesh.average_gradients(gradients(mx), bucket_bytes=BUCKET_BYTES, compression="int8")
        mesh.average_gradients(gradients(mx), bucket_bytes=BUCKET_BYTES, missing="zeros")
        mesh.average_gradients(gradients(mx), bucket_bytes=BUCKET_BYTES, async_op=True).wait()

    SimulatedMesh(2).run(train)
    assert evaluated == [LAYERS + 2] * 6


def test_a_step_of_powersgd_is_a_call_and_not_a_bucket(mx: Any) -> None:
    def train(mesh: pmesh.Mesh) -> list[str]:
        found = []
        for _ in range(3):
            scheme = pmesh.PowerSGD(rank=1, start_step=2)
            mesh.average_gradients(gradients(mx), bucket_bytes=BUCKET_BYTES, compression=scheme)
            assert mesh.last_op is not None
            found.append(mesh.last_op.compression.partition("(")[0])
        return found

    assert SimulatedMesh(2).run(train) == [["none", "none", "powersgd"]] * 2


def test_gradients_that_do_not_count_are_not_computed(mx: Any, evaluated: list[int]) -> None:
    def train(mesh: pmesh.Mesh) -> list[float]:
        mean = mesh.average_gradients(gradients(mx, mesh.rank), weight=mesh.rank)
        return cast("list[float]", np.array(mean["lm_head"])[:1].tolist())

    assert SimulatedMesh(2).run(train) == [[np.float32(1) / np.float32(7)]] * 2
    assert evaluated == [LAYERS + 2]


def test_a_rank_that_is_alone_gets_its_own(mx: Any) -> None:
    def train(mesh: pmesh.Mesh) -> object:
        mean = mesh.average_gradients(gradients(mx, 7), bucket_bytes=BUCKET_BYTES)
        return mean["lm_head"].tolist()

    assert SimulatedMesh(1).run(train) == [[1.0] * 512]


def test_ranks_whose_dicts_or_libraries_are_in_other_orders_agree_on_one(mx: Any) -> None:
    """Whoever calls late reads the error of the first op, too, and goes on as the others do."""

    def train(mesh: pmesh.Mesh) -> list[list[float]]:
        found = []
        for _ in range(2):
            grads = gradients(mx, mesh.rank, range(LAYERS)[:: 1 if mesh.rank else -1])
            if mesh.rank == 2:
                flat = {key: np.array(value) for key, value in grads["model"].items()}
                grads = {key: np.array(x) for key, x in grads.items() if key != "model"}
                grads["model"] = flat
            mean = mesh.average_gradients(grads, bucket_bytes=BUCKET_BYTES)
            found.append(np.array(mean["model"]["layer.3"])[:1].tolist())
        return found

    first, *others = SimulatedMesh(3).run(train)
    assert first[0] == pytest.approx([4 / 3])
    assert others == [first] * 2


def test_trees_that_differ_are_named_though_the_orders_differ_too(mx: Any) -> None:
    def train(mesh: pmesh.Mesh) -> str:
        grads = gradients(mx, layers=range(LAYERS + mesh.rank))
        with pytest.raises(pmesh.OpMismatch) as caught:
            mesh.average_gradients(grads, bucket_bytes=BUCKET_BYTES)
        return str(caught.value)

    first, second = SimulatedMesh(2).run(train)
    assert first == second
    assert first.endswith("differs: model.layer.6: only on rank 1 (simulated)")
