"""Runs a program that knows only MLX over a mesh: the drop-in replaces MLX's own functions.

`pmesh mlx` executes this module: python -m pmesh.mlx.program script|module|code TARGET ARGUMENT...
"""

import functools
import logging
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import mlx.core as mx

import pmesh.mlx
from pmesh.mlx import ops
from pmesh.mlx.groups import is_shared, leave

_logger = logging.getLogger("pmesh")
_native_compile = mx.compile


def run(kind: str, target: str, arguments: Sequence[str]) -> None:
    """Run a program as `__main__`, as Python itself does, and leave the job when it ends.

    If the program raises an error or exits with a code other than 0, the other ranks see a crash.
    """
    apply_patches()
    try:
        _run(kind, target, arguments)
    except SystemExit as e:
        leave(crashed=e if e.code else None)
        raise
    except BaseException as e:
        leave(crashed=e)
        raise
    leave()


def _run(kind: str, target: str, arguments: Sequence[str]) -> None:
    if kind == "module":
        sys.argv = [target, *arguments]
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    elif kind == "script":
        sys.argv = [target, *arguments]
        sys.path[0] = os.path.dirname(os.path.realpath(target))  # noqa: PTH120 - as Python sets it
        runpy.run_path(target, run_name="__main__")
    else:
        sys.argv = ["-c", *arguments]
        sys.path[0] = ""
        exec(compile(target, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102 - it is what the user typed


def apply_patches() -> None:
    """Replace `mx.distributed`, `nn.average_gradients` and `mx.compile`, before other imports."""
    # Imported first, so that MLX compiles its own functions: none of them calls us.
    nn, utils = import_module("mlx.nn"), import_module("mlx.nn.utils")
    for name in pmesh.mlx.__all__:
        if hasattr(mx.distributed, name):
            setattr(mx.distributed, name, getattr(pmesh.mlx, name))
    native: Callable[..., Any] = utils.average_gradients
    average: Any = functools.wraps(native)(ops.average_gradients)
    for module in (nn, utils):
        setattr(module, "average_gradients", average)  # noqa: B010 - a module has no such attribute to type checkers
    mx.compile = compile_what_does_not_wait


def compile_what_does_not_wait(
    fun: Callable[..., Any],
    inputs: object = None,
    outputs: object = None,
    shapeless: bool = False,  # noqa: FBT001, FBT002 - as MLX has it
) -> Callable[..., Any]:
    """Compile like `mx.compile`, but leave functions that call other ranks uncompiled.

    Such a call waits for the network, which is impossible in a trace. A trace that fails can't be
    undone: its tracers stay in the model, and the random state is lost. So with several ranks a
    function with captured state, such as a training step, is never traced. Any other function runs
    uncompiled once, and is compiled afterwards if it called no other rank.
    """
    return _Function(fun, inputs, outputs, shapeless=shapeless)


class _Function:
    """The result of `compile_what_does_not_wait`; like MLX's, it never becomes a bound method."""

    def __init__(
        self, fun: Callable[..., Any], inputs: object, outputs: object, *, shapeless: bool
    ) -> None:
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._compiled: Callable[..., Any] = _native_compile(fun, inputs, outputs, shapeless)
        self._captures = inputs is not None or outputs is not None
        self._runs_uncompiled = self._captures
        self._has_run = self._captures

    def __call__(self, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - whatever it takes
        if not is_shared():
            return self._compiled(*arguments, **named)
        if not self._has_run:
            before = ops.calls[0]
            result = self._fun(*arguments, **named)
            self._has_run, self._runs_uncompiled = True, ops.calls[0] > before
            if self._runs_uncompiled:
                _warn_uncompiled(self._fun)
            return result
        if self._captures:
            _warn_uncompiled(self._fun)
        run = self._fun if self._runs_uncompiled else self._compiled
        return run(*arguments, **named)


_said: set[str] = set()


def _warn_uncompiled(fun: Callable[..., Any]) -> None:
    if not _said:
        name = getattr(fun, "__qualname__", type(fun).__qualname__)
        _said.add(name)
        _logger.warning(
            "%s runs uncompiled, as every function does here that captures state or calls other "
            "ranks: pmesh waits for the network in Python, where a compiled function can't",
            name,
        )


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], sys.argv[3:])
