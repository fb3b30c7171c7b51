"""MLX arrays. Only this module uses MLX; it is imported when the user has an array of it."""

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
import numpy as np

from pmesh.client.trees.arrays import Leaf, check_dtype
from pmesh.client.trees.raw import RawArray, check_size
from pmesh.core.ops.reductions import Values
from pmesh.errors import ProtocolError


def evaluate(arrays: Sequence[object]) -> None:
    """Compute all arrays at once, in this thread, as MLX's streams belong to threads."""
    mx.eval(*arrays)  # pyright: ignore[reportUnknownMemberType] - its stub leaves *args bare


def describe(x: object, where: str, *, lazily: bool = False) -> Leaf:
    """Return an evaluated array as numpy sees it, without a copy, as the CPU shares its memory.

    With `lazily` it need not be evaluated: the leaf's values have its shape and are arbitrary.
    """
    array = cast("mx.array", x)
    dtype = str(array.dtype).removeprefix("mlx.core.")
    check_dtype(dtype, where)
    is_bfloat16 = dtype == "bfloat16"
    values: Values
    if lazily:
        values = np.broadcast_to(np.zeros((), "uint16" if is_bfloat16 else dtype), array.shape)
    else:
        viewed = array.view(mx.uint16) if is_bfloat16 else array
        values = cast("Values", np.array(viewed, copy=False))

    def rebuild(native: Values) -> mx.array:
        if is_bfloat16:
            return mx.array(native).view(mx.bfloat16)
        return mx.array(native, dtype=array.dtype)  # else float64 would become float32

    return Leaf(dtype=dtype, values=values, rebuild=rebuild, rebuild_copies=True)


def to_raw(x: object, where: str) -> RawArray:
    """Return the bytes of an evaluated array."""
    del where  # no array raises an error
    array = cast("mx.array", x)
    # Always a view: `x += 1` frees or overwrites the memory of x unless another array shares it.
    viewed = array.view(mx.uint16 if array.dtype == mx.bfloat16 else array.dtype)
    values = np.ascontiguousarray(cast("Values", np.array(viewed, copy=False))).reshape(-1)
    return RawArray(
        library="mlx",
        dtype=str(array.dtype).removeprefix("mlx.core."),
        shape=array.shape,
        data=values.view(np.uint8) if values.size else np.empty(0, np.uint8),
    )


def from_raw(dtype: str, shape: tuple[int, ...], data: Values, like: object) -> mx.array:
    """Return an array of a copy of these bytes; raise ProtocolError if MLX can't have it."""
    del like  # MLX arrays have no device
    found = getattr(mx, "bool_" if dtype == "bool" else dtype, None)
    if not isinstance(found, mx.Dtype):
        raise ProtocolError(f"no MLX array has the dtype {dtype!r}")
    check_size(data, found.size, shape)
    same_bits = np.dtype("uint16" if found == mx.bfloat16 else dtype)
    values = data.view(same_bits) if data.size else np.empty(0, same_bits)
    if found == mx.bfloat16:
        return mx.array(values.reshape(shape)).view(mx.bfloat16)
    return mx.array(values.reshape(shape), dtype=found)  # else float64 would become float32
