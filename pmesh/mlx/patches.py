"""Puts the drop-in into the place of MLX's own functions, for programs that know only those."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import mlx.core as mx

import pmesh.mlx
from pmesh.mlx import ops
from pmesh.mlx.groups import is_shared

_logger = logging.getLogger("pmesh")
_native_compile = mx.compile


def apply() -> None:
    """Replace `mx.distributed`, `nn.average_gradients` and `mx.compile`; before other imports."""
    from mlx import nn  # noqa: PLC0415 - its own compiled functions stay as they are: none calls us
    from mlx.nn import utils  # noqa: PLC0415

    for name in pmesh.mlx.__all__:
        if name != "average_gradients":
            setattr(mx.distributed, name, getattr(pmesh.mlx, name))
    average: Any = functools.wraps(utils.average_gradients)(ops.average_gradients)
    nn.average_gradients = utils.average_gradients = average
    mx.compile = compile_what_does_not_wait


def compile_what_does_not_wait(
    fun: Callable[..., Any],
    inputs: object = None,
    outputs: object = None,
    shapeless: bool = False,  # noqa: FBT001, FBT002 - as MLX has it
) -> Callable[..., Any]:
    """`mx.compile`, but for functions that call other ranks: those run as they are.

    Such a call waits for the network, which a trace can't, and a trace that fails can't be undone:
    it leaves its tracers in the model, and the random state is gone. So where there are several
    ranks, a function with captured state, as a training step is, is never traced. Another one runs
    once as it is, and is compiled if it has called no other rank then.
    """
    compiled: Callable[..., Any] = _native_compile(fun, inputs, outputs, shapeless)
    captures = inputs is not None or outputs is not None
    runs_as_it_is: list[bool] = [True] if captures else []

    @functools.wraps(fun)
    def call(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - whatever it takes
        if not is_shared():
            return compiled(*arguments, **named)
        if not runs_as_it_is:
            before = ops.calls[0]
            result = fun(*arguments, **named)
            runs_as_it_is.append(ops.calls[0] > before)
            if runs_as_it_is[0]:
                _say_uncompiled(fun)
            return result
        if captures:
            _say_uncompiled(fun)
        return (fun if runs_as_it_is[0] else compiled)(*arguments, **named)

    return call


_said: set[str] = set()


def _say_uncompiled(fun: Callable[..., Any]) -> None:
    if not _said:
        name = getattr(fun, "__qualname__", type(fun).__qualname__)
        _said.add(name)
        _logger.warning(
            "%s runs uncompiled, as every function does here that captures state or calls other "
            "ranks: pmesh waits for the network in Python, where a compiled function can't",
            name,
        )
