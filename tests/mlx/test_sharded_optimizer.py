import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn, optimizers
from mlx.utils import tree_flatten, tree_map

import pmesh
from pmesh.mlx import ShardedOptimizer
from pmesh.testing import SimulatedMesh

BATCH = 12  # of all ranks together
Make = Callable[[], Any]


def make_model() -> Any:  # noqa: ANN401 - MLX's modules have no types
    """Weights that no number of ranks divides."""
    mx.random.seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 1))


def loss_of(model: Any, x: mx.array, y: mx.array) -> mx.array:  # noqa: ANN401 - as above
    loss: mx.array = nn.losses.mse_loss(model(x), y, reduction="mean")
    return loss


def batch(step: int) -> tuple[mx.array, mx.array]:
    x = np.random.default_rng(step).normal(size=(BATCH, 5)).astype(np.float32)
    return mx.array(x), mx.array(np.sin(x.sum(axis=1, keepdims=True)))


def weights_of(model: Any) -> np.ndarray[Any, Any]:  # noqa: ANN401 - as above
    flat = tree_flatten(model.parameters())
    return np.concatenate([np.array(x.astype(mx.float32)).reshape(-1) for _, x in flat])


def train_plainly(make: Make, steps: int) -> np.ndarray[Any, Any]:
    model, optimizer = make_model(), make()
    for step in range(steps):
        _, gradients = nn.value_and_grad(model, loss_of)(model, *batch(step))
        optimizer.update(model, gradients)
    return weights_of(model)


def update_once(mesh: pmesh.Mesh, model: Any, optimizer: ShardedOptimizer, step: int) -> None:  # noqa: ANN401 - as above
    """By unequal shares of the batch."""
    x, y = batch(step)
    cuts = [0, *(BATCH * (rank + 1) // mesh.size - (rank == 0) for rank in range(mesh.size - 1))]
    begin, end = [*cuts, BATCH][mesh.rank : mesh.rank + 2]
    _, gradients = nn.value_and_grad(model, loss_of)(model, x[begin:end], y[begin:end])
    optimizer.update(model, gradients, weight=end - begin)


def multi() -> Any:  # noqa: ANN401 - as above
    return optimizers.MultiOptimizer(
        [optimizers.Muon(0.01), optimizers.AdamW(0.01)], [lambda _path, x: x.ndim == 2]
    )


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda: optimizers.SGD(0.05, momentum=0.9),
    "AdamW": lambda: optimizers.AdamW(0.01),
    "Adam": lambda: optimizers.Adam(optimizers.cosine_decay(0.01, 20), bias_correction=True),
    "Lion": lambda: optimizers.Lion(0.001),
    "Adafactor": optimizers.Adafactor,
    "Muon and AdamW": multi,
}


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    "name",
    [
        *("Adafactor", "Muon and AdamW"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("SGD", "AdamW", "Adam", "Lion")),
    ],
)
def test_twenty_steps_are_those_of_one_machine(name: str, replicas: int) -> None:
    make = OPTIMIZERS[name]

    def train(mesh: pmesh.Mesh) -> np.ndarray[Any, Any]:
        model = make_model()
        optimizer = ShardedOptimizer(make(), mesh, replicas=replicas, bucket_bytes=200)
        for step in range(20):
            update_once(mesh, model, optimizer, step)
        assert optimizer.step.item() == 20
        return weights_of(model)

    results = SimulatedMesh(3).run(train)
    assert len({each.tobytes() for each in results}) == 1
    np.testing.assert_allclose(results[0], train_plainly(make, 20), atol=1e-5)


def test_each_of_three_ranks_keeps_a_third_of_the_state() -> None:
    def train(mesh: pmesh.Mesh) -> int:
        mx.random.seed(1)
        model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
        optimizer = ShardedOptimizer(optimizers.AdamW(0.01), mesh)
        x = mx.ones((2, 100))
        _, gradients = nn.value_and_grad(model, lambda m, x: m(x).sum())(model, x)
        optimizer.update(model, gradients)
        return optimizer.nbytes

    plain = 2 * 4 * 2 * (100 * 100 + 100)
    kept = SimulatedMesh(3).run(train)
    assert sum(kept) == plain
    assert max(kept) <= plain * 1.01 / 3


@pytest.mark.parametrize("name", ["AdamW", "Muon and AdamW"])
def test_with_replicas_a_lost_rank_takes_no_state_with_it(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, simulated = OPTIMIZERS[name], SimulatedMesh(3, on_loss="continue")

    def train(mesh: pmesh.Mesh) -> np.ndarray[Any, Any]:
        model, own = make_model(), mesh.rank
        optimizer = ShardedOptimizer(make(), mesh, replicas=2, bucket_bytes=200)
        for step in range(10):
            if step == 5:
                if own == 1:
                    simulated.lose(1)
                mesh.barrier()  # returns among the others, so that their shares are those of two
            update_once(mesh, model, optimizer, step)
        return weights_of(model)

    first, second = simulated.run(train)
    assert first.tobytes() == second.tobytes()
    np.testing.assert_allclose(first, train_plainly(make, 10), atol=1e-5)
    assert "begin anew" not in caplog.text


def test_an_update_goes_on_among_the_others_from_where_a_rank_was_lost() -> None:
    simulated = SimulatedMesh(3, on_loss="continue")

    def train(mesh: pmesh.Mesh) -> tuple[np.ndarray[Any, Any], int]:
        model, inner, own = make_model(), optimizers.AdamW(0.01), mesh.rank
        optimizer = ShardedOptimizer(inner, mesh, replicas=2, bucket_bytes=200)
        plain, calls = inner.apply_single, 0

        def apply_single(*arguments: object) -> object:
            nonlocal calls
            calls += 1
            if calls == 15 and own == 1:
                simulated.lose(1)  # in the middle of a step: each takes several calls
            return plain(*arguments)

        inner.apply_single = apply_single
        for step in range(6):
            # All have the same batch, so that the mean is the same whoever is there.
            _, gradients = nn.value_and_grad(model, loss_of)(model, *batch(step))
            optimizer.update(model, gradients)
        assert optimizer.step.item() == 6
        return weights_of(model), optimizer.nbytes

    (first, kept), (second, others) = simulated.run(train)
    assert first.tobytes() == second.tobytes()
    np.testing.assert_allclose(first, train_plainly(OPTIMIZERS["AdamW"], 6), atol=1e-5)
    assert kept == others == 2 * first.nbytes  # two of two parts, of two moments


def test_without_replicas_the_lost_part_begins_anew_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    simulated = SimulatedMesh(3, on_loss="continue")

    def train(mesh: pmesh.Mesh) -> tuple[int, bytes]:
        model, own = make_model(), mesh.rank
        optimizer = ShardedOptimizer(optimizers.AdamW(0.01), mesh, bucket_bytes=200)
        for step in range(6):
            if step == 3 and own == 1:
                simulated.lose(1)
            update_once(mesh, model, optimizer, step)
        return optimizer.nbytes, weights_of(model).tobytes()

    (first, weights), (second, others) = simulated.run(train)
    assert weights == others
    assert first + second == 2 * 4 * len(weights) // 4
    assert "values of the optimizer's state are lost" in caplog.text


def test_a_newcomer_gets_its_part_and_all_end_with_the_same_bits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    simulated = SimulatedMesh(2, on_loss="continue")
    ends: list[bytes] = []

    def train(mesh: pmesh.Mesh) -> bytes:
        model = make_model()
        optimizer = ShardedOptimizer(optimizers.AdamW(0.01), mesh, bucket_bytes=200)
        while mesh.step < 8 or mesh.size < 3:
            weights, optimizer.state = mesh.sync((model.parameters(), optimizer.state))
            model.update(weights)
            if mesh.step == 3 and mesh.rank == 0:
                newcomer.start()
            update_once(mesh, model, optimizer, mesh.step)
        assert optimizer.step.item() == mesh.step
        return weights_of(model).tobytes()

    newcomer = threading.Thread(target=lambda: ends.append(train(simulated.connect())))
    ends += simulated.run(train)
    newcomer.join()
    assert len(ends) == 3
    assert len(set(ends)) == 1
    assert "begin anew" not in caplog.text


def test_a_newcomer_may_get_the_number_of_a_lost_rank() -> None:
    simulated = SimulatedMesh(2, on_loss="continue")
    ends: list[bytes] = []

    def train(mesh: pmesh.Mesh) -> bytes:
        model, own, lost = make_model(), mesh.rank, mesh.rank < 0
        optimizer = ShardedOptimizer(optimizers.AdamW(0.01), mesh, bucket_bytes=200)
        while True:
            weights, optimizer.state = mesh.sync((model.parameters(), optimizer.state))
            model.update(weights)
            if optimizer.step.item() == 5:
                return weights_of(model).tobytes()
            if optimizer.step.item() == 2 and not lost:
                lost = True
                if own == 1:
                    simulated.lose(1)
                    newcomer.start()
            elif mesh.size == 2:  # else the newcomer is not here yet
                update_once(mesh, model, optimizer, int(np.array(optimizer.step)))

    newcomer = threading.Thread(target=lambda: ends.append(train(simulated.connect())))
    ends += simulated.run(train)
    newcomer.join()
    assert len(ends) == 2
    assert len(set(ends)) == 1


def test_a_rank_that_gets_the_state_of_others_drops_what_it_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def train(mesh: pmesh.Mesh) -> bytes:
        model = make_model()
        optimizer = ShardedOptimizer(multi(), mesh, bucket_bytes=200)
        update_once(mesh, model, optimizer, 0)
        if mesh.rank == 1:
            optimizer.state = {**optimizer.state, "shared": -1}
            assert optimizer.nbytes == 0
        update_once(mesh, model, optimizer, 1)
        return weights_of(model).tobytes()

    assert len(set(SimulatedMesh(2).run(train))) == 1
    assert "begin anew" in caplog.text


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gathered_state_is_that_of_the_plain_optimizer_and_goes_on_elsewhere(name: str) -> None:
    make = OPTIMIZERS[name]

    def begin(mesh: pmesh.Mesh) -> tuple[dict[str, Any], Any]:
        model, optimizer = make_model(), ShardedOptimizer(make(), mesh, bucket_bytes=200)
        for step in range(5):
            update_once(mesh, model, optimizer, step)
        return optimizer.gather_state(), model.parameters()

    def resume(mesh: pmesh.Mesh) -> np.ndarray[Any, Any]:
        model, optimizer = make_model(), ShardedOptimizer(make(), mesh, bucket_bytes=200)
        model.update(parameters)
        optimizer.load_state(state, model.trainable_parameters())
        for step in range(5, 10):
            update_once(mesh, model, optimizer, step)
        return weights_of(model)

    state, parameters = SimulatedMesh(3).run(begin)[0]
    plain = make()
    plain.init(make_model().trainable_parameters())
    assert {path for path, _ in tree_flatten(state)} == {
        path for path, _ in tree_flatten(plain.state)
    }
    resumed = SimulatedMesh(2).run(resume)[0]
    np.testing.assert_allclose(resumed, train_plainly(make, 10), atol=1e-5)


def test_a_newcomer_drops_the_state_of_an_older_checkpoint() -> None:
    """All have loaded the same one; the others have made steps since, and it has not."""
    simulated = SimulatedMesh(2)

    def begin(mesh: pmesh.Mesh) -> tuple[dict[str, Any], Any]:
        model, optimizer = make_model(), ShardedOptimizer(multi(), mesh)
        for step in range(3):
            update_once(mesh, model, optimizer, step)
        return optimizer.gather_state(), model.parameters()

    def resume(mesh: pmesh.Mesh) -> tuple[int, np.ndarray[Any, Any]]:
        model, optimizer = make_model(), ShardedOptimizer(multi(), mesh)
        model.update(parameters)
        optimizer.load_state(state, model.trainable_parameters())
        together = 0
        while together < 3:
            weights, optimizer.state = mesh.sync((model.parameters(), optimizer.state))
            model.update(weights)
            step = int(np.array(optimizer.step))
            if step == 6 and mesh.rank == 0:
                newcomer.start()
            update_once(mesh, model, optimizer, step)
            together += mesh.size == 3
        return int(np.array(optimizer.step)), weights_of(model)

    state, parameters = SimulatedMesh(1).run(begin)[0]
    newcomer = threading.Thread(target=lambda: resume(simulated.connect()))
    steps, found = simulated.run(resume)[0]
    newcomer.join()
    np.testing.assert_allclose(found, train_plainly(multi, steps), atol=1e-4)


@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
def test_a_rank_without_rows_has_gradients_that_do_not_count(name: str) -> None:
    expected = train_plainly(OPTIMIZERS[name], 2)

    def train(mesh: pmesh.Mesh) -> np.ndarray[Any, Any]:
        model = make_model()
        optimizer = ShardedOptimizer(OPTIMIZERS[name](), mesh)
        for step in range(2):
            x, y = (each[: BATCH * (mesh.rank == 0)] for each in batch(step))
            _, gradients = nn.value_and_grad(model, loss_of)(model, x, y)
            if mesh.rank:
                gradients = tree_map(lambda x: x * mx.nan, gradients)
            optimizer.update(model, gradients, weight=len(x))
        return weights_of(model)

    for found in SimulatedMesh(2).run(train):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_bfloat16_parameters_stay_so() -> None:
    def train(mesh: pmesh.Mesh) -> tuple[set[mx.Dtype], bytes]:
        model = make_model()
        model.set_dtype(mx.bfloat16)
        optimizer = ShardedOptimizer(optimizers.AdamW(0.01), mesh)
        for step in range(3):
            update_once(mesh, model, optimizer, step)
        return {x.dtype for _, x in tree_flatten(model.parameters())}, weights_of(model).tobytes()

    first, second = SimulatedMesh(2).run(train)
    assert first == second
    assert first[0] == {mx.bfloat16}


def test_what_means_nothing_is_refused() -> None:
    def train(mesh: pmesh.Mesh) -> None:
        for options in ({"replicas": 0}, {"bucket_bytes": 0}, {"timeout_s": 0}):
            with pytest.raises(pmesh.UsageError):
                ShardedOptimizer(optimizers.SGD(0.1), mesh, **options)
        model, optimizer = make_model(), ShardedOptimizer(optimizers.SGD(0.1), mesh)
        with pytest.raises(pmesh.UsageError, match="before the first update"):
            optimizer.gather_state()
        gradients = model.parameters()
        with pytest.raises(pmesh.UsageError, match="add up to 0"):
            optimizer.update(model, gradients, weight=0)
        assert optimizer.step.item() == 0
        with pytest.raises(pmesh.UsageError, match="weight"):
            optimizer.update(model, gradients, weight=float("nan"))
        with pytest.raises(pmesh.UsageError, match="other paths"):
            optimizer.update(model, {"layers": gradients["layers"][:1]})
        optimizer.learning_rate = 0.5
        assert optimizer.learning_rate.item() == 0.5
        assert optimizer.optimizer.learning_rate.item() == 0.5

    SimulatedMesh(1).run(train)


@pytest.mark.parametrize("make", [optimizers.AdamW, optimizers.Lion, optimizers.SGD])
def test_each_rank_keeps_the_bytes_that_its_shard_names(make: Callable[[float], Any]) -> None:
    def train(mesh: pmesh.Mesh) -> tuple[int, int]:
        model, optimizer = make_model(), ShardedOptimizer(make(0.01), mesh)
        update_once(mesh, model, optimizer, 0)
        shard = pmesh.Shard.of(mesh.rank, mesh.size, weights_of(model).size)
        return optimizer.nbytes, shard.bytes(optimizer.optimizer)

    for kept, named in SimulatedMesh(3).run(train):
        assert kept == named
