"""Train a classifier of handwritten digits on all your machines, with MLX.

On each machine: `pmesh up`, then `python train_mlx.py 3` where 3 trainers shall take part.
"""

import sys

import mlx.core as mx
import numpy as np
from mlx import nn, optimizers
from sklearn.datasets import load_digits

import pmesh

BATCH, STEPS, RATE = 96, 400, 0.5


def mean_loss(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    """The mean cross-entropy over the batch."""
    loss: mx.array = nn.losses.cross_entropy(model(x), y, reduction="mean")
    return loss


def main(ranks: int) -> None:
    """Every rank takes its share of each batch; the averaged gradient is that of the whole."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    rng = np.random.default_rng(0)  # the same on every rank: all draw the same batches
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = optimizers.SGD(learning_rate=RATE)
    loss_and_gradients = nn.value_and_grad(model, mean_loss)
    with pmesh.connect(job="digits", wait_for=ranks) as mesh:
        model.update(mesh.broadcast(model.trainable_parameters()))  # everyone starts alike
        for step in range(STEPS):
            mine = rng.integers(0, 1500, BATCH)[mesh.rank :: mesh.size]
            loss, gradients = loss_and_gradients(
                model, mx.array(images[mine]), mx.array(labels[mine])
            )
            gradients = mesh.average_gradients(gradients, weight=len(mine))
            optimizer.update(model, gradients)
            mx.eval(model.parameters())
            if step % 100 == 0:
                print(f"rank {mesh.rank} of {mesh.size}: step {step}, loss {loss.item():.3f}")
        found = model(mx.array(images[1500:])).argmax(axis=1)
        print(f"rank {mesh.rank}: accuracy {(np.array(found) == labels[1500:]).mean():.1%}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
