"""Train a classifier of handwritten digits on all your machines, with nothing but numpy.

On each machine: `pmesh up`, then `python train_numpy.py 3` where 3 trainers shall take part, or
once `pmesh run --on all --sync -- python train_numpy.py`. Stop one and the others go on; start it
again and it takes part again.
"""

import sys

import numpy as np
from sklearn.datasets import load_digits

import pmesh

BATCH, STEPS, RATE = 96, 400, 0.5
Array = np.ndarray
Parameters = dict[str, Array]


def loss_and_gradients(p: Parameters, x: Array, y: Array) -> tuple[float, Parameters]:
    """Of a network with one hidden layer: the mean cross-entropy over the batch, by hand."""
    hidden = np.maximum(x @ p["w1"] + p["b1"], 0)
    logits = hidden @ p["w2"] + p["b2"]
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    odds /= odds.sum(axis=1, keepdims=True)
    rows = np.arange(len(y))
    loss = -np.log(odds[rows, y]).mean()
    odds[rows, y] -= 1
    back = (odds / len(y)) @ p["w2"].T * (hidden > 0)
    gradients = {"w1": x.T @ back, "b1": back.sum(axis=0)}
    gradients |= {"w2": hidden.T @ odds / len(y), "b2": odds.mean(axis=0)}
    return float(loss), gradients


def main(ranks: int | None) -> None:
    """Every rank takes its share of each batch; the averaged gradient is that of the whole."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    x, y = images[:1500], labels[:1500]
    rng = np.random.default_rng()
    p: Parameters = {
        "w1": rng.normal(0, 0.1, (64, 64)).astype(np.float32),
        "b1": np.zeros(64, np.float32),
        "w2": rng.normal(0, 0.1, (64, 10)).astype(np.float32),
        "b2": np.zeros(10, np.float32),
    }
    epoch = position = 0
    with pmesh.connect(job="digits", wait_for=ranks, on_superseded="sync") as mesh:
        while mesh.step < STEPS:
            # All ranks get the same state; a newcomer enters here, with the state of the others.
            p, epoch, position = mesh.sync((p, epoch, position))
            mine = mesh.batch(len(x), BATCH, epoch=epoch, position=position)
            loss, gradients = loss_and_gradients(p, x[mine], y[mine])
            gradients = mesh.average_gradients(gradients, weight=len(mine))
            p = {name: value - RATE * gradients[name] for name, value in p.items()}
            position += BATCH
            if position + BATCH > len(x):
                epoch, position = epoch + 1, 0
            mesh.report(loss=loss)  # for `pmesh top` and `pmesh plot digits`
            if mesh.step % 100 == 0:
                print(f"rank {mesh.rank} of {mesh.size}: step {mesh.step}, loss {loss:.3f}")
        scores = np.maximum(images[1500:] @ p["w1"] + p["b1"], 0) @ p["w2"] + p["b2"]
        print(f"rank {mesh.rank}: accuracy {(scores.argmax(axis=1) == labels[1500:]).mean():.1%}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else None)
