# ruff: noqa: ANN401 - arrays of libraries that have no common type
"""Arrays of each library and of many dtypes, made alike and compared by their bytes."""

from typing import Any

import numpy as np
import pytest

LIBRARIES = {
    "numpy": ["float64", "float32", "float16", "bfloat16", "int64", "int8", "uint16", "bool"],
    "mlx": ["float32", "float16", "bfloat16", "int32", "uint8", "bool"],
    "torch": ["float64", "float16", "bfloat16", "int64", "uint8", "bool"],
}
KINDS = [(library, dtype) for library, dtypes in LIBRARIES.items() for dtype in dtypes]


def make(library: str, dtype: str, values: Any) -> Any:
    """An array of that library and dtype with these values."""
    x = np.asarray(values)
    if library == "mlx":
        mx = pytest.importorskip("mlx.core")
        return mx.array(x).astype(mx.bool_ if dtype == "bool" else getattr(mx, dtype))
    if library == "torch":
        torch = pytest.importorskip("torch")
        return torch.from_numpy(x.copy()).to(getattr(torch, dtype))
    ml_dtypes = pytest.importorskip("ml_dtypes")
    return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def seen(x: Any) -> tuple[str, str, tuple[int, ...], list[Any]]:
    """Library, dtype, shape and values; in a form that can be compared."""
    module = type(x).__module__.partition(".")[0]
    dtype = str(x.dtype).rpartition(".")[2].removesuffix("_")
    if module == "numpy":
        return module, dtype, x.shape, x.astype(np.float64).tolist()
    return module, dtype, tuple(x.shape), _plain(x.tolist())


def _plain(values: Any) -> Any:
    return [_plain(value) for value in values] if isinstance(values, list) else float(values)
