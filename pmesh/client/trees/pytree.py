"""Nested dicts, lists and tuples of arrays, taken apart in an order that all ranks share."""

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A tree's leaves with their paths, such as `layers.0.weight`, and the way back."""

    paths: tuple[str, ...]
    leaves: tuple[object, ...]
    rebuild: Callable[[Sequence[object]], object]
    """The same tree with other leaves, given in the same order."""

    @property
    def is_bare(self) -> bool:
        """Whether it is no container but one leaf."""
        return self.paths == ("",)


def flatten(x: object) -> Tree:
    """Take a tree apart; an array, and whatever else is no container, is its own only leaf.

    Dicts are walked in the order of their keys as text, not of insertion, which may differ between
    ranks. Containers keep their types: named tuples, OrderedDicts with their attributes, and so on.

    >>> tree = flatten({"b": [1, 2], "a": (3,)})
    >>> tree.paths, tree.leaves
    (('a.0', 'b.0', 'b.1'), (3, 1, 2))
    >>> tree.rebuild([30, 10, 20])
    {'b': [10, 20], 'a': (30,)}
    """
    found = tuple(_walk(x, ""))

    def rebuild(leaves: Sequence[object]) -> object:
        return _rebuild(x, iter(leaves))

    return Tree(
        paths=tuple(path for path, _ in found),
        leaves=tuple(leaf for _, leaf in found),
        rebuild=rebuild,
    )


def digest(lines: Sequence[str]) -> str:
    """Eight characters that differ where the lines do."""
    return hashlib.sha3_256("\n".join(lines).encode(errors="replace")).hexdigest()[:8]


def _items(x: object) -> list[tuple[Any, object]] | None:
    """Key and child of each entry, in the order that all ranks share; None for a leaf."""
    if isinstance(x, dict):
        entries = cast("dict[Any, object]", x).items()
        return sorted(entries, key=lambda entry: (str(entry[0]), type(entry[0]).__name__))
    if isinstance(x, list | tuple):
        return list(enumerate(cast("Sequence[object]", x)))
    return None


def _walk(x: object, path: str) -> Iterator[tuple[str, object]]:
    items = _items(x)
    if items is None:
        yield path, x
        return
    for key, child in items:
        yield from _walk(child, f"{path}.{key}" if path else str(key))


def _rebuild(x: object, leaves: Iterator[object]) -> object:
    items = _items(x)
    if items is None:
        return next(leaves)
    children = {key: _rebuild(child, leaves) for key, child in items}
    if isinstance(x, tuple):
        kind = cast("type[Any]", type(cast("object", x)))
        make = getattr(kind, "_make", kind)  # a named tuple's own way
        return make(children.values())
    container = copy.copy(cast("dict[Any, object]", x))  # keeps its type, attributes and order
    for key, child in children.items():
        container[key] = child
    return container
