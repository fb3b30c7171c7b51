"""One rank of a training in stages: stages.py JOB STEPS RANKS.

It prints each step with its loss, and at the end a hash of its stage's weights.
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


def train(job: str, steps: int, ranks: int) -> None:
    with pmesh.connect(job=job, wait_for=ranks) as mesh:
        print(json.dumps({"rank": mesh.rank}), flush=True)
        mx.random.seed(1)
        count = LAYERS_EACH * ranks
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]
        by = [LAYERS_EACH] * ranks
        training = ElasticPipeline(layers, mesh, nn.losses.mse_loss, optimizers.AdamW(1e-3), by=by)
        for step, value in training.train(batch, steps):
            print(json.dumps({"step": step, "loss": value, "rank": mesh.rank}), flush=True)
        hasher = hashlib.sha256()
        for _, x in tree_flatten(training.stage.parameters()):
            hasher.update(np.array(x).tobytes())
        print(json.dumps({"stage": training.number, "digest": hasher.hexdigest()}), flush=True)


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
