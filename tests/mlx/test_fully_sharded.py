from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn, optimizers
from mlx.utils import tree_flatten

import pmesh
from pmesh.mlx import Block, FullySharded, fully_shard
from pmesh.testing import SimulatedMesh

BATCH, WORDS, WIDTH = 12, 13, 10


def make_parts() -> list[Any]:
    """An embedding, four blocks and a norm; nothing of it is divisible by three."""
    mx.random.seed(3)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return [nn.Embedding(WORDS, WIDTH), *layers, nn.RMSNorm(WIDTH)]


def blocks_of(parts: list[Any]) -> list[Any]:
    """The head is the embedding again."""
    embedding, norm = parts[0], parts[-1]
    return [*parts[:-1], Block((norm, embedding), lambda x: embedding.as_linear(norm(x)))]


def batch(step: int) -> tuple[mx.array, mx.array]:
    words = np.random.default_rng(step).integers(0, WORDS, (BATCH, 2))
    return mx.array(words[:, :1]), mx.array(words[:, 1:])


def loss_of(logits: mx.array, y: mx.array) -> mx.array:
    loss: mx.array = nn.losses.cross_entropy(logits, y, reduction="mean")
    return loss


def share_of(mesh: pmesh.Mesh, step: int) -> tuple[mx.array, mx.array]:
    """Of unequal sizes: three ranks get 3, 4 and 5 samples."""
    x, y = batch(step)
    begin, end = ([0, 3, 7, BATCH], [0, 5, BATCH], [0, BATCH])[3 - mesh.size][
        mesh.rank : mesh.rank + 2
    ]
    return x[begin:end], y[begin:end]


def numbers(arrays: list[dict[str, mx.array]]) -> np.ndarray[Any, Any]:
    return np.concatenate([np.array(x).reshape(-1) for each in arrays for x in each.values()])


def train_plainly(steps: int) -> tuple[list[float], np.ndarray[Any, Any]]:
    parts, optimizer, losses = make_parts(), optimizers.AdamW(0.01), list[float]()
    model = nn.Sequential(*parts)

    def whole(_: object, x: mx.array, y: mx.array) -> mx.array:
        for block in blocks_of(parts):
            x = block.call(x) if isinstance(block, Block) else block(x)
        return loss_of(x, y)

    for step in range(steps):
        loss, gradients = nn.value_and_grad(model, whole)(model, *batch(step))
        optimizer.update(model, gradients)
        losses.append(loss.item())
    # In the order in which blocks name them first: the embedding, the layers, the norm.
    return losses, numbers([dict(tree_flatten(part.parameters())) for part in parts])


def step_once(mesh: pmesh.Mesh, model: FullySharded, optimizer: Any, step: int) -> float:  # noqa: ANN401 - MLX's have no types
    x, y = share_of(mesh, step)
    loss, gradients = model.loss_and_gradients(loss_of, x, y, weight=len(x))
    optimizer.update(model, gradients)
    mx.eval(model.parameters(), optimizer.state)
    return float(np.array(loss))


def test_twenty_steps_are_those_of_one_machine() -> None:
    def train(mesh: pmesh.Mesh) -> tuple[list[float], np.ndarray[Any, Any]]:
        model, optimizer = fully_shard(blocks_of(make_parts()), mesh), optimizers.AdamW(0.01)
        losses = [step_once(mesh, model, optimizer, step) for step in range(20)]
        return losses, numbers(list(model.gather()))

    losses, weights = train_plainly(20)
    results = SimulatedMesh(3).run(train)
    assert len({each.tobytes() for _, each in results}) == 1
    np.testing.assert_allclose(results[0][1], weights, atol=1e-5)
    for found, _ in results:
        np.testing.assert_allclose(found, losses, rtol=1e-5)


@pytest.mark.parametrize("rows", [0, 3])
def test_a_rank_of_no_weight_does_not_count_whatever_its_loss_is(rows: int) -> None:
    losses, weights = train_plainly(2)

    def nan(logits: mx.array, y: mx.array) -> mx.array:
        return loss_of(logits, y) * mx.nan

    def train(mesh: pmesh.Mesh) -> tuple[list[float], np.ndarray[Any, Any]]:
        model, optimizer = fully_shard(blocks_of(make_parts()), mesh), optimizers.AdamW(0.01)
        found = list[float]()
        for step in range(2):
            x, y = batch(step)
            if mesh.rank:
                x, y = x[:rows], y[:rows]
            mine, weight = (nan, 0) if mesh.rank else (loss_of, BATCH)
            loss, gradients = model.loss_and_gradients(mine, x, y, weight=weight)
            optimizer.update(model, gradients)
            found.append(float(np.array(loss)))
        return found, numbers(list(model.gather()))

    for found, ends in SimulatedMesh(2).run(train):
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        np.testing.assert_allclose(ends, weights, atol=1e-5)


def test_the_backward_pass_drops_what_the_forward_pass_has_dropped() -> None:
    """A model that is linear in each layer's weights: their sum times gradients is the output."""

    def step(mesh: pmesh.Mesh) -> tuple[float, float]:
        mx.random.seed(3)
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]
        model = fully_shard([nn.Sequential(each, nn.Dropout(0.5)) for each in layers], mesh)
        x = mx.random.normal((BATCH, WIDTH))
        loss, gradients = model.loss_and_gradients(lambda output: output.sum(), x)
        parts, found = (dict(tree_flatten(each)) for each in (model.parameters(), gradients))
        along = sum(float((parts[path] * found[path]).sum().item()) for path in parts)
        return float(np.array(loss)), float(mesh.all_reduce(np.array(along), "sum"))

    for loss, along in SimulatedMesh(2).run(step):
        assert along == pytest.approx(3 * loss, rel=1e-4)


def test_running_statistics_are_those_of_one_machine() -> None:
    rows = np.random.default_rng(1).normal(size=(BATCH, WIDTH)).astype(np.float32)

    def make() -> list[Any]:
        mx.random.seed(3)
        return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm(WIDTH)) for _ in range(3)]

    def train(mesh: pmesh.Mesh) -> tuple[list[dict[str, Any]], bool]:
        model, x = fully_shard(make(), mesh), mx.array(rows)
        for _ in range(3):
            model.loss_and_gradients(lambda output: output.mean(), x)
        found = [{name: np.array(a) for name, a in each.items()} for each in model.gather()]
        mine = x if mesh.rank else x[:0]  # whose mean is NaN
        model.loss_and_gradients(lambda output: output.mean(), mine, weight=len(mine))
        return found, bool(np.isfinite(numbers(list(model.gather()))).all())

    alone = make()
    for _ in range(3):
        nn.Sequential(*alone)(mx.array(rows))
    for found, stays_finite in SimulatedMesh(2).run(train):
        assert stays_finite
        for module, own in zip(alone, found, strict=True):
            for name, a in tree_flatten(module.parameters()):
                np.testing.assert_allclose(own[name], np.array(a), atol=1e-6, err_msg=name)


def test_each_rank_keeps_its_part_and_the_modules_are_empty() -> None:
    def train(mesh: pmesh.Mesh) -> int:
        parts = make_parts()
        model, optimizer = fully_shard(blocks_of(parts), mesh), optimizers.AdamW(0.01)
        step_once(mesh, model, optimizer, 0)
        model(batch(0)[0])
        assert all(x.size == 0 for part in parts for _, x in tree_flatten(part.parameters()))
        moments = [x for _, x in tree_flatten(optimizer.state["modules"])]
        kept: int = sum(x.size for _, x in tree_flatten(model.parameters()))
        assert sum(x.size for x in moments) == 2 * kept
        return kept

    whole = sum(x.size for part in make_parts() for _, x in tree_flatten(part.parameters()))
    kept = SimulatedMesh(3).run(train)
    assert sum(kept) == whole
    assert max(kept) - min(kept) <= 6  # one more of each module


def test_a_call_computes_what_the_model_does() -> None:
    expected = batch(0)[0]
    for block in blocks_of(make_parts()):
        expected = block.call(expected) if isinstance(block, Block) else block(expected)

    def forward(mesh: pmesh.Mesh) -> np.ndarray[Any, Any]:
        model = fully_shard(blocks_of(make_parts()), mesh)
        return np.array(model(batch(0)[0]))

    for found in SimulatedMesh(2).run(forward):
        np.testing.assert_allclose(found, np.array(expected), atol=1e-6)


def test_frozen_weights_are_shared_out_and_get_no_gradients() -> None:
    def train(mesh: pmesh.Mesh) -> tuple[bool, bool]:
        parts = make_parts()
        before = numbers([dict(tree_flatten(parts[0].parameters()))])
        parts[0].freeze()
        for part in parts[1:]:
            part.set_dtype(mx.bfloat16)
        embedding, *layers, norm = parts
        head = Block((norm, embedding), lambda x: embedding.as_linear(norm(x)))
        cast = Block((), lambda x: x.astype(mx.bfloat16))
        model, optimizer = fully_shard([embedding, cast, *layers, head], mesh), optimizers.SGD(0.1)
        first = [np.array(x.astype(mx.float32)) for _, x in tree_flatten(model.parameters())]
        step_once(mesh, model, optimizer, 0)
        second = [np.array(x.astype(mx.float32)) for _, x in tree_flatten(model.parameters())]
        after = numbers([next(iter(list(model.gather())))])
        moved = any((one != two).any() for one, two in zip(first, second, strict=True))
        return bool((before == after).all()), moved

    assert SimulatedMesh(2).run(train) == [(True, True)] * 2


def test_after_a_loss_all_load_what_was_saved_and_go_on() -> None:
    simulated = SimulatedMesh(3, on_loss="continue")

    def train(mesh: pmesh.Mesh) -> np.ndarray[Any, Any]:
        model, optimizer = fully_shard(blocks_of(make_parts()), mesh), optimizers.AdamW(0.01)
        own, saved, changes = mesh.rank, list[dict[str, mx.array]](), 0
        step = 0
        while step < 6:
            if step == 2:
                saved = list(model.gather())
            if step == 4 and own == 1 and not changes:
                simulated.lose(1)
            try:
                step_once(mesh, model, optimizer, step)
                step += 1
            except pmesh.errors.RosterChanged:
                changes += 1
                model.load(saved)
                step, optimizer = 2, optimizers.AdamW(0.01)
        assert changes == 1
        return numbers(list(model.gather()))

    first, second = simulated.run(train)
    assert first.tobytes() == second.tobytes()


def test_weights_of_another_model_are_refused_and_the_model_keeps_its_own() -> None:
    def train(mesh: pmesh.Mesh) -> None:
        model = fully_shard(blocks_of(make_parts()), mesh)
        own = list(model.gather())
        wide = [{path: mx.zeros((99, *x.shape[1:])) for path, x in each.items()} for each in own]
        for others in (wide, own[:-1], [*own, own[0]], [{"scales": own[0]["weight"]}, *own[1:]]):
            with pytest.raises(pmesh.UsageError, match="more or fewer modules"):
                model.load(others)
        assert numbers(list(model.gather())).tobytes() == numbers(own).tobytes()
        model.load(own)
        assert numbers(list(model.gather())).tobytes() == numbers(own).tobytes()

    SimulatedMesh(2).run(train)


def test_ranks_that_cannot_load_after_a_loss_go_on_with_nothing() -> None:
    simulated = SimulatedMesh(3, on_loss="continue")

    def train(mesh: pmesh.Mesh) -> None:
        model, own = fully_shard(blocks_of(make_parts()), mesh), mesh.rank
        saved = list(model.gather())
        if own == 1:
            simulated.lose(1)
        while mesh.size == 3:
            mesh.barrier()
        with pytest.raises(pmesh.UsageError):
            model.load(saved[:2])
        with pytest.raises(pmesh.errors.RosterChanged, match="call load"):
            model(batch(0)[0])

    simulated.run(train)


def test_what_means_nothing_is_refused() -> None:
    def train(mesh: pmesh.Mesh) -> None:
        with pytest.raises(pmesh.UsageError, match="no block"):
            fully_shard([], mesh)
        shared, tanh = nn.Linear(WIDTH, WIDTH), nn.Tanh()
        fully_shard([nn.Sequential(nn.Linear(WIDTH, WIDTH), tanh) for _ in range(2)], mesh)
        with pytest.raises(pmesh.UsageError, match="two modules of the model share a Linear"):
            fully_shard([nn.Sequential(shared, tanh) for _ in range(2)], mesh)
        model = fully_shard(blocks_of(make_parts()), mesh)
        for weight in (0, -1, float("inf")):
            with pytest.raises(pmesh.UsageError, match="weight"):
                model.loss_and_gradients(loss_of, *batch(0), weight=weight)

    SimulatedMesh(1).run(train)
