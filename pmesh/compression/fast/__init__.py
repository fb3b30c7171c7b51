"""Twins of kernels in numba: the same bits (except in a NaN), in fewer passes over memory.

Importing one of these modules compiles it, which takes too long for an event loop.
"""

from importlib import import_module
from types import ModuleType


def load(name: str) -> ModuleType | None:
    """Import and compile a module of twins; this takes seconds the first time on a machine.

    Returns None if numba is not installed (`pip install pmesh[fast]`), does not fit this numpy, or
    has no directory for its cache.
    """
    try:
        return import_module(f"pmesh.compression.fast.{name}")
    except (ImportError, RuntimeError):
        return None
