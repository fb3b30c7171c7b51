"""Trees of arrays: they are taken apart in the same order on all ranks, for numpy.

float16 and bfloat16 are sent and added as float32. numpy does not know bfloat16: here it is a
uint16 with the same bits.
"""

import copy
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from types import MappingProxyType, NoneType
from typing import Any, cast

import msgspec
import numpy as np

from pmesh.core.ops.reductions import Values, parts_of
from pmesh.errors import UnsupportedArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A tree's leaves, their paths, such as `layers.0.weight`, and a function that rebuilds it."""

    paths: tuple[str, ...]
    leaves: tuple[object, ...]
    rebuild: Callable[[Sequence[object]], object]
    """Returns the same tree with other leaves, given in the same order."""
    source: object
    """The object that was taken apart."""
    is_bare: bool = False
    """True if it is one leaf, without a container."""


_CONTAINERS: tuple[type, ...] = (dict, list, tuple, NoneType)


def flatten(x: object, *, with_none: bool = False) -> Tree:
    """Take a tree apart. Anything that is not a container, such as an array, is a leaf.

    None, as for a parameter without a gradient, is an empty container; `with_none` it is a leaf.
    Dicts are walked in the order of their keys as text, since the order of insertion may differ
    between ranks. Containers keep their types: named tuples, OrderedDicts with their attributes.

    >>> tree = flatten({"b": [1, 2], "a": (3,)})
    >>> tree.paths, tree.leaves
    (('a.0', 'b.0', 'b.1'), (3, 1, 2))
    >>> tree.rebuild([30, 10, 20])
    {'b': [10, 20], 'a': (30,)}
    """
    if not isinstance(x, _CONTAINERS):
        return Tree(paths=("",), leaves=(x,), rebuild=itemgetter(0), source=x, is_bare=True)
    found = tuple(_walk(x, "", with_none=with_none))

    def rebuild(leaves: Sequence[object]) -> object:
        return _rebuild(x, iter(leaves), with_none=with_none)

    return Tree(
        paths=tuple(path for path, _ in found),
        leaves=tuple(leaf for _, leaf in found),
        rebuild=rebuild,
        source=x,
    )


def digest(lines: Sequence[str]) -> str:
    """Return eight characters that are the same only for the same lines."""
    return hashlib.sha3_256("\n".join(lines).encode(errors="replace")).hexdigest()[:8]


def _items(x: object, *, with_none: bool) -> list[tuple[Any, object]] | None:
    """Return each key and child, in the same order on all ranks; None for a leaf."""
    if isinstance(x, dict):
        entries = cast("dict[Any, object]", x).items()
        return sorted(entries, key=lambda entry: (str(entry[0]), type(entry[0]).__name__))
    if isinstance(x, list | tuple):
        return list(enumerate(cast("Sequence[object]", x)))
    return [] if x is None and not with_none else None


def _walk(x: object, path: str, *, with_none: bool) -> Iterator[tuple[str, object]]:
    items = _items(x, with_none=with_none)
    if items is None:
        yield path, x
        return
    for key, child in items:
        yield from _walk(child, f"{path}.{key}" if path else str(key), with_none=with_none)


def _rebuild(x: object, leaves: Iterator[object], *, with_none: bool) -> object:
    items = _items(x, with_none=with_none)
    if items is None:
        return next(leaves)
    if x is None:
        return None
    children = {key: _rebuild(child, leaves, with_none=with_none) for key, child in items}
    if isinstance(x, tuple):
        kind = cast("type[Any]", type(cast("object", x)))
        make = getattr(kind, "_make", kind)  # the constructor of a named tuple
        return make(children.values())
    container = copy.copy(cast("dict[Any, object]", x))  # keeps its type, attributes and order
    for key, child in children.items():
        container[key] = child
    return container


WIRE_OF = MappingProxyType(
    {
        "float64": "float64",
        "float32": "float32",
        "float16": "float32",
        "bfloat16": "float32",
        "complex128": "complex128",
        "complex64": "complex64",
        "int64": "int64",
        "int32": "int32",
        "int16": "int16",
        "int8": "int8",
        "uint64": "uint64",
        "uint32": "uint32",
        "uint16": "uint16",
        "uint8": "uint8",
        "bool": "bool",
    }
)
"""The dtype in which each dtype is sent."""


class Leaf(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """An array of the user's."""

    dtype: str
    values: Values
    """A view of it, never written (I8); of the dtype, in any byte order, or bfloat16's bits."""
    rebuild: Callable[[Values], object]
    """Makes an array like the user's from native values of the same dtype and shape."""
    rebuild_copies: bool = False
    """True if `rebuild` copies its argument, which then may lie in an arena."""
    target: "Values | None" = None
    """The memory that `rebuild` writes to, if it has the dtype that is sent."""
    takes_read_only: bool = False
    """True if the result may be a read-only array."""
    bits_of: str = ""
    """The user's dtype, if `dtype` only has the same size: then the values are its bits."""

    @property
    def users_dtype(self) -> str:
        """The dtype of the user's array."""
        return self.bits_of or self.dtype

    @property
    def wire(self) -> str:
        """The dtype that is sent."""
        return WIRE_OF[self.dtype]

    def fill(self, region: Values, weight: float | None = None) -> None:
        """Write the values, multiplied by the weight if there is one, into a region of an arena.

        With a weight of 0 it writes zeros and does not read the values, since a mean over no
        samples is NaN.
        """
        shaped = region.reshape(self.values.shape)
        if weight == 0:
            shaped.fill(0)
        elif self.dtype == "bfloat16":
            np.left_shift(self.values, 16, out=shaped.view(np.uint32), dtype=np.uint32)
            if weight is not None and weight != 1:
                _multiply(shaped, weight, shaped)
        elif weight is None or weight == 1:
            np.copyto(shaped, self.values)
        else:
            _multiply(self.values, weight, shaped)

    def may_keep(self, dtype: "np.dtype[Any]") -> bool:
        """Return True if `of` makes an array that keeps values of this dtype as its memory."""
        return not self.rebuild_copies and self.dtype == _name_of(dtype)

    def of(self, values: Values) -> object:
        """Return an array like the user's with these values, which become its memory if they can.

        Rounds to nearest, ties to even; a value that is too large for the dtype becomes infinite.

        Args:
            values: flat, of the dtype that is sent.
        """
        shaped = values.reshape(self.values.shape)
        if self.dtype == "bfloat16":
            return self.rebuild(_bfloat16_bits(shaped))
        if self.dtype == _name_of(values.dtype):
            return self.rebuild(shaped)
        with np.errstate(over="ignore", invalid="ignore"):
            return self.rebuild(shaped.astype(self.dtype, casting="same_kind"))

    def quotient(self, values: Values, divisor: float) -> object:
        """Return an array with the quotients, which are written into `target` if there is one."""
        if self.target is None:
            return self.of(divided(values, divisor))
        divided(values.reshape(self.values.shape), divisor, out=self.target)
        return self.rebuild(self.target)

    def like(self, region: Values) -> object:
        """Return an array like the user's that shares no memory with the region."""
        return self.of(region.copy() if self.may_keep(region.dtype) else region)


def divided(values: Values, divisor: float, *, out: "Values | None" = None) -> Values:
    """Return the quotients, in `out` or in fresh memory; 0 / 0 is NaN."""
    quotients = np.empty(values.shape, values.dtype) if out is None else out
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for part, into in zip(parts_of(values), parts_of(quotients), strict=True):
            np.divide(part, divisor, out=into)
    return quotients


def insertion_order(tree: Tree) -> tuple[int, ...]:
    """Return the indices of the leaves in the order in which the dicts were filled.

    >>> tree = flatten({"model": {"b": 1, "a": 2}, "lm_head": 3})
    >>> [tree.paths[index] for index in insertion_order(tree)]
    ['model.b', 'model.a', 'lm_head']
    """
    index_of = {path: index for index, path in enumerate(tree.paths)}
    return tuple(index_of[path] for path in _inserted(tree.source, "") if path in index_of)


def _inserted(x: object, path: str) -> Iterator[str]:
    children: Iterable[tuple[object, object]]
    if isinstance(x, dict):
        children = cast("dict[object, object]", x).items()
    elif isinstance(x, list | tuple):
        children = enumerate(cast("Sequence[object]", x))
    else:
        yield path
        return
    for key, child in children:
        yield from _inserted(child, f"{path}.{key}" if path else str(key))


def describe(
    tree: Tree, indices: Iterable[int] | None = None, *, lazily: bool = False
) -> list[Leaf]:
    """Return the tree's arrays; those of MLX are evaluated, all at once.

    Args:
        tree: the user's tree.
        indices: the indices of the leaves to describe; None for all.
        lazily: evaluate none; the values of MLX's arrays then have their shapes and are arbitrary.

    Raises:
        UnsupportedArray: a leaf is not an array, or its dtype is not supported.
    """
    chosen = range(len(tree.leaves)) if indices is None else tuple(indices)
    if not lazily:
        evaluate_mlx([tree.leaves[index] for index in chosen])
    return [_describe(tree.leaves[index], tree.paths[index], lazily=lazily) for index in chosen]


def describe_one(x: object) -> Leaf | None:
    """Return an array that is no part of a tree, evaluated; None for a container.

    Raises:
        UnsupportedArray: it is not an array, or its dtype is not supported.
    """
    if type(x) is np.ndarray:
        return numpy_leaf(cast("Values", x))
    if isinstance(x, _CONTAINERS):
        return None
    if is_mlx(x):
        evaluate_mlx([x])
    return _describe(x, "", lazily=False)


def _describe(x: object, path: str, *, lazily: bool) -> Leaf:
    where = f"{path}: " if path else ""
    if isinstance(x, np.ndarray | np.generic):
        leaf = numpy_leaf(cast("Values | np.generic", x), where)
    elif is_mlx(x):
        from pmesh.client.trees import mlx  # noqa: PLC0415 - MLX is there, as the user has an array

        leaf = mlx.describe(x, where, lazily=lazily)
    elif is_of("torch", "Tensor", x):
        from pmesh.client.trees import torch  # noqa: PLC0415 - torch is there, as the user has a tensor

        leaf = torch.describe(x, where)
    else:
        raise no_array(x, where)
    return leaf


def no_array(x: object, where: str) -> UnsupportedArray:
    """Return the error for a leaf that is not an array, with what to pass instead."""
    kind = type(x).__name__
    hint = ""
    if isinstance(x, bool | int | float):
        hint = "; wrap it, as in numpy.array(x)"
    elif isinstance(x, Iterable) and not isinstance(
        x, str | bytes | AbstractSet | list | tuple | dict
    ):
        hint = "; pass a list, as in list(x)"  # a generator, such as torch's net.parameters()
    return UnsupportedArray(f"{where}a {kind} is not an array{hint}")


def check_dtype(dtype: str, where: str) -> None:
    """Raise UnsupportedArray, with the supported dtypes, unless the dtype is one of them."""
    if dtype not in WIRE_OF:
        raise UnsupportedArray(f"{where}{dtype} is not supported; use {', '.join(WIRE_OF)}")


def numpy_leaf(x: "Values | np.generic", where: str = "") -> Leaf:
    """Return an array or scalar of numpy; for the errors see `describe`."""
    kind = type(x)
    if isinstance(x, np.ndarray) and kind is not np.ndarray:
        raise UnsupportedArray(
            f"{where}a {kind.__name__} means more than its values; pass numpy.asarray(x)"
        )
    array = np.asarray(x)
    dtype, name = array.dtype, _name_of(array.dtype)
    if name not in WIRE_OF:
        check_dtype(name, where)

    def rebuild(fresh: Values) -> object:
        typed = fresh.view(dtype) if name == "bfloat16" else fresh.astype(dtype, copy=False)
        return typed if kind is np.ndarray else typed[()]

    values = array.view(np.uint16) if name == "bfloat16" else array
    return Leaf(dtype=name, values=values, rebuild=rebuild, takes_read_only=True)


@lru_cache(maxsize=64)  # numpy builds the name each time, which is slow
def _name_of(dtype: "np.dtype[Any]") -> str:
    return dtype.name


def evaluate_mlx(leaves: Sequence[object]) -> None:
    """Compute the MLX arrays among these, all at once."""
    found = [x for x in leaves if is_mlx(x)]
    if found:
        from pmesh.client.trees import mlx  # noqa: PLC0415 - MLX is there, as the user has arrays of it

        mlx.evaluate(found)


def is_mlx(x: object) -> bool:
    """Return True if x is an MLX array."""
    return is_of("mlx.core", "array", x)


def is_of(module: str, name: str, x: object) -> bool:
    """Return True if x is of that class; the library is not imported if nobody has."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(x, kind)


def _multiply(values: Values, weight: float, into: Values) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        for part, product in zip(parts_of(values), parts_of(into), strict=True):
            np.multiply(part, weight, out=product, dtype=product.dtype)


def _bfloat16_bits(values: Values) -> Values:
    """Return float32 as bfloat16, rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)  # with at least one dimension
    rounded = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
    quiet = (bits >> 16) | 0x0040  # rounding could turn a NaN into infinity
    chosen = np.where(np.isnan(values), quiet, rounded)
    return chosen.astype(np.uint16).reshape(values.shape)
