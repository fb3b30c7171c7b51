"""What `pmesh demo` trains: a small network that learns to write Python, byte by byte.

Its text is the standard library's sources, which every machine with Python has. One rank alone
takes the same batches as several do together, so both should arrive at the same weights but for
the order of additions.
"""

import argparse
import hashlib
import json
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import pmesh
from pmesh.terminal.lines import say

STEPS = 400
BATCH = 512  # of all ranks together
CONTEXT = 8  # bytes from which the next one is guessed
BYTES = 128  # a byte beyond ASCII counts as a question mark
WIDTH = 16  # numbers that stand for a byte
HIDDEN = 128
TEXT_BYTES = 1_000_000
HELD_OUT_BYTES = 20_000  # at the end of the text
REPORT_EVERY = 10
LEARNING_RATE = 0.1
MOMENTUM = 0.9
SEED = 7

Weights = dict[str, NDArray[np.float32]]
Text = NDArray[np.uint8]


def load_text() -> Text:
    """The first sources of the standard library by name, as one array of bytes."""
    text, size = list[bytes](), 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text.append(path.read_bytes())
        size += len(text[-1])
        if size >= TEXT_BYTES:
            break
    values = np.frombuffer(b"".join(text)[:TEXT_BYTES], np.uint8)
    return np.where(values < BYTES, values, ord("?")).astype(np.uint8)


def make_weights() -> Weights:
    """Of a network with one hidden layer, 35,072 numbers."""
    rng = np.random.default_rng(SEED)
    inputs = CONTEXT * WIDTH
    return {
        "bytes": rng.normal(0, 1, (BYTES, WIDTH)).astype(np.float32),
        "hidden": rng.normal(0, inputs**-0.5, (inputs, HIDDEN)).astype(np.float32),
        "hidden_bias": np.zeros(HIDDEN, np.float32),
        "next": rng.normal(0, HIDDEN**-0.5, (HIDDEN, BYTES)).astype(np.float32),
        "next_bias": np.zeros(BYTES, np.float32),
    }


def loss_and_gradients(
    weights: Weights, text: Text, starts: NDArray[np.int64]
) -> tuple[float, Weights]:
    """The mean loss of the bytes after these contexts, in bits, and its gradients, of nats."""
    contexts = text[starts[:, None] + np.arange(CONTEXT)]
    wanted = text[starts + CONTEXT]
    seen = weights["bytes"][contexts].reshape(len(starts), -1)
    hidden = np.tanh(seen @ weights["hidden"] + weights["hidden_bias"])
    logits = hidden @ weights["next"] + weights["next_bias"]
    chances = np.exp(logits - logits.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    rows = np.arange(len(starts))
    loss = -np.log2(chances[rows, wanted]).mean()

    chances[rows, wanted] -= 1
    logits_gradient = chances / len(starts)
    hidden_gradient = logits_gradient @ weights["next"].T * (1 - hidden**2)
    seen_gradient = (hidden_gradient @ weights["hidden"].T).reshape(len(starts), CONTEXT, WIDTH)
    bytes_gradient = np.zeros_like(weights["bytes"])
    np.add.at(bytes_gradient, contexts, seen_gradient)
    return float(loss), {
        "bytes": bytes_gradient,
        "hidden": seen.T @ hidden_gradient,
        "hidden_bias": hidden_gradient.sum(axis=0),
        "next": hidden.T @ logits_gradient,
        "next_bias": logits_gradient.sum(axis=0),
    }


def train(mesh: pmesh.Mesh) -> tuple[Weights, dict[str, object]]:
    """Train; report steps on standard output; return the weights and what was measured."""
    text, weights = load_text(), make_weights()
    velocity = {name: np.zeros_like(array) for name, array in weights.items()}
    places = len(text) - HELD_OUT_BYTES - CONTEXT
    began = time.perf_counter()
    for step in range(STEPS):
        starts = mesh.batch(places, BATCH, position=step * BATCH)
        loss, gradients = loss_and_gradients(weights, text, starts)
        # Named: each strategy adds in an order of its own, and training follows each rounding.
        gradients = mesh.average_gradients(gradients, weight=len(starts), strategy="ring")
        for name, gradient in gradients.items():
            velocity[name] = MOMENTUM * velocity[name] + gradient
            weights[name] -= LEARNING_RATE * velocity[name]
        if (step + 1) % REPORT_EVERY == 0:
            say(json.dumps({"step": step + 1, "loss": loss}))
    seconds = time.perf_counter() - began
    held_out = np.arange(places + CONTEXT, len(text) - CONTEXT)
    return weights, {
        "rank": mesh.rank,
        "steps_per_s": STEPS / seconds,
        "held_out_bits": loss_and_gradients(weights, text, held_out)[0],
        "hash": hash_of(weights),
    }


def hash_of(weights: Weights) -> str:
    """One hash of all weights, bit for bit."""
    return hashlib.sha256(b"".join(array.tobytes() for array in weights.values())).hexdigest()


def main(argv: list[str]) -> None:
    """Train, save the weights, and print what was measured as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, required=True, help="how many ranks to wait for")
    parser.add_argument("--save", type=Path, required=True, help="where the weights go (.npz)")
    options = parser.parse_args(argv)
    job = f"python-{options.ranks}"
    with pmesh.connect(job=job, wait_for=options.ranks, timeout_s=30) as mesh:
        weights, measured = train(mesh)
    np.savez(options.save, **weights)  # type: ignore[arg-type]
    say(json.dumps(measured))


if __name__ == "__main__":
    main(sys.argv[1:])
