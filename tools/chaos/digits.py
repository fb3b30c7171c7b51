"""A training run that can be compared: handwritten digits, while nodes are killed and come back.

Softmax regression with weight decay, so that it converges to one minimum, whatever has happened on
the way. The batch of all ranks together is the same for any number of them.
"""

import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

import pmesh
from tools.chaos import trainer
from tools.chaos.trainer import Options, say

GLOBAL_BATCH = 96
WEIGHT_DECAY = 1e-3
LEARNING_RATE = 0.5
SEED = 7

Array = NDArray[np.float32]


def load() -> tuple[Array, NDArray[np.int64]]:
    """scikit-learn's digits, without the two seconds that its import takes."""
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise pmesh.UsageError("the digits ship with scikit-learn: install it")
    file = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    digits = np.loadtxt(file, delimiter=",", dtype=np.float32)
    return (digits[:, :64] / 16).astype(np.float32), digits[:, 64].astype(np.int64)


def loss_of(weights: Array, pixels: Array, labels: NDArray[np.int64]) -> tuple[float, Array]:
    """The mean loss over these samples, and its gradient, both without the decay."""
    logits = pixels @ weights[:-1] + weights[-1]
    chance = np.exp(logits - logits.max(axis=1, keepdims=True))
    chance /= chance.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = float(-np.log(chance[rows, labels]).mean())
    chance[rows, labels] -= 1
    gradient = np.vstack([pixels.T @ chance, chance.sum(axis=0)]) / len(labels)
    return loss, gradient.astype(np.float32)


def learn(mesh: pmesh.Mesh, options: Options) -> None:
    """The elastic loop, for so many epochs; the last line gives the loss and the weights' hash."""
    pixels, labels = load()
    state: dict[str, Any] = {
        "weights": np.zeros((65, 10), np.float32),
        "epoch": 0,
        "position": 0,
        "steps": 0,
    }
    while True:
        state = mesh.sync(state)
        if state["epoch"] >= options.epochs:
            break
        share = GLOBAL_BATCH // mesh.size
        size = mesh.size
        mine = mesh.shard(len(labels), epoch=state["epoch"], position=state["position"], seed=SEED)[
            :share
        ]
        _, gradient = (
            loss_of(state["weights"], pixels[mine], labels[mine])
            if len(mine)
            else (
                0.0,
                np.zeros((65, 10), np.float32),
            )
        )
        time.sleep(options.pause_s)
        say("called", step=state["steps"])
        gradient = mesh.average_gradients(gradient, weight=len(mine))
        rate = LEARNING_RATE * (1 - state["epoch"] / options.epochs)
        weights = state["weights"]
        weights = weights - np.float32(rate) * (gradient + np.float32(WEIGHT_DECAY) * weights)
        position = state["position"] + share * size
        over = position >= len(labels)
        say(
            "done", step=state["steps"], names=mesh.names, digest=xxhash.xxh3_128_hexdigest(weights)
        )
        state = {
            "weights": weights,
            "epoch": state["epoch"] + over,
            "position": 0 if over else position,
            "steps": state["steps"] + 1,
        }
    loss, _ = loss_of(state["weights"], pixels, labels)
    digest = xxhash.xxh3_128_hexdigest(state["weights"])
    say("ended", step=state["steps"], digest=digest, value=loss)


def main(options_text: str) -> int:
    """As `tools.chaos.trainer`."""
    return trainer.main(options_text, learn)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
