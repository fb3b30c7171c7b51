"""Arrays of any library as raw bytes, and back. Nothing is converted: every dtype is preserved."""

import importlib
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, cast

import numpy as np

from pmesh.client.trees.arrays import Leaf, Tree, evaluate_mlx, is_of, no_array
from pmesh.core.ops.reductions import Values
from pmesh.errors import ProtocolError, UnsupportedArray, UsageError

_ADAPTERS = {"mlx": "pmesh.client.trees.mlx", "torch": "pmesh.client.trees.torch"}
_NOTATION = re.compile(r"[<>|][biufcmMSUV]\d{1,9}(\[\d{0,9}[a-zA-Z]{1,2}\])?")  # no objects
_BITS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64", 16: "complex128"}
_EXTENSION = "ml_dtypes"  # the package that gives numpy bfloat16 and similar dtypes


@dataclass(frozen=True, slots=True, kw_only=True)
class RawArray:
    """An array of the user's as its bytes."""

    library: str
    """numpy, scalar (numpy's), mlx or torch."""
    dtype: str
    """The library's name of the dtype."""
    shape: tuple[int, ...]
    data: Values
    """Flat uint8; a view of the array's memory if that is in one piece."""

    @property
    def plain_dtype(self) -> str | None:
        """Numpy's name of the dtype, whatever the library; None unless it is of native numbers."""
        if self.library in _ADAPTERS or not self.dtype.startswith(("<", ">", "|")):
            return self.dtype
        return _plain_name(self.dtype)


@lru_cache(maxsize=64)
def _plain_name(notation: str) -> str | None:
    dtype = np.dtype(notation)
    return dtype.name if dtype.isnative and dtype.kind in "biufc" else None


class _Adapter(Protocol):
    def to_raw(self, x: object, where: str) -> RawArray: ...

    def from_raw(
        self, dtype: str, shape: tuple[int, ...], data: Values, like: object
    ) -> object: ...


def library_of(x: object) -> str | None:
    """Return the library of x: numpy, mlx or torch; None if x is not an array."""
    if isinstance(x, np.ndarray | np.generic):
        return "numpy"
    if is_of("mlx.core", "array", x):
        return "mlx"
    return "torch" if is_of("torch", "Tensor", x) else None


def to_raw(x: object, where: str) -> RawArray | None:
    """Return the array's bytes; None if x is not an array.

    MLX arrays must have been evaluated. Raises UnsupportedArray if x is more than its bytes.
    """
    library = library_of(x)
    if library is None:
        return None
    if library == "numpy":
        return _numpy_to_raw(cast("Values | np.generic", x), where)
    return _adapter(library).to_raw(x, where)


def describe_bits(tree: Tree) -> list[Leaf]:
    """Return the tree's arrays as integers of the same size, for calls that only move them.

    Raises:
        UnsupportedArray: a leaf is not an array of numbers.
    """
    evaluate_mlx(tree.leaves)
    return [_bits(x, path) for path, x in zip(tree.paths, tree.leaves, strict=True)]


def _bits(x: object, path: str) -> Leaf:
    where = f"{path}: " if path else ""
    swapped = _swapped_dtype(x)
    native = x if swapped is None else cast("Values", x).astype(swapped.newbyteorder("="))
    raw = to_raw(native, where)
    if raw is None:
        raise no_array(x, where)
    count = math.prod(raw.shape)
    bits = _BITS.get(raw.data.size // count if count else 1)
    if raw.plain_dtype is None or bits is None:
        raise UnsupportedArray(f"{where}arrays of numbers can be moved, not of {raw.dtype}")

    def rebuild(fresh: Values) -> object:
        data = fresh.reshape(-1).view(np.uint8)
        made = from_raw(raw.library, raw.dtype, raw.shape, data, like=x)
        return made if swapped is None else cast("Values", made).astype(swapped)

    return Leaf(
        dtype=bits,
        bits_of=raw.plain_dtype,
        values=raw.data.view(bits).reshape(raw.shape),
        rebuild=rebuild,
        rebuild_copies=raw.library == "mlx",
    )


def _swapped_dtype(x: object) -> "np.dtype[Any] | None":
    """Return the dtype of a numpy array in the other byte order; None for any other x."""
    if not isinstance(x, np.ndarray):
        return None
    dtype = cast("Values", x).dtype
    return None if dtype.isnative else dtype


def from_raw(
    library: str, dtype: str, shape: tuple[int, ...], data: Values, *, like: object
) -> object:
    """Return an array of these bytes, which it may keep as its memory.

    Args:
        library: as in `RawArray`.
        dtype: as in `RawArray`.
        shape: as in `RawArray`.
        data: flat uint8, writable, its start aligned for every dtype.
        like: the user's value that it replaces; a torch tensor goes to the same device.

    Raises:
        ProtocolError: the library, dtype, shape or size is invalid.
        UsageError: the library is not installed here.
    """
    if library in ("numpy", "scalar"):
        array = _numpy_from_raw(dtype, shape, data)
        return array if library == "numpy" else array[()]
    if library not in _ADAPTERS:
        raise ProtocolError(f"arrays of {library!r}")
    try:
        adapter = _adapter(library)
    except ImportError as e:
        raise UsageError(
            f"what has arrived holds {library} arrays, and {library} is not installed here"
        ) from e
    return adapter.from_raw(dtype, shape, data, like)


def check_size(data: Values, itemsize: int, shape: tuple[int, ...]) -> None:
    """Raise ProtocolError unless the size of the data is that of the array."""
    if min(shape, default=0) < 0 or math.prod(shape) * itemsize != data.size:
        raise ProtocolError(f"{data.size} bytes for values of {itemsize} in the shape {shape}")


def _adapter(library: str) -> _Adapter:
    return cast("_Adapter", importlib.import_module(_ADAPTERS[library]))


def _numpy_to_raw(x: "Values | np.generic", where: str) -> RawArray:
    kind = type(x)
    if isinstance(x, np.ndarray) and kind is not np.ndarray:
        raise UnsupportedArray(
            f"{where}a {kind.__name__} means more than its values; pass numpy.asarray(x)"
        )
    name = _name_of(x.dtype)
    if name is None:
        raise UnsupportedArray(f"{where}an array of {x.dtype} is more than its bytes")
    flat = np.ascontiguousarray(x).reshape(-1)
    library = "numpy" if kind is np.ndarray else "scalar"
    data = flat.view(np.uint8) if flat.size else np.empty(0, np.uint8)
    return RawArray(library=library, dtype=name, shape=x.shape, data=data)


@lru_cache(maxsize=64)  # numpy builds a name each time, which is slow
def _name_of(dtype: "np.dtype[Any]") -> str | None:
    named = (name for name in (dtype.str, dtype.name) if _dtype_named(name) == dtype)
    return next(named, None)


def _numpy_from_raw(dtype: str, shape: tuple[int, ...], data: Values) -> Values:
    found = _dtype_named(dtype)
    if found is None:
        raise ProtocolError(f"no numpy array has the dtype {dtype!r}")
    check_size(data, found.itemsize, shape)
    return data.view(found).reshape(shape) if data.size else np.empty(shape, found)


def _dtype_named(name: str) -> "np.dtype[np.generic] | None":
    """Return the dtype for numpy's notation, with the byte order, or for a name of ml_dtypes."""
    try:
        if _NOTATION.fullmatch(name):
            return np.dtype(name)
        found: object = getattr(importlib.import_module(_EXTENSION), name, None)
        if not isinstance(found, type):
            return None
        dtype: np.dtype[np.generic] = np.dtype(found)
    except (ImportError, TypeError, ValueError):
        return None
    return None if dtype.hasobject else dtype  # a class that is no dtype becomes `object`
