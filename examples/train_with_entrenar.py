"""Train a linear model of two blocks together with workers of entrenar.

On one machine:    pmesh bridge entrenar --job linear --workers 2
On each machine:   python train_with_entrenar.py --ranks 2
"""

import argparse

import numpy as np

import pmesh
from pmesh.bridge.client import average_blocks

parser = argparse.ArgumentParser()
parser.add_argument("--job", default="linear")
parser.add_argument("--ranks", type=int, default=2, help="how many run this, without the bridge")
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()

# The same weights on all ranks and workers: only gradients travel.
blocks = [[np.zeros((2, 1)), np.zeros(1)], [np.zeros((3, 1)), np.zeros(1)]]
others = [np.zeros(5), np.zeros(1), np.zeros(2)]

with pmesh.connect(job=options.job, wait_for=options.ranks + 1) as mesh:
    random = np.random.default_rng(mesh.rank)
    for step in range(options.steps):
        # In place of a backward pass: the gradient of the distance to random targets.
        block_gradients = [[w - random.normal(1, 0.1, w.shape) for w in block] for block in blocks]
        other_gradients = [w - random.normal(1, 0.1, w.shape) for w in others]
        block_means, other_means = average_blocks(mesh, block_gradients, other_gradients)
        for block, means in zip(blocks, block_means, strict=True):
            for weights, mean in zip(block, means, strict=True):
                weights -= 0.1 * mean
        for weights, mean in zip(others, other_means, strict=True):
            weights -= 0.1 * mean
    print(f"rank {mesh.rank}: {options.steps} steps, first weight {blocks[0][0][0, 0]:.3f}")
