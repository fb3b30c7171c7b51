"""Train a classifier of handwritten digits on all your machines, with MLX.

On each machine: `pmesh up`, then `python train_mlx.py 3` where 3 trainers shall take part, or once
`pmesh run --on all --sync -- python train_mlx.py`. Stop one and the others go on; start it
again and it takes part again.
"""

import sys

import mlx.core as mx
import numpy as np
from mlx import nn, optimizers
from sklearn.datasets import load_digits

import pmesh

BATCH, STEPS, RATE = 96, 400, 0.1


def mean_loss(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    """The mean cross-entropy over the batch."""
    loss: mx.array = nn.losses.cross_entropy(model(x), y, reduction="mean")
    return loss


def main(ranks: int | None) -> None:
    """Every rank takes its share of each batch; the averaged gradient is that of the whole."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    x, y = images[:1500], labels[:1500]
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = optimizers.SGD(learning_rate=RATE, momentum=0.9)
    loss_and_gradients = nn.value_and_grad(model, mean_loss)
    epoch = position = 0
    with pmesh.connect(job="digits", wait_for=ranks, on_superseded="sync") as mesh:
        while mesh.step < STEPS:
            # All ranks get the same state; a newcomer enters here, with the state of the others.
            state = mesh.sync((model.parameters(), optimizer.state, epoch, position))
            parameters, optimizer.state, epoch, position = state
            model.update(parameters)
            mine = mesh.batch(len(x), BATCH, epoch=epoch, position=position)
            loss, gradients = loss_and_gradients(model, mx.array(x[mine]), mx.array(y[mine]))
            gradients = mesh.average_gradients(gradients, weight=len(mine))
            optimizer.update(model, gradients)
            mx.eval(model.parameters(), optimizer.state)
            position += BATCH
            if position + BATCH > len(x):
                epoch, position = epoch + 1, 0
            mesh.report(loss=loss.item())  # for `pmesh top` and `pmesh plot digits`
            if mesh.step % 100 == 0:
                print(f"rank {mesh.rank} of {mesh.size}: step {mesh.step}, loss {loss.item():.3f}")
        found = model(mx.array(images[1500:])).argmax(axis=1)
        print(f"rank {mesh.rank}: accuracy {(np.array(found) == labels[1500:]).mean():.1%}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else None)
