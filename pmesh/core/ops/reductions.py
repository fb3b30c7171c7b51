"""Reductions: what two ranks' values become, in place, in the dtypes that travel."""

from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

Values: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[Any]]"

WIRE_DTYPES = MappingProxyType(
    {name: np.dtype(name) for name in ("float32", "float64", "int32", "int64", "bool", "uint8")}
)
"""What travels. float16 and bfloat16 are widened to float32 by the client, so that sums keep it;
uint8 are bytes of any dtype, which are moved and not reduced."""

_UFUNCS = MappingProxyType(
    {
        "sum": np.add,
        "mean": np.add,  # divided at its end by `finish`
        "max": np.maximum,  # propagates NaN, as does minimum
        "min": np.minimum,
        "prod": np.multiply,
    }
)
_FOR_FLOATS = ("sum", "mean", "max", "min", "prod")
_FOR_INTEGERS = ("sum", "max", "min", "prod")  # a mean of integers is not an integer
_FOR_BOOLS = ("max", "min", "prod")  # any, all, all; how many is a sum of integers
_ALLOWED = MappingProxyType({"f": _FOR_FLOATS, "i": _FOR_INTEGERS, "b": _FOR_BOOLS, "u": ()})


def check_reduction(reduction: str, dtype: str) -> None:
    """Raises ValueError, saying what is allowed, if values of `dtype` can't be reduced so."""
    if dtype not in WIRE_DTYPES:
        raise ValueError(f"{dtype} does not travel; these do: {', '.join(WIRE_DTYPES)}")
    allowed = _ALLOWED[WIRE_DTYPES[dtype].kind]
    if reduction not in allowed:
        raise ValueError(f"no {reduction!r} of {dtype}; these are allowed: {', '.join(allowed)}")


def accumulate(reduction: str, into: Values, other: Values) -> None:
    """Add (multiply, ...) `other` to `into`, in place, without an allocation.

    Args:
        reduction: sum, mean (its sum), max, min or prod.
        into: any shape, a wire dtype.
        other: the same shape and dtype; only read.
    """
    # Infinity and NaN are valid results, so numpy does not warn of them. Integers wrap.
    with np.errstate(over="ignore", invalid="ignore"):
        _UFUNCS[reduction](into, other, out=into)


def is_exact(reduction: str, dtype: str) -> bool:
    """Whether all processors reduce two values to the same bits, if NaN are made equal.

    IEEE 754 says what every bit of a sum or product is, but for NaN. The greater of 0 and -0 may be
    either.
    """
    return WIRE_DTYPES[dtype].kind != "f" or reduction not in {"max", "min"}


def make_nan_equal(values: Values) -> None:
    """Replace every NaN by the same one, in place: its sign and its payload are the processor's."""
    if values.dtype.kind == "f":
        np.copyto(values, np.nan, where=np.isnan(values))


def finish(reduction: str, into: Values, contributors: int) -> None:
    """Make the mean of a sum, in place; every other reduction is finished as it is."""
    if reduction == "mean":
        np.divide(into, contributors, out=into)
