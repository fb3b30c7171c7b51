"""Handwritten digits with MLX over its ring, as one writes it for mlx.launch: it knows no pmesh.

Usage: mlx_digits.py DATA CHECKPOINT STEPS PAUSE
"""

import hashlib
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np

BATCH, SAVE_EVERY, RATE = 32, 5, 0.5


def loss_of(weights: mx.array, x: mx.array, y: mx.array) -> mx.array:
    logits = x @ weights
    picked = mx.take_along_axis(logits, y[:, None], axis=1)[:, 0]
    return mx.mean(mx.logsumexp(logits, axis=1) - picked)


def main(data: Path, checkpoint: Path, steps: int, pause_s: float) -> None:
    mx.set_default_device(mx.cpu)
    group = mx.distributed.init(backend="ring", strict=True)
    rank, size = group.rank(), group.size()
    with np.load(data) as digits:
        x, y = mx.array(digits["images"]), mx.array(digits["labels"])
    weights, first = mx.zeros((64, 10)), 0
    if checkpoint.exists():
        with np.load(checkpoint) as saved:
            weights, first = mx.array(saved["weights"]), int(saved["step"])
        print(f"resumed at step {first}", flush=True)
    gradient_of = mx.grad(loss_of)
    for step in range(first, steps):
        mine = (mx.arange(BATCH) * size + rank + step * BATCH * size) % len(x)
        gradient = mx.distributed.all_sum(gradient_of(weights, x[mine], y[mine])) / size
        weights = weights - RATE * gradient
        mx.eval(weights)
        if rank == 0 and (step + 1) % SAVE_EVERY == 0:
            written = checkpoint.with_suffix(".new.npz")
            np.savez(written, weights=np.array(weights), step=step + 1)
            written.replace(checkpoint)
        print(f"step {step}", flush=True)
        time.sleep(pause_s)
    accuracy = mx.mean(mx.argmax(x @ weights, axis=1) == y).item()
    digest = hashlib.sha256(np.array(weights).tobytes()).hexdigest()[:8]
    print(f"trained {steps} {digest} {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
