"""What is reduced: Gaussian values, the same in each run, as a matrix or as a model's arrays."""

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tools.bench_compression.orders import Layout, Order

Values: TypeAlias = NDArray[np.float32]

SEED = 11
TURN = 7919  # a prime: ranks' values have nothing to do with each other's at any place
PIECE = 1 << 16
STAGES = ((64, 64), (64, 128), (128, 256), (256, 512))  # channels in and out of a ResNet18's


@dataclass(frozen=True, slots=True)
class Arrays:
    """One rank's."""

    layout: Layout
    side: int
    own: list[Values]
    out: list[Values]
    """For the results."""
    right: Values
    """The exact mean, of all arrays one after the other."""

    def are_for(self, order: Order) -> bool:
        """Whether they are those that it asks for."""
        return (self.layout, self.side) == (order.layout, order.side)

    def error(self) -> float:
        """Relative L2 error of what is in `out`."""
        wrong = whole = 0.0
        place = 0
        for out in self.out:
            flat = out.reshape(-1)
            for start in range(0, flat.size, PIECE):
                piece = flat[start : start + PIECE]
                right = self.right[place + start :][: piece.size]
                off = piece - right
                wrong += float(np.dot(off, off))
                whole += float(np.dot(right, right))
            place += flat.size
        return math.sqrt(wrong / whole)


def shapes_of(layout: Layout, side: int) -> list[tuple[int, ...]]:
    """Of the arrays.

    >>> sum(math.prod(shape) for shape in shapes_of("resnet18", 0))
    11173962
    """
    if layout == "matrix":
        return [(side, side)]
    norm = 2  # of each convolution: scale and shift
    shapes: list[tuple[int, ...]] = [(64, 3, 3, 3), *[(64,)] * norm]
    for before, after in STAGES:
        for channels in (before, after, after, after):
            shapes += [(after, channels, 3, 3), *[(after,)] * norm]
        if before != after:
            shapes += [(after, before, 1, 1), *[(after,)] * norm]
    return [*shapes, (10, 512), (10,)]


def arrays_of(order: Order, rank: int, size: int) -> Arrays:
    """This rank's."""
    shapes = shapes_of(order.layout, order.side)
    count = sum(map(math.prod, shapes))
    base = np.random.default_rng(SEED).standard_normal(count, np.float32)
    right = np.zeros(count, np.float32)
    for each in range(size):
        right += np.roll(base, each * TURN)
    right /= np.float32(size)
    own = _cut(np.roll(base, rank * TURN), shapes)
    return Arrays(order.layout, order.side, own, [np.zeros_like(x) for x in own], right)


def _cut(values: Values, shapes: list[tuple[int, ...]]) -> list[Values]:
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
    parts = np.split(values, ends)
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
