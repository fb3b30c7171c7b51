"""Errors that show the user's lines, and one of ours.

What pmesh raises on purpose says all in its message, and a Ctrl-C has no cause in pmesh: frames of
ours would only hide where the call stands. Any other exception is a bug, and keeps its traceback.
"""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import ParamSpec, TypeVar

from pmesh.errors import PmeshError

P = ParamSpec("P")
T = TypeVar("T")


def public(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function that a user calls; what it raises on purpose begins at the user's line."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (PmeshError, KeyboardInterrupt) as e:
            raise e.with_traceback(None) from None

    return call


def make_public(cls: type) -> None:
    """Make all methods of this class public whose names have no underscore in front."""
    for name, method in list(vars(cls).items()):
        if isinstance(method, FunctionType) and not name.startswith("_"):
            setattr(cls, name, public(method))
