"""A training state as one sequence of bytes, and back.

The bytes begin with a header: the tree's structure, its plain values, and the library, dtype and
shape of each array. Then comes the memory of each array, aligned. Two states are equal if their
bytes are.
"""

import copy
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, TypeAlias, assert_never, cast

import msgspec
import numpy as np
import xxhash

from pmesh.client.trees.arrays import evaluate_mlx, flatten
from pmesh.client.trees.raw import RawArray, from_raw, to_raw
from pmesh.core.ops.reductions import Values
from pmesh.errors import ProtocolError, UnsupportedArray

ALIGNMENT_BYTES = 64  # a cache line, and a multiple of every dtype's size
_LENGTH_BYTES = 8
_ZEROS = np.zeros(ALIGNMENT_BYTES, np.uint8)


class _Node(msgspec.Struct, frozen=True, array_like=True):
    pass


class _Plain(_Node, frozen=True, tag="plain"):
    value: bool | int | float | str | None


class _Bytes(_Node, frozen=True, tag="bytes"):
    value: bytes


class _LargeInteger(_Node, frozen=True, tag="integer"):
    """An integer beyond the 64 bits of msgpack, as in the state of numpy's PCG64."""

    digits: str
    """The number, hexadecimal."""


class _Array(_Node, frozen=True, tag="array"):
    library: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: Annotated[int, msgspec.Meta(ge=0)]


class _Dict(_Node, frozen=True, tag="dict"):
    """A dict in its order of insertion, which is part of the state: sums over it depend on it."""

    keys: "tuple[_Scalar, ...]"
    children: "tuple[_Tree, ...]"


class _List(_Node, frozen=True, tag="list"):
    children: "tuple[_Tree, ...]"


class _Tuple(_Node, frozen=True, tag="tuple"):
    children: "tuple[_Tree, ...]"


_Scalar: TypeAlias = _Plain | _Bytes | _LargeInteger
_Tree: TypeAlias = _Scalar | _Array | _Dict | _List | _Tuple
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[_Tree] = msgspec.msgpack.Decoder(_Tree)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A state as bytes, in place in the user's arrays."""

    pieces: tuple[Values, ...]
    """Flat uint8; together they are the bytes of the state."""
    starts: tuple[int, ...]
    """The position of each piece in the bytes."""
    nbytes: int
    digest: tuple[int, int]
    """The hash of all bytes, as two int64."""

    def copy_to(self, region: Values, start: int) -> None:
        """Copy the bytes from `start` on into a region (flat uint8), until one of them ends."""
        stop = start + region.size
        touched = slice(bisect_right(self.starts, start) - 1, bisect_left(self.starts, stop))
        for position, piece in zip(self.starts[touched], self.pieces[touched], strict=True):
            begin, end = max(position, start), min(position + piece.size, stop)
            region[begin - start : end - start] = piece[begin - position : end - position]


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A state taken apart: its structure with the plain values, and its arrays."""

    header: bytes
    """The structure and the plain values."""
    paths: tuple[str, ...]
    """The path of each array, such as `layers.0.weight`; two may be equal."""
    arrays: tuple[RawArray, ...]
    """Views of the user's arrays."""


def describe(state: object) -> Described:
    """Take a state apart, without copying arrays that lie in one piece.

    Raises:
        UnsupportedArray: it holds something else than dicts, lists, tuples, arrays and plain
            values; the error names the path.
    """
    evaluate_mlx(flatten(state).leaves)
    found: list[tuple[str, RawArray]] = []
    tree = _describe(state, "", found)
    try:
        header = _encoder.encode(tree)
    except UnicodeEncodeError as e:
        raise UnsupportedArray(f"a text of the state is no Unicode: {e}") from e
    return Described(
        header=header,
        paths=tuple(path for path, _ in found),
        arrays=tuple(array for _, array in found),
    )


def pack(state: object) -> Packed:
    """Return the bytes of the state; raises as `describe` does."""
    described = describe(state)
    header, arrays = described.header, described.arrays
    prefixed = len(header).to_bytes(_LENGTH_BYTES, "little") + header
    pieces: list[Values] = []
    for data in (np.frombuffer(prefixed, np.uint8), *(array.data for array in arrays)):
        pieces += [data, _ZEROS[: -data.size % ALIGNMENT_BYTES]]
    hasher = xxhash.xxh3_128()
    for piece in pieces:
        hasher.update(piece.data)
    *starts, nbytes = accumulate((piece.size for piece in pieces), initial=0)
    return Packed(
        pieces=tuple(pieces), starts=tuple(starts), nbytes=nbytes, digest=digest_of(hasher)
    )


def digest_of(hasher: xxhash.xxh3_128) -> tuple[int, int]:
    """Return the hash as two int64, which a `sync` sends."""
    digest = hasher.digest()
    first, second = (int.from_bytes(half, "big", signed=True) for half in (digest[:8], digest[8:]))
    return first, second


def unpack_untrusted(data: Values, own: object) -> object:
    """Return the state of these bytes; its arrays may keep `data` as their memory.

    Args:
        data: flat uint8, writable, aligned.
        own: the user's own state. If a dict, list or tuple in it has a class of its own, such as a
            named tuple, the one in the same place gets that class.

    Raises:
        ProtocolError: the bytes are not a state.
        UsageError: it holds arrays of a library that is not installed here.
    """
    length = int.from_bytes(data[:_LENGTH_BYTES].tobytes(), "little")
    end = _LENGTH_BYTES + length
    try:
        tree = _decoder.decode(data[_LENGTH_BYTES:end].tobytes())
        position = end + -end % ALIGNMENT_BYTES
        return _Builder(_taker(data, position)).build(tree, own)
    except _NO_STATE as e:
        raise ProtocolError(f"not a state: {e}") from e


def rebuild_untrusted(header: bytes, arrays: Iterable[Values], own: object) -> object:
    """Return the state that `describe` has taken apart into this header and these arrays.

    Args:
        header: as in `Described`.
        arrays: the bytes of each array, as for `unpack_untrusted`; they may be kept.
        own: as for `unpack_untrusted`.

    Raises:
        ProtocolError: the parts are not those of a state.
        UsageError: it holds arrays of a library that is not installed here.
    """
    given = iter(arrays)
    try:
        return _Builder(lambda _: next(given)).build(_decoder.decode(header), own)
    except (*_NO_STATE, StopIteration) as e:
        raise ProtocolError(f"not a state: {e}") from e


_NO_STATE = (msgspec.MsgspecError, ValueError, TypeError, RecursionError)


def _taker(data: Values, position: int) -> Callable[[int], Values]:
    """Return a function that takes the next array, of so many bytes, from the data."""

    def take(nbytes: int) -> Values:
        nonlocal position
        start, end = position, position + nbytes
        if end > data.size:
            raise ProtocolError(f"an array ends at {end} of {data.size} bytes")
        position = end + -end % ALIGNMENT_BYTES
        return data[start:end]

    return take


def _describe(x: object, path: str, arrays: list[tuple[str, RawArray]]) -> _Tree:
    def child(key: object, value: object) -> _Tree:
        return _describe(value, f"{path}.{key}" if path else str(key), arrays)

    where = f"{path}: " if path else ""
    if isinstance(x, dict):
        entries = cast("dict[object, object]", x)
        keys = tuple(_describe_plain(key, where) for key in entries)
        return _Dict(keys, tuple(child(key, value) for key, value in entries.items()))
    if isinstance(x, list | tuple):
        children = tuple(child(i, y) for i, y in enumerate(cast("list[object]", x)))
        return _List(children) if isinstance(x, list) else _Tuple(children)
    array = to_raw(x, where)
    if array is None:
        return _describe_plain(x, where)
    arrays.append((path, array))
    return _Array(array.library, array.dtype, array.shape, array.data.size)


def _describe_plain(x: object, where: str) -> _Scalar:
    if type(x) is int and not -(2**63) <= x < 2**64:
        return _LargeInteger(f"{x:x}")
    if type(x) is bytes:
        return _Bytes(x)
    if x is None or type(x) in (bool, int, float, str):
        return _Plain(cast("bool | int | float | str | None", x))
    raise UnsupportedArray(
        f"{where}a value of type {type(x).__name__} can't be sent or saved; use arrays, None, "
        "bool, int, float, str and bytes, in dicts, lists and tuples"
    )


class _Builder:
    """Builds a tree from a header and the arrays, which it takes in order."""

    def __init__(self, take: Callable[[int], Values]) -> None:
        self._take = take

    def build(self, tree: _Tree, own: object) -> object:
        match tree:
            case _Plain(value) | _Bytes(value):
                return value
            case _LargeInteger(digits):
                return int(digits, 16)
            case _Array():
                return self._array(tree, own)
            case _Dict(keys, children):
                return self._dict(keys, children, own)
            case _List(children):
                return self._list(children, own)
            case _Tuple(children):
                return self._tuple(children, own)
        assert_never(tree)

    def _array(self, tree: _Array, own: object) -> object:
        data = self._take(tree.nbytes)
        return from_raw(tree.library, tree.dtype, tree.shape, data, like=own)

    def _dict(self, keys: tuple[_Scalar, ...], children: tuple[_Tree, ...], own: object) -> object:
        if len(keys) != len(children):
            raise ProtocolError(f"{len(keys)} keys of {len(children)} values")
        template = cast("dict[object, object]", own) if isinstance(own, dict) else {}
        built: dict[object, object] = {}
        for key, child in zip((self.build(key, None) for key in keys), children, strict=True):
            built[key] = self.build(child, template.get(key))
        if type(template) is dict:
            return built
        fresh = copy.copy(template)  # keeps its class and attributes
        fresh.clear()
        fresh.update(built)
        return fresh

    def _list(self, children: tuple[_Tree, ...], own: object) -> object:
        template = cast("list[object]", own) if isinstance(own, list) else []
        built = self._in_order(children, template)
        if type(template) is list:
            return built
        fresh = copy.copy(template)
        fresh[:] = built
        return fresh

    def _tuple(self, children: tuple[_Tree, ...], own: object) -> object:
        template = cast("tuple[object, ...]", own) if isinstance(own, tuple) else ()
        built = self._in_order(children, template)
        kind = cast("type[Any]", type(template))
        if kind is tuple or len(template) != len(built):
            return tuple(built)
        return getattr(kind, "_make", kind)(built)  # the constructor of a named tuple

    def _in_order(self, children: tuple[_Tree, ...], own: Sequence[object]) -> list[object]:
        return [
            self.build(child, own[i] if i < len(own) else None) for i, child in enumerate(children)
        ]
