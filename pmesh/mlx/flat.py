"""MLX arrays of one dtype, treated as one flat array that is never built as a whole."""

import importlib
from dataclasses import dataclass
from typing import Any, Self, TypeAlias, cast

import mlx.core as mx

from pmesh.client.trees.mlx import evaluate
from pmesh.core.ops.shard import Shard
from pmesh.mlx.shards import Span

utils: Any = importlib.import_module("mlx.utils")  # it has no types

NamedArrays: TypeAlias = dict[str, mx.array]
"""Arrays by their path in a tree."""


def as_arrays(tree: object) -> NamedArrays:
    """Return the arrays of a tree by their paths, in the order of MLX."""
    return cast("NamedArrays", dict(utils.tree_flatten(tree)))


@dataclass(frozen=True, slots=True)
class Flat:
    """The layout of several arrays, one after another, in one flat array."""

    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    dtype: mx.Dtype

    @classmethod
    def of(cls, arrays: NamedArrays) -> Self:
        """Return the layout of one or more arrays, which must have the same dtype."""
        shapes = tuple(x.shape for x in arrays.values())
        sizes = tuple(x.size for x in arrays.values())
        return cls(tuple(arrays), shapes, sizes, next(iter(arrays.values())).dtype)

    @property
    def count(self) -> int:
        """The number of values in all arrays."""
        return sum(self.sizes)

    def cut(self, arrays: NamedArrays, span: Span | Shard) -> mx.array:
        """Return the values in the span."""
        found: list[mx.array] = []
        at = 0
        for path, size in zip(self.paths, self.sizes, strict=True):
            begin, end = max(span.begin - at, 0), min(span.end - at, size)
            if begin < end:
                found.append(mx.flatten(arrays[path])[begin:end])
            at += size
        return mx.concatenate(found) if found else mx.zeros(0, self.dtype)

    def take_apart(self, values: mx.array) -> NamedArrays:
        """Return the arrays as views of the flat array `values`."""
        found: NamedArrays = {}
        at = 0
        for path, shape, size in zip(self.paths, self.shapes, self.sizes, strict=True):
            found[path] = mx.reshape(values[at : at + size], shape)
            at += size
        evaluate([found])
        return found
