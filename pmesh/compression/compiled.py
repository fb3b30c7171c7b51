"""The kernels of the native library: numpy's bits (except in a NaN), in fewer passes over memory.

`native/kernels.h` says what each takes. The library checks lengths on the wire; what it can't see,
such as the dtype and the length of a residual, is checked here.
"""

import ctypes
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from pmesh import native
from pmesh.compression.blocks import Bytes, Float32s, Indices

_ADDRESS, _SIZE, _WORD = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64
_Array: TypeAlias = np.ndarray[Any, Any]
_Dtype: TypeAlias = np.dtype[Any]
_BYTES, _FLOAT32, _INT64 = np.dtype(np.uint8), np.dtype(np.float32), np.dtype(np.int64)


class _Hop(ctypes.Structure):
    """`struct pmesh_hop`."""

    _fields_ = (
        ("incoming", _ADDRESS),
        ("outgoing", _ADDRESS),
        ("wire_bytes", _SIZE),
        ("own", _ADDRESS),
        ("residual", _ADDRESS),
        ("residual_out", _ADDRESS),
        ("count", _SIZE),
        ("counter", _WORD),
        ("own_scale", ctypes.c_float),
        ("divisor", ctypes.c_float),
        ("residual_factor", ctypes.c_float),
    )


_HOP, _DECODER = (ctypes.POINTER(_Hop),), (_ADDRESS, _SIZE, _ADDRESS, _SIZE)
_ARGUMENTS = {
    "hop_fp16": _HOP,
    "hop_bf16": _HOP,
    "hop_int8": _HOP,
    "hop_int8_stochastic": _HOP,
    "decode_fp16": _DECODER,
    "decode_bf16": _DECODER,
    "decode_int8": _DECODER,
    "compress_one_bit": (_ADDRESS, _ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _SIZE),
    "accumulate_one_bit": _DECODER,
    "draw_indices": (_WORD, _WORD, _WORD, _ADDRESS, _SIZE),
    "multiply": (_ADDRESS, _SIZE, _ADDRESS, _SIZE, _SIZE, _ADDRESS, _SIZE, _ADDRESS),
}


class Kernels:
    """The functions of the library, for arrays. Other threads run meanwhile."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions = {name: getattr(library, f"pmesh_{name}") for name in _ARGUMENTS}
        for name, function in self._functions.items():
            function.argtypes = _ARGUMENTS[name]
            function.restype = ctypes.c_int64

    def _call(self, name: str, *arguments: object) -> int:
        result: int = self._functions[name](*arguments)
        if result < 0:
            raise ValueError(f"{name}: the lengths of the arrays do not fit")
        return result

    def hop(
        self,
        codec: str,
        incoming: Bytes | None,
        own: Float32s,
        outgoing: Bytes,
        *,
        own_scale: float,
        divisor: float,
        residual: Float32s | None,
        residual_out: Float32s | None,
        residual_factor: float,
        counter: int = 0,
    ) -> int:
        """Run a hop of fp16, bf16, int8 or int8_stochastic; return how many values were clipped."""
        hop = _Hop(
            _address(incoming, _BYTES, len(outgoing)),
            *_written(outgoing, _BYTES),
            _address(own, _FLOAT32),
            _address(residual, _FLOAT32, len(own)),
            _result(residual_out, _FLOAT32, len(own)),
            len(own),
            counter,
            own_scale,
            divisor,
            residual_factor,
        )
        return self._call(f"hop_{codec}", hop)

    def decode(self, codec: str, wire: Bytes, out: Float32s) -> None:
        """Decode fp16, bf16 or int8."""
        self._call(f"decode_{codec}", *_read(wire, _BYTES), *_written(out, _FLOAT32))

    def compress_one_bit(
        self, own: Float32s, wire: Bytes, residual: Float32s | None, residual_out: Float32s | None
    ) -> None:
        self._call(
            "compress_one_bit",
            _address(own, _FLOAT32),
            _address(residual, _FLOAT32, len(own)),
            _result(residual_out, _FLOAT32, len(own)),
            len(own),
            *_written(wire, _BYTES),
        )

    def accumulate_one_bit(self, wire: Bytes, into: Float32s) -> None:
        self._call("accumulate_one_bit", *_read(wire, _BYTES), *_written(into, _FLOAT32))

    def draw_indices(self, counter: int, count: int, offset: int, indices: Indices) -> None:
        self._call("draw_indices", counter, count, offset, *_written(indices, _INT64))

    def multiply(
        self, p: Float32s, q: Float32s, rank: int, out: Float32s, left: Float32s | None
    ) -> None:
        self._call(
            "multiply",
            *_read(p, _FLOAT32),
            *_read(q, _FLOAT32),
            rank,
            *_written(out, _FLOAT32),
            _result(left, _FLOAT32, len(out)),
        )


def address_of_floats(array: Float32s | None, count: int, *, written: bool) -> int | None:
    """Return where so many values begin, for C; None for None.

    Raises ValueError if they are not in one piece, or can't be written but are to be.
    """
    return (_result if written else _address)(array, _FLOAT32, count)


def _read(array: _Array, dtype: _Dtype) -> tuple[int | None, int]:
    return _address(array, dtype), len(array)


def _written(array: _Array, dtype: _Dtype) -> tuple[int | None, int]:
    return _result(array, dtype, len(array)), len(array)


def _result(array: _Array | None, dtype: _Dtype, count: int) -> int | None:
    if array is not None and not array.flags.writeable:
        raise ValueError("a result must be writable")
    return _address(array, dtype, count)


def _address(array: _Array | None, dtype: _Dtype, count: int | None = None) -> int | None:
    """Return where the values begin, so many if that is given; None for None."""
    if array is None:
        return None
    wanted = len(array) if count is None else count
    if array.dtype != dtype or len(array) != wanted or not array.flags.c_contiguous:
        raise ValueError(f"need {dtype}[{wanted}] in one piece, not {array.dtype}[{len(array)}]")
    if array.flags.writeable and wanted:  # in half the time, but not for others
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    return array.ctypes.data


_hidden: list[bool] = []


def kernels() -> Kernels | None:
    """Return the compiled kernels; None where there are none, and numpy computes."""
    return None if _hidden else _of_the_library()


@cache
def _of_the_library() -> Kernels | None:
    library = native.library()
    return None if library is None else Kernels(library)


def forget() -> None:
    """Find the library anew at the next use, after a test has changed what is there."""
    _of_the_library.cache_clear()


@contextmanager
def in_numpy() -> Generator[None]:
    """Compute by numpy in all threads, to compare the two."""
    _hidden.append(True)
    try:
        yield
    finally:
        _hidden.pop()
