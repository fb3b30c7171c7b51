"""The switch between numpy and numba twins for the trainers' schemes."""

from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType

from pmesh.compression import fast

_compiled: list[ModuleType] = []  # the module once it is ready


def prepare() -> bool:
    """Compile the twins, which then give the same bits in less time, in all threads.

    Call it in a background thread: it takes 10 s the first time on a machine, then 1 s, most of it
    for numba's import. Other threads use numpy meanwhile.

    Returns False if numba is not installed or does not fit numpy.
    """
    module = fast.load("schemes")
    if module is not None:
        _compiled[:] = [module]
    return module is not None


def twins() -> ModuleType | None:
    """Return the module `fast.schemes` if it is compiled."""
    return next(iter(_compiled), None)


@contextmanager
def computed_by(module: ModuleType | None) -> Generator[None]:
    """Compute by this module, or by numpy if it is None, in all threads, to compare the two."""
    before = _compiled[:]
    _compiled[:] = [] if module is None else [module]
    try:
        yield
    finally:
        _compiled[:] = before
