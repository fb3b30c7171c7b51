"""What is trained: small models with a loss that levels off well above zero.

A net that learns its samples by heart has a final loss near zero, and the ratio of two such numbers
says nothing. So the digits get fresh noise in each batch (it regularizes: Bishop 1995), and the
text is longer than what is read of it. What is left is a loss that no training takes away.
"""

import functools
import math
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from sklearn.datasets import load_digits

Weights: TypeAlias = dict[str, mx.array]
Samples: TypeAlias = tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]

NOISE = 0.5  # of the pixels' range: as much as a stroke is brighter than the paper
CONTEXT = 8  # characters that the next one is guessed from
ALPHABET = 128  # ASCII; what is not in it is read as a question mark
# Long ones, in every Python from 3.11 on.
FILES = (
    *("argparse", "ast", "calendar", "configparser", "dataclasses", "datetime", "difflib"),
    *("doctest", "inspect", "ipaddress", "mailbox", "pickle", "statistics", "subprocess"),
    *("tarfile", "threading", "turtle", "typing", "unittest/mock"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One training, the same for all schemes."""

    name: str
    what: str
    shapes: Mapping[str, tuple[int, ...]]
    """Of the weights; a vector is a bias, and begins at zero."""
    logits: Callable[[Weights, mx.array], mx.array]
    draw: Callable[[np.random.Generator, int], Samples]
    """So many samples."""
    batch: int
    """Samples of each rank in each step."""
    steps: int
    rate: float
    """The highest learning rate of plain SGD."""

    @property
    def count(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def begin(self, seed: int) -> Weights:
        """The first weights, by He et al. 2015: normal, of variance 2 / inputs."""
        random = np.random.default_rng(seed)
        return {
            name: mx.array(random.standard_normal(shape) * _deviation(shape), mx.float32)
            for name, shape in self.shapes.items()
        }

    def loss(self, weights: Weights, x: mx.array, y: mx.array) -> mx.array:
        """The mean cross-entropy in nats."""
        logits = self.logits(weights, x)
        right = mx.take_along_axis(logits, y[:, None], axis=1)[:, 0]
        return mx.mean(mx.logsumexp(logits, axis=1) - right)


def digits_mlp() -> Model:
    """A perceptron with two hidden layers."""

    def logits(weights: Weights, x: mx.array) -> mx.array:
        for layer in ("1", "2"):
            x = mx.maximum(x @ weights["w" + layer] + weights["b" + layer], 0)
        return x @ weights["w3"] + weights["b3"]

    shapes = {"w1": (64, 128), "b1": (128,), "w2": (128, 128), "b2": (128,), "w3": (128, 10)}
    return Model(
        name="mlp",
        what="digits, a perceptron",
        shapes=shapes | {"b3": (10,)},
        logits=logits,
        draw=_draw_digits,
        batch=32,
        steps=500,
        rate=0.5,
    )


def digits_convolutional() -> Model:
    """As LeCun et al. 1998: two layers of filters, of which the second halves, two dense ones."""

    def logits(weights: Weights, x: mx.array) -> mx.array:
        x = x.reshape(-1, 8, 8, 1)
        x = mx.maximum(mx.conv2d(x, weights["w1"], padding=1) + weights["b1"], 0)
        x = mx.maximum(mx.conv2d(x, weights["w2"], stride=2, padding=1) + weights["b2"], 0)
        x = mx.maximum(x.reshape(len(x), -1) @ weights["w3"] + weights["b3"], 0)
        return x @ weights["w4"] + weights["b4"]

    return Model(
        name="convolutional",
        what="digits, a convolutional net",
        shapes={
            "w1": (8, 3, 3, 1),
            "b1": (8,),
            "w2": (24, 3, 3, 8),
            "b2": (24,),
            "w3": (4 * 4 * 24, 64),
            "b3": (64,),
            "w4": (64, 10),
            "b4": (10,),
        },
        logits=logits,
        draw=_draw_digits,
        batch=16,
        steps=400,
        rate=0.1,
    )


def characters() -> Model:
    """Bengio et al. 2003: the last characters' embeddings, side by side, and one hidden layer."""

    def logits(weights: Weights, x: mx.array) -> mx.array:
        x = weights["embedding"][x].reshape(len(x), -1)
        x = mx.tanh(x @ weights["w1"] + weights["b1"])
        return x @ weights["w2"] + weights["b2"]

    return Model(
        name="characters",
        what="the standard library's sources, a character language model",
        shapes={
            "embedding": (ALPHABET, 16),
            "w1": (CONTEXT * 16, 96),
            "b1": (96,),
            "w2": (96, ALPHABET),
            "b2": (ALPHABET,),
        },
        logits=logits,
        draw=_draw_text,
        batch=32,
        steps=500,
        rate=1.0,
    )


MODELS: Mapping[str, Callable[[], Model]] = {
    "mlp": digits_mlp,
    "convolutional": digits_convolutional,
    "characters": characters,
}


@functools.cache
def _digits() -> Samples:
    """All 1,797 of them, pixels from 0 to 1."""
    pixels, labels = load_digits(return_X_y=True)
    return (pixels / 16).astype(np.float32), labels.astype(np.int32)


def _draw_digits(random: np.random.Generator, count: int) -> Samples:
    pixels, labels = _digits()
    chosen = random.integers(len(labels), size=count)
    noise = random.standard_normal((count, pixels.shape[1]), dtype=np.float32)
    return pixels[chosen] + np.float32(NOISE) * noise, labels[chosen]


@functools.cache
def _text() -> "np.ndarray[Any, Any]":
    folder = Path(sysconfig.get_path("stdlib"))
    text = "".join((folder / f"{name}.py").read_text(encoding="utf-8") for name in FILES)
    return np.frombuffer(text.encode("ascii", errors="replace"), np.uint8)


def _draw_text(random: np.random.Generator, count: int) -> Samples:
    text = _text()
    begins = random.integers(len(text) - CONTEXT, size=count)
    windows = text[begins[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)
    return windows[:, :CONTEXT], windows[:, CONTEXT]


def _deviation(shape: tuple[int, ...]) -> float:
    """Of He et al. 2015; the filters' inputs are all dimensions but the first, MLX's order."""
    if len(shape) == 1:
        return 0.0
    inputs = shape[0] if len(shape) == 2 else math.prod(shape[1:])  # noqa: PLR2004 - a matrix
    return math.sqrt(2 / inputs)
