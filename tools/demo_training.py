"""What `make demo` trains: handwritten digits with MLX, as one rank of a job or all by itself.

Alone it takes the union of the batches that the ranks take in the same step, so both should arrive
at the same weights but for the order of additions.
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn, optimizers
from mlx.utils import tree_flatten
from sklearn.datasets import load_digits

import pmesh

EPOCHS = 20
GLOBAL_BATCH = 96
HELD_OUT = 360  # a fifth of the 1,797 digits
SEED = 7
JOB = "digits"


def make_network() -> Any:
    """Two hidden layers, 26,122 weights: images of shape (n, 64) to logits of shape (n, 10)."""
    hidden = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(128, 10))


def load_data() -> tuple[mx.array, mx.array]:
    """All digits, pixels from 0 to 1, in one random order."""
    digits = load_digits()
    order = np.random.default_rng(SEED).permutation(len(digits.target))
    return mx.array(digits.data[order] / 16, mx.float32), mx.array(digits.target[order])


def batches(count: int, rank: int, size: int) -> Iterator[mx.array]:
    """This rank's share of each batch, as indices; the same batches for any number of ranks."""
    for epoch in range(EPOCHS):
        order = np.random.default_rng([SEED, epoch]).permutation(count)
        for start in range(0, count, GLOBAL_BATCH):
            yield mx.array(np.array_split(order[start : start + GLOBAL_BATCH], size)[rank])


def train(mesh: pmesh.Mesh | None) -> tuple[Any, dict[str, Any]]:
    """Train; report each step on standard output; return the network and what was measured."""
    pixels, labels = load_data()
    mx.random.seed(SEED)
    model, optimizer = make_network(), optimizers.SGD(learning_rate=0.2, momentum=0.9)
    rank, size = (mesh.rank, mesh.size) if mesh else (0, 1)
    if mesh:
        model.update(mesh.broadcast(model.parameters()))

    def loss_of(model: Any, chosen: mx.array) -> mx.array:
        logits = model(pixels[chosen])
        return nn.losses.cross_entropy(logits, labels[chosen], reduction="mean")

    loss_and_grad = nn.value_and_grad(model, loss_of)
    began, step = time.perf_counter(), 0
    for step, chosen in enumerate(batches(len(labels) - HELD_OUT, rank, size), 1):
        loss, grads = loss_and_grad(model, chosen)
        if mesh:
            # Named: each strategy adds in an order of its own, and training follows each rounding.
            grads = mesh.average_gradients(grads, weight=len(chosen), strategy="ring")
        optimizer.update(model, grads)
        mx.eval(model.parameters(), optimizer.state)
        if step % 10 == 0:
            print(json.dumps({"step": step, "loss": loss.item()}), flush=True)
    seconds = time.perf_counter() - began
    right = mx.argmax(model(pixels[-HELD_OUT:]), axis=1) == labels[-HELD_OUT:]
    return model, {
        "rank": rank,
        "steps": step,
        "steps_per_s": step / seconds,
        "accuracy": mx.mean(right).item(),
        "hash": hash_of(model),
    }


def hash_of(model: Any) -> str:
    """One hash of all weights, bit for bit."""
    digest = hashlib.sha256()
    flat: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    for name, weights in sorted(flat.items()):
        digest.update(name.encode() + np.asarray(weights).tobytes())
    return digest.hexdigest()


def main(argv: list[str]) -> None:
    """Train, save the weights, and print what was measured as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, help="how many ranks to wait for; none: alone")
    parser.add_argument("--save", type=Path, required=True, help="where the weights go (.npz)")
    options = parser.parse_args(argv)
    if options.ranks:
        with pmesh.connect(job=JOB, wait_for=options.ranks, timeout_s=30) as mesh:
            model, measured = train(mesh)
    else:
        model, measured = train(None)
    mx.savez(str(options.save), **dict(tree_flatten(model.parameters())))
    print(json.dumps(measured), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
