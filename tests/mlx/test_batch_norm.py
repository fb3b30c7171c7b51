"""SyncBatchNorm beside one process that has the joined batch."""

import threading
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

import pmesh
from pmesh.client.collective.bucketed import LastOp
from pmesh.errors import RosterChanged, UsageError
from pmesh.mlx import SyncBatchNorm
from pmesh.testing import SimulatedMesh

ROWS = (5, 0, 2)
"""Of each rank."""
CHANNELS = 4
Array = np.ndarray[Any, Any]


def weighed(normal: mx.array, begin: int) -> mx.array:
    """A loss in which every value counts differently."""
    weights = np.sin(np.arange(begin, begin + normal.size)).astype(np.float32)
    return (normal * mx.array(weights).reshape(normal.shape)).sum()


def normalize(norm: Any, x: mx.array, begin: int) -> tuple[Array, ...]:  # noqa: ANN401 - MLX's modules have no types
    """Return the output, the gradients for x and the scale, and the running statistics."""

    def loss(parameters: dict[str, mx.array], x: mx.array) -> tuple[mx.array, mx.array]:
        norm.update(parameters)
        y = norm(x)
        return weighed(y, begin), y

    parameters = norm.trainable_parameters()
    (_, y), (scales, gradient) = mx.value_and_grad(loss, argnums=(0, 1))(parameters, x)
    found = y, gradient, scales["weight"], norm.running_mean, norm.running_var
    return tuple(np.array(each) for each in found)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
@pytest.mark.parametrize("about", [0.0, 1e6])
def test_ranks_with_unequal_batches_get_what_one_process_gets(
    shape: tuple[int, ...], about: float
) -> None:
    values = np.random.default_rng(2).uniform(-1, 1, (sum(ROWS), *shape, CHANNELS))
    whole = (about + values).astype(np.float32)
    given = np.split(whole, np.cumsum(ROWS)[:-1])

    def train(mesh: pmesh.Mesh) -> tuple[Array, ...]:
        norm = SyncBatchNorm(CHANNELS, mesh, momentum=0.3)
        begin = sum(part.size for part in given[: mesh.rank])
        return normalize(norm, mx.array(given[mesh.rank]), begin)

    found = SimulatedMesh(len(ROWS)).run(train)
    # MLX's own has no digits left for 1e6 ± 1 in float32, so it gets what is left of 0 ± 1.
    near = (whole.astype(np.float64) - about).astype(np.float32)
    alone = normalize(nn.BatchNorm(CHANNELS, momentum=0.3), mx.array(near), 0)

    for index in (0, 1):  # the outputs and their gradients
        joined = np.concatenate([each[index] for each in found])
        np.testing.assert_allclose(joined, alone[index], rtol=1e-5, atol=1e-5)
    scales = np.sum([each[2] for each in found], axis=0)
    np.testing.assert_allclose(scales, alone[2], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[0][3], alone[3] + 0.3 * about, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found[0][4], alone[4], rtol=1e-5)
    assert all(np.array_equal(each[i], found[0][i]) for each in found for i in (3, 4))


def test_it_makes_one_op_forward_and_one_backward() -> None:
    def train(mesh: pmesh.Mesh) -> list[int]:
        norm = SyncBatchNorm(CHANNELS, mesh)
        ops = list[LastOp | None]()

        def loss(x: mx.array) -> mx.array:
            y = norm(x)
            ops.append(mesh.last_op)
            return y.sum()

        mx.grad(loss)(mx.random.normal((3, CHANNELS)))
        ops.append(mesh.last_op)
        return [0 if op is None else op.op for op in ops]

    first, second = SimulatedMesh(2).run(train)
    assert first == second == [0, 1]


def test_evaluation_needs_no_other_rank_and_bfloat16_stays() -> None:
    def train(mesh: pmesh.Mesh) -> mx.Dtype:
        x = mx.random.normal((6, CHANNELS)).astype(mx.bfloat16)
        norm = SyncBatchNorm(CHANNELS, mesh, affine=False)
        y = norm(x)
        if mesh.rank == 0:
            norm.eval()(x)
        return y.dtype

    assert SimulatedMesh(2).run(train) == [mx.bfloat16] * 2


def test_the_statistics_are_those_of_the_ranks_that_are_left() -> None:
    lost = threading.Event()
    simulated = SimulatedMesh(3, on_loss="continue")

    def train(mesh: pmesh.Mesh) -> list[float] | None:
        rank = int(mesh.rank)
        norm = SyncBatchNorm(1, mesh, momentum=1.0)
        if rank == 2:
            lost.wait()
            simulated.lose(2)
            return None
        lost.set()
        norm(mx.full((2, 1), float(rank)))
        return [norm.running_mean.item(), norm.running_var.item()]

    left = simulated.run(train)[:2]
    assert left == [[0.5, pytest.approx(1 / 3)]] * 2


class Unsettled:
    """A mesh that loses a rank in the first op."""

    def __init__(self) -> None:
        self.calls = 0
        self.size = 2

    def all_gather_into(self, rows: list[Array], row: Array, timeout_s: float) -> None:
        del timeout_s
        assert len(rows) == self.size
        self.calls += 1
        if self.size == 2:
            self.size = 1
            raise RosterChanged("rank 1 is lost")
        rows[0][:] = row


def test_an_op_in_which_a_rank_is_lost_is_called_again() -> None:
    mesh: Any = Unsettled()
    SyncBatchNorm(1, mesh)(mx.array([[1.0], [3.0]]))
    assert mesh.calls == 2


def test_convert_keeps_parameters_statistics_and_mode() -> None:
    mesh: Any = Unsettled()
    plain, still = nn.BatchNorm(3, eps=0.1, momentum=0.2), nn.BatchNorm(3, affine=False)
    plain.freeze(keys=["bias"], recurse=False)
    plain.weight = mx.array([1.0, 2.0, 3.0])
    model = nn.Sequential(plain, nn.Sequential(nn.Linear(3, 3), still), plain)
    still.eval()
    assert SyncBatchNorm.convert(model, mesh) is model
    first, inner, last = model.layers
    assert first is last
    assert isinstance(first, SyncBatchNorm)
    assert (first.eps, first.momentum, first.training) == (0.1, 0.2, True)
    assert first.weight.tolist() == [1.0, 2.0, 3.0]
    assert list(first.trainable_parameters()) == ["weight"]
    assert isinstance(inner.layers[1], SyncBatchNorm)
    assert not inner.layers[1].training
    assert "weight" not in inner.layers[1]
    assert isinstance(SyncBatchNorm.convert(plain, mesh), SyncBatchNorm)


def test_what_it_cannot_normalize_is_refused() -> None:
    mesh: Any = Unsettled()
    with pytest.raises(UsageError, match=r"takes \[N, ..., 4\] of 2 to 4 dimensions, not \[2, 3\]"):
        SyncBatchNorm(4, mesh)(mx.zeros((2, 3)))
    with pytest.raises(UsageError, match="at least two values per channel"):
        SyncBatchNorm(4, mesh)(mx.zeros((1, 4)))


@pytest.mark.parametrize("of_layer", [mx.float32, mx.bfloat16])
def test_the_output_has_the_dtype_of_the_input_and_the_layer_keeps_its_own(of_layer: Any) -> None:  # noqa: ANN401
    def dtypes(mesh: pmesh.Mesh) -> tuple[Any, ...]:
        norm = SyncBatchNorm(CHANNELS, mesh)
        norm.set_dtype(of_layer)
        x = mx.ones((2, CHANNELS), mx.bfloat16)
        trained = norm(x).dtype
        norm.eval()
        return trained, norm(x).dtype, norm.running_mean.dtype, norm.running_var.dtype

    (found,) = SimulatedMesh(1).run(dtypes)
    assert found == (mx.bfloat16, mx.bfloat16, of_layer, of_layer)
