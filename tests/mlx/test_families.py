import importlib
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn, optimizers
from mlx.utils import tree_flatten

import pmesh
from pmesh.mlx import Pipeline, fully_shard, language_model_blocks, split_layers
from pmesh.mlx.families import FAMILIES
from pmesh.testing import SimulatedMesh

CONFIG: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 64,
    "vocab_size": 29,
}


def make_model(family: str, *, tied: bool, **more: Any) -> Any:  # noqa: ANN401 - mlx-lm has no types
    pytest.importorskip("mlx_lm")
    # mlx-lm reads a mistral as a llama.
    module = "llama" if family == "mistral" else family
    models: Any = importlib.import_module(f"mlx_lm.models.{module}")
    mx.random.seed(2)
    config = {**CONFIG, "model_type": family, "tie_word_embeddings": tied, **more}
    return models.Model(models.ModelArgs.from_dict(config))


def tokens(length: int) -> mx.array:
    return mx.array(np.random.default_rng(1).integers(0, 29, (2, length)))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_blocks_of_a_family_compute_what_the_model_does(family: str, tied: bool) -> None:  # noqa: FBT001
    model = make_model(family, tied=tied)
    for length in (1, 7):
        found = tokens(length)
        for block in language_model_blocks(model):
            found = block.call(found)
        np.testing.assert_array_equal(np.array(found), np.array(model(tokens(length))))


def test_a_language_model_trains_fully_sharded_as_it_does_alone() -> None:
    def loss_of(logits: mx.array, y: mx.array) -> mx.array:
        loss: mx.array = nn.losses.cross_entropy(logits, y, reduction="mean")
        return loss

    def train(mesh: pmesh.Mesh) -> list[float]:
        model = fully_shard(language_model_blocks(make_model("llama", tied=True)), mesh)
        optimizer, losses, own = optimizers.AdamW(0.01), list[float](), tokens(9)[mesh.rank :][:1]
        for _ in range(3):
            loss, gradients = model.loss_and_gradients(loss_of, own[:, :-1], own[:, 1:])
            optimizer.update(model, gradients)
            losses.append(float(np.array(loss)))
        return losses

    model, optimizer, expected = make_model("llama", tied=True), optimizers.AdamW(0.01), []
    for _ in range(3):
        loss, gradients = nn.value_and_grad(model, lambda m, x: loss_of(m(x[:, :-1]), x[:, 1:]))(
            model, tokens(9)
        )
        optimizer.update(model, gradients)
        expected.append(loss.item())
    for found in SimulatedMesh(2).run(train):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_adapters_of_a_language_model_train_in_stages_as_they_do_alone() -> None:
    def loss_of(logits: mx.array, y: mx.array) -> mx.array:
        loss: mx.array = nn.losses.cross_entropy(logits, y, reduction="mean")
        return loss

    def with_adapters() -> Any:  # noqa: ANN401 - mlx-lm has no types
        model = make_model("qwen3", tied=True)
        model.freeze()
        tuner: Any = importlib.import_module("mlx_lm.tuner.utils")
        tuner.linear_to_lora_layers(model, 3, {"rank": 2, "scale": 4.0, "dropout": 0.0})
        return model

    def train(mesh: pmesh.Mesh) -> list[float]:
        stage = split_layers(with_adapters(), mesh, by=[1, 2])
        pipeline, optimizer = Pipeline(stage, mesh, loss_of), optimizers.SGD(1.0)
        losses = list[float]()
        for _ in range(3):
            value, gradients = pipeline.step(tokens(9)[:, :-1], tokens(9)[:, 1:])
            assert all("lora" in path for path, _ in tree_flatten(gradients))
            optimizer.update(stage, gradients)
            losses.append(value)
        return losses

    model, optimizer, expected = with_adapters(), optimizers.SGD(1.0), []
    for _ in range(3):
        loss, gradients = nn.value_and_grad(model, lambda m, x: loss_of(m(x[:, :-1]), x[:, 1:]))(
            model, tokens(9)
        )
        optimizer.update(model, gradients)
        expected.append(loss.item())
    assert expected[-1] != expected[0]
    for found in SimulatedMesh(2).run(train):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(pmesh.UsageError, match="mamba"):
        language_model_blocks(SimpleNamespace(model_type="mamba"))
    sliding = make_model(
        "llama", tied=True, layer_types=["full_attention", "sliding_attention"], sliding_window=4
    )
    assert tree_flatten(sliding.parameters())
    with pytest.raises(pmesh.UsageError, match="sliding"):
        language_model_blocks(sliding)
