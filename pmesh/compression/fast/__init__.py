"""Kernels compiled by numba: numpy's bits (except in a NaN), in fewer passes over memory.

Importing one of these modules compiles it, which takes too long for an event loop.
"""

from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

_schemes: list[ModuleType] = []  # `fast.schemes` once it is compiled


def load(name: str) -> ModuleType | None:
    """Import and compile a module of kernels; this takes seconds the first time on a machine.

    Returns None if numba is not installed (the extra `fast`), does not fit this numpy, or has no
    directory for its cache.
    """
    try:
        return import_module(f"pmesh.compression.fast.{name}")
    except (ImportError, RuntimeError):
        return None


def prepare_schemes() -> bool:
    """Compile the kernels of the trainers' schemes, which all threads use from then on.

    Call it in a background thread: it takes 10 s the first time on a machine, then 1 s, most of it
    for numba's import. Other threads use numpy meanwhile.

    Returns False if numba is not installed or does not fit numpy.
    """
    module = load("schemes")
    if module is not None:
        _schemes[:] = [module]
    return module is not None


def compiled_schemes() -> ModuleType | None:
    """Return the module `fast.schemes` if it is compiled."""
    return next(iter(_schemes), None)


@contextmanager
def computed_by(module: ModuleType | None) -> Generator[None]:
    """Compute by this module, or by numpy if it is None, in all threads, to compare the two."""
    before = _schemes[:]
    _schemes[:] = [] if module is None else [module]
    try:
        yield
    finally:
        _schemes[:] = before
