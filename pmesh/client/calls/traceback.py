"""Short tracebacks: they show the user's lines and one of ours.

The errors of pmesh explain themselves in their message, and a Ctrl-C has no cause in pmesh. Our
frames would only hide the user's call. Any other exception is a bug, and keeps its traceback.
"""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import ParamSpec, TypeVar

from pmesh.errors import PmeshError

P = ParamSpec("P")
T = TypeVar("T")


def public(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function with short tracebacks: its errors begin at the user's line."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (PmeshError, KeyboardInterrupt) as e:
            raise e.with_traceback(None) from None

    return call


def make_public(cls: type) -> None:
    """Wrap all methods of the class in `public` whose names do not begin with an underscore."""
    for name, method in list(vars(cls).items()):
        if isinstance(method, FunctionType) and not name.startswith("_"):
            setattr(cls, name, public(method))
