"""One training: four ranks as threads, which make the calls that a user's script makes."""

import hashlib
import math
from collections.abc import Callable
from typing import TypeAlias

import mlx.core as mx
import numpy as np

import pmesh
from pmesh.compression.schemes import Scheme
from pmesh.testing import SimulatedMesh
from tools.compare_compression.models import Model, Weights

RANKS = 4
POINTS = 20  # of a curve
MEASURED_SAMPLES = 8192  # the mean of fewer would follow single samples
_MEASURED_SEED = 2**31  # of samples that no training draws by the same numbers
_WARM_UP = 0.05  # of the steps, in which the learning rate rises

Choice: TypeAlias = Callable[[int, int], Scheme | str]
"""The compression of a call, by its step and by how many there are."""
Trained: TypeAlias = tuple[float, tuple[float, ...]]
"""The final loss, and the mean losses of the batches on the way."""


def train(model: Model, seed: int, *, steps: int, compression: Choice) -> Trained:
    """Train, and measure the loss at the end on samples that are the same for all.

    Raises:
        RuntimeError: the ranks ended with different bits.
    """

    def rank(mesh: pmesh.Mesh) -> tuple[Weights, list[float]]:
        return _train_rank(mesh, model, seed, steps, compression)

    trained = SimulatedMesh(RANKS).run(rank)
    if len({_hash_of(weights) for weights, _ in trained}) > 1:
        raise RuntimeError(f"{model.name}, seed {seed}: the ranks' weights differ")
    losses = np.mean([losses for _, losses in trained], axis=0)
    curve = tuple(float(part.mean()) for part in np.array_split(losses, min(POINTS, steps)))
    return _measure(model, trained[0][0]), curve


def learning_rate(model: Model, step: int, steps: int) -> float:
    """Up in a twentieth of the steps, then down to zero in a straight line."""
    return model.rate * min(1.0, (step + 1) / (_WARM_UP * steps), 1 - step / steps)


def _train_rank(
    mesh: pmesh.Mesh,
    model: Model,
    seed: int,
    steps: int,
    compression: Choice,
) -> tuple[Weights, list[float]]:
    # Each rank has arrays of its own: MLX's belong to the thread that computes them.
    weights = model.begin(seed)
    loss_and_gradients = mx.value_and_grad(model.loss)
    losses: list[float] = []
    for step in range(steps):
        x, y = model.draw(np.random.default_rng([seed, step, mesh.rank]), model.batch)
        loss, gradients = loss_and_gradients(weights, mx.array(x), mx.array(y))
        gradients = mesh.average_gradients(
            gradients, weight=len(y), compression=compression(step, steps)
        )
        rate = learning_rate(model, step, steps)
        weights = {name: value - rate * gradients[name] for name, value in weights.items()}
        mx.eval(weights, loss)
        losses.append(float(np.array(loss)))
    return weights, losses


def _measure(model: Model, weights: Weights) -> float:
    """Infinite if it has diverged."""
    here = {name: mx.array(np.array(value)) for name, value in weights.items()}
    x, y = model.draw(np.random.default_rng(_MEASURED_SEED), MEASURED_SAMPLES)
    loss = float(np.array(model.loss(here, mx.array(x), mx.array(y))))
    return loss if math.isfinite(loss) else math.inf


def _hash_of(weights: Weights) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(name.encode() + np.array(value).tobytes())
    return digest.hexdigest()
