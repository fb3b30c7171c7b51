"""`out=`: results that are written into arrays which the user has."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np

from pmesh.client.calls import Arrays, take_apart
from pmesh.client.leaves import Leaf, is_of
from pmesh.core.reductions import WIRE_DTYPES, Values
from pmesh.errors import UnsupportedArray, UsageError


def written_into(arrays: Arrays, out: object) -> Arrays:
    """The same arrays, whose results go into those of `out`.

    Raises:
        UnsupportedArray: an array of `out` can't be written to.
        UsageError: its paths, shapes or dtypes are others.
    """
    targets = take_apart(out)
    if not targets.is_like(arrays):
        raise UsageError("out= is to have the paths, shapes and dtypes of what is reduced")
    leaves = tuple(
        replace(
            leaf, rebuild=_writer(target, x, path), rebuild_copies=True, target=_divisible(target)
        )
        for leaf, target, x, path in zip(
            arrays.leaves, targets.leaves, targets.tree.leaves, targets.tree.paths, strict=True
        )
    )
    return Arrays(targets.tree, leaves)


def _writer(target: Leaf, x: object, path: str) -> Callable[[Values], object]:
    if not _can_be_written(x):
        where = f"{path}: " if path else ""
        raise UnsupportedArray(
            f"{where}out= takes numpy arrays that may be written to and torch tensors on the CPU"
        )

    def write(values: Values) -> object:
        if values is not target.values:
            np.copyto(target.values, values)
        return x

    return write


def _divisible(target: Leaf) -> "Values | None":
    """The array, if quotients need no rounding on their way into it."""
    return target.values if target.values.dtype == WIRE_DTYPES[target.wire] else None


def _can_be_written(x: object) -> bool:
    if isinstance(x, np.ndarray):
        return bool(x.flags.writeable)
    tensor = cast("Any", x)  # torch has no types here
    return is_of("torch", "Tensor", x) and tensor.device.type == "cpu" and not tensor.is_neg()
