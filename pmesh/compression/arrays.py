"""What the kernels take and give: one-dimensional, contiguous arrays of one dtype each."""

from typing import Any, TypeAlias

import numpy as np

Float32s: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float32]]
Int8s: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int8]]
Bytes: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint8]]
Words64: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint64]]
UInt16s: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint16]]
UInt32s: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint32]]
Halves: TypeAlias = np.ndarray[tuple[int], np.dtype[Any]]
"""Values of two bytes: float16, or bfloat16, which numpy's types don't know."""

Rows: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.float32]]
