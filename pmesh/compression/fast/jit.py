"""How to compile kernels: before the first call, without the GIL, to exact IEEE arithmetic."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _array(dtype: Any, *, readonly: bool = False) -> Any:  # noqa: ANN401 - numba's types have none
    # Aligned or not: data in a record or an arena may begin anywhere.
    return numba.types.Array(dtype, 1, "C", readonly=readonly, aligned=False)


NOTHING = numba.void
COUNT = numba.int64
FLAG = numba.boolean
FLOAT32 = numba.float32
UINT64 = numba.uint64
FLOAT32S = _array(numba.float32)
INT8S = _array(numba.int8)
UINT16S = _array(numba.uint16)
FLOAT32S_READ = _array(numba.float32, readonly=True)
INT8S_READ = _array(numba.int8, readonly=True)
UINT16S_READ = _array(numba.uint16, readonly=True)


def compiled(result: Any, *arguments: Any) -> Callable[[_Function], _Function]:  # noqa: ANN401 - as above
    """Compile for these types now, or load the result of an earlier process on this machine.

    There is no `fastmath`: no fused multiply-add, no reordered sum. There are no checks for
    division by zero, which would prevent vector instructions.
    """
    decorate = numba.njit(result(*arguments), cache=True, nogil=True, error_model="numpy")
    return cast("Callable[[_Function], _Function]", decorate)


def inlined(function: _Function) -> _Function:
    """Mark a function that `compiled` functions of the same file call: compiled with each."""
    return cast("_Function", numba.njit(nogil=True, error_model="numpy")(function))
