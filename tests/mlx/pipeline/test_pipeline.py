"""Training in stages beside one process that has the whole model and the whole batch."""

import argparse
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn, optimizers
from mlx.utils import tree_flatten

import pmesh
from pmesh.mlx import Block, Pipeline, Stage, split_layers
from pmesh.testing import SimulatedMesh

WIDTH, HEADS, LENGTH, ROWS, STEPS, LAYERS = 16, 2, 12, 10, 6, 8
Weights = dict[str, np.ndarray[Any, Any]]


class CausalLayer(nn.Module):  # type: ignore[misc] # MLX's modules have no types
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, norm_first=True)

    def __call__(self, x: mx.array) -> mx.array:
        mask = nn.MultiHeadAttention.create_additive_causal_mask(x.shape[1]).astype(x.dtype)
        found: mx.array = self.layer(x, mask)
        return found


def make_blocks() -> list[Any]:
    """A language model of bytes; its head is its embedding."""
    mx.random.seed(3)
    embedding, norm = nn.Embedding(128, WIDTH), nn.LayerNorm(WIDTH)
    layers = [CausalLayer() for _ in range(LAYERS - 2)]
    return [embedding, *layers, Block((norm, embedding), lambda x: embedding.as_linear(norm(x)))]


@cache
def text() -> bytes:
    return Path(argparse.__file__).read_bytes()


def batch(step: int) -> tuple[mx.array, mx.array]:
    """Some rows of Python's own sources."""
    begins = np.random.default_rng(step).integers(0, 9000, ROWS)
    rows = [list(text()[b : b + LENGTH + 1]) for b in begins]
    words = mx.minimum(mx.array(rows), 127)
    return words[:, :-1], words[:, 1:]


def loss_of(logits: mx.array, y: mx.array) -> mx.array:
    loss: mx.array = nn.losses.cross_entropy(logits, y, reduction="mean")
    return loss


def weights_of(blocks: list[Any], wanted: Callable[[int], bool] = lambda _: True) -> Weights:
    return {
        f"{i}.{j}.{path}": np.array(x.astype(mx.float32))
        for i, block in enumerate(blocks)
        if wanted(i)
        for j, module in enumerate(block.modules if isinstance(block, Block) else (block,))
        for path, x in tree_flatten(module.parameters())
    }


@cache
def alone() -> tuple[list[float], Weights]:
    blocks, optimizer, losses = make_blocks(), optimizers.SGD(0.1, momentum=0.9), list[float]()
    modules = [*blocks[:-1], blocks[-1].modules[0]]
    model = nn.Sequential(*modules)

    def whole(_: object, x: mx.array, y: mx.array) -> mx.array:
        for block in blocks:
            x = block.call(x) if isinstance(block, Block) else block(x)
        return loss_of(x, y)

    for step in range(STEPS):
        loss, gradients = nn.value_and_grad(model, whole)(model, *batch(step))
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        losses.append(loss.item())
    return losses, weights_of(blocks)


def own_blocks(stage: Stage, rank: int, size: int) -> Callable[[int], bool]:
    numbers = [s for s, count in enumerate(stage.layout.counts) for _ in range(count)]
    return lambda i: numbers[i] % size == rank


def train(mesh: pmesh.Mesh, steps: int, per_rank: int = 1, **options: Any) -> Any:  # noqa: ANN401
    blocks, optimizer, losses = make_blocks(), optimizers.SGD(0.1, momentum=0.9), list[float]()
    stages = mesh.size * per_rank
    by = [pmesh.Shard.of(i, stages, LAYERS).size for i in range(stages)]
    stage = split_layers(blocks, mesh, by=by, stages_per_rank=per_rank)
    pipeline = Pipeline(stage, mesh, loss_of, micro_batch_size=4, **options)
    first, last = mesh.rank == 0, mesh.rank == mesh.size - 1
    for step in range(steps):
        x, y = batch(step)
        value, gradients = pipeline.step(x if first else None, y if last else None)
        optimizer.update(stage, gradients)
        mx.eval(stage.parameters(), optimizer.state)
        losses.append(value)
    return losses, weights_of(blocks, own_blocks(stage, mesh.rank, mesh.size)), pipeline


@pytest.mark.parametrize(
    ("schedule", "per_rank", "recompute"),
    [
        ("gpipe", 1, True),
        ("1f1b", 1, False),
        ("interleaved", 2, True),
        ("zero_bubble", 1, True),
        ("zero_bubble", 2, False),
    ],
)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_weights_are_those_of_one_process(
    ranks: int,
    schedule: str,
    per_rank: int,
    recompute: bool,  # noqa: FBT001
) -> None:
    losses, weights = alone()
    results = SimulatedMesh(ranks).run(
        lambda mesh: train(mesh, STEPS, per_rank, schedule=schedule, recompute=recompute)
    )
    found: Weights = {}
    for own_losses, own, _ in results:
        np.testing.assert_allclose(own_losses, losses, rtol=1e-5)
        found |= own
    assert found.keys() == weights.keys()
    for name, values in weights.items():
        np.testing.assert_allclose(found[name], values, atol=1e-5, err_msg=name)


def test_tied_weights_stay_the_same_bits_on_both_ranks() -> None:
    def both(mesh: pmesh.Mesh) -> bytes:
        stage = split_layers(make_blocks(), mesh, by=[4, 4])
        pipeline, optimizer = Pipeline(stage, mesh, loss_of), optimizers.Adam(0.01)
        for step in range(3):
            optimizer.update(stage, pipeline.step(*batch(step))[1])
        (embedding,) = (m for m in stage.layers if isinstance(m, nn.Embedding))
        return np.array(embedding.weight).tobytes()

    first, last = SimulatedMesh(2).run(both)
    assert first == last


@pytest.mark.parametrize("recompute", [True, False])
def test_activations_cross_as_bfloat16_where_asked_and_where_a_stage_is_so(
    recompute: bool,  # noqa: FBT001
) -> None:
    def measure(mesh: pmesh.Mesh) -> tuple[float, float, set[mx.Dtype]]:
        losses = [
            train(mesh, 3, send_as=send_as, recompute=recompute)[0][-1]
            for send_as in (None, "bfloat16")
        ]
        blocks = make_blocks()
        for layer in blocks[1:4]:
            layer.set_dtype(mx.bfloat16)
        stage = split_layers(blocks, mesh, by=[4, 4])
        pipeline = Pipeline(stage, mesh, loss_of, recompute=recompute)
        gradients = pipeline.step(*batch(0))[1]
        return *losses, {x.dtype for _, x in tree_flatten(gradients)}

    found = SimulatedMesh(2).run(measure)
    for exact, rounded, _ in found:
        assert exact != rounded
        assert rounded == pytest.approx(exact, rel=1e-2)
    assert [each[2] for each in found] == [{mx.float32, mx.bfloat16}, {mx.float32}]


def test_activations_cross_as_int8_where_asked_and_the_loss_is_within_one_percent() -> None:
    losses = alone()[0]
    for own, *_ in SimulatedMesh(3).run(lambda mesh: train(mesh, STEPS, send_as="int8")):
        assert own != losses
        np.testing.assert_allclose(own, losses, rtol=0.01)


def test_a_grid_trains_in_stages_and_on_parts_of_the_batch() -> None:
    def each(mesh: pmesh.Mesh) -> Weights:
        grid = pmesh.DeviceMesh(mesh, (2, 2), ("data", "stage"))
        blocks, optimizer = make_blocks(), optimizers.SGD(0.1, momentum=0.9)
        stage = split_layers(blocks, grid["stage"], by=[3, 5])
        pipeline = Pipeline(stage, grid["stage"], loss_of)
        begin, end = ((0, 4), (4, ROWS))[grid["data"].rank]
        for step in range(STEPS):
            x, y = batch(step)
            _, gradients = pipeline.step(x[begin:end], y[begin:end])
            gradients = grid["data"].average_gradients(gradients, weight=pipeline.rows)
            optimizer.update(stage, gradients)
            mx.eval(stage.parameters(), optimizer.state)
        return weights_of(blocks, own_blocks(stage, grid["stage"].rank, 2))

    results = SimulatedMesh(4).run(each)
    for found in results:
        for name, values in found.items():
            np.testing.assert_allclose(values, alone()[1][name], atol=1e-5, err_msg=name)
    assert results[0].keys() | results[1].keys() == alone()[1].keys()


def test_a_module_within_layers_of_two_ranks_is_refused() -> None:
    def split(mesh: pmesh.Mesh) -> None:
        shared = nn.Linear(WIDTH, WIDTH)
        layers: list[Any] = [nn.Sequential(shared, nn.Tanh()) for _ in range(2)]
        layers.append(nn.Linear(WIDTH, WIDTH))
        split_layers(layers, mesh, by=[2, 1])  # both are here
        with pytest.raises(pmesh.UsageError, match="two modules of the model share a Linear"):
            split_layers(layers, mesh, by=[1, 2])
        shared.freeze()
        split_layers(layers, mesh, by=[1, 2])
        shared.unfreeze()
        named = [Block((shared,), layer) for layer in layers[:2]]
        assert split_layers(named, mesh, by=[1, 1]).layout.holders == ((0, 1),)

    SimulatedMesh(2).run(split)


def test_frozen_layers_get_no_gradients_and_a_stage_may_have_none() -> None:
    def each(mesh: pmesh.Mesh) -> list[str]:
        blocks = make_blocks()
        for block in blocks[:-1]:
            block.freeze()
        blocks[5].layer.linear1.unfreeze()
        stage = split_layers(blocks, mesh, by=[4, 4])
        value, gradients = Pipeline(stage, mesh, loss_of).step(*batch(0))
        assert value == pytest.approx(alone()[0][0], rel=1e-5)
        return [path.rsplit(".", 2)[-2] for path, _ in tree_flatten(gradients)]

    first, last = SimulatedMesh(2).run(each)
    assert first == []
    assert "linear1" in last


@pytest.mark.parametrize("recompute", [True, False])
def test_the_backward_pass_drops_what_the_forward_pass_has_dropped(recompute: bool) -> None:  # noqa: FBT001 - pytest's
    """A model that is linear in each layer's weights: their sum times gradients is the loss."""

    def step(mesh: pmesh.Mesh) -> tuple[float, float]:
        mx.random.seed(3 + mesh.rank)
        layers = [nn.Sequential(nn.Linear(8, 8, bias=False), nn.Dropout(0.5)) for _ in range(3)]
        stage = split_layers(layers, mesh, by=[1, 1, 1])
        pipeline = Pipeline(
            stage, mesh, lambda output, _: output.mean(), micro_batch_size=4, recompute=recompute
        )
        x = mx.random.normal((ROWS, 8))
        value, gradients = pipeline.step(x, x)
        weights, found = (dict(tree_flatten(t)) for t in (stage.parameters(), gradients))
        return value, sum(float((weights[path] * found[path]).sum().item()) for path in weights)

    for value, along in SimulatedMesh(3).run(step):
        assert along == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize("affine", [True, False])  # without, the first stage has no gradients
@pytest.mark.parametrize("recompute", [True, False])
def test_running_statistics_are_updated_once_by_each_micro_batch(
    recompute: bool,  # noqa: FBT001 - pytest's
    affine: bool,  # noqa: FBT001 - pytest's
) -> None:
    norms = [nn.BatchNorm(8, affine=affine) for _ in range(2)]
    numbers = np.random.default_rng(1).normal(size=(ROWS, 8)).astype(np.float32)
    for part in (numbers[:4], numbers[4:8], numbers[8:]):
        norms[1](norms[0](mx.array(part)))

    def step(mesh: pmesh.Mesh) -> Weights:
        rows = mx.array(numbers)
        layers = [nn.BatchNorm(8, affine=affine) for _ in range(2)]
        stage = split_layers(layers, mesh, by=[1, 1])
        pipeline = Pipeline(
            stage, mesh, lambda output, _: output.mean(), micro_batch_size=4, recompute=recompute
        )
        pipeline.step(rows, rows)
        return {path: np.array(x) for path, x in tree_flatten(stage.layers[0].parameters())}

    for norm, found in zip(norms, SimulatedMesh(2).run(step), strict=True):
        for name in ("running_mean", "running_var"):
            np.testing.assert_allclose(found[name], np.array(norm[name]), atol=1e-6)


def test_gradients_of_complex_weights_keep_their_imaginary_part() -> None:
    class Rotation(nn.Module):  # type: ignore[misc] # as above
        def __init__(self) -> None:
            super().__init__()
            self.factor = mx.array([1 + 2j, 3 - 1j])

        def __call__(self, x: mx.array) -> mx.array:
            return mx.imag(self.factor * x)

    def step(mesh: pmesh.Mesh) -> Any:  # noqa: ANN401
        stage = split_layers([Rotation(), Rotation()], mesh, by=[1, 1])
        pipeline = Pipeline(stage, mesh, lambda output, _: output.mean(), micro_batch_size=2)
        x = mx.array([[1.0, 2.0]] * 4)
        gradients = dict(tree_flatten(pipeline.step(x, x)[1]))
        return gradients["layers.0.factor"].tolist()

    assert SimulatedMesh(2).run(step) == [[1j, -1j]] * 2


def test_the_report_has_the_times_of_all_ranks_beside_the_schedule() -> None:
    def each(mesh: pmesh.Mesh) -> Any:  # noqa: ANN401
        pipeline = train(mesh, 2)[2]
        assert pipeline.rows == ROWS
        return pipeline.report()

    first, last = SimulatedMesh(2).run(each)
    assert first == last
    assert first.schedule_bubble == pytest.approx(1 / 4)  # three micro-batches, the last one short
    assert len(first.stages) == 2
    assert 0 <= first.bubble < 1
    assert all(s.compute_s + s.wait_s + s.send_s <= first.step_s + 1e-6 for s in first.stages)


def test_layers_are_split_by_measured_speed_or_refused() -> None:
    def each(mesh: pmesh.Mesh) -> tuple[int, ...]:
        counts = split_layers(nn.Sequential(*make_blocks()[1:-1]), mesh).layout.counts
        for by, why in (([4, 3], "adds up to 7 layers, and the model has 8"), ([8], "1 stages")):
            with pytest.raises(pmesh.UsageError, match=why):
                split_layers(make_blocks(), mesh, by=by)
        with pytest.raises(pmesh.UsageError, match="at least 1, not 0"):
            split_layers(make_blocks(), mesh, stages_per_rank=0)
        with pytest.raises(pmesh.UsageError, match="1 layers, too few for 2 stages"):
            split_layers(make_blocks()[:1], mesh)
        return counts

    first, last = SimulatedMesh(2).run(each)
    assert first == last
    assert sum(first) == LAYERS - 2


def test_bad_input_is_named_on_all_ranks_before_anything_is_sent() -> None:
    def each(mesh: pmesh.Mesh) -> None:
        stage = split_layers(make_blocks(), mesh, by=[4, 4])
        pipeline = Pipeline(stage, mesh, loss_of)
        (x, y), found = batch(0), pytest.raises
        with found(pmesh.UsageError, match="no step yet"):
            pipeline.report()
        with found(pmesh.UsageError, match="rank 0 has passed no x"):
            pipeline.step(None, y)
        with found(pmesh.UsageError, match="rank 1 has passed no y"):
            pipeline.step(x)
        for wrong, rows in ((y[:3], "3"), ((y, y[:3]), "arrays of different numbers of")):
            with found(pmesh.UsageError, match=f"x on rank 0 has 10 rows and y .* {rows} rows"):
                pipeline.step(x, wrong)
        for options, why in (
            ({"micro_batch_size": 0}, "at least 1, not 0"),
            ({"send_as": "int3"}, "'bfloat16', 'int8' or None"),
            ({"schedule": "interleaved"}, "stages_per_rank=2"),
            ({"micro_batch_size": 2 + mesh.rank}, "pass the same ones"),
        ):
            with found(pmesh.UsageError, match=why):
                Pipeline(stage, mesh, loss_of, **options)
        other = split_layers(make_blocks(), mesh, by=[[4, 4], [3, 5]][mesh.rank])
        with found(pmesh.UsageError, match="all must split one model"):
            Pipeline(other, mesh, loss_of)

    SimulatedMesh(2).run(each)


def test_a_step_that_failed_is_the_last_one() -> None:
    def fail(*_: mx.array) -> mx.array:
        raise OSError("a loss of the user's")

    def each(mesh: pmesh.Mesh) -> None:
        pipeline = Pipeline(split_layers(make_blocks(), mesh, by=[LAYERS]), mesh, fail)
        with pytest.raises(OSError, match="of the user's"):
            pipeline.step(*batch(0))
        with pytest.raises(pmesh.errors.RosterChanged, match="a step of this pipeline has failed"):
            pipeline.step(*batch(0))

    SimulatedMesh(1).run(each)


def test_two_tied_modules_may_come_in_another_order() -> None:
    def make() -> list[Any]:
        mx.random.seed(1)
        a, b = nn.Linear(4, 4), nn.Linear(4, 4)
        return [Block((a, b), lambda x: b(mx.tanh(a(x)))), Block((b, a), lambda x: a(b(x)))]

    def square(output: mx.array, y: mx.array) -> mx.array:
        return mx.square(output - y).mean()

    def each(mesh: pmesh.Mesh) -> list[np.ndarray[Any, Any]]:
        stage = split_layers(make(), mesh, by=[1, 1])
        gradients = Pipeline(stage, mesh, square).step(x, x)[1]
        return [np.array(g) for _, g in tree_flatten(gradients)]

    x = mx.random.normal((5, 4))
    mx.eval(x)  # streams of MLX belong to threads
    first, last = SimulatedMesh(2).run(each)
    (alone_,) = SimulatedMesh(1).run(
        lambda mesh: [
            np.array(g)
            for _, g in tree_flatten(
                Pipeline(split_layers(make(), mesh, by=[2]), mesh, square).step(x, x)[1]
            )
        ]
    )
    for one, other, expected in zip(first, last, alone_, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-6)
