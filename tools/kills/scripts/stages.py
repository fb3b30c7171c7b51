"""One rank of a training in stages: stages.py JOB STEPS RANKS [FEWER_AFTER_S WAIT_S].

It prints each step with its loss, and at the end a hash of the weights of each of its layers.
"""

import hashlib
import json
import sys

import mlx.core as mx
import numpy as np
from mlx import nn, optimizers
from mlx.utils import tree_flatten

import pmesh
from pmesh.mlx import ElasticPipeline

WIDTH, ROWS, LAYERS_EACH = 64, 16, 2


def batch(step: int) -> tuple[mx.array, mx.array]:
    x = mx.random.normal((ROWS, WIDTH), key=mx.random.key(step))
    return x, mx.sin(x)


def train(job: str, steps: int, ranks: int, **patience: float) -> None:
    with pmesh.connect(job=job, wait_for=ranks) as mesh:
        print(json.dumps({"rank": mesh.rank}), flush=True)
        mx.random.seed(1)
        count = LAYERS_EACH * ranks
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]
        training = ElasticPipeline(
            layers,
            mesh,
            nn.losses.mse_loss,
            optimizers.AdamW(1e-3),
            by=[LAYERS_EACH] * ranks,
            **patience,
        )
        for step, value in training.train(batch, steps):
            print(json.dumps({"step": step, "loss": value, "rank": mesh.rank}), flush=True)
        digests = [digest(layer) for layer in training.stage.layers]
        print(json.dumps({"stage": training.number, "digests": digests}), flush=True)


def digest(layer: nn.Module) -> str:
    hasher = hashlib.sha256()
    for _, x in tree_flatten(layer.parameters()):
        hasher.update(np.array(x).tobytes())
    return hasher.hexdigest()


if __name__ == "__main__":
    job, steps, ranks, *times = sys.argv[1:]
    patience = dict(zip(("fewer_after_s", "wait_s"), map(float, times), strict=False))
    train(job, int(steps), int(ranks), **patience)
