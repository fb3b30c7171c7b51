"""Arrays of MLX of one dtype, seen as one run of values without a copy of them all."""

import importlib
from dataclasses import dataclass
from typing import Any, Self, TypeAlias, cast

import mlx.core as mx

from pmesh.client.trees.mlx import evaluate
from pmesh.mlx.shards import Span

utils: Any = importlib.import_module("mlx.utils")  # it has no types

Arrays: TypeAlias = dict[str, mx.array]
"""By their path."""


def as_arrays(tree: object) -> Arrays:
    """A tree's arrays by their paths, in MLX's order."""
    return cast("Arrays", dict(utils.tree_flatten(tree)))


@dataclass(frozen=True, slots=True)
class Flat:
    """Which arrays lie one behind the other."""

    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    dtype: mx.Dtype

    @classmethod
    def of(cls, arrays: Arrays) -> Self:
        """These arrays, of one dtype; at least one."""
        shapes = tuple(x.shape for x in arrays.values())
        sizes = tuple(x.size for x in arrays.values())
        return cls(tuple(arrays), shapes, sizes, next(iter(arrays.values())).dtype)

    @property
    def count(self) -> int:
        """The values of all of them."""
        return sum(self.sizes)

    def cut(self, arrays: Arrays, span: Span) -> mx.array:
        """Some of the values."""
        found: list[mx.array] = []
        at = 0
        for path, size in zip(self.paths, self.sizes, strict=True):
            begin, end = max(span.begin - at, 0), min(span.end - at, size)
            if begin < end:
                found.append(mx.flatten(arrays[path])[begin:end])
            at += size
        return mx.concatenate(found) if found else mx.zeros(0, self.dtype)

    def take_apart(self, values: mx.array) -> Arrays:
        """The arrays from all their values; they share the memory of these."""
        found: Arrays = {}
        at = 0
        for path, shape, size in zip(self.paths, self.shapes, self.sizes, strict=True):
            found[path] = mx.reshape(values[at : at + size], shape)
            at += size
        evaluate([found])
        return found
