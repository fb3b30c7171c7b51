"""Twins of kernels in numba: the same bits (save a NaN's), in fewer passes over memory.

Importing one of these modules compiles it, which no event loop has the time for.
"""

from importlib import import_module
from types import ModuleType


def load(name: str) -> ModuleType | None:
    """The module of twins of that name, compiled: seconds of work at the first time on a machine.

    Returns:
        None where numba is not installed (`pip install pmesh[fast]`), does not fit this numpy, or
        finds no place to keep what it compiles.
    """
    try:
        return import_module(f"pmesh.compression.fast.{name}")
    except (ImportError, RuntimeError):
        return None
