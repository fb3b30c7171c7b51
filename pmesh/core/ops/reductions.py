"""Reductions of two ranks' values, in place, in the dtypes that travel."""

from types import MappingProxyType
from typing import Any, TypeAlias, cast, get_args

import numpy as np
from numpy.typing import NDArray

from pmesh.core.wire.trainer import WireDtype

Values: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[Any]]"

_NAMES: tuple[str, ...] = get_args(WireDtype)
WIRE_DTYPES = MappingProxyType({name: np.dtype(name) for name in _NAMES})
"""The dtypes that travel, of each kind the widest first. The client widens float16 and bfloat16 to
float32, so that sums are in float32."""

_UFUNCS = MappingProxyType(
    {
        "sum": np.add,
        "mean": np.add,  # `finish` divides it at the end
        "max": np.maximum,  # propagates NaN, as does minimum
        "min": np.minimum,
        "prod": np.multiply,
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
    }
)
REDUCTIONS = tuple(_UFUNCS)
_FOR_FLOATS = ("sum", "mean", "max", "min", "prod")
_FOR_COMPLEX = ("sum", "mean", "prod")  # complex numbers have no order
_FOR_INTEGERS = (
    "sum",
    "max",
    "min",
    "prod",
    "band",
    "bor",
    "bxor",
)  # a mean of integers is not an integer
_ALLOWED = MappingProxyType(
    {
        "f": _FOR_FLOATS,
        "c": _FOR_COMPLEX,
        "i": _FOR_INTEGERS,
        "u": _FOR_INTEGERS,
        "b": _FOR_INTEGERS,  # a sum or max is any, a min or prod is all, as in numpy, MLX and NCCL
    }
)
_INEXACT = MappingProxyType({"f": ("max", "min"), "c": ("prod",)})


def check_reduction(reduction: str, dtype: str) -> None:
    """Raise ValueError, which says what is allowed, if values of `dtype` can't be reduced so."""
    if dtype not in WIRE_DTYPES:
        raise ValueError(f"{dtype} does not travel; these do: {', '.join(WIRE_DTYPES)}")
    allowed = _ALLOWED[WIRE_DTYPES[dtype].kind]
    if reduction not in allowed:
        raise ValueError(f"no {reduction!r} of {dtype}; these are allowed: {', '.join(allowed)}")


def accumulate(reduction: str, into: Values, other: Values) -> None:
    """Add (multiply, ...) `other` to `into`, in place, without an allocation.

    Args:
        reduction: sum, mean (its sum), max, min, prod, band, bor or bxor.
        into: any shape, a wire dtype.
        other: the same shape and dtype; only read.
    """
    # Infinity and NaN are valid results, so numpy does not warn of them. Integers wrap.
    with np.errstate(over="ignore", invalid="ignore"):
        _UFUNCS[reduction](into, other, out=into)


def is_exact(reduction: str, dtype: str) -> bool:
    """Return whether all processors reduce two values to the same bits, if NaN are made equal.

    IEEE 754 defines every bit of a sum or product, except of NaN. The greater of 0 and -0 may be
    either. A complex product is several operations, some of which a processor may fuse.
    """
    return reduction not in _INEXACT.get(WIRE_DTYPES[dtype].kind, ())


def parts_of(values: Values) -> tuple[Values, ...]:
    """Return views of the real and the imaginary parts; only the values if they are not complex."""
    if values.dtype.kind != "c":
        return (values,)
    parts = cast("NDArray[np.complexfloating]", values)
    return parts.real, parts.imag


def make_nan_equal(values: Values) -> None:
    """Replace every NaN by the same one, in place: sign and payload depend on the processor."""
    if values.dtype.kind in "fc":
        for part in parts_of(values):
            np.copyto(part, np.nan, where=np.isnan(part))


def finish(reduction: str, into: Values, contributors: int) -> None:
    """Turn a sum into its mean, in place; every other reduction is finished as it is."""
    if reduction == "mean":
        for part in parts_of(into):  # an infinite part divided as a complex number spoils the other
            np.divide(part, contributors, out=part)
