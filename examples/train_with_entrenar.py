"""Train a model of two blocks on handwritten digits, together with workers of entrenar.

On one machine:    pmesh bridge entrenar --job digits --workers 2
On each machine:   python train_with_entrenar.py --ranks 2
"""

import argparse
import itertools

import numpy as np
from sklearn.datasets import load_digits

import pmesh
from pmesh.bridge.client import average_blocks

parser = argparse.ArgumentParser()
parser.add_argument("--job", default="digits")
parser.add_argument("--ranks", type=int, default=2, help="how many run this, without the bridge")
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()

digits = load_digits()
images, labels = np.asarray(digits.data, np.float32) / 16, np.asarray(digits.target)

# The same weights on all ranks and workers: only gradients travel.
random = np.random.default_rng(0)
embedding, head = random.normal(0, 0.1, (64, 16)), random.normal(0, 0.1, (16, 10))
norm = np.ones(16)
blocks = [[random.normal(0, 0.1, (16, 16)), np.zeros(16)] for _ in range(2)]

with pmesh.connect(job=options.job, wait_for=options.ranks + 1) as mesh:
    for step in range(options.steps):
        rows = random.integers(len(images), size=(options.ranks + 1, 64))[mesh.rank]
        x, y = images[rows], labels[rows]

        hidden = [x @ embedding]
        for weight, bias in blocks:  # each adds to what comes in
            hidden.append(hidden[-1] + np.tanh(hidden[-1] @ weight + bias))
        scores = (hidden[-1] * norm) @ head
        odds = np.exp(scores - scores.max(axis=1, keepdims=True))
        odds /= odds.sum(axis=1, keepdims=True)
        loss = -np.log(odds[np.arange(len(y)), y]).mean()

        back = (odds - np.eye(10)[y]) / len(y)
        head_gradient = (hidden[-1] * norm).T @ back
        back = back @ head.T
        norm_gradient = (back * hidden[-1]).sum(axis=0)
        back *= norm
        gradients: list[list[np.ndarray]] = []
        for (weight, bias), given in zip(reversed(blocks), reversed(hidden[:-1]), strict=True):
            slope = back * (1 - np.tanh(given @ weight + bias) ** 2)
            gradients.insert(0, [given.T @ slope, slope.sum(axis=0)])
            back += slope @ weight.T
        means, others = average_blocks(mesh, gradients, [head_gradient, norm_gradient, x.T @ back])

        weights = [*itertools.chain(*blocks), head, norm, embedding]
        for weight, mean in zip(weights, [*itertools.chain(*means), *others], strict=True):
            weight[...] -= 0.1 * mean
        if step % 40 == 0 or step == options.steps - 1:
            print(f"rank {mesh.rank}: step {step}, loss {loss:.3f}", flush=True)
