"""Handwritten digits with our own calls: no checkpoint, as the ranks that are left go on.

Usage: pmesh_digits.py DATA CHECKPOINT STEPS PAUSE      (CHECKPOINT is not used)
"""

import hashlib
import sys
import time
from pathlib import Path

import numpy as np

import pmesh

BATCH, RATE = 32, 0.5


def main(data: Path, steps: int, pause_s: float) -> None:
    with np.load(data) as digits:
        x, y = digits["images"], digits["labels"]
    weights = np.zeros((64, 10), np.float32)
    entered = False
    with pmesh.connect() as mesh:
        while mesh.step < steps:
            weights = mesh.sync(weights)
            if not entered:
                print(f"entered at step {mesh.step}", flush=True)
                entered = True
            step = mesh.step
            mine = (np.arange(BATCH) * mesh.size + mesh.rank + step * BATCH * mesh.size) % len(x)
            logits = x[mine] @ weights
            odds = np.exp(logits - logits.max(axis=1, keepdims=True))
            odds /= odds.sum(axis=1, keepdims=True)
            odds[np.arange(BATCH), y[mine]] -= 1
            weights = weights - RATE * mesh.average_gradients(x[mine].T @ odds / BATCH)
            print(f"step {step}", flush=True)
            time.sleep(pause_s)
    accuracy = ((x @ weights).argmax(axis=1) == y).mean()
    digest = hashlib.sha256(weights.tobytes()).hexdigest()[:8]
    print(f"trained {steps} {digest} {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[3]), float(sys.argv[4]))
