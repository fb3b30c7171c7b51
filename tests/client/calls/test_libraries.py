# ruff: noqa: ANN401 - modules and arrays of libraries that may be absent
"""MLX arrays, torch tensors, and ranks that use different libraries."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmesh
from pmesh.errors import UnsupportedArray
from tests.worlds.watched_agent import WatchedAgent, run_ranks

INTEGERS = ["int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"]
NAMES = ["float32", "float16", "bfloat16", "complex64", *INTEGERS, "bool"]


@pytest.fixture(scope="module")
def mx() -> Any:
    return pytest.importorskip("mlx.core")


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


def one_rank(home: Path) -> pmesh.Mesh:
    """In this thread: MLX's streams belong to threads."""
    return pmesh.connect("job", home=home)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 2)])
def test_mlx_arrays_come_back_as_they_were(
    agent: WatchedAgent, mx: Any, name: str, shape: tuple[int, ...]
) -> None:
    dtype = mx.bool_ if name == "bool" else getattr(mx, name)
    x = mx.array(np.arange(6)[: int(np.prod(shape))].reshape(shape)).astype(dtype)
    with one_rank(agent.home) as mesh:
        for result in (mesh.all_reduce(x, "prod"), mesh.broadcast([x])[0]):
            assert type(result) is mx.array
            assert result.dtype == dtype
            assert result.shape == shape
            assert mx.array_equal(result, x).item()


def test_mlx_float64_stays_float64(agent: WatchedAgent, mx: Any) -> None:
    x = mx.array(np.array([1 / 3]), dtype=mx.float64)
    with one_rank(agent.home) as mesh:
        result = mesh.all_reduce(x)
    assert result.dtype == mx.float64
    assert np.array(result)[0] == 1 / 3


def test_a_result_is_no_view_of_an_arena(agent: WatchedAgent, mx: Any) -> None:
    with one_rank(agent.home) as mesh:
        results = [mesh.all_reduce(mx.full((4,), k)) for k in range(3)]
    assert [result.tolist() for result in results] == [[0.0] * 4, [1.0] * 4, [2.0] * 4]


def test_lazy_and_transposed_mlx_arrays_work(agent: WatchedAgent, mx: Any) -> None:
    x = (mx.arange(6).reshape(2, 3) * 2).T
    y = mx.arange(6).reshape(2, 3).astype(mx.bfloat16)[:, ::2]
    with one_rank(agent.home) as mesh:
        reduced_x, reduced_y = mesh.all_reduce((x, y))
    assert reduced_x.tolist() == [[0, 6], [2, 8], [4, 10]]
    assert reduced_y.tolist() == [[0, 2], [3, 5]]


def test_mlx_trees_of_value_and_grad_are_averaged_as_they_are(agent: WatchedAgent, mx: Any) -> None:
    nn: Any = pytest.importorskip("mlx.nn")
    utils: Any = pytest.importorskip("mlx.utils")
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))

    def loss(model: Any, x: Any) -> Any:
        return model(x).square().mean()

    _, grads = nn.value_and_grad(model, loss)(model, mx.ones((5, 4)))
    with one_rank(agent.home) as mesh:
        averaged = mesh.average_gradients(grads, weight=5)
        model.update(mesh.broadcast(model.trainable_parameters()))
    before, after = dict(utils.tree_flatten(grads)), dict(utils.tree_flatten(averaged))
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert mx.allclose(after[key], value, rtol=1e-6, atol=0).item()


def test_unsupported_mlx_reductions_are_named(agent: WatchedAgent, mx: Any) -> None:
    with (
        one_rank(agent.home) as mesh,
        pytest.raises(UnsupportedArray, match=r"^w: no 'max' of complex64; .*: sum, mean, prod"),
    ):
        mesh.all_reduce({"w": mx.zeros(2, dtype=mx.complex64)}, "max")


@pytest.mark.parametrize("name", [*NAMES, "float64"])
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 2)])
def test_torch_tensors_come_back_as_they_were(
    agent: WatchedAgent, torch: Any, name: str, shape: tuple[int, ...]
) -> None:
    x = torch.arange(6)[: int(np.prod(shape))].reshape(shape).to(getattr(torch, name))
    with one_rank(agent.home) as mesh:
        for result in (mesh.all_reduce(x, "prod"), mesh.broadcast([x])[0]):
            assert type(result) is torch.Tensor
            assert (result.dtype, result.shape, result.device) == (x.dtype, x.shape, x.device)
            assert torch.equal(result, x)
            assert not result.numel() or result.data_ptr() != x.data_ptr()
            result.zero_()  # it is the user's to write


def test_torch_results_stay_out_of_autograd_also_for_parameters(
    agent: WatchedAgent, torch: Any
) -> None:
    x = torch.nn.Parameter(torch.ones(3))
    with one_rank(agent.home) as mesh:
        result = mesh.all_reduce(x * 2)
        assert torch.equal(mesh.broadcast(x), torch.ones(3))
    assert not result.requires_grad
    assert x.requires_grad


def test_transposed_and_negated_torch_tensors_work(agent: WatchedAgent, torch: Any) -> None:
    x = torch.arange(6.0).reshape(2, 3).T.to(torch.bfloat16)
    negated = torch.complex(torch.zeros(2), torch.ones(2)).conj().imag
    assert negated.is_neg()
    with one_rank(agent.home) as mesh:
        assert torch.equal(mesh.all_reduce(x), x)
        assert mesh.all_reduce(negated).tolist() == [-1, -1]


def test_a_torch_state_dict_keeps_its_type_and_metadata(agent: WatchedAgent, torch: Any) -> None:
    state = torch.nn.Linear(2, 2).state_dict()
    with one_rank(agent.home) as mesh:
        result = mesh.broadcast(state)
    assert type(result) is type(state)
    assert result._metadata == state._metadata  # noqa: SLF001 - torch reads it when loading
    assert list(result) == list(state)


def test_torch_tensors_without_dense_values_are_refused(agent: WatchedAgent, torch: Any) -> None:
    with one_rank(agent.home) as mesh:
        for x in (torch.eye(2).to_sparse(), torch.ones(2, device="meta")):
            with pytest.raises(UnsupportedArray, match="dense torch tensors"):
                mesh.all_reduce(x)
        with pytest.raises(UnsupportedArray, match="float8_e5m2 is not supported"):
            mesh.all_reduce(torch.ones(2, dtype=torch.float8_e5m2))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64"])
def test_ranks_with_different_libraries_get_the_same_bits(
    agent: WatchedAgent, mx: Any, torch: Any, name: str
) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)

    def program(mesh: pmesh.Mesh) -> list[float]:
        x: Any = np.arange(5).astype(dtype)
        if mesh.rank == 1:
            x = torch.arange(5).to(getattr(torch, name))
        elif mesh.rank == 2:
            x = mx.arange(5).astype(getattr(mx, name))
        result: Any = mesh.all_reduce({"x": x})["x"]
        return [float(value) for value in result.tolist()]

    assert run_ranks(agent.home, 3, program) == [[0, 3, 6, 9, 12]] * 3
