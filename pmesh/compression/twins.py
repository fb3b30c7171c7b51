"""Whether the trainers' schemes are computed by their twins in numba."""

from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType

from pmesh.compression import fast

_compiled: list[ModuleType] = []  # one, from when it is ready on


def prepare() -> bool:
    """Compile the twins, which from then on give the same bits in less time, in all threads.

    To be called in a thread that may take its time: 10 s at the first time on a machine, 1 s after
    that, most of it numba's import. Other threads go on with numpy meanwhile.

    Returns:
        Whether there are twins now; no, where numba is not installed or does not fit numpy.
    """
    module = fast.load("schemes")
    if module is not None:
        _compiled[:] = [module]
    return module is not None


def twins() -> ModuleType | None:
    """The module `fast.schemes`, if it is compiled."""
    return next(iter(_compiled), None)


@contextmanager
def computed_by(module: ModuleType | None) -> Generator[None]:
    """Compare the two: meanwhile this module computes in all threads; None: numpy does."""
    before = _compiled[:]
    _compiled[:] = [] if module is None else [module]
    try:
        yield
    finally:
        _compiled[:] = before
