"""MLX arrays; the only file that knows MLX, imported when the user has an array of it."""

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
import numpy as np

from pmesh.client.leaves import Leaf, check_dtype
from pmesh.core.reductions import Values


def evaluate(arrays: Sequence[object]) -> None:
    """Compute all of them at once, in this thread: MLX's streams belong to threads."""
    mx.eval(*arrays)  # pyright: ignore[reportUnknownMemberType] - its stub leaves *args bare


def describe(x: object, where: str) -> Leaf:
    """An evaluated array as numpy sees it, without a copy: its memory is shared with the CPU."""
    array = cast("mx.array", x)
    dtype = str(array.dtype).removeprefix("mlx.core.")
    check_dtype(dtype, where)
    is_bfloat16 = dtype == "bfloat16"
    values = cast("Values", np.array(array.view(mx.uint16) if is_bfloat16 else array, copy=False))

    def rebuild(native: Values) -> mx.array:
        if is_bfloat16:
            return mx.array(native).view(mx.bfloat16)
        return mx.array(native, dtype=array.dtype)  # else float64 would become float32

    return Leaf(dtype=dtype, values=values, rebuild=rebuild, rebuild_copies=True)
