# ruff: noqa: ANN401 - arrays of libraries that have no common type
"""Arrays of each library, made alike and compared."""

from typing import Any

import numpy as np
import pytest

KINDS = [
    *(("numpy", "float64"), ("numpy", "bfloat16"), ("numpy", "bool")),
    *(("mlx", "bfloat16"), ("mlx", "bool"), ("torch", "bfloat16"), ("torch", "bool")),
]
"""All others are in tests/client/calls/test_dtypes.py."""


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
